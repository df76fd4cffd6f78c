"""Attachment of the blocks of any module to an engine that streams their weights.

    with attach_offload(model.blocks, policy=OffloadPolicy.layerwise(1), device="cuda") as engine:
        model(x)                       # each forward is one run of one pass
        with engine.passes(2):         # two forwards in one run: the second one finds its first blocks fetched
            model(x), model(y)

A caller with its own loop over blocks (lanes, two experts, many steps) names the visits instead:

    engine = attach_offload({"high": ..., "low": ...}, policy=..., device=..., follow_forward=False)
    with engine.run(visits) as run:
        for step, expert, block in visits:
            with run.visit(step, expert, block):
                ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from ..devices import compute_device
from ..schema import OffloadPolicy, plan_residency
from .engine.engine import OffloadEngine, Stacks
from .host_memory.shared_segment import SharedSegment
from .sharding.group import Sharded
from .sources.base import BlockSource
from .sources.module import ModuleSource

ONLY_STACK = "blocks"
"""Name of a stack in visits if only one stack is attached."""


def attach_offload(
    blocks: Stacks | Sequence[nn.Module],
    *,
    policy: OffloadPolicy,
    device: torch.device | str,
    source: BlockSource | None = None,
    follow_forward: bool = True,
    shared: SharedSegment | None = None,
    sharded: Sharded | None = None,
) -> OffloadEngine:
    """Stream the Linear weights of `blocks` to `device`; all other tensors of the blocks are moved there once.

    Args:
        blocks: one stack of similar blocks, or several by name. Weights may be on `meta` if `source` is given.
        policy: resident blocks, prefetch depth, and RAM-resident blocks.
        device: compute device.
        source: source of the stored bytes; by default the blocks' own weights, which are kept in RAM.
        follow_forward: stream blocks during the model's own forward; False for callers that name the visits.
        shared: RAM that the ranks of one machine share, for blocks that are RAM-resident across runs.
        sharded: ranks that keep one shard of every block each and gather a block before its visit. All ranks run the
            same visits under the same policy. The source must be a `RangeSource`; file and module sources are.

    Returns:
        The engine; `detach()` or exiting its `with` restores every block exactly.

    Raises:
        ValueError: the device does not exist, the policy does not fit the number of blocks, the source does not fit a
            block, or weights are on `meta` without a source. The blocks are unchanged.
        SourceError: there is not enough RAM for the RAM-resident blocks. The blocks are unchanged.
    """
    stacks: Stacks = blocks if isinstance(blocks, Mapping) else {ONLY_STACK: blocks}
    plan_residency(policy, {name: len(stack) for name, stack in stacks.items()})  # refuse before reading any weights
    return OffloadEngine(
        stacks,
        policy=policy,
        device=compute_device(device),
        source=source or ModuleSource(stacks),
        follow_forward=follow_forward,
        shared=shared,
        sharded=sharded,
    )
