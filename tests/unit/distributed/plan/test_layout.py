"""Layout chosen by the rule, and a worker's part in a run and on a machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from wanstream.distributed import (
    check_layout,
    choose_layout,
    describe_layout,
    describe_wire,
    wire_traffic,
    worker_share,
)
from wanstream.plan import Budgets, DoesNotFitError, Machine, plan_offload
from wanstream.plan.machine import expected_machine
from wanstream.plan.memory import VRAM_RESERVE, VRAM_SHARE
from wanstream.schema import Mesh, MeshError, OffloadPolicy
from wanstream.shapes import T2V_A14B, RunShape, StepShape, VideoShape
from wanstream.tests.support.plan_fixtures import needs_of, run_shape, visit_seconds

MakeMachine = Callable[..., Machine]
NO_LIMIT = Budgets()
GUIDED = {"high": 2, "low": 2}


def a14b() -> RunShape:
    return run_shape(
        26,
        14,
        expert=T2V_A14B,
        tokens=VideoShape(width=1280, height=720, frames=81).tokens,
        sides=GUIDED,
        outside_bytes=2 * T2V_A14B.resident_bytes(),
    )


@pytest.mark.parametrize(
    ("workers", "one", "thousand"),
    [
        (1, Mesh(), Mesh()),
        (2, Mesh(cfg=2), Mesh(data=2)),
        (4, Mesh(cfg=2, ulysses=2), Mesh(data=4)),
        (8, Mesh(cfg=2, ulysses=4), Mesh(data=8)),
        (16, Mesh(cfg=2, ulysses=8), Mesh(data=8, cfg=2)),
        (32, Mesh(cfg=2, ring=2, ulysses=8), Mesh(data=16, cfg=2)),
    ],
)
def test_the_rule_gives_the_layouts_of_the_published_tables(
    workers: int, one: Mesh, thousand: Mesh
) -> None:
    """Layouts from docs/scaling.md: fastest for one video, and as proposed for 1000 on RTX 4090."""
    machine = expected_machine("RTX 4090", ram_bytes=2**39, disk_bytes_per_s=7e9)
    assert choose_layout(workers, a14b(), machine, NO_LIMIT) == one
    assert choose_layout(workers, a14b(), machine, NO_LIMIT, samples=1000) == thousand


@pytest.mark.parametrize("samples", [1, 2, 3, 7, 20])
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 6, 8])
def test_every_layout_suits_its_run(workers: int, samples: int, rate_machine: MakeMachine) -> None:
    run = run_shape(sides=GUIDED, tokens=960)
    mesh = choose_layout(workers, run, rate_machine(), NO_LIMIT, samples=samples)
    check_layout(mesh, run, samples)
    assert mesh.size == workers


@pytest.mark.parametrize(
    ("workers", "samples", "lanes", "mesh"),
    [
        (2, 3, GUIDED, Mesh(cfg=2)),  # two rounds of data 2 would leave a worker idle in the second
        (8, 4, GUIDED, Mesh(data=4, cfg=2)),
        (
            2,
            1,
            {"high": 2, "low": 1},
            Mesh(ulysses=2),
        ),  # one side would idle under the low-noise expert
        (2, 1, {"high": 1, "low": 1}, Mesh(ulysses=2)),
    ],
)
def test_no_worker_idles_where_another_layout_uses_it(
    workers: int, samples: int, lanes: dict[str, int], mesh: Mesh, rate_machine: MakeMachine
) -> None:
    assert (
        choose_layout(workers, run_shape(sides=lanes), rate_machine(), NO_LIMIT, samples=samples)
        == mesh
    )


def test_ulysses_stays_inside_a_machine(rate_machine: MakeMachine) -> None:
    def chosen(per_machine: int) -> Mesh:
        machine = rate_machine(vram_bytes=10**12, ram_bytes=10**12)
        return choose_layout(16, a14b(), machine, NO_LIMIT, workers_per_machine=per_machine)

    assert chosen(8) == Mesh(cfg=2, ulysses=8)
    assert chosen(4) == Mesh(cfg=2, ring=2, ulysses=4)


def test_rings_need_a_gpu(rate_machine: MakeMachine, rate_cpu: MakeMachine) -> None:
    run = run_shape(high=1, low=1, tokens=999)
    assert choose_layout(3, run, rate_machine(), NO_LIMIT) == Mesh(ring=3)
    with pytest.raises(
        MeshError, match="3 workers cannot share 1 video of 999 tokens and 2 heads evenly: use 2"
    ):
        choose_layout(3, run, rate_cpu(), NO_LIMIT)


def test_ulysses_shares_any_number_of_tokens(rate_machine: MakeMachine) -> None:
    run = run_shape(high=1, low=1, tokens=2_809)
    mesh = choose_layout(2, run, rate_machine(), NO_LIMIT)
    assert mesh == Mesh(ulysses=2)
    # The largest share decides whether a worker has enough memory.
    assert (
        worker_share(mesh, run, rate_machine(), NO_LIMIT, workers_per_machine=2).run.tokens == 1_405
    )


def test_references_that_workers_cannot_share(rate_machine: MakeMachine) -> None:
    """The video has 999 tokens. One side's references divide, the other's do not."""
    run = run_shape(high=1, low=1, tokens=999 + 30, extra_tokens=(30, 25))
    message = (
        r"3 workers .* of 1029 tokens \(positive\) and 1024 \(negative\) and 2 heads evenly: use "
        r"2; .* of 48 pixels"
    )
    with pytest.raises(MeshError, match=message):
        choose_layout(3, run, rate_machine(), NO_LIMIT)
    equal = replace(run, extra_tokens=(30, 30))
    assert choose_layout(3, equal, rate_machine(), NO_LIMIT) == Mesh(ring=3)
    share = worker_share(Mesh(ring=3), equal, rate_machine(), NO_LIMIT, workers_per_machine=3)
    assert share.run.tokens_of_sides == (1029 // 3,)


@pytest.mark.parametrize(
    ("videos", "share"),
    [(1, (2000, 1000)), (2, (2000, 2000, 1000)), (4, (2000,) * 4 + (1000,) * 2)],
)
def test_two_cfg_ranks_share_long_and_short_lanes_evenly(
    videos: int, share: tuple[int, ...], rate_machine: MakeMachine
) -> None:
    """Lanes without context are half as long, and come in the middle."""
    run = run_shape(
        tokens=2000,
        extra_tokens=(1000, 0, 1000),
        samples=videos,
        sides={"high": 3, "low": 1},
    )
    worker = worker_share(Mesh(cfg=2), run, rate_machine(), NO_LIMIT, workers_per_machine=2).run
    assert worker.lane_tokens("high") == share
    assert worker.lane_tokens("low") == (2000,) * -(-videos // 2)
    by_four = worker_share(
        Mesh(cfg=2, ulysses=2), run, rate_machine(), NO_LIMIT, workers_per_machine=4
    ).run
    assert by_four.lane_tokens("high") == tuple(tokens // 2 for tokens in share)
    assert visit_seconds(worker, rate_machine(), "high", None) == pytest.approx(
        sum(
            visit_seconds(run_shape(tokens=tokens), rate_machine(), "high", None)
            for tokens in share
        )
    )


def test_a_short_lane_on_both_cfg_ranks_counts_as_a_loss(rate_machine: MakeMachine) -> None:
    """Computing the short lane twice costs more than sharing tokens."""
    three = dict.fromkeys(GUIDED, 3)
    run = run_shape(tokens=2 * 32_760, extra_tokens=(32_760, 0, 32_760), sides=three)
    assert choose_layout(2, run, rate_machine(vram_bytes=10**12), NO_LIMIT) == Mesh(ulysses=2)
    assert choose_layout(2, run_shape(sides=GUIDED), rate_machine(), NO_LIMIT) == Mesh(cfg=2)


@pytest.mark.parametrize(("workers", "samples"), [(0, 1), (1, 0)])
def test_workers_and_videos_are_one_or_more(
    workers: int, samples: int, rate_machine: MakeMachine
) -> None:
    with pytest.raises(
        MeshError, match=f"{workers} workers for {samples} videos: give 1 or more of both"
    ):
        choose_layout(workers, run_shape(), rate_machine(), NO_LIMIT, samples=samples)


def test_videos_too_large_for_one_worker_are_shared(rate_machine: MakeMachine) -> None:
    run = run_shape(sides=GUIDED, tokens=400_000)
    smallest = replace(OffloadPolicy.layerwise(1, source="file"), chunk_tokens=2048)
    alone = needs_of(run, rate_machine(), smallest).device_bytes
    machine = rate_machine(vram_bytes=int((alone - 1 + VRAM_RESERVE) / VRAM_SHARE))
    assert choose_layout(2, run, rate_machine(vram_bytes=10**12), NO_LIMIT, samples=2) == Mesh(
        data=2
    )
    assert choose_layout(2, run, machine, NO_LIMIT, samples=2) == Mesh(cfg=2)


def test_too_little_memory_is_refused_with_numbers(rate_machine: MakeMachine) -> None:
    with pytest.raises(
        DoesNotFitError,
        match=r"one worker of cfg 2: needs 2 buffers of .*; 0\.00 GB given; make the video",
    ):
        choose_layout(2, run_shape(sides=GUIDED), rate_machine(vram_bytes=10**8), NO_LIMIT)


def test_a_worker_has_its_lanes_tokens_and_steps(rate_machine: MakeMachine) -> None:
    run = run_shape(high=3, low=5, sides=GUIDED)
    share = worker_share(
        Mesh(stage=2, cfg=2, ring=2, ulysses=2),
        run,
        rate_machine(),
        NO_LIMIT,
        workers_per_machine=16,
    )
    assert share.run.tokens == run.tokens // 4
    assert share.run.workers == Mesh(ring=2, ulysses=2)
    assert share.run.experts_of_steps == ("low",) * 5
    assert share.run.lanes == {"low": 1}
    assert share.run.blocks.outside_bytes == run.blocks.outside_bytes // 2


def test_a_stage_has_the_lora_strengths_and_the_skips_of_its_steps(
    rate_machine: MakeMachine,
) -> None:
    low = [
        StepShape(expert="low", patch=patch, is_skipped=skipped)
        for patch, skipped in ((0, 0), (1, 0), (1, 1))
    ]
    run = run_shape(steps=[StepShape(expert="high", patch=1, is_skipped=True)] * 2 + low)
    share = worker_share(Mesh(stage=2), run, rate_machine(), NO_LIMIT, workers_per_machine=8)
    assert share.run.steps == tuple(low)


def test_one_copy_in_ram_and_one_disk_serve_a_machine(rate_machine: MakeMachine) -> None:
    """Two stages keep one expert each in the same RAM. Another machine's workers have their own."""
    run, machine = run_shape(), rate_machine()
    one = worker_share(Mesh(), run, machine, NO_LIMIT, workers_per_machine=8)
    eight = worker_share(Mesh(data=8), run, machine, NO_LIMIT, workers_per_machine=8)
    apart = worker_share(Mesh(data=8), run, machine, NO_LIMIT, workers_per_machine=1)
    assert (
        one.budgets == eight.budgets == apart.budgets == Budgets(ram_bytes=machine.ram_bytes // 2)
    )
    assert eight.machine.disk_bytes_per_s == machine.disk_bytes_per_s / 8
    assert apart.machine == one.machine == machine
    stages = worker_share(
        Mesh(stage=2), run, machine, Budgets(ram_bytes=1000), workers_per_machine=8
    )
    assert stages.budgets.ram_bytes == 500


def test_workers_on_a_cpu_share_all_of_it(rate_cpu: MakeMachine) -> None:
    run, machine = run_shape(), rate_cpu()
    two = worker_share(Mesh(data=2), run, machine, NO_LIMIT, workers_per_machine=8)
    assert two.budgets.ram_bytes == machine.ram_bytes // 4
    assert two.machine.flops_per_s == machine.flops_per_s / 2
    needed = needs_of(run, machine, OffloadPolicy.layerwise(1)).device_bytes
    small = rate_cpu(ram_bytes=3 * needed)
    assert choose_layout(1, run, small, NO_LIMIT) == Mesh()
    with pytest.raises(DoesNotFitError, match="one worker of data 2: needs 2 buffers"):
        choose_layout(2, run, small, NO_LIMIT, samples=2)


def test_shards_in_device_memory_count_there(rate_machine: MakeMachine) -> None:
    run, mesh = run_shape(sides=GUIDED), Mesh(cfg=2, ulysses=2)
    share = worker_share(
        mesh,
        run,
        rate_machine(ram_bytes=1),
        NO_LIMIT,
        workers_per_machine=8,
        weights="sharded in VRAM",
    )
    assert (
        share.run.blocks.outside_bytes
        == run.blocks.outside_bytes + 16 * run.blocks.stored_bytes // 4
    )
    assert plan_offload(share.run, share.machine, share.budgets).policy.source == "pinned"


def test_a_layout_is_described_by_shared_work() -> None:
    assert describe_layout(Mesh()) == "one worker"
    assert describe_layout(Mesh(data=8)) == "data 8: 8 videos at a time"
    assert describe_layout(Mesh(cfg=2, ring=2, ulysses=4)) == (
        "cfg 2 x ring 2 x ulysses 4: both prompts side by side, the tokens of each lane shared "
        "by 8 workers"
    )


VELOCITY = 2 * 16 * 21 * 90 * 160
"""Bytes in a bf16 velocity at 1280x720x81."""
HIDDEN = 2 * 75600 * 5120
"""Bytes in a bf16 hidden state at 1280x720x81."""


@pytest.mark.parametrize(
    ("layout", "machines", "wanted", "exchanges"),
    [
        (Mesh(cfg=2), "AA", None, 0),
        (Mesh(cfg=2), "AB", {"cfg": VELOCITY}, 2),
        (Mesh(cfg=2, ulysses=2), "AABB", {"cfg": 2 * VELOCITY}, 2),
        (Mesh(ulysses=2), "AB", {"ulysses": 80 * 4 * HIDDEN // 4}, 1 + 4 * 80),
        (Mesh(ulysses=4), "AABB", {"ulysses": 4 * 80 * 4 * HIDDEN // 16}, 1 + 4 * 80),
        (Mesh(ulysses=4), "AAAB", {"ulysses": 3 * 80 * 4 * HIDDEN // 16}, 1 + 4 * 80),
        (Mesh(cfg=2, ulysses=2), "ABAB", {"ulysses": 2 * 40 * 4 * HIDDEN // 4}, 1 + 4 * 40),
        (Mesh(ring=2, ulysses=2), "AABB", {"ring": 2 * 80 * 2 * HIDDEN // 4}, 1 + 80),
        (Mesh(ring=3), "ABC", {"ring": 2 * 80 * 2 * HIDDEN // 3}, 1 + 80),
    ],
    ids=str,
)
def test_the_traffic_between_machines_is_that_of_the_splits(
    layout: Mesh, machines: str, wanted: dict[str, int] | None, exchanges: int
) -> None:
    traffic = wire_traffic(layout, machines, a14b())
    if wanted is None:
        assert traffic is None
    else:
        assert traffic is not None
        assert dict(traffic.bytes_by_axis) == wanted
        assert (traffic.bytes, traffic.exchanges) == (sum(wanted.values()), exchanges)


def test_the_traffic_of_short_lanes_is_their_own() -> None:
    """A source doubles the tokens in two lanes. Both cfg ranks compute the third, short one."""
    video = a14b().tokens
    three = dict.fromkeys(GUIDED, 3)
    run = replace(a14b(), extra_tokens=(video, 0, video), sides=three)
    for layout, machines, wanted in [
        (Mesh(ulysses=2), "AB", {"ulysses": 40 * 5 * 4 * HIDDEN // 4}),
        (Mesh(cfg=2, ulysses=2), "ABAB", {"ulysses": 2 * 40 * 3 * 4 * HIDDEN // 4}),
        (Mesh(cfg=2), "AB", {"cfg": 2 * VELOCITY}),
    ]:
        traffic = wire_traffic(layout, machines, run)
        assert traffic is not None
        assert dict(traffic.bytes_by_axis) == wanted


def test_a_group_that_is_apart_is_described_with_bytes_and_seconds() -> None:
    run = a14b()
    sides = wire_traffic(Mesh(cfg=2), "AB", run)
    tokens = wire_traffic(Mesh(ulysses=4), "AABB", run)
    assert sides is not None
    assert tokens is not None
    assert describe_wire(sides, 0) == (
        "each step moves 9.68 MB between the machines (cfg 9.68 MB) in 2 exchanges, at least "
        "0.0774 s at 1 Gb/s (assumed: the network card reports none)"
    )
    assert describe_wire(tokens, 1_250_000_000) == (
        "each step moves 61.9 GB between the machines (ulysses 61.9 GB) in 321 exchanges, at least "
        "49.55 s at 10 Gb/s (the link speed of the network card); only data or cfg between the "
        "machines costs less"
    )
