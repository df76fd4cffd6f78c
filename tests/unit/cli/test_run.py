"""Run progress: bars for a terminal, a few lines for a log."""

from __future__ import annotations

import sys
from contextlib import closing

import pytest

from wanstream.cli.run import LINE_EVERY_S, ProgressBars, ProgressLines, progress_of_run
from wanstream.host.embedded.events import NodeProgress

SHORT = [("text", 0, 1), ("text", 1, 1), *(("sampler", n, 8) for n in range(9)), ("sampler", 1, 1)]


@pytest.mark.parametrize(
    ("pause_s", "events", "lines"),
    [
        (0.5, SHORT, ["text: 1.0 s", "sampler: 8/8 steps 5.0 s"]),
        # Steps that take long are seen every ten seconds.
        (
            0.6 * LINE_EVERY_S,
            [("sampler", done, 4) for done in range(5)],
            ["sampler: 2/4 steps 12.0 s", "sampler: 4/4 steps 24.0 s"],
        ),
    ],
)
def test_lines_of_a_log(pause_s, events, lines, capsys):
    now = 0.0
    with closing(ProgressLines(lambda: now)) as progress:
        for node_id, done, total in events:
            progress.show(NodeProgress(node_id=node_id, class_type="N", done=done, total=total))
            now += pause_s
    assert capsys.readouterr().err.splitlines() == lines


@pytest.mark.parametrize(("terminal", "kind"), [(True, ProgressBars), (False, ProgressLines)])
def test_only_a_terminal_gets_bars(terminal, kind, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    assert isinstance(progress_of_run(), kind)
