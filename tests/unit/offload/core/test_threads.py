"""Waits between a run's threads, and a pool that computes with one torch thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from wanstream.offload.core.threads import RunStopped, RunThread, torch_thread_pool
from wanstream.tests.support.polling import eventually

CPU = torch.device("cpu")
THREADS = 3


def run_thread(error: BaseException) -> tuple[RunThread, list[BaseException | None]]:
    """Return an ended thread with an error, and what `failed` found."""
    seen: list[BaseException | None] = []

    def work() -> None:
        raise error

    thread = RunThread("wanstream-test", device=CPU, failed=lambda: seen.append(thread.error))
    thread.join()  # never started
    thread.start(work)
    thread.join()
    return thread, seen


def test_an_error_is_known_before_others_wake_and_raised_again():
    thread, seen = run_thread(OSError("the disk went away"))
    assert isinstance(seen[0], OSError)
    with pytest.raises(OSError, match="went away"):
        thread.result()


def test_a_stop_is_no_error():
    thread, seen = run_thread(RunStopped())
    thread.result()
    assert (thread.error, seen) == (None, [])


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


def arithmetic() -> torch.Tensor:
    """Start torch's thread pool: a product, and element-wise work above the 32 Ki grain."""
    torch.manual_seed(0)
    matrix = torch.randn(512, 512)
    return (matrix @ matrix).mul_(0.5).to(torch.float8_e4m3fn).float()


@pytest.mark.usefixtures("three_threads")
def test_a_pool_computes_alone_and_leaves_other_threads():
    seen: list[int] = []
    before = arithmetic()
    both = threading.Barrier(2)

    def work() -> int:
        both.wait(timeout=60)
        return torch.get_num_threads()

    with torch_thread_pool(2, "alone") as pool:
        jobs = [pool.submit(work) for _ in range(2)]
        assert [job.result() for job in jobs] == [1, 1]
        assert torch.get_num_threads() == THREADS
        assert torch.equal(arithmetic(), before)
        later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        later.start()
        later.join()
        assert torch.equal(pool.submit(arithmetic).result(), before)
    assert seen == [THREADS]
    assert torch.get_num_threads() == THREADS


@pytest.mark.usefixtures("three_threads")
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads in /proc")
def test_no_second_pool_of_torch_is_started():
    arithmetic()  # starts this thread's pool

    def foreign() -> set[int]:
        """Return new threads started by torch.

        A torch pool ends with the thread using it.
        """
        tasks = {int(task.name) for task in Path("/proc/self/task").iterdir()}
        return tasks - before - {thread.native_id for thread in threading.enumerate()}

    before: set[int] = set()
    before = foreign() | {thread.native_id for thread in threading.enumerate()}
    with torch_thread_pool(1, "alone") as pool:
        pool.submit(arithmetic).result()
        # An ended Python thread stays in /proc for a moment.
        assert eventually(lambda: not foreign()), foreign()
