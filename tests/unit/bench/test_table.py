from __future__ import annotations

from dataclasses import replace

from wanstream.bench import Table

TABLE = Table(
    title="Steps",
    head=("Step", "Read", "Phase"),
    rows=(("1", "", "First"), ("2", "", "")),
    marked=0,
)


def test_markdown_has_a_title_a_head_and_a_bold_row() -> None:
    lines = [
        "| Step | Read | Phase |",
        "| --: | --- | --- |",
        "| **1** |  | **First** |",
        "| 2 |  |  |",
    ]
    assert TABLE.markdown().splitlines() == ["## Steps", "", *lines]
    assert replace(TABLE, title="").markdown().splitlines() == lines


def test_characters_that_would_end_a_cell_are_removed() -> None:
    spoilt = Table(title="a\n# b", head=("x|y",), rows=(("1\n| 2 |",),))
    assert spoilt.markdown().splitlines() == ["## a # b", "", "| x/y |", "| --: |", "| 1 / 2 / |"]


def test_columns_without_a_word_are_left_out() -> None:
    found = TABLE.without_empty_columns()
    assert (found.head, found.rows) == (("Step", "Phase"), (("1", "First"), ("2", "")))
    assert (found.title, found.marked) == (TABLE.title, TABLE.marked)


def test_text_has_figures_to_the_right_and_words_to_the_left() -> None:
    rows = (("20 of 40 blocks", "1.50 s", "-"), ("resident", "12.25 s (1 run)", "703 MB"))
    assert Table(head=("device", "total", "VRAM"), rows=rows).text().splitlines() == [
        "device                     total    VRAM",
        "20 of 40 blocks           1.50 s       -",
        "resident         12.25 s (1 run)  703 MB",
    ]
    assert Table(
        head=("", ""), rows=(("a block", "1.5 TFLOP/s"), ("RAM", "25 GB/s"))
    ).text().splitlines() == [
        "a block  1.5 TFLOP/s",
        "RAM          25 GB/s",
    ]
    assert Table(head=("a", "b"), rows=()).text() == "a  b"


def test_html_marks_its_row_and_keeps_markup_out() -> None:
    page = Table(title="a < b", head=("<i>",), rows=(("1",), ("<b>",)), marked=1).html()
    assert page.startswith("<h2>a &lt; b</h2>")
    assert "<tr><td>1</td></tr>" in page
    assert '<tr class="marked"><td>&lt;b&gt;</td></tr>' in page
    assert "<i>" not in page
