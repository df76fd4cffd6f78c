"""A work thread keeps no references to its calls."""

import weakref

import torch

from wanstream.distributed.transport.threads import WorkThread
from wanstream.tests.support.polling import eventually

LIMIT_S = 10


def test_a_thread_that_waits_keeps_nothing_of_its_last_call():
    thread = WorkThread("test")
    given = torch.zeros(1)
    kept = weakref.ref(given)
    assert thread.submit(torch.Tensor.item, given).result(LIMIT_S) == 0
    del given
    assert eventually(lambda: kept() is None)
    thread.close()
