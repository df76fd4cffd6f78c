"""Threads that do torch arithmetic beside the one that computes, each alone.

torch gives every thread that calls it a pool of its own, as large as the machine, which fights the pool of the thread
that computes for the cores.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

_setting = threading.Lock()


def one_thread_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """Return a pool of up to `threads` threads in which torch computes with the calling thread alone.

    The number of torch's threads elsewhere stays as it is, also that of threads that start later.
    """
    return ThreadPoolExecutor(threads, thread_name_prefix=name, initializer=_compute_alone)


def _compute_alone() -> None:
    """Let torch compute with one thread on this thread."""
    with _setting:
        usual = torch.get_num_threads()
        torch.set_num_threads(1)
        # The number belongs to the thread that sets it, but whoever calls torch for the first time takes over the one
        # that was set last: a thread that ends at once sets the usual one again.
        last = threading.Thread(target=torch.set_num_threads, args=(usual,))
        last.start()
        last.join()
