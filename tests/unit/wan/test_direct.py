"""Experts whose blocks are read past the page cache."""

from __future__ import annotations

import sys

import pytest
import torch

from wanstream.offload.sources.reader import HAS_DIRECT
from wanstream.plan.programs import step_visits
from wanstream.schema import OffloadPolicy
from wanstream.wan import forward_lanes
from wanstream.wan.experts.open import open_experts

STEPS = ["high", "low"]


def bytes_from_storage() -> int:
    """Return this process's bytes read from disks, not from the page cache."""
    with open("/proc/self/io", encoding="ascii") as counters:
        return next(int(line.split()[1]) for line in counters if line.startswith("read_bytes"))


@pytest.mark.skipif(
    sys.platform != "linux" or not HAS_DIRECT, reason="O_DIRECT and /proc are Linux's"
)
@pytest.mark.parametrize("storage", ["as stored", "fp8"])
def test_blocks_that_are_read_past_the_page_cache_are_the_same(tiny_expert_folder, lane, storage):
    high, low = (tiny_expert_folder(seed=seed, dtype=torch.bfloat16) for seed in (1, 2))
    outcomes: dict[bool, list[torch.Tensor]] = {}
    from_storage: dict[bool, int] = {}
    for direct in (
        False,
        True,
    ):  # in this order: the files are in the page cache when they are read past it
        with open_experts(high, low, storage=storage, direct=direct) as pair:
            engine = pair.engine(OffloadPolicy.layerwise(1), "cpu")
            before, outcomes[direct] = bytes_from_storage(), []
            with torch.inference_mode(), engine.run(step_visits(STEPS, engine.block_counts)) as run:
                for step, expert in enumerate(STEPS):
                    visit = lambda block, at=(step, expert): run.visit(*at, block)  # noqa: E731
                    outcomes[direct] += forward_lanes(
                        engine.models[expert], [lane], torch.tensor([990.0]), visit
                    )
            from_storage[direct] = bytes_from_storage() - before
    assert all(torch.equal(*pair) for pair in zip(outcomes[False], outcomes[True], strict=True))
    if from_storage[True] == 0:
        pytest.skip("the temporary folder is on no disk")
    assert from_storage[True] > 4 * 2 * 10 * 128 * 128 * 2
