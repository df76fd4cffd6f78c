"""Two experts' stacks, and a slow source with their weights."""

from __future__ import annotations

import pytest
from torch import nn

from wanstream.offload.sources.module import ModuleSource
from wanstream.tests.support.offload.fixtures import SlowSource
from wanstream.tests.support.offload.streaming import BLOCKS


@pytest.fixture
def stacks(make_stack) -> dict[str, nn.ModuleList]:
    return {"high": make_stack(BLOCKS, seed=1), "low": make_stack(BLOCKS, seed=2)}


@pytest.fixture
def slow(stacks) -> SlowSource:
    """The stacks' weights after short pauses at random."""
    return SlowSource(ModuleSource(stacks), seed=0, longest_s=0.001)
