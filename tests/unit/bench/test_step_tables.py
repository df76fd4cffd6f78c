"""The table of steps and the bandwidth histogram."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from wanstream.bench import Report, Table, Variant
from wanstream.bench.report_tables import bandwidth_tables, every_table, step_table
from wanstream.schema.records import Timeline
from wanstream.schema.records.timeline import RateRange

MakeTimeline = Callable[..., Timeline]
MakeVariant = Callable[..., Variant]


def column(table: Table, name: str) -> list[str]:
    place = table.head.index(name)
    return [row[place] for row in table.rows]


def test_a_switch_that_blocks_is_seen_at_a_glance(
    blocking: Timeline, make_variant: MakeVariant
) -> None:
    table = step_table(make_variant("old", blocking))
    assert table.title == "Per-step timing: old"
    assert column(table, "Step") == ["1", "2", "3", "4", "5", "6"]
    assert column(table, "Expert") == ["high"] * 3 + ["low"] * 3
    assert column(table, "Cumulative (s)") == [
        "40.00",
        "60.00",
        "80.00",
        "127.00",
        "147.00",
        "167.00",
    ]
    assert column(table, "Delta (s)") == ["40.00", "20.00", "20.00", "47.00", "20.00", "20.00"]
    assert column(table, "Spread (s)") == ["1 run"] * 6
    assert column(table, "Phase") == [
        "First step: +20.00 s (+100 %) over a steady step",
        "Steady",
        "Steady (last step of the high-noise expert)",
        "Switch to the low-noise expert: +27.00 s (+135 %) over a steady step",
        "Steady",
        "Last step",
    ]
    assert table.marked == 3


def test_a_seamless_switch_costs_nothing(seamless: Timeline, make_variant: MakeVariant) -> None:
    table = step_table(make_variant("new", seamless))
    assert (
        column(table, "Phase")[3]
        == "Switch to the low-noise expert: +0.00 s (+0 %) over a steady step"
    )


def test_a_first_step_may_be_the_shortest(
    make_timeline: MakeTimeline, make_variant: MakeVariant
) -> None:
    table = step_table(make_variant("a", make_timeline(1.5, 2, 2, switch=9)))
    assert column(table, "Phase")[0] == "First step: -0.50 s (-25 %) over a steady step"
    almost = step_table(make_variant("a", make_timeline(1.999, 2, 2, switch=9)))
    assert column(almost, "Phase")[0] == "First step: +0.00 s (+0 %) over a steady step"


def test_of_several_runs_each_step_has_its_median_and_both_ends(
    make_timeline: MakeTimeline, make_variant: MakeVariant
) -> None:
    runs = [make_timeline(*walls) for walls in ((4, 2, 2, 3, 2), (6, 1, 2, 9, 2), (5, 3, 2, 4, 2))]
    table = step_table(make_variant("a", *runs))
    assert column(table, "Delta (s)") == ["5.00", "2.00", "2.00", "4.00", "2.00"]
    assert column(table, "Spread (s)")[:2] == ["4.00 to 6.00", "1.00 to 3.00"]
    assert column(table, "Cumulative (s)") == ["5.00", "7.00", "9.00", "14.00", "16.00"]
    assert "+2.00 s (+100 %)" in column(table, "Phase")[3]


def test_a_run_of_one_expert_has_no_switch(
    make_timeline: MakeTimeline, make_variant: MakeVariant
) -> None:
    table = step_table(make_variant("a", make_timeline(3, 2, 2, switch=9)))
    assert table.marked is None
    assert not [phase for phase in column(table, "Phase") if "Switch" in phase]
    alone = step_table(make_variant("a", make_timeline(3)))
    assert column(alone, "Phase") == ["First step"]


def test_columns_of_which_nothing_is_known_are_left_out(
    make_timeline: MakeTimeline, make_variant: MakeVariant
) -> None:
    bare = step_table(make_variant("a", make_timeline(2, 2)))
    assert not {"Read", "From files", "VRAM peak", "RAM", "Hidden", "Stall, files (s)"} & {
        *bare.head
    }
    rates = {"copied_bytes": 28 * 10**9, "copy_s": 2.0, "read_bytes": 10**9, "read_s": 0.5}
    values = {
        "stall_s": 0.5,
        "stall_on_read_s": 0.25,
        "device_bytes": 3 * 10**9,
        "rss_bytes": 10**9,
        **rates,
    }
    full = step_table(make_variant("a", make_timeline(2, 2, **values)))
    assert column(full, "Moved") == ["28.0 GB"] * 2
    assert column(full, "To buffers") == ["14.0 GB/s"] * 2
    assert (column(full, "Read"), column(full, "From files")) == (
        ["1.00 GB"] * 2,
        ["2.00 GB/s"] * 2,
    )
    assert (column(full, "Stall (s)"), column(full, "Stall, files (s)")) == (
        ["0.50"] * 2,
        ["0.25"] * 2,
    )
    assert column(full, "Hidden") == ["75.0 %"] * 2
    assert (column(full, "VRAM peak"), column(full, "RAM")) == (["3.00 GB"] * 2, ["1.00 GB"] * 2)


def test_without_a_run_there_is_no_table(
    make_variant: MakeVariant, make_report: Callable[..., Report]
) -> None:
    report = make_report(make_variant("a"))
    assert [table.title for table in every_table(report)] == ["Figures", "Settings"]
    assert [*bandwidth_tables(make_variant("a"))] == []


def rates(border: int, fetches: int, nbytes: int, busy_s: float) -> RateRange:
    return RateRange(from_gb_per_s=border, fetches=fetches, nbytes=nbytes, busy_s=busy_s)


def test_the_histogram_counts_fetches_with_their_data_and_time(
    make_timeline: MakeTimeline, make_variant: MakeVariant
) -> None:
    """Two steps with forty fetches each make eighty fetches, whatever the steps' rates."""
    one = make_timeline(
        2, 2, copy_rates=(rates(1, 3, 6 * 10**9, 3.0), rates(20, 77, 54 * 10**9, 2.0))
    )
    other = make_timeline(2, 2, copy_rates=(rates(20, 80, 56 * 10**9, 2.25),))
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


