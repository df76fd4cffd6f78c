"""Probe for a group's transfers: blocks and shards over the bus, and gathers between devices."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch

from ...devices import clock_for, runtime_for
from ..core.pages import LockedBlocks, copy_to_device, map_memory
from ..sharding.group import Gather, shard_bytes
from .machine import typical_s

PROBE_BYTES = 128 * 1024**2
CPU_PROBE_BYTES = 4 * 1024**2
"""Largest block sizes in the probe: large enough to make copy latency negligible."""
REPEATS = 5
"""Number of measurements after a warm-up. The median counts."""


def probe_gather(gather: Gather, device: torch.device, block_bytes: int) -> dict[str, float]:
    """Measure the `WeightFigures` times on this rank, in seconds per block of `block_bytes`.

    Each is above 0.

    All ranks must call it at the same time. Raises GatherBrokenError.
    """
    runtime = runtime_for(device)
    most = CPU_PROBE_BYTES if device.type == "cpu" else PROBE_BYTES
    shard = shard_bytes(min(block_bytes, most), gather.size)
    host = map_memory(shard * gather.size)
    # Every page is touched first, so no page fault is measured.
    host.zero_()
    copied, gathered = (
        torch.empty(host.numel(), dtype=torch.uint8, device=device) for _ in range(2)
    )
    own = torch.zeros(shard, dtype=torch.uint8, device=device)
    copy_block = partial(copy_to_device, copied, host)
    copy_shard = partial(copy_to_device, copied[:shard], host[:shard])
    gather_block = partial(gather.all_gather, gathered, own)
    on_copies: Callable[[], AbstractContextManager[object]] = nullcontext

    def aside(work: Callable[[], None]) -> None:
        with on_copies():  # on a CPU, which has no streams, before what follows
            work()

    def measured(work: Callable[[], None], **concurrent: Any) -> float:
        gather.compare(b"probe")  # all ranks begin together
        return typical_s(work, device, repeats=REPEATS, **concurrent)

    times = {}
    with ExitStack() as undo:
        if runtime is not None:
            on_copies = partial(runtime.on_stream, runtime.stream())
            locked = LockedBlocks(runtime)
            locked.add(host)
            # Callbacks run in reverse: the copies end before the memory is unlocked.
            undo.callback(locked.release)
            undo.callback(aside, clock_for(device).settle)
        # One rank at a time: this is the bus without the other ranks' copies.
        for rank in range(gather.size):
            gather.compare(b"probe")
            if rank == gather.rank:
                times["h2d_s"] = typical_s(copy_block, device, repeats=REPEATS)
        times["h2d_concurrent_s"] = measured(copy_block)
        times["gather_s"] = measured(gather_block)
        times["shard_h2d_s"] = measured(copy_shard, on_stream=on_copies, meanwhile=gather_block)
        times["gather_during_h2d_s"] = measured(gather_block, meanwhile=partial(aside, copy_shard))
    scale = block_bytes / host.numel()
    return {name: scale * max(seconds, 1e-9) for name, seconds in times.items()}
