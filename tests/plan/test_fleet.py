"""Cells of a mesh against the planner's own simulation of one worker, and what they add up to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from wanstream.plan import DoesNotFitError, Machine, Mesh, OffloadJob, OffloadPolicy, simulate_fleet
from wanstream.plan.fleet_exchange import lane_exchange, step_exchange
from wanstream.plan.links import LINKS
from wanstream.plan.memory_needs import memory_needs
from wanstream.plan.predict import predict
from wanstream.plan.residency import plan_residency

MakeJob, MakeMachine = Callable[..., OffloadJob], Callable[..., Machine]
NVLINK = LINKS["nvlink"]
AT_ONCE = replace(NVLINK, peer_bytes_per_s=1e18, latency_s=0.0, network_bytes_per_s=1e18)
GUIDED = {"high": 2, "low": 2}


def _bus_bound(rate_machine: MakeMachine, job: OffloadJob, **changes: Any) -> Machine:
    """A GPU on which two blocks and what is computed in fit, so that all blocks stream."""
    room = 5 * job.computed_bytes + job.expert.working_bytes(job.tokens, lanes=2)
    vram = int((room + 600_000_000) / 0.95)
    return rate_machine(**{"copy": 1.0, "visit": 0.01, "vram_bytes": vram, **changes})


def test_one_worker_is_what_the_planner_says(make_job: MakeJob, rate_machine: MakeMachine) -> None:
    job, machine = make_job(), rate_machine()
    run = simulate_fleet(job, machine, NVLINK, Mesh())
    (stage,) = run.stages
    assert run.makespan_s == pytest.approx(predict(job, machine, stage.policy).total_s, abs=1e-3)
    assert run.first_video_s == run.makespan_s
    assert (stage.weights, stage.exchange_s, stage.peer_bytes) == ("full", 0, 0)


def test_a_cell_shares_the_computing(make_job: MakeJob, rate_machine: MakeMachine) -> None:
    job, machine = make_job(lanes=GUIDED), rate_machine()
    alone = simulate_fleet(job, machine, AT_ONCE, Mesh()).stages[0]
    assert alone.compute_s == pytest.approx(2 * 8 * 8 * 1.0)
    for mesh in (Mesh(cfg=2), Mesh(ulysses=2), Mesh(ring=2), Mesh(cfg=2, ring=2, ulysses=2)):
        stage = simulate_fleet(job, machine, AT_ONCE, mesh).stages[0]
        assert stage.compute_s == pytest.approx(alone.compute_s / mesh.cell_size, rel=1e-6)


def test_one_lane_has_no_second_side(make_job: MakeJob, rate_machine: MakeMachine) -> None:
    job, machine = make_job(lanes={"high": 2, "low": 1}), rate_machine()
    stage = simulate_fleet(job, machine, AT_ONCE, Mesh(cfg=2)).stages[0]
    assert stage.compute_s == pytest.approx(4 * 8 * 1.0 + 4 * 8 * 1.0)


def test_exchanges_are_added_to_every_lane_and_step(make_job: MakeJob, rate_machine: MakeMachine) -> None:
    job, machine, mesh = make_job(lanes=GUIDED), rate_machine(), Mesh(ulysses=2)
    slow = replace(NVLINK, peer_bytes_per_s=1e6)
    stage = simulate_fleet(job, machine, slow, mesh).stages[0]
    lane, step = lane_exchange(job, mesh, slow), step_exchange(job, mesh, slow)
    assert stage.exchange_s == pytest.approx(2 * 8 * 8 * lane.seconds + 8 * step.seconds)
    assert stage.peer_bytes == pytest.approx(2 * 8 * 8 * lane.nbytes + 8 * step.nbytes)
    assert stage.next_s == pytest.approx(stage.compute_s + stage.exchange_s + stage.stall_s)


def test_two_stages_never_wait_at_a_switch(make_job: MakeJob, rate_machine: MakeMachine) -> None:
    job = make_job(high=3, low=5)
    machine = rate_machine(visit=0.01, vram_bytes=10**9)
    run = simulate_fleet(job, machine, NVLINK, Mesh(stage=2), videos=8)
    assert [stage.steps for stage in run.stages] == [range(3), range(3, 8)]
    assert [stage.stall_s for stage in run.stages] == [0.0, 0.0]
    high, low = run.stages
    assert run.makespan_s == pytest.approx(high.first_s + low.first_s + 7 * low.next_s, rel=1e-3)
    assert [load.videos for load in run.loads] == [8, 8]


def test_shards_lighten_the_bus_of_a_worker(make_job: MakeJob, rate_machine: MakeMachine) -> None:
    job = make_job(lanes=GUIDED)
    machine = _bus_bound(rate_machine, job)
    mesh = Mesh(cfg=2, ulysses=2)
    full, sharded = (simulate_fleet(job, machine, AT_ONCE, mesh, weights=(home,)) for home in ("full", "sharded"))
    assert (full.stages[0].weights, sharded.stages[0].weights) == ("full", "sharded")
    assert full.stages[0].policy == sharded.stages[0].policy
    assert sharded.stages[0].bus_bytes == pytest.approx(full.stages[0].bus_bytes / 4)
    gathered = sharded.stages[0].peer_bytes - full.stages[0].peer_bytes
    assert gathered == pytest.approx(full.stages[0].bus_bytes * 3 / 4)
    assert sharded.stages[0].next_s < full.stages[0].next_s / 3
    assert simulate_fleet(job, machine, AT_ONCE, mesh).stages[0].weights != "full"


def test_over_pcie_a_gather_takes_its_time_of_the_bus(make_job: MakeJob, rate_machine: MakeMachine) -> None:
    """The two sides of the guidance exchange nothing in a block, so that only weights pass."""
    job = make_job(lanes=GUIDED)
    machine = _bus_bound(rate_machine, job)
    assert machine.h2d_bytes_per_s is not None
    as_fast = replace(AT_ONCE, peer_bytes_per_s=machine.h2d_bytes_per_s)
    beside, shared = (
        simulate_fleet(job, machine, replace(as_fast, shares_bus=shares), Mesh(cfg=2), weights=("sharded",)).stages[0]
        for shares in (False, True)
    )
    assert shared.next_s == pytest.approx(2 * beside.next_s, rel=0.05)


@pytest.mark.parametrize(
    "mesh", [Mesh(), Mesh(ulysses=4), Mesh(ring=4), Mesh(ring=2, ulysses=2), Mesh(cfg=2, ulysses=2)]
)
def test_what_workers_send_each_other_takes_device_memory(
    mesh: Mesh, make_job: MakeJob, rate_machine: MakeMachine
) -> None:
    job, machine = make_job(lanes=GUIDED), rate_machine()
    (stage,) = simulate_fleet(job, machine, AT_ONCE, mesh).stages
    working = job.expert.working_bytes(
        job.tokens,
        lanes=2 // mesh.cfg,
        chunk_tokens=stage.policy.chunk_tokens,
        ring=mesh.ring,
        ulysses=mesh.ulysses,
    )
    _, buffers = plan_residency(stage.policy, job.block_counts)
    assert stage.device_bytes == buffers * job.computed_bytes + job.staying_bytes + working


@pytest.mark.parametrize(("missing", "at_once"), [(0, True), (1_000_000, False)])
def test_a_worker_takes_as_many_tokens_at_once_as_fit_beside_what_is_sent(
    missing: int, at_once: bool, make_job: MakeJob, rate_machine: MakeMachine
) -> None:
    """Room for the share of its tokens alone is not room for Ulysses, which holds q, k and v several times."""
    job = make_job(tokens=100_000)
    working = job.expert.working_bytes(job.tokens, lanes=1, ulysses=4)
    assert job.expert.working_bytes(job.tokens // 4, lanes=1) < working - missing
    room = 2 * job.computed_bytes + job.staying_bytes + working - missing
    machine = rate_machine(vram_bytes=int((room + 600_000_000) / 0.95) + 1)
    (stage,) = simulate_fleet(job, machine, AT_ONCE, Mesh(ulysses=4)).stages
    assert (stage.policy.chunk_tokens is None) == at_once


def test_shards_in_device_memory_leave_the_bus_alone(make_job: MakeJob, rate_machine: MakeMachine) -> None:
    job = make_job(lanes=GUIDED)
    machine = _bus_bound(rate_machine, job)
    roomy = replace(machine, vram_bytes=machine.vram_bytes + int(5 * job.stored_bytes / 0.95))
    stage = simulate_fleet(job, roomy, AT_ONCE, Mesh(cfg=2, ulysses=2), weights=("sharded in VRAM",)).stages[0]
    assert stage.bus_bytes == 0
    assert stage.peer_bytes > 0
    with pytest.raises(DoesNotFitError, match=r"one worker of cfg 2 x ulysses 2: needs 2 buffers .* \+ 0\.01 GB that"):
        simulate_fleet(
            job,
            replace(roomy, vram_bytes=machine.vram_bytes - 2 * job.stored_bytes),
            AT_ONCE,
            Mesh(cfg=2, ulysses=2),
            weights=("sharded in VRAM",),
        )


def test_over_pcie_weights_wait_while_tokens_pass(make_job: MakeJob, rate_machine: MakeMachine) -> None:
    job = make_job(lanes=GUIDED)
    machine = _bus_bound(rate_machine, job, copy=0.02)
    own = replace(AT_ONCE, peer_bytes_per_s=1e8)
    beside, shared = (
        simulate_fleet(job, machine, replace(own, shares_bus=shares), Mesh(ulysses=2), weights=("full",)).stages[0]
        for shares in (False, True)
    )
    assert beside.exchange_s == shared.exchange_s > 0
    assert shared.next_s > beside.next_s


def test_ram_of_a_machine_is_shared_by_its_buses(make_job: MakeJob, rate_machine: MakeMachine) -> None:
    job = make_job()
    machine = _bus_bound(rate_machine, job)
    assert machine.h2d_bytes_per_s is not None
    narrow = replace(AT_ONCE, ram_bytes_per_s=machine.h2d_bytes_per_s)
    alone, four = (simulate_fleet(job, machine, narrow, Mesh(data=data)).stages[0].next_s for data in (1, 4))
    apart = replace(narrow, workers_per_machine=1)
    assert four == pytest.approx(4 * alone, rel=0.05)
    assert simulate_fleet(job, machine, apart, Mesh(data=4)).stages[0].next_s == alone


def test_workers_that_read_files_share_the_disk(make_job: MakeJob, rate_machine: MakeMachine) -> None:
    """RAM holds four blocks of sixteen: all read all the time."""
    job = make_job()
    machine = _bus_bound(rate_machine, job, read=1.0, copy=0.01, ram_bytes=8 * job.stored_bytes)
    alone, two = (simulate_fleet(job, machine, AT_ONCE, Mesh(data=data)).stages[0] for data in (1, 2))
    assert (alone.policy.source, two.policy.source) == ("file", "file")
    assert two.next_s == pytest.approx(2 * alone.next_s, rel=0.05)


def test_one_copy_in_ram_serves_all_workers_of_a_machine(make_job: MakeJob, rate_machine: MakeMachine) -> None:
    job = make_job()
    machine = _bus_bound(rate_machine, job, read=1.0, copy=0.01, ram_bytes=34 * job.stored_bytes)
    runs = [simulate_fleet(job, machine, AT_ONCE, Mesh(data=data)).stages[0] for data in (1, 8)]
    assert [run.policy.source for run in runs] == ["pinned", "pinned"]
    assert runs[0].first_s == runs[1].first_s > runs[0].next_s


@pytest.mark.parametrize(("blocks", "source"), [(16, "pinned"), (12, "file")])
def test_stages_of_one_machine_share_its_ram(
    blocks: int, source: str, make_job: MakeJob, rate_machine: MakeMachine
) -> None:
    """Each stage has the eight blocks of its expert in RAM, and there must be room for both."""
    job = make_job()
    machine = _bus_bound(rate_machine, job, read=1.0, copy=0.01, ram_bytes=2 * blocks * job.stored_bytes)
    run = simulate_fleet(job, machine, AT_ONCE, Mesh(stage=2))
    assert [stage.policy.source for stage in run.stages] == [source, source]


def test_workers_on_a_cpu_share_its_memory(make_job: MakeJob, rate_cpu: MakeMachine) -> None:
    job, links = make_job(), LINKS["loopback"]
    needed = memory_needs(job, rate_cpu(), OffloadPolicy.layerwise(1)).device_bytes
    machine = rate_cpu(ram_bytes=3 * needed)
    assert simulate_fleet(job, machine, links, Mesh()).stages[0].device_bytes >= needed
    with pytest.raises(DoesNotFitError, match="one worker of data 2: needs 2 buffers"):
        simulate_fleet(job, machine, links, Mesh(data=2))


def test_workers_on_a_cpu_share_its_cores(make_job: MakeJob, rate_cpu: MakeMachine) -> None:
    job, machine, links = make_job(), rate_cpu(ram_bytes=10**9), LINKS["loopback"]
    alone, two = (simulate_fleet(job, machine, links, Mesh(data=data)).stages[0] for data in (1, 2))
    assert two.compute_s == pytest.approx(2 * alone.compute_s)
    assert two.weights == "full"


def test_loads_add_up(make_job: MakeJob, rate_machine: MakeMachine) -> None:
    run = simulate_fleet(make_job(lanes=GUIDED), rate_machine(), NVLINK, Mesh(data=2, stage=2, cfg=2), videos=5)
    assert [load.rank for load in run.loads] == list(range(8))
    assert sum(load.videos for load in run.loads) == 5 * 2 * 2
    for load in run.loads:
        assert load.busy_s == pytest.approx(load.compute_s + load.exchange_s + load.stall_s)
        assert load.busy_s <= run.makespan_s
    assert 0 < run.busy_share < 1
    assert run.video_s == run.makespan_s / 5
    assert run.stages[0].policy.kind in ("layerwise", "block_swap", "resident")
    assert isinstance(run.stages[0].policy, OffloadPolicy)
