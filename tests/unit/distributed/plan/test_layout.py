"""Layout chosen by the rule or refused, and a worker's part in a run and on a machine."""

from dataclasses import replace

import pytest

from wanstream import distributed
from wanstream.plan import VRAM_RESERVE, Budgets, DoesNotFitError, expected_machine, plan_offload
from wanstream.plan.memory import VRAM_SHARE
from wanstream.schema import Mesh, MeshError, OffloadPolicy
from wanstream.shapes import HEAD_DIM, T2V_A14B, RunShape, StepShape, VideoShape
from wanstream.tests.support import plan_fixtures
from wanstream.tests.support.plan_fixtures import rated, run_shape

NO_LIMIT = Budgets()
GUIDED = {"high": 2, "low": 2}
CFG = Mesh(cfg=2)
LARGE = 10**12


def choose(workers, run, samples=1, per_machine=8, **machine):
    """Choose a layout on GPUs."""
    given = {"samples": samples, "workers_per_machine": per_machine}
    return distributed.choose_layout(workers, run, rated(**machine), NO_LIMIT, **given)


def share(mesh, run, machine=None, budgets=NO_LIMIT, per_machine=8, **more):
    """Return a worker's part in a run."""
    given = {"workers_per_machine": per_machine, **more}
    return distributed.worker_share(mesh, run, machine or rated(), budgets, **given)


def a14b() -> RunShape:
    tokens = VideoShape(width=1280, height=720, frames=81).tokens
    given = {"sides": GUIDED, "outside_bytes": 2 * T2V_A14B.resident_bytes()}
    return run_shape(26, 14, expert=T2V_A14B, tokens=tokens, **given)


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
def test_the_rule_gives_the_layouts_of_the_published_tables(workers, one, thousand):
    """Layouts from docs/scaling.md: fastest for one video, and as proposed for 1000 on RTX 4090."""
    machine = expected_machine("RTX 4090", ram_bytes=2**39, disk_bytes_per_s=7e9)
    assert distributed.choose_layout(workers, a14b(), machine, NO_LIMIT) == one
    assert distributed.choose_layout(workers, a14b(), machine, NO_LIMIT, samples=1000) == thousand


@pytest.mark.parametrize(
    ("workers", "samples"), [(1, 20), (2, 3), (3, 7), (4, 2), (6, 1), (8, 7), (8, 1)]
)
def test_every_layout_suits_its_run(workers, samples):
    run = run_shape(sides=GUIDED, tokens=960)
    mesh = choose(workers, run, samples)
    distributed.check_layout(mesh, run, samples)
    assert mesh.size == workers


@pytest.mark.parametrize(
    ("workers", "samples", "lanes", "mesh"),
    [
        (2, 3, (2, 2), Mesh(cfg=2)),  # with data 2, a worker would idle in the second round
        (8, 4, (2, 2), Mesh(data=4, cfg=2)),
        (2, 1, (2, 1), Mesh(ulysses=2)),  # one side would idle under the low-noise expert
        (2, 1, (1, 1), Mesh(ulysses=2)),
    ],
)
def test_no_worker_idles_where_another_layout_uses_it(workers, samples, lanes, mesh):
    sides = dict(zip(("high", "low"), lanes, strict=True))
    assert choose(workers, run_shape(sides=sides), samples) == mesh


def test_ulysses_stays_inside_a_machine():
    large = {"vram_bytes": LARGE, "ram_bytes": LARGE}
    assert choose(16, a14b(), **large) == Mesh(cfg=2, ulysses=8)
    assert choose(16, a14b(), per_machine=4, **large) == Mesh(cfg=2, ring=2, ulysses=4)


def test_rings_need_a_gpu():
    run = run_shape(high=1, low=1, tokens=999)
    assert choose(3, run) == Mesh(ring=3)
    said = "3 workers cannot share 1 video of 999 tokens and 2 heads evenly: use 2"
    with pytest.raises(MeshError, match=said):
        distributed.choose_layout(3, run, plan_fixtures.rated_cpu(), NO_LIMIT)


def test_ulysses_shares_any_number_of_tokens():
    run = run_shape(high=1, low=1, tokens=2_809)
    assert choose(2, run) == Mesh(ulysses=2)
    # The largest share decides whether a worker has enough memory.
    assert share(Mesh(ulysses=2), run).run.tokens == 1_405


