"""Experts whose blocks are read past the page cache."""

from __future__ import annotations

import sys

import pytest
import torch

from wanstream.offload.sources.reader import HAS_DIRECT
from wanstream.schema import OffloadPolicy
from wanstream.tests.support.wan.opened_experts import streamed
from wanstream.wan.experts.open import open_experts


def bytes_from_storage() -> int:
    """Return this process's bytes read from disks, not from the page cache."""
    with open("/proc/self/io", encoding="ascii") as counters:
        return next(int(line.split()[1]) for line in counters if line.startswith("read_bytes"))


@pytest.mark.skipif(
    sys.platform != "linux" or not HAS_DIRECT, reason="O_DIRECT and /proc are Linux's"
)
def test_blocks_read_past_the_page_cache_are_the_same(tiny_expert_folder, lane):
    high, low = (tiny_expert_folder(seed=seed, dtype=torch.bfloat16) for seed in (1, 2))
    found = []
    from_storage = []
    # In this order: the files are in the page cache when they are read past it.
    for direct in (False, True):
        with open_experts(high, low, direct=direct) as pair:
            before = bytes_from_storage()
            found.append(streamed(pair, OffloadPolicy.layerwise(1), lane, steps=["high", "low"]))
            from_storage.append(bytes_from_storage() - before)
    assert all(map(torch.equal, *found))
    if from_storage[1] == 0:
        pytest.skip("the temporary folder is on no disk")
    assert from_storage[1] > 4 * 2 * 10 * 128 * 128 * 2
