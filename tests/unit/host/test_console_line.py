"""The line on a console is there on a terminal, and nowhere else."""

from __future__ import annotations

import io

import pytest

from wanstream.host.comfy.console_line import ConsoleLine


class Console(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def test_a_terminal_shows_steps_their_rate_and_an_end() -> None:
    console = Console(is_terminal=True)
    line = ConsoleLine(2, unit="step", file=console)
    assert "0/2 [00:00<?, ?step/s]" in console.getvalue()
    line.update(1)
    line.update(2)
    said = console.getvalue()
    assert "2/2 [" in said
    assert "step/s]" in said.splitlines()[-1] or "s/step]" in said.splitlines()[-1]
    assert said.endswith("\n"), "the next line of the log begins on a line of its own"


@pytest.mark.parametrize("done", [1, 2])
def test_a_log_shows_nothing(done: int) -> None:
    log = Console(is_terminal=False)
    ConsoleLine(2, unit="step", file=log).update(done)
    assert log.getvalue() == ""