def test_references_that_workers_cannot_share():
    """The video has 999 tokens. One side's references divide, the other's do not."""
    run = run_shape(high=1, low=1, tokens=999 + 30, extra_tokens=(30, 25))
    said = r"1029 tokens \(positive\) and 1024 \(negative\) and 2 heads evenly: use 2; .* of 48 pix"
    with pytest.raises(MeshError, match=said):
        choose(3, run)
    equal = replace(run, extra_tokens=(30, 30))
    assert choose(3, equal) == Mesh(ring=3)
    assert share(Mesh(ring=3), equal).run.tokens_of_sides == (1029 // 3,)


@pytest.mark.parametrize(
    ("videos", "lanes"),
    [(1, (2000, 1000)), (2, (2000, 2000, 1000)), (4, (2000,) * 4 + (1000,) * 2)],
)
def test_two_cfg_ranks_share_long_and_short_lanes_evenly(videos, lanes):
    """Lanes without context are half as long, and come in the middle."""
    sides = {"high": 3, "low": 1}
    run = run_shape(tokens=2000, extra_tokens=(1000, 0, 1000), samples=videos, sides=sides)
    worker = share(CFG, run).run
    assert worker.lane_tokens("high") == lanes
    assert worker.lane_tokens("low") == (2000,) * -(-videos // 2)
    by_four = share(Mesh(cfg=2, ulysses=2), run).run
    assert by_four.lane_tokens("high") == tuple(tokens // 2 for tokens in lanes)
    of_lanes = [
        plan_fixtures.visit_seconds(run_shape(tokens=each), rated(), "high") for each in lanes
    ]
    assert plan_fixtures.visit_seconds(worker, rated(), "high") == pytest.approx(sum(of_lanes))


def test_a_short_lane_on_both_cfg_ranks_counts_as_a_loss():
    """Computing the short lane twice costs more than sharing tokens."""
    three = dict.fromkeys(GUIDED, 3)
    run = run_shape(tokens=2 * 32_760, extra_tokens=(32_760, 0, 32_760), sides=three)
    assert choose(2, run, vram_bytes=LARGE) == Mesh(ulysses=2)
    assert choose(2, run_shape(sides=GUIDED)) == CFG


@pytest.mark.parametrize(("workers", "samples"), [(0, 1), (1, 0)])
def test_workers_and_videos_are_one_or_more(workers, samples):
    with pytest.raises(MeshError, match=f"{workers} workers for {samples} videos: give 1 or more"):
        choose(workers, run_shape(), samples)


def test_videos_too_large_for_one_worker_are_shared():
    run = run_shape(sides=GUIDED, tokens=400_000)
    smallest = replace(OffloadPolicy.layerwise(1, source="file"), chunk_tokens=2048)
    alone = plan_fixtures.needs_of(run, rated(), smallest).device_bytes
    assert choose(2, run, 2, vram_bytes=LARGE) == Mesh(data=2)
    assert choose(2, run, 2, vram_bytes=int((alone - 1 + VRAM_RESERVE) / VRAM_SHARE)) == CFG
    said = r"one worker of cfg 2: needs 2 buffers of .*; 0\.00 GB given; make the video"
    with pytest.raises(DoesNotFitError, match=said):
        choose(2, run_shape(sides=GUIDED), vram_bytes=10**8)


def test_a_worker_has_its_lanes_tokens_and_steps():
    run = run_shape(high=3, low=5, sides=GUIDED)
    part = share(Mesh(stage=2, cfg=2, ring=2, ulysses=2), run, per_machine=16).run
    assert (part.tokens, part.workers) == (run.tokens // 4, Mesh(ring=2, ulysses=2))
    assert (part.experts_of_steps, part.lanes) == (("low",) * 5, {"low": 1})
    assert part.blocks.outside_bytes == run.blocks.outside_bytes // 2


def test_stage_has_strengths_and_skips_of_its_steps():
    high = StepShape(expert="high", patch=1, is_skipped=True)
    low = [StepShape(expert="low", patch=patch, is_skipped=patch > 1) for patch in range(3)]
    run = run_shape(steps=[high, high, *low])
    assert share(Mesh(stage=2), run).run.steps == tuple(low)


def test_one_copy_in_ram_and_one_disk_serve_a_machine():
    """Two stages keep one expert each in the same RAM. Another machine's workers have their own."""
    run = run_shape()
    machine = rated()
    one, eight, apart = (
        share(mesh, run, machine, per_machine=count)
        for mesh, count in ((Mesh(), 8), (Mesh(data=8), 8), (Mesh(data=8), 1))
    )
    half = Budgets(ram_bytes=machine.ram_bytes // 2)
    assert one.budgets == eight.budgets == apart.budgets == half
    assert eight.machine.disk_bytes_per_s == machine.disk_bytes_per_s / 8
    assert apart.machine == one.machine == machine
    assert share(Mesh(stage=2), run, machine, Budgets(ram_bytes=1000)).budgets.ram_bytes == 500


def test_workers_on_a_cpu_share_all_of_it():
    run = run_shape()
    machine = plan_fixtures.rated_cpu()
    two = share(Mesh(data=2), run, machine)
    assert two.budgets.ram_bytes == machine.ram_bytes // 4
    assert two.machine.flops_per_s == machine.flops_per_s / 2
    needed = plan_fixtures.needs_of(run, machine, OffloadPolicy.layerwise(1)).device_bytes
    small = plan_fixtures.rated_cpu(ram_bytes=3 * needed)
    assert distributed.choose_layout(1, run, small, NO_LIMIT) == Mesh()
    with pytest.raises(DoesNotFitError, match="one worker of data 2: needs 2 buffers"):
        distributed.choose_layout(2, run, small, NO_LIMIT, samples=2)


def test_shards_in_device_memory_count_there():
    run = run_shape(sides=GUIDED)
    little = rated(ram_bytes=1)
    part = share(Mesh(cfg=2, ulysses=2), run, little, weights="sharded in VRAM")
    shards = 16 * run.blocks.stored_bytes // 4
    assert part.run.blocks.outside_bytes == run.blocks.outside_bytes + shards
    assert plan_offload(part.run, part.machine, part.budgets).policy.source == "pinned"


def test_a_layout_is_described_by_shared_work():
    assert distributed.describe_layout(Mesh()) == "one worker"
    assert distributed.describe_layout(Mesh(data=8)) == "data 8: 8 videos at a time"
    assert distributed.describe_layout(Mesh(cfg=2, ring=2, ulysses=4)) == (
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
        (CFG, "AA", None, 0),
        (CFG, "AB", {"cfg": VELOCITY}, 2),
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
def test_the_traffic_between_machines_is_that_of_the_splits(layout, machines, wanted, exchanges):
    traffic = distributed.wire_traffic(layout, machines, a14b())
    found = traffic and (dict(traffic.bytes_by_axis), traffic.bytes, traffic.exchanges)
    assert found == (wanted and (wanted, sum(wanted.values()), exchanges))


def test_the_traffic_of_short_lanes_is_their_own():
    """A source doubles the tokens in two lanes. Both cfg ranks compute the third, short one."""
    video = a14b().tokens
    three = dict.fromkeys(GUIDED, 3)
    run = replace(a14b(), extra_tokens=(video, 0, video), sides=three)
    for layout, machines, wanted in [
        (Mesh(ulysses=2), "AB", {"ulysses": 40 * 5 * 4 * HIDDEN // 4}),
        (Mesh(cfg=2, ulysses=2), "ABAB", {"ulysses": 2 * 40 * 3 * 4 * HIDDEN // 4}),
        (CFG, "AB", {"cfg": 2 * VELOCITY}),
    ]:
        assert dict(distributed.wire_traffic(layout, machines, run).bytes_by_axis) == wanted


def test_group_on_several_machines_is_described():
    run = a14b()
    assert distributed.describe_wire(distributed.wire_traffic(CFG, "AB", run), 0) == (
        "each step moves 9.68 MB between the machines (cfg 9.68 MB) in 2 exchanges, at least "
        "0.0774 s at 1 Gb/s (assumed: the network card reports none)"
    )
    traffic = distributed.wire_traffic(Mesh(ulysses=4), "AABB", run)
    assert distributed.describe_wire(traffic, 1_250_000_000) == (
        "each step moves 61.9 GB between the machines (ulysses 61.9 GB) in 321 exchanges, at least "
        "49.55 s at 10 Gb/s (the link speed of the network card); only data or cfg between the "
        "machines costs less"
    )


ONE_SIDE = {"high": 1, "low": 1}


def tokens(count, *extra):
    return {"tokens": count, "extra_tokens": extra}


USUAL = {"tokens": 32_760, "sides": GUIDED, "samples": 1}
EXPERTS = ("high",) * 10 + ("low",) * 10


def _check(mesh, *, heads=40, experts=EXPERTS, **changes):
    expert = replace(T2V_A14B, width=heads * HEAD_DIM)
    steps = [StepShape(expert=name) for name in experts]
    given = {**USUAL, **changes}
    samples = given.pop("samples")
    return distributed.check_layout(mesh, run_shape(expert=expert, steps=steps, **given), samples)


REFS = "2809 of them belong to sources and references: give every reference a side of a multiple"


@pytest.mark.parametrize(
    ("mesh", "changes", "message"),
    [
        (Mesh(ulysses=3), {}, "ulysses 3 does not divide 40 heads: 2, 4, 5, 8, 10 do"),
        (Mesh(ulysses=2), {"heads": 1}, "ulysses 2 does not divide 1 heads: only 1 does"),
        (Mesh(ring=2, ulysses=8), {}, "= 16 does not divide 32760 tokens: 2, 3, .*, 14, 15 do"),
        (Mesh(ring=2), {"tokens": 7}, "ring 2 x ulysses 1 = 2 does not divide 7 tokens: 7 does$"),
        (Mesh(ulysses=8), {"tokens": 7}, "ulysses 8 does not divide 7 tokens: 7 does$"),
        (Mesh(ring=2), tokens(32_760 + 53 * 53, 53 * 53), f"divide 35569 tokens: .*; {REFS}"),
        (Mesh(ring=2), tokens(30, 18, 15), r"30 .* \(positive\) and 27 .*: 3 does; 18 and 15 of"),
        (Mesh(ring=2), tokens(30, 15, 0, 15), r"and 15 \(without context\): 3, 5, 15 do$"),
        (Mesh(ring=2), tokens(31, 4), "= 2 does not divide 31 tokens: only 1 does$"),
        (Mesh(cfg=2), {"sides": ONE_SIDE}, "guidance is 1 under every expert, so each step has"),
        (Mesh(stage=2), {"experts": ("high",), "samples": 9}, "stage 2 for 1 step: "),
        (Mesh(data=2, cfg=2), {}, "one video is made: 2 of 4 workers would be idle; use data 1"),
    ],
)
def test_a_mesh_that_cannot_run_is_refused_with_a_remedy(mesh, changes, message):
    with pytest.raises(MeshError, match=message):
        _check(mesh, **changes)


@pytest.mark.parametrize(
    ("mesh", "changes", "words"),
    [
        (Mesh(data=4), {"samples": 3}, "data 4 for 3 videos: 1 of 4 rows of workers are idle"),
        (Mesh(stage=2), {}, "stage 2 x data 1 for 1 video: at most 1 of 2 groups work at a time"),
        (Mesh(cfg=2), {"sides": {"high": 2, "low": 1}}, "cfg 2: the low expert has one lane, so"),
        (Mesh(), {}, ""),
        (Mesh(ulysses=8), {"tokens": 32_763}, ""),
        (Mesh(cfg=2, ulysses=2), {"tokens": 2_809}, ""),
        (Mesh(cfg=2, ulysses=4), {}, ""),
        (Mesh(ring=2, ulysses=8), {"tokens": 75_600}, ""),
        (Mesh(data=4, stage=2), {"samples": 8}, ""),
        (Mesh(ring=3), {"heads": 1}, ""),
        (Mesh(ring=3), tokens(30, 18, 15), ""),
        (Mesh(ulysses=2), tokens(30, 15, 15), ""),
    ],
)
def test_idle_workers_are_reported(mesh, changes, words):
    """Without words, the mesh keeps every worker busy."""
    said = [warning[: len(words)] for warning in _check(mesh, **changes)]
    assert said == [words] * bool(words)
