from __future__ import annotations

from wanstream.bench import run_table
from wanstream.schema.records import StepRecord, Timeline


def record(index: int, expert: str, **values: float) -> StepRecord:
    defaults = {
        "sigma": 1 - index / 4,
        "wall_s": 1.5,
        "compute_s": 1.25,
        "stall_s": 0.25,
        "bytes_moved": 2_000_000,
    }
    return StepRecord.of(index=index, expert=expert, **{**defaults, **values})


def lines(*steps: StepRecord) -> list[str]:
    return run_table(Timeline(steps=steps, kind="measured")).text().splitlines()


def test_one_line_per_step_and_one_for_the_run() -> None:
    steps = (
        record(0, "high", rss_bytes=500_000_000),
        record(1, "low", rss_bytes=700_000_000, bytes_moved=0),
    )
    assert lines(*steps) == [
        "step  expert   sigma  seconds  stall    moved  memory",
        "1     high    1.0000     1.50   0.25  2.00 MB  500 MB",
        "2     low     0.7500     1.50   0.25      0 B  700 MB",
        "all                      3.00   0.50  2.00 MB  700 MB",
    ]


def test_reads_and_decoding_have_a_column_where_there_are_any() -> None:
    steps = (
        record(0, "high", read_bytes=2_000_000, decode_s=0.5, device_bytes=9),
        record(1, "low", decode_s=0.25, device_bytes=9),
    )
    assert lines(*steps) == [
        "step  expert   sigma  seconds  stall  decode    moved     read  memory",
        "1     high    1.0000     1.50   0.25    0.50  2.00 MB  2.00 MB     9 B",
        "2     low     0.7500     1.50   0.25    0.25  2.00 MB              9 B",
        "all                      3.00   0.50    0.75  4.00 MB  2.00 MB     9 B",
    ]


def test_each_of_the_two_stands_for_itself() -> None:
    for values, there, missing in (
        ({"read_bytes": 5}, "read", "decode"),
        ({"decode_s": 0.5}, "decode", "read"),
    ):
        headings = lines(record(0, "high", **values))[0].split()
        assert there in headings
        assert missing not in headings


def test_a_run_without_steps_is_a_line() -> None:
    assert lines() == ["step  seconds  stall  moved", "all      0.00   0.00    0 B"]


def test_memory_is_that_of_the_device_where_it_is_counted() -> None:
    table = "\n".join(lines(record(0, "high", device_bytes=3, rss_bytes=7)))
    assert "3 B" in table
    assert "7 B" not in table


def test_unknown_values_stay_empty() -> None:
    assert "None" not in "\n".join(lines(record(0, "high", sigma=None)))
