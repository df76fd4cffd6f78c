from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from wanstream.bench import Report, Table, Trial, Variant
from wanstream.bench.report_tables import (
    comparison,
    every_table,
    phase_table,
    run_phase_table,
    settings_table,
)
from wanstream.schema.records import PhaseRecord, Timeline
from wanstream.tests.support.steps import changed_step

MakeTimeline = Callable[..., Timeline]
MakeVariant = Callable[..., Variant]
MakeReport = Callable[..., Report]


def row(table: Table, name: str) -> tuple[str, ...]:
    (found,) = (row[1:] for row in table.rows if row[0] == name)
    return found


def test_two_variants_stand_head_to_head(
    seamless: Timeline, blocking: Timeline, make_variant: MakeVariant, make_report: MakeReport
) -> None:
    table = comparison(make_report(make_variant("new", seamless), make_variant("old", blocking)))
    assert table.title == "Head to head, ratios to the first"
    assert table.head == ("Metric", "new", "old")
    assert row(table, "Total denoising") == ("180.0 s (1 run)", "167.0 s (1 run), 0.93x")
    assert row(table, "Steady step, low-noise expert") == (
        "23.00 s (1 run)",
        "20.00 s (1 run), 0.87x",
    )
    assert row(table, "First step") == ("65.00 s (1 run)", "40.00 s (1 run), 0.62x")
    assert row(table, "Switch step over a steady one") == ("0.00 s (1 run)", "27.00 s (1 run)")
    assert row(table, "Moved to buffers") == ("168 GB (1 run)", "168 GB (1 run), 1.00x")


def test_there_is_no_ratio_to_next_to_nothing(
    make_timeline: MakeTimeline, make_variant: MakeVariant, make_report: MakeReport
) -> None:
    def ratio(one: float, other: float) -> str:
        runs = (make_timeline(20, 20, stall_s=stall) for stall in (one, other))
        table = comparison(
            make_report(*(make_variant(name, run) for name, run in zip("ab", runs, strict=True)))
        )
        return row(table, "Stall")[1].partition(", ")[2]

    assert [ratio(0.001, 2), ratio(0, 0), ratio(1, 2), ratio(2, 0)] == ["", "", "2.00x", "0.00x"]
    early = make_timeline(23, 23, 23, 22, 23, 23)
    late = make_timeline(23, 23, 23, 33, 23, 23)
    table = comparison(make_report(make_variant("late", late), make_variant("early", early)))
    assert row(table, "Switch step over a steady one")[1] == "-1.00 s (1 run)"


def test_one_variant_has_its_figures(
    seamless: Timeline, make_variant: MakeVariant, make_report: MakeReport
) -> None:
    table = comparison(make_report(make_variant("new", seamless)))
    assert (table.title, table.head) == ("Figures", ("Metric", "new"))


def test_unknown_figures_have_no_row(
    seamless: Timeline, make_variant: MakeVariant, make_report: MakeReport
) -> None:
    names = {row[0] for row in comparison(make_report(make_variant("new", seamless))).rows}
    assert "Peak VRAM, allocated" not in names
    assert "Predicted total" not in names
    assert "Remarks" not in names


def test_many_variants_have_a_line_each(
    make_timeline: MakeTimeline, make_variant: MakeVariant, make_report: MakeReport
) -> None:
    variants = [
        make_variant(f"{steps} steps", make_timeline(*[2.0] * steps, switch=2))
        for steps in range(4, 9)
    ]
    table = comparison(make_report(*variants))
    assert [row[0] for row in table.rows] == [variant.name for variant in variants]
    assert table.rows[4][table.head.index("Total denoising")] == "16.00 s (1 run), 2.00x"
    side_by_side = comparison(make_report(*variants[:4]))
    assert side_by_side.head[0] == "Metric"


def test_latents_are_compared_among_variants_of_one_job(
    make_timeline: MakeTimeline, make_variant: MakeVariant, make_report: MakeReport
) -> None:
    run = make_timeline(2, 2)
    first, other = make_variant("a", run, run), make_variant("b", run)
    broken = make_variant("c", run, latents="cd" * 32)
    another = make_variant("d", run, latents="ef" * 32, job="two")
    said = row(comparison(make_report(first, other, broken, another)), "Latents")
    assert said[0] == "abababababab in 2 of 2 runs"
    assert said[1:] == ("equal to the bit", "not equal", "efefefefefef in 1 of 1 runs")
    said = row(comparison(make_report(another, first, other)), "Latents")
    assert said[2] == "equal to the bit to a"


def test_a_result_that_changes_from_run_to_run_is_reported(
    make_timeline: MakeTimeline, make_variant: MakeVariant, make_report: MakeReport
) -> None:
    first = make_variant("a", make_timeline(2, 2))
    odd = Trial(timeline=make_timeline(2, 2), latents="cd" * 32, warmup=True)
    shaky = replace(first, trials=(odd, *first.trials))
    assert row(comparison(make_report(shaky)), "Latents") == ("differ from run to run",)


