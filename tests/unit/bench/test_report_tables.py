"""Tables of a report: figures side by side, steps, phases, settings, and bandwidth."""

from dataclasses import replace

from wanstream.bench import Table, Trial, run_table
from wanstream.bench.report_tables import (
    bandwidth_tables,
    comparison,
    every_table,
    phase_table,
    run_phase_table,
    settings_table,
    step_table,
)
from wanstream.schema.records import PhaseRecord, RateRange, StepRecord, Timeline
from wanstream.tests.support.bench_runs import (
    BLOCKING,
    SEAMLESS,
    make_report,
    make_timeline,
    make_variant,
)
from wanstream.tests.support.sampling.steps import changed_step

GB = 10**9


# --- a table --------------------------------------------------------------------------------------

ROWS = (("1", "", "First"), ("2", "", ""))
TABLE = Table(title="Steps", head=("Step", "Read", "Phase"), rows=ROWS, marked=0)


def test_markdown_has_a_title_a_head_and_a_bold_row():
    lines = ["| Step | Read | Phase |", "| --: | --- | --- |"]
    lines += ["| **1** |  | **First** |", "| 2 |  |  |"]
    assert TABLE.markdown().splitlines() == ["## Steps", "", *lines]
    assert replace(TABLE, title="").markdown().splitlines() == lines
    spoilt = Table(title="a\n# b", head=("x|y",), rows=(("1\n| 2 |",),))
    assert spoilt.markdown().splitlines() == ["## a # b", "", "| x/y |", "| --: |", "| 1 / 2 / |"]


def test_columns_without_a_word_are_left_out():
    found = TABLE.without_empty_columns()
    assert found == replace(TABLE, head=("Step", "Phase"), rows=(("1", "First"), ("2", "")))


def test_text_has_figures_to_the_right_and_words_to_the_left():
    rows = (("20 of 40 blocks", "1.50 s", "-"), ("resident", "12.25 s (1 run)", "703 MB"))
    assert Table(head=("device", "total", "VRAM"), rows=rows).text().splitlines() == [
        "device                     total    VRAM",
        "20 of 40 blocks           1.50 s       -",
        "resident         12.25 s (1 run)  703 MB",
    ]
    rates = (("a block", "1.5 TFLOP/s"), ("RAM", "25 GB/s"))
    lines = ["a block  1.5 TFLOP/s", "RAM          25 GB/s"]
    assert Table(head=("", ""), rows=rates).text().splitlines() == lines
    assert Table(head=("a", "b"), rows=()).text() == "a  b"


def test_html_marks_its_row_and_keeps_markup_out():
    page = Table(title="a < b", head=("<i>",), rows=(("1",), ("<b>",)), marked=1).html()
    assert page.startswith("<h2>a &lt; b</h2>")
    assert "<tr><td>1</td></tr>" in page
    assert '<tr class="marked"><td>&lt;b&gt;</td></tr>' in page
    assert "<i>" not in page


# --- figures side by side -------------------------------------------------------------------------


def row(report, name):
    (found,) = (row[1:] for row in comparison(report).rows if row[0] == name)
    return found


def test_two_variants_stand_head_to_head():
    report = make_report(make_variant("new", SEAMLESS), make_variant("old", BLOCKING))
    table = comparison(report)
    assert table.title == "Head to head, ratios to the first"
    assert table.head == ("Metric", "new", "old")
    for name, first, second in (
        ("Total denoising", "180.0 s", "167.0 s (1 run), 0.93x"),
        ("Steady step, low-noise expert", "23.00 s", "20.00 s (1 run), 0.87x"),
        ("First step", "65.00 s", "40.00 s (1 run), 0.62x"),
        ("Switch step over a steady one", "0.00 s", "27.00 s (1 run)"),
        ("Moved to buffers", "168 GB", "168 GB (1 run), 1.00x"),
    ):
        assert row(report, name) == (f"{first} (1 run)", second)
    alone = comparison(make_report(make_variant("new", SEAMLESS)))
    assert (alone.title, alone.head) == ("Figures", ("Metric", "new"))
    unknown = {"Peak VRAM, allocated", "Predicted total", "Remarks"}
    assert not unknown & {row[0] for row in alone.rows}


def test_ratio_to_next_to_nothing_is_left_out():
    for one, other, ratio in ((0.001, 2, ""), (0, 0, ""), (1, 2, "2.00x"), (2, 0, "0.00x")):
        runs = (make_timeline(20, 20, stall_s=stall) for stall in (one, other))
        report = make_report(*(make_variant("a", run) for run in runs))
        assert row(report, "Stall")[1].partition(", ")[2] == ratio
    early, late = (make_timeline(23, 23, 23, switch_s, 23, 23) for switch_s in (22, 33))
    report = make_report(make_variant("late", late), make_variant("early", early))
    assert row(report, "Switch step over a steady one")[1] == "-1.00 s (1 run)"


