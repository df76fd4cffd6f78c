from __future__ import annotations

from wanstream.metrics.report_table import Table

TABLE = Table(title="Steps", head=("Step", "Read", "Phase"), rows=(("1", "", "First"), ("2", "", "")), marked=0)


def test_markdown_has_a_title_a_head_and_a_bold_row() -> None:
    assert TABLE.markdown().splitlines() == [
        "### Steps",
        "",
        "| Step | Read | Phase |",
        "| --- | --- | --- |",
        "| **1** |  | **First** |",
        "| 2 |  |  |",
    ]


def test_what_would_end_a_cell_is_taken_out() -> None:
    spoilt = Table(title="a\n# b", head=("x|y",), rows=(("1\n| 2 |",),))
    assert spoilt.markdown().splitlines() == ["### a # b", "", "| x/y |", "| --- |", "| 1 / 2 / |"]


def test_columns_without_a_word_are_left_out() -> None:
    found = TABLE.without_empty_columns()
    assert (found.head, found.rows) == (("Step", "Phase"), (("1", "First"), ("2", "")))
    assert (found.title, found.marked) == (TABLE.title, TABLE.marked)
