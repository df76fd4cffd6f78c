"""The line on a console is there on a terminal, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.comfy

STEPS = """
import io
from installed_pack import load_pack

load_pack()
from wanstream.host.comfy.progress import NodeBar

class Console(io.StringIO):
    def isatty(self):
        return arguments[0]

console, stderr = Console(), sys.stderr
sys.stderr, said = console, []
bar = NodeBar(2, None, arguments[1])
for done in (1, 2):
    said.append(console.getvalue())
    bar.update(done)
answer, sys.stderr = [*said, console.getvalue()], stderr
"""


def test_a_terminal_shows_steps_their_rate_and_an_end(in_comfyui: Callable[..., Any]) -> None:
    start, _, end = in_comfyui(STEPS, True, "step")
    assert "0/2 [00:00<?, ?step/s]" in start
    assert "2/2 [" in end
    assert "step/s]" in end.splitlines()[-1] or "s/step]" in end.splitlines()[-1]
    assert end.endswith("\n"), "the next line of the log begins on a line of its own"


@pytest.mark.parametrize(("is_terminal", "unit"), [(False, "step"), (True, None)])
def test_a_log_shows_nothing(in_comfyui: Callable[..., Any], is_terminal: bool, unit: str | None) -> None:
    assert in_comfyui(STEPS, is_terminal, unit) == ["", "", ""]