def test_each_route_that_moved_something_has_a_histogram(
    make_timeline: MakeTimeline, make_variant: MakeVariant
) -> None:
    run = make_timeline(
        2, copy_rates=(rates(1, 1, 10**9, 1.0),), read_rates=(rates(0, 1, 10**9, 2.0),)
    )
    assert [table.title for table in bandwidth_tables(make_variant("a", run))] == [
        "Bandwidth histogram: a, RAM to buffers",
        "Bandwidth histogram: a, files",
    ]


def test_bytes_read_by_only_some_runs_are_shown_by_their_median(
    make_timeline: MakeTimeline, make_variant: MakeVariant
) -> None:
    """The first run read blocks that the others had in RAM. One run waited for a file again."""
    given = ((4 * 10**9, 1.0), (0, 0.0), (2 * 10**9, 0.5))
    runs = [
        make_timeline(2, stall_s=1, read_bytes=read, stall_on_read_s=stall) for read, stall in given
    ]
    table = step_table(make_variant("a", *runs))
    assert (column(table, "Read"), column(table, "Stall, files (s)")) == (["2.00 GB"], ["0.50"])


def test_the_extra_time_of_a_step_is_relative_to_the_steady_steps(
    make_timeline: MakeTimeline, make_variant: MakeVariant
) -> None:
    """The runs differ in their steady steps as well: 1, 2 and 5 s."""
    runs = [make_timeline(*walls, switch=9) for walls in ((2, 1, 1), (6, 2, 2), (6, 5, 5))]
    table = step_table(make_variant("a", *runs))
    assert column(table, "Phase")[0] == "First step: +1.00 s (+50 %) over a steady step"


def test_skipped_blocks_have_a_column_if_there_are_any(
    make_timeline: MakeTimeline, make_variant: MakeVariant
) -> None:
    plain = make_timeline(2, 1, 2)
    steps = (
        plain.steps[0],
        replace(plain.steps[1], skipped_visits=39, skipped_lanes=2),
        plain.steps[2],
    )
    cached = step_table(make_variant("a", plain, replace(plain, steps=steps)))
    assert column(cached, "Skipped") == ["", "39 blocks, 2 lanes", ""]
    without = step_table(make_variant("a", plain))
    assert "Skipped" not in without.head
