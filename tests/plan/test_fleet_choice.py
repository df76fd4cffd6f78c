"""The mesh that is proposed, and what it was chosen from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from wanstream.plan import (
    DoesNotFitError,
    Machine,
    Mesh,
    MeshError,
    OffloadJob,
    OffloadPolicy,
    propose_mesh,
    simulate_fleet,
)
from wanstream.plan.fleet_choice import SAME
from wanstream.plan.fleet_layouts import layouts
from wanstream.plan.links import LINKS
from wanstream.plan.memory_needs import VRAM_RESERVE, VRAM_SHARE, memory_needs

MakeJob, MakeMachine = Callable[..., OffloadJob], Callable[..., Machine]
NVLINK, PCIE = LINKS["nvlink"], LINKS["pcie4"]
GUIDED = {"high": 2, "low": 2}
# What SMALL of conftest.py exchanges is nothing against seconds of computing.
TOKENS = 1000


@pytest.mark.parametrize("samples", [1, 3, 20])
@pytest.mark.parametrize("workers", [1, 2, 4, 6])
def test_no_other_layout_is_faster(workers: int, samples: int, make_job: MakeJob, rate_machine: MakeMachine) -> None:
    job, machine = make_job(high=6, low=2, lanes=GUIDED), rate_machine(visit=0.01, copy=0.02)
    plan = propose_mesh(workers, job, machine, NVLINK, samples, heads=4)
    every = layouts(workers, job, heads=4, samples=samples, rings=True)
    assert {run.mesh for run in plan.candidates} <= set(every)
    fastest = min(simulate_fleet(job, machine, NVLINK, mesh, videos=samples).makespan_s for mesh in every)
    assert plan.run.makespan_s <= (1 + SAME) * fastest * (1 + SAME)
    assert plan.run == simulate_fleet(job, machine, NVLINK, plan.mesh, videos=samples)
    assert plan.mesh.size == workers


@pytest.mark.parametrize(
    ("workers", "samples", "mesh"),
    [
        (1, 1, Mesh()),
        (2, 1, Mesh(cfg=2)),
        (4, 1, Mesh(ulysses=4)),
        (8, 1, Mesh(cfg=2, ulysses=4)),
        (2, 1000, Mesh(data=2)),
        (8, 1000, Mesh(data=8)),
        (8, 4, Mesh(data=4, cfg=2)),
    ],
)
def test_what_is_proposed_where_computing_is_all(
    workers: int, samples: int, mesh: Mesh, make_job: MakeJob, rate_machine: MakeMachine
) -> None:
    plan = propose_mesh(workers, make_job(lanes=GUIDED), rate_machine(), NVLINK, samples, heads=4)
    assert plan.mesh == mesh
    assert plan.weights == "full"
    assert plan.alone_s is not None
    assert plan.reason.startswith(f"{mesh}: {'one video' if samples == 1 else f'{samples} videos'} in ")
    assert ("times as fast as one worker" in plan.reason) == (workers > 1)


def test_a_queue_that_waits_for_the_disk_at_each_switch_becomes_a_pipeline(
    make_job: MakeJob, rate_machine: MakeMachine
) -> None:
    """With two stages each worker keeps its expert in device memory, which both together do not fit into."""
    job = make_job(high=4, low=4, tokens=999)
    one_stays = memory_needs(job, rate_machine(), OffloadPolicy.block_swap(0)).device_bytes
    machine = rate_machine(
        read=1.0,
        visit=0.01,
        copy=1.0,
        vram_bytes=int((one_stays + 2 * job.computed_bytes + VRAM_RESERVE) / VRAM_SHARE),
        ram_bytes=12 * job.stored_bytes,
    )
    plan = propose_mesh(2, job, machine, NVLINK, 50, heads=4)
    assert plan.mesh == Mesh(stage=2)
    assert all(stage.stall_s == 0 for stage in plan.run.stages)
    with_switch = simulate_fleet(job, machine, NVLINK, Mesh(data=2), videos=50)
    assert with_switch.stages[0].stall_s > 0
    assert with_switch.makespan_s > 2 * plan.run.makespan_s


def test_fewer_workers_are_named_where_they_are_faster(make_job: MakeJob, rate_machine: MakeMachine) -> None:
    slow = replace(PCIE, peer_bytes_per_s=1e7, latency_s=0.0)
    plan = propose_mesh(7, make_job(lanes=GUIDED, tokens=840), rate_machine(visit=0.01), slow, heads=4)
    assert plan.fewer is not None
    assert plan.fewer.mesh.size < 7
    assert plan.fewer.makespan_s < plan.run.makespan_s
    assert f"{plan.fewer.mesh.size} of the workers alone are faster, {plan.fewer.mesh} with" in plan.reason
    assert propose_mesh(7, make_job(tokens=840), rate_machine(visit=0.01), slow, 20, heads=4).fewer is None


def test_two_videos_leave_some_of_seven_workers_out(make_job: MakeJob, rate_machine: MakeMachine) -> None:
    slow = replace(PCIE, peer_bytes_per_s=1e7, latency_s=0.0)
    quick = rate_machine(read=1e-3, copy=1e-4, visit=0.01)
    plan = propose_mesh(7, make_job(lanes=GUIDED, tokens=840), quick, slow, 2, heads=4)
    assert plan.mesh == Mesh(data=7)
    assert plan.fewer is not None
    assert plan.fewer.mesh == Mesh(data=2, cfg=2)


def test_stages_are_not_proposed_where_experts_change_too_often(make_job: MakeJob, rate_machine: MakeMachine) -> None:
    job = make_job(experts_of_steps=("high", "low", "high"), tokens=999)
    assert {mesh.stage for mesh in layouts(6, job, heads=1, samples=9, rings=False)} == {1, 3}
    assert propose_mesh(6, job, rate_machine(), NVLINK, 9, heads=1).mesh.stage in (1, 3)


def test_rings_need_a_gpu(make_job: MakeJob, rate_machine: MakeMachine, rate_cpu: MakeMachine) -> None:
    job = make_job(high=1, low=1, tokens=999)
    assert propose_mesh(3, job, rate_machine(), NVLINK, heads=4).mesh == Mesh(ring=3)
    with pytest.raises(
        MeshError, match="3 workers cannot share 1 video of 2 steps, 999 tokens and 4 heads evenly: use 2"
    ):
        propose_mesh(3, job, rate_cpu(), LINKS["loopback"], heads=4)


def test_what_fits_nowhere_is_told_with_numbers(make_job: MakeJob, rate_machine: MakeMachine) -> None:
    with pytest.raises(
        DoesNotFitError, match=r"one worker of cfg 2: needs 2 buffers of .*; 0\.00 GB given; make the video"
    ):
        propose_mesh(2, make_job(lanes=GUIDED), rate_machine(vram_bytes=10**8), NVLINK, heads=1)


@pytest.mark.parametrize(("workers", "samples"), [(0, 1), (1, 0)])
def test_there_must_be_workers_and_videos(
    workers: int, samples: int, make_job: MakeJob, rate_machine: MakeMachine
) -> None:
    with pytest.raises(MeshError, match=f"{workers} workers for {samples} videos: give 1 or more of both"):
        propose_mesh(workers, make_job(), rate_machine(), NVLINK, samples)


def test_heads_are_those_of_the_experts(make_job: MakeJob, rate_machine: MakeMachine) -> None:
    """The experts of conftest.py are 256 wide: 2 heads."""
    job = make_job(lanes=GUIDED, high=1, low=0)
    assert propose_mesh(8, job, rate_machine(), NVLINK).mesh.ulysses <= 2
