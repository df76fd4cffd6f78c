"""Stages of models that are not ours, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

import wanstream
from wanstream.distributed import RestartLimitError, StepProcess, run_stages
from wanstream.tests.support.polling import eventually
from wanstream.tests.support.step_functions import (
    make_adding,
    make_dying,
    make_meeting,
    make_nothing,
    make_slowly,
)

pytestmark = pytest.mark.integration

ROOT = Path(str(wanstream.__file__)).parent
FILES = Path("/proc/self/fd")
EXAMPLES = ROOT / "docs" / "examples"


@pytest.fixture
def svd(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example, as a module that new processes find too."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return import_module("svd_stages")


@pytest.fixture
def in_one_process(svd: ModuleType) -> list[torch.Tensor]:
    """Latents of the example's videos, computed here one after the other."""
    step, found, threads = svd.make_step("cpu"), [], torch.get_num_threads()
    for seed in range(svd.VIDEOS):
        state = svd.new_video(seed)
        for number in range(svd.STEPS):
            state = step(state, number)
        found.append(state["latent"])
    torch.set_num_threads(threads)
    return found


@pytest.mark.parametrize("workers", [2, 4])
def test_svd_in_stages_is_bit_equal_to_one_process(
    workers: int, svd: ModuleType, in_one_process: list[torch.Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    latents = svd.main(workers)
    assert svd.VIDEOS == 4
    for found, expected in zip(latents, in_one_process, strict=True):
        assert found.shape == (1, svd.FRAMES, 4, 8, 8)
        assert torch.equal(found, expected)
        assert torch.isfinite(found).all()
    assert not torch.equal(latents[0], latents[1])
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line.partition(":")[0] for line in lines) == sorted(
        f"video {video}" for video in range(4) for _ in range(svd.STEPS)
    )


def test_the_example_runs_as_its_page_says() -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "svd_stages.py", "1"], capture_output=True, text=True, timeout=240, check=True
    )
    assert len(done.stdout.splitlines()) == 32
    assert "examples/svd_stages.py" in (ROOT / "docs" / "workers.md").read_text(encoding="utf-8")


def test_processes_compute_different_items_at_once(tmp_path: Path) -> None:
    """The first stage's second item and the second stage's first one wait for each other: only together they end."""
    with ExitStack() as stack:
        stages = [
            stack.enter_context(StepProcess(make_meeting, str(tmp_path), own, other))
            for own, other in (("first", "second"), ("second", "first"))
        ]
        assert run_stages(stages, [0, 100], steps=2) == [2, 102]


def test_a_process_that_ends_is_replaced_and_its_step_taken_again(tmp_path: Path) -> None:
    with StepProcess(make_adding, 10) as first, StepProcess(make_dying, str(tmp_path / "died"), 3) as second:
        assert run_stages([first, second], [0, 100], steps=4, max_restarts=1) == [22, 122]
    assert (tmp_path / "died").exists()


def test_a_loss_too_many_names_the_step(tmp_path: Path) -> None:
    with (
        StepProcess(make_dying, str(tmp_path / "died"), 1) as stage,
        pytest.raises(RestartLimitError, match="the process of make_dying ended in step 1"),
    ):
        run_stages([stage], [0], steps=2)


def test_an_error_of_making_the_step_is_raised_here_and_makes_it_once(tmp_path: Path) -> None:
    with StepProcess(make_nothing, str(tmp_path)) as stage, pytest.raises(ValueError, match="no room for the model"):
        run_stages([stage], [0], steps=1)
    assert (tmp_path / "calls").read_text(encoding="utf-8") == "called\n"


@pytest.mark.skipif(not FILES.exists(), reason="file descriptors are counted in /proc")
def test_a_tensor_of_an_item_holds_two_file_descriptors_at_most() -> None:
    """The figure of the class, by which users choose their number of items."""
    states, peak = [torch.zeros(8) for _ in range(50)], 0

    def count(item: int, state: torch.Tensor) -> None:
        nonlocal peak
        peak = max(peak, len([*FILES.iterdir()]))

    with StepProcess(make_adding, 1) as first, StepProcess(make_adding, 2) as second:
        before = len([*FILES.iterdir()])
        ended = run_stages([first, second], states, steps=4, on_step=count)
    assert all(state.eq(6).all() for state in ended)
    assert 50 < peak - before < 2 * 50 + 20, "a few more for the messages in flight"


def test_a_process_that_is_still_loading_does_not_delay_the_end(tmp_path: Path) -> None:
    before = set(multiprocessing.active_children())
    with StepProcess(make_slowly, str(tmp_path)):
        assert eventually((tmp_path / "started").exists)
    assert not (tmp_path / "made").exists()
    assert eventually(lambda: set(multiprocessing.active_children()) <= before)


PARENT = """
import sys
from wanstream.distributed import StepProcess
from wanstream.tests.support.step_functions import make_pid
if __name__ == "__main__":
    with StepProcess(make_pid) as stage:
        print(stage(0, 0), flush=True)
        sys.stdin.read()
"""


def test_a_process_ends_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT, encoding="utf-8")
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, script], stdin=pipe, stdout=pipe, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
        try:
            # The process has inherited the pipe: its end is that of the last one that holds it.
            assert parent.communicate(timeout=30) == ("", None)
        except subprocess.TimeoutExpired:
            os.kill(child, signal.SIGKILL)
            raise