def test_many_variants_have_a_line_each():
    variants = [make_variant(f"v{n}", make_timeline(*[2.0] * n, switch=2)) for n in range(4, 9)]
    table = comparison(make_report(*variants))
    assert [row[0] for row in table.rows] == [variant.name for variant in variants]
    assert table.rows[4][table.head.index("Total denoising")] == "16.00 s (1 run), 2.00x"
    assert comparison(make_report(*variants[:4])).head[0] == "Metric"


def test_latents_are_compared_among_variants_of_one_job():
    run = make_timeline(2, 2)
    first = make_variant("a", run, run)
    other = make_variant("b", run)
    broken = make_variant("c", run, latents="cd" * 32)
    another = make_variant("d", run, latents="ef" * 32, job="two")
    found = row(make_report(first, other, broken, another), "Latents")
    in_runs = ("abababababab in 2 of 2 runs", "efefefefefef in 1 of 1 runs")
    assert found == (in_runs[0], "equal to the bit", "not equal", in_runs[1])
    assert row(make_report(another, first, other), "Latents")[2] == "equal to the bit to a"
    odd = Trial(timeline=run, latents="cd" * 32, warmup=True)
    shaky = replace(first, trials=(odd, *first.trials))
    assert row(make_report(shaky), "Latents") == ("differ from run to run",)


def test_prediction_is_next_to_the_measurement():
    with_prediction = make_variant("a", SEAMLESS, predicted=make_timeline(100, kind="simulated"))
    report = make_report(with_prediction, make_variant("b", SEAMLESS))
    assert row(report, "Predicted total") == ("100.0 s (measured: 1.80x)", "")


def test_limit_of_the_device_is_one_number():
    def run(*compute_s, **fields):
        timeline = make_timeline(*[9.0] * len(compute_s))
        pairs = zip(timeline.steps, compute_s, strict=True)
        steps = tuple(changed_step(step, compute_s=each, **fields) for step, each in pairs)
        return replace(timeline, steps=steps)

    predicted = run(1.0, 1.0, limit_s=0.8)
    report = make_report(
        make_variant("a", run(1.0, 1.0), run(2.0, 2.0), predicted=predicted),
        make_variant("cached", run(1.0, 1.0, skipped_lanes=1), predicted=predicted),
        make_variant("unknown", run(1.0, 1.0)),
    )
    assert row(report, "Share of the device's limit") == ("60.0 % (40.0 % to 80.0 %)", "", "")


def test_changes_and_failures_are_remarks():
    changed = make_timeline(2, changes=("fewer buffers",))
    report = make_report(
        make_variant("a", make_timeline(2)),
        make_variant("b", changed, changed),
        make_variant("c", failed="needs 57 GB, 24 GB free"),
    )
    assert row(report, "Remarks") == ("", "fewer buffers", "failed: needs 57 GB, 24 GB free")
    assert row(report, "Total denoising")[2:] == ("",)


def test_settings_stand_beside_each_other():
    one = make_variant("a", settings={"Policy": "a"})
    two = make_variant("b", settings={"Policy": "b", "LoRA": "x"})
    table = settings_table(make_report(one, two))
    assert table.head == ("Setting", "a", "b")
    assert table.rows == (("Policy", "a", "b"), ("LoRA", "", "x"))


def test_phases_of_the_queue_item_and_medians_of_those_of_runs():
    opened = PhaseRecord(name="open", start_s=-3, wall_s=2.5, rss_bytes=GB)
    phases = (opened, PhaseRecord(name="high", start_s=0, wall_s=40))
    table = phase_table(make_report(make_variant("a"), phases=phases))
    assert table.head == ("Phase", "Began (s)", "Took (s)", "RAM")
    assert table.rows == (("open", "-3.00", "2.50", "1.00 GB"), ("high", "0.00", "40.00", ""))
    assert phase_table(make_report(make_variant("a"))).rows == ()

    def run(switch_s: float, low_s: float) -> Timeline:
        named = {"first block": 1, "high": 40, "switch": switch_s, "low": low_s}
        phases = (PhaseRecord(name=name, start_s=0, wall_s=each) for name, each in named.items())
        return make_timeline(40, 50, phases=tuple(phases))

    report = make_report(make_variant("a", run(2, 50), run(4, 60)), make_variant("b"))
    table = run_phase_table(report)
    assert table.head == ("Phase", "a", "b")
    assert [row[0] for row in table.rows] == ["first block", "high", "switch", "low"]
    medians = ["3.00 s (2.00 to 4.00)", "55.00 s (50.00 to 60.00)"]
    assert [row[1] for row in table.rows][2:] == medians
    assert run_phase_table(make_report(make_variant("a", make_timeline(1)))).rows == ()


