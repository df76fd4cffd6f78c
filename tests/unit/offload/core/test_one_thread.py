from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from wanstream.offload.core.threads import torch_thread_pool
from wanstream.tests.support.polling import eventually

THREADS = 3


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
def test_the_pool_computes_alone_and_leaves_the_others_as_they_are():
    seen: list[int] = []
    before = arithmetic()
    with torch_thread_pool(2, "alone") as pool:
        both = threading.Barrier(2)

        def work() -> int:
            both.wait(timeout=60)
            return torch.get_num_threads()

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
def test_no_second_pool_of_torch_is_started():
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        pytest.skip("threads are counted in /proc")
    arithmetic()  # starts this thread's pool

    def task_ids() -> set[int]:
        return {int(task.name) for task in tasks.iterdir()}

    def foreign() -> set[int]:
        """Return new threads started by torch.

        A torch pool ends with the thread using it.
        """
        return task_ids() - before - {thread.native_id for thread in threading.enumerate()}

    before = task_ids()
    with torch_thread_pool(1, "alone") as pool:
        pool.submit(arithmetic).result()
        # An ended Python thread stays in /proc for a moment.
        assert eventually(lambda: not foreign()), foreign()
