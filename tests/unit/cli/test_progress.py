"""Run progress: bars for a terminal, a few lines for a log."""

from __future__ import annotations

import sys
from contextlib import closing

import pytest

from wanstream.cli.run import LINE_EVERY_S, ProgressBars, ProgressLines, progress_of_run
from wanstream.host.embedded.events import NodeProgress


def _at(node_id: str, done: int, total: int) -> NodeProgress:
    return NodeProgress(node_id=node_id, class_type="Node", done=done, total=total)


def test_a_log_has_one_line_for_each_node(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    with closing(ProgressLines(lambda: now)) as lines:
        for node, done, total in (
            ("text", 0, 1),
            ("text", 1, 1),
            *(("sampler", n, 8) for n in range(9)),
            ("sampler", 1, 1),
        ):
            lines.show(_at(node, done, total))
            now += 0.5
    assert capsys.readouterr().err == "text: 1.0 s\nsampler: 8/8 steps 5.0 s\n"


def test_steps_that_take_long_are_seen_every_ten_seconds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = 0.0
    with closing(ProgressLines(lambda: now)) as lines:
        for done in range(5):
            lines.show(_at("sampler", done, 4))
            now += 0.6 * LINE_EVERY_S
    assert capsys.readouterr().err.splitlines() == [
        "sampler: 2/4 steps 12.0 s",
        "sampler: 4/4 steps 24.0 s",
    ]


@pytest.mark.parametrize(("terminal", "kind"), [(True, ProgressBars), (False, ProgressLines)])
def test_only_a_terminal_gets_bars(
    terminal: bool, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    assert isinstance(progress_of_run(), kind)