def test_every_table_comes_once():
    bad = make_variant("bad", failed="no")
    report = make_report(make_variant("new", SEAMLESS), make_variant("old", BLOCKING), bad)
    steps = ["Per-step timing: new", "Per-step timing: old"]
    titles = ["Head to head, ratios to the first", *steps, "Settings"]
    assert [table.title for table in every_table(report)] == titles
    nothing = make_variant("a")
    assert [table.title for table in every_table(make_report(nothing))] == ["Figures", "Settings"]
    assert [*bandwidth_tables(nothing)] == []


# --- steps ----------------------------------------------------------------------------------------


def columns(variant, *names):
    """Return columns of a table of steps."""
    table = step_table(variant)
    assert table.title == f"Per-step timing: {variant.name}"
    return [[row[table.head.index(name)] for row in table.rows] for name in names]


def phases_of(*runs: tuple[float, ...]) -> list[str]:
    """Return the phases of runs with one expert."""
    timelines = [make_timeline(*walls, switch=9) for walls in runs]
    (phases,) = columns(make_variant("a", *timelines), "Phase")
    return phases


def test_switch_that_blocks_is_marked():
    names = ("Step", "Expert", "Cumulative (s)", "Delta (s)", "Spread (s)", "Phase")
    old = make_variant("old", BLOCKING)
    steps, experts, cumulative, delta, spread, phases = columns(old, *names)
    assert steps == ["1", "2", "3", "4", "5", "6"]
    assert experts == ["high"] * 3 + ["low"] * 3
    assert cumulative == ["40.00", "60.00", "80.00", "127.00", "147.00", "167.00"]
    assert delta == ["40.00", "20.00", "20.00", "47.00", "20.00", "20.00"]
    assert spread == ["1 run"] * 6
    assert phases == [
        "First step: +20.00 s (+100 %) over a steady step",
        "Steady",
        "Steady (last step of the high-noise expert)",
        "Switch to the low-noise expert: +27.00 s (+135 %) over a steady step",
        "Steady",
        "Last step",
    ]
    assert step_table(old).marked == 3
    (phases,) = columns(make_variant("new", SEAMLESS), "Phase")
    assert phases[3] == "Switch to the low-noise expert: +0.00 s (+0 %) over a steady step"


def test_run_of_one_expert_has_no_switch():
    assert phases_of((1.5, 2, 2))[0] == "First step: -0.50 s (-25 %) over a steady step"
    assert phases_of((1.999, 2, 2))[0] == "First step: +0.00 s (+0 %) over a steady step"
    assert not any("Switch" in phase for phase in phases_of((3, 2, 2)))
    assert phases_of((3,)) == ["First step"]
    assert step_table(make_variant("a", make_timeline(3, 2, 2, switch=9))).marked is None


def test_step_of_several_runs_has_its_median_and_ends():
    runs = [make_timeline(*walls) for walls in ((4, 2, 2, 3, 2), (6, 1, 2, 9, 2), (5, 3, 2, 4, 2))]
    names = ("Delta (s)", "Spread (s)", "Cumulative (s)", "Phase")
    variant = make_variant("a", *runs)
    warmup = replace(variant.trials[1], warmup=True)
    measured = replace(variant, trials=(warmup, *variant.trials))
    delta, spread, cumulative, phases = columns(measured, *names)
    assert delta == ["5.00", "2.00", "2.00", "4.00", "2.00"]
    assert spread[:2] == ["4.00 to 6.00", "1.00 to 3.00"]
    assert cumulative == ["5.00", "7.00", "9.00", "14.00", "16.00"]
    assert "+2.00 s (+100 %)" in phases[3]
    # The runs differ in their steady steps as well: 1, 2 and 5 s.
    phases = phases_of((2, 1, 1), (6, 2, 2), (6, 5, 5))
    assert phases[0] == "First step: +1.00 s (+50 %) over a steady step"


def test_columns_without_known_values_are_left_out():
    bare = step_table(make_variant("a", make_timeline(2, 2)))
    expected = {"Moved": "28.0 GB", "To buffers": "14.0 GB/s", "Read": "1.00 GB"}
    expected |= {"From files": "2.00 GB/s", "Stall (s)": "0.50", "Stall, files (s)": "0.25"}
    expected |= {"Hidden": "75.0 %", "VRAM peak": "3.00 GB", "RAM": "1.00 GB"}
    expected["Compute (s)"] = "1.50"
    assert {*bare.head} & expected.keys() == {"Moved", "Stall (s)", "Compute (s)"}
    rates = {"copied_bytes": 28 * GB, "copy_s": 2.0, "read_bytes": GB, "read_s": 0.5}
    stalls = {"stall_s": 0.5, "stall_on_read_s": 0.25}
    run = make_timeline(2, 2, device_bytes=3 * GB, rss_bytes=GB, **stalls, **rates)
    assert columns(make_variant("a", run), *expected) == [[each] * 2 for each in expected.values()]


