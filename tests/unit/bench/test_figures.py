from dataclasses import replace

from wanstream.bench import figures
from wanstream.schema.records import MemorySample, PhaseRecord
from wanstream.tests.support.bench_runs import BLOCKING, make_timeline, make_variant


def figure(name: str) -> figures.Figure:
    (found,) = (figure for figure in figures.FIGURES if figure.name == name)
    return found


def test_spread_is_the_median_with_both_ends():
    for values, ends in (([5, 1, 3], (3, 1, 5)), ([4, 1], (2.5, 1, 4)), ([0], (0, 0, 0))):
        spread = figures.Spread.of(values)
        assert (spread.median, spread.low, spread.high, spread.runs) == (*ends, len(values))
    assert figures.Spread.of([1, None, 3]) is None
    assert figures.Spread.of([]) is None


def test_steady_step_is_none_that_begins_a_stage():
    assert figures.steady_s(BLOCKING, "high") == figures.steady_s(BLOCKING, "low") == 20
    switch = figures.switch_record(BLOCKING)
    assert switch is BLOCKING.steps[3]
    assert figures.over_steady_s(BLOCKING, switch) == 27
    assert figures.over_steady_s(BLOCKING, BLOCKING.steps[0]) == 20
    # A stage of one step has no steady one.
    run = make_timeline(40, 20, 50, switch=2)
    assert figures.steady_s(run, "high") == 20
    assert figures.steady_s(run, "low") is None
    assert figures.over_steady_s(run, run.steps[2]) is None
    one_expert = make_timeline(40, 20, switch=9)
    assert figures.switch_record(one_expert) is None
    assert figure("Switch step").of(one_expert) is None
    # Steps are known by their number, not by their place.
    late = make_timeline(20, 20, 47, 20, switch=12, first=10)
    assert late.switch_step == 12
    assert figures.switch_record(late) is late.steps[2]


def test_figures_are_those_of_the_timelines():
    """Warm-ups do not count, and only known figures are shown."""
    reads = {"read_bytes": 2 * 10**9, "read_s": 4.0}
    given = {"copied_bytes": 10**9, "copy_s": 0.5, "stall_s": 1.0, "rss_bytes": 7, **reads}
    given["first_block_s"] = 0.25
    variant = make_variant("a", *(make_timeline(n, 2, 2, 3, **given) for n in (90, 4, 5, 9)))
    cold, *warm = variant.trials
    variant = replace(variant, trials=(replace(cold, warmup=True), *warm))
    expected = {
        "Total denoising": (12, 11, 16),
        "Average per step": (3, 2.75, 4),
        "Steady step, high-noise expert": (2, 2, 2),
        "First step": (5, 4, 9),
        "Switch step": (3, 3, 3),
        "First block after": (0.25,) * 3,
        "Stall": (4, 4, 4),
        "Moved to buffers": (4 * 28e9,) * 3,
        "Rate to buffers": (2e9,) * 3,
        "Rate from files": (0.5e9,) * 3,
        "Transfers hidden": (0.75,) * 3,
        "Most RAM of the process": (7,) * 3,
    }
    written = figures.figures_dict(variant)
    for name, values in expected.items():
        found = [written[name][key] for key in ("median", "low", "high", "runs")]
        assert found == [*values, 3], name
    assert not {"Steady step, low-noise expert", "Peak VRAM, allocated"} & written.keys()
    assert figures.figures_dict(make_variant("c")) == {}


def test_whole_run_includes_time_between_its_steps():
    """Of old timelines it is not known."""
    whole = figure("Whole run, with what lies between steps")
    run = make_timeline(2, 3, read_bytes=10, non_block_bytes=5)
    opened = PhaseRecord(name="open", start_s=-3.0, wall_s=2.0)
    phases = [opened, PhaseRecord(name="first block", start_s=0.0, wall_s=1.5)]
    phases.append(PhaseRecord(name="high", start_s=1.5, wall_s=5.5))
    for known, whole_s in ((0, None), (1, None), (3, 7.0)):
        assert whole.of(replace(run, phases=tuple(phases[:known]))) == whole_s
    assert figure("Total denoising").of(run) == 5.0
    assert figure("Read from files").of(run) == 20
    assert figure("Weights outside the blocks").of(run) == 5


def test_memory_between_the_steps_counts_too():
    sample = MemorySample(at_s=1, device_bytes=9, device_used_bytes=30, rss_bytes=5)
    run = make_timeline(1, 1, device_bytes=8, device_used_bytes=20, rss_bytes=7, memory=(sample,))
    cases = [("Peak VRAM, allocated", 9), ("Most VRAM used by all", 30)]
    cases += [("Most RAM of the process", 7), ("Most page-locked RAM", None)]
    for name, nbytes in cases:
        assert figure(name).of(run) == nbytes


def test_figure_is_never_a_number_alone():
    def text(name: str, *values: float) -> str:
        return figures.Spread.of(values).text(figure(name).unit)

    assert text("Total denoising", 660.04, 662.2, 664) == "662.2 s (660.0 to 664.0)"
    assert text("Total denoising", 0.0101, 0.0123, 1.5) == "0.0123 s (0.0101 to 1.5000)"
    assert text("Total denoising", 23) == "23.00 s (1 run)"
    assert text("Moved to buffers", 27e9, 28e9, 29e9) == "28.0 GB (27.0 GB to 29.0 GB)"
    assert text("Rate from files", 2e9, 2.5e9, 3e9) == "2.50 GB/s (2.00 GB/s to 3.00 GB/s)"
    assert text("Transfers hidden", 0.25, 0.5, 1) == "50.0 % (25.0 % to 100.0 %)"
    # A short time among long ones has their digits.
    assert figures.Spread.of([0, 0, 0.25]).text("s", 2) == "0.00 s (0.00 to 0.25)"
    assert figures.Spread.of([660, 662.2, 664]).text("s", 2).startswith("662.2 s")


def test_usual_run_is_the_one_in_the_middle():
    short, middle, long = (make_timeline(wall) for wall in (1, 2, 9))
    assert make_variant("a", long, short, middle).median_run is middle
    assert make_variant("a", long, short).median_run is short
    assert make_variant("a").median_run is None


def test_cache_has_a_share_of_shortened_steps():
    share = figure("Steps in which a cache skipped blocks")
    plain = make_timeline(2, 2, 2, 2)
    assert share.of(plain) is None
    steps = zip(plain.steps, ((0, 0), (1, 0), (2, 39), (2, 39)), strict=True)
    cached = (replace(step, skipped_lanes=lanes, skipped_visits=n) for step, (lanes, n) in steps)
    assert share.of(replace(plain, steps=tuple(cached))) == 0.5
