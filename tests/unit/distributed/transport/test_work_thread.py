"""A thread that calls what it is given keeps nothing of it."""

from __future__ import annotations

import time
import weakref

import torch

from wanstream.distributed.transport.threads import WorkThread

LIMIT_S = 10


def test_a_thread_that_waits_keeps_nothing_of_its_last_call() -> None:
    thread, given = WorkThread("test"), torch.zeros(1)
    kept = weakref.ref(given)
    assert thread.submit(torch.Tensor.item, given).result(LIMIT_S) == 0
    del given
    deadline = time.monotonic() + LIMIT_S
    while kept() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert kept() is None
    thread.close()