def test_the_prediction_is_next_to_the_measurement(
    seamless: Timeline,
    make_timeline: MakeTimeline,
    make_variant: MakeVariant,
    make_report: MakeReport,
) -> None:
    predicted = make_variant("a", seamless, predicted=make_timeline(100, kind="simulated"))
    said = row(comparison(make_report(predicted, make_variant("b", seamless))), "Predicted total")
    assert said == ("100.0 s (measured: 1.80x)", "")


def test_the_limit_of_the_device_is_one_number(
    make_timeline: MakeTimeline, make_variant: MakeVariant, make_report: MakeReport
) -> None:
    def run(*compute_s: float, **fields: Any) -> Timeline:
        timeline = make_timeline(*[9.0] * len(compute_s))
        pairs = zip(timeline.steps, compute_s, strict=True)
        return replace(
            timeline,
            steps=tuple(changed_step(step, compute_s=each, **fields) for step, each in pairs),
        )

    predicted = run(1.0, 1.0, limit_s=0.8)
    variants = [
        make_variant("a", run(1.0, 1.0), run(2.0, 2.0), predicted=predicted),
        make_variant("cached", run(1.0, 1.0, skipped_lanes=1), predicted=predicted),
        make_variant("unknown", run(1.0, 1.0)),
    ]
    found = row(comparison(make_report(*variants)), "Share of the device's limit")
    assert found == ("60.0 % (40.0 % to 80.0 %)", "", "")


def test_changes_and_failures_are_remarks(
    make_timeline: MakeTimeline, make_variant: MakeVariant, make_report: MakeReport
) -> None:
    changed = make_timeline(2, changes=("fewer buffers",))
    failed = make_variant("c", failed="needs 57 GB, 24 GB free")
    table = comparison(
        make_report(
            make_variant("a", make_timeline(2)), make_variant("b", changed, changed), failed
        )
    )
    assert row(table, "Remarks") == ("", "fewer buffers", "failed: needs 57 GB, 24 GB free")
    assert row(table, "Total denoising")[2:] == ("",)


def test_settings_stand_beside_each_other(
    make_variant: MakeVariant, make_report: MakeReport
) -> None:
    one, two = (
        make_variant(name, settings={"Policy": name, **more})
        for name, more in (("a", {}), ("b", {"LoRA": "x"}))
    )
    table = settings_table(make_report(one, two))
    assert table.head == ("Setting", "a", "b")
    assert table.rows == (("Policy", "a", "b"), ("LoRA", "", "x"))


def test_the_parts_of_the_queue_item(make_report: MakeReport, make_variant: MakeVariant) -> None:
    phases = (
        PhaseRecord(name="open", start_s=-3, wall_s=2.5, rss_bytes=10**9),
        PhaseRecord(name="high", start_s=0, wall_s=40),
    )
    table = phase_table(make_report(make_variant("a"), phases=phases))
    assert table.head == ("Phase", "Began (s)", "Took (s)", "RAM")
    assert table.rows == (("open", "-3.00", "2.50", "1.00 GB"), ("high", "0.00", "40.00", ""))
    assert phase_table(make_report(make_variant("a"))).rows == ()


def test_phases_of_runs_have_medians_too(
    make_timeline: MakeTimeline, make_variant: MakeVariant, make_report: MakeReport
) -> None:
    def run(*seconds: float) -> Timeline:
        names = ("first block", "high", "switch", "low")
        phases = (
            PhaseRecord(name=name, start_s=0, wall_s=wall)
            for name, wall in zip(names, seconds, strict=True)
        )
        return make_timeline(40, 50, phases=tuple(phases))

    table = run_phase_table(
        make_report(make_variant("a", run(1, 40, 2, 50), run(3, 40, 4, 60)), make_variant("b"))
    )
    assert table.head == ("Phase", "a", "b")
    assert [row[0] for row in table.rows] == ["first block", "high", "switch", "low"]
    assert [row[1] for row in table.rows][2:] == [
        "3.00 s (2.00 to 4.00)",
        "55.00 s (50.00 to 60.00)",
    ]
    assert run_phase_table(make_report(make_variant("a", make_timeline(1)))).rows == ()


def test_every_table_comes_once(
    seamless: Timeline, blocking: Timeline, make_variant: MakeVariant, make_report: MakeReport
) -> None:
    report = make_report(
        make_variant("new", seamless),
        make_variant("old", blocking),
        make_variant("bad", failed="no"),
    )
    assert [table.title for table in every_table(report)] == [
        "Head to head, ratios to the first",
        "Per-step timing: new",
        "Per-step timing: old",
        "Settings",
    ]
