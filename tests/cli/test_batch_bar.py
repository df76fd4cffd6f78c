from __future__ import annotations

import pytest

from wanstream.cli.batch_bar import BatchBar
from wanstream.cli.batch_rows import Row
from wanstream.host.embedded_door import NodeProgress


def test_the_bar_counts_rows_that_ended_and_tells_what_failed(capsys: pytest.CaptureFixture[str]) -> None:
    row = Row(line=7, position=6, hash="h")
    with BatchBar(rows=4, ended=1) as bar:
        bar.show(NodeProgress(node_id="sampler", class_type="S", done=3, total=20))
        bar.done(row, [])
        bar.failed(row, "too big")
        bar.tick()
    told = capsys.readouterr().err
    assert "line 7: too big\n" in told
    assert "sampler 3/20" in told
    last = told.split("\r")[-1]
    assert "3/4" in last
    assert "<" in last, "the time that is left"


def test_nothing_is_left_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    with BatchBar(rows=1, ended=0) as bar:
        bar.note("a word")
    assert capsys.readouterr().out == ""