def test_bytes_read_by_only_some_runs_are_shown_by_their_median():
    """The first run read blocks that the others had in RAM. One run waited for a file again."""
    reads = ((4 * GB, 1.0), (0, 0.0), (2 * GB, 0.5))
    runs = [make_timeline(2, stall_s=1, read_bytes=n, stall_on_read_s=stall) for n, stall in reads]
    assert columns(make_variant("a", *runs), "Read", "Stall, files (s)") == [["2.00 GB"], ["0.50"]]


def test_skipped_blocks_have_a_column_if_there_are_any():
    plain = make_timeline(2, 1, 2)
    first, second, third = plain.steps
    skipping = replace(second, skipped_visits=39, skipped_lanes=2)
    cached = make_variant("a", plain, replace(plain, steps=(first, skipping, third)))
    assert columns(cached, "Skipped") == [["", "39 blocks, 2 lanes", ""]]
    assert "Skipped" not in step_table(make_variant("a", plain)).head


# --- bandwidth ------------------------------------------------------------------------------------


def rates(border: int, fetches: int, nbytes: int, busy_s: float) -> RateRange:
    return RateRange(from_gb_per_s=border, fetches=fetches, nbytes=nbytes, busy_s=busy_s)


def test_histogram_counts_fetches_with_data_and_time():
    """Two steps with forty fetches each make eighty fetches, whatever the steps' rates."""
    one = make_timeline(2, 2, copy_rates=(rates(1, 3, 6 * GB, 3.0), rates(20, 77, 54 * GB, 2.0)))
    other = make_timeline(2, 2, copy_rates=(rates(20, 80, 56 * GB, 2.25),))
    (table,) = bandwidth_tables(make_variant("a", one, other))
    assert table.title == "Bandwidth histogram: a, RAM to buffers (2 runs together)"
    assert table.head == ("Range", "Fetches", "Data", "Time")
    assert table.rows == (
        ("0-1 GB/s", "0", "0 B", "0.00 s"),
        ("1-5 GB/s", "3", "6.00 GB", "3.00 s"),
        ("5-20 GB/s", "0", "0 B", "0.00 s"),
        ("20-50 GB/s", "157", "110 GB", "4.25 s"),
        ("50-80 GB/s", "0", "0 B", "0.00 s"),
        ("over 80 GB/s", "0", "0 B", "0.00 s"),
    )
    both = {"copy_rates": (rates(1, 1, GB, 1.0),), "read_rates": (rates(0, 1, GB, 2.0),)}
    tables = bandwidth_tables(make_variant("a", make_timeline(2, **both)))
    assert [table.title for table in tables] == [
        f"Bandwidth histogram: a, {route}" for route in ("RAM to buffers", "files")
    ]


# --- one run --------------------------------------------------------------------------------------


def lines(*steps):
    """Return the table of a run whose steps change the expert."""
    usual = {"wall_s": 1.5, "compute_s": 1.25, "stall_s": 0.25, "bytes_moved": 2_000_000}
    own = ({"index": at, "sigma": 1 - at / 4, **usual, **each} for at, each in enumerate(steps))
    records = tuple(StepRecord.of(expert=("high", "low")[each["index"]], **each) for each in own)
    return run_table(Timeline(steps=records, kind="measured")).text().splitlines()


def test_one_line_per_step_and_one_for_the_run():
    assert lines({"rss_bytes": 500_000_000}, {"rss_bytes": 700_000_000, "bytes_moved": 0}) == [
        "step  expert   sigma  seconds  stall    moved  memory",
        "1     high    1.0000     1.50   0.25  2.00 MB  500 MB",
        "2     low     0.7500     1.50   0.25      0 B  700 MB",
        "all                      3.00   0.50  2.00 MB  700 MB",
    ]
    assert lines() == ["step  seconds  stall  moved", "all      0.00   0.00    0 B"]
    assert "None" not in "\n".join(lines({"sigma": None}))


def test_reads_and_decoding_have_a_column_where_there_are_any():
    """Memory is that of the device where it is counted."""
    first = {"read_bytes": 2_000_000, "decode_s": 0.5, "device_bytes": 9, "rss_bytes": 7}
    assert lines(first, {"decode_s": 0.25, "device_bytes": 9}) == [
        "step  expert   sigma  seconds  stall  decode    moved     read  memory",
        "1     high    1.0000     1.50   0.25    0.50  2.00 MB  2.00 MB     9 B",
        "2     low     0.7500     1.50   0.25    0.25  2.00 MB              9 B",
        "all                      3.00   0.50    0.75  4.00 MB  2.00 MB     9 B",
    ]
    assert "decode" not in lines({"read_bytes": 5})[0].split()
    assert "read" not in lines({"decode_s": 5})[0].split()
