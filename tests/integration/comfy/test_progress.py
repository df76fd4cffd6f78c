"""A run's line on the console, and the fractions in the page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.comfy

STEPS = """
import io
from installed_pack import load_pack

load_pack()
from wanstream.host.comfy.adapter.progress import NodeBar

class Console(io.StringIO):
    def isatty(self):
        return arguments[0]

console, stderr = Console(), sys.stderr
sys.stderr, said = console, []
bar = NodeBar(2, None, arguments[1])
for done in range(1, arguments[2] + 1):
    said.append(console.getvalue())
    bar.update(done)
bar.close()
answer, sys.stderr = [*said, console.getvalue()], stderr
"""


@pytest.mark.parametrize("done", [1, 2])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_console_shows_steps_their_rate_and_an_end(
    in_comfyui: Callable[..., Any], is_terminal: bool, done: int
) -> None:
    """A cancelled run ends the line too."""
    start, *_, end = in_comfyui(STEPS, is_terminal, "step", done)
    assert "0/2 [00:00<?, ?step/s]" in start
    assert f"{done}/2 [" in end
    assert "step/s]" in end.splitlines()[-1] or "s/step]" in end.splitlines()[-1]
    assert end.endswith("\n"), "the next line of the log begins on a line of its own"


def test_a_run_of_other_samplers_has_no_line(in_comfyui: Callable[..., Any]) -> None:
    assert in_comfyui(STEPS, True, None, 2) == ["", "", ""]


FRACTIONS = """
import threading
from comfy_execution import progress
from installed_pack import load_pack

load_pack()
from wanstream.host.comfy.adapter.progress import NodeBar

class Page(progress.ProgressHandler):
    def update_handler(self, node_id, value, max_value, state, prompt_id, image=None):
        sent.append([node_id, value, max_value])

sent = []
progress.reset_progress_state("prompt", None)
progress.add_progress_handler(Page("page"))
bar = NodeBar(4, "7", None)
fractions = lambda: [bar.advance(done) for done in (0.0, 0.25, 0.5, 0.25)]
thread = threading.Thread(target=fractions)
thread.start()
thread.join()
answer = sent
"""


def test_another_thread_sends_fractions_of_a_step(in_comfyui: Callable[..., Any]) -> None:
    assert in_comfyui(FRACTIONS) == [["7", 0.25, 4], ["7", 0.5, 4]]
