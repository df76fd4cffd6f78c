"""Streams the blocks of any module through an engine, and takes everything back.

    with attach_offload(model.blocks, policy=OffloadPolicy.layerwise(1), device="cuda") as engine:
        model(x)                       # each forward is one run of one pass
        with engine.passes(2):         # two forwards known in advance: the second finds its first blocks there
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

ONLY_STACK = "blocks"  # the name a single stack of blocks goes by in visits


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
    """Let the Linear weights of `blocks` be streamed to `device`; everything else of the blocks moves there and stays.

    Args:
        blocks: one stack of like blocks, or several by name. Weights may be on `meta` if `source` is given.
        policy: which blocks stay resident, how many buffers lie ahead, and which blocks have a home in RAM.
        device: where the blocks compute.
        source: where the stored bytes come from; by default the blocks' own weights, which are kept in RAM.
        follow_forward: run the blocks' own forwards through the engine; off for callers that name the visits.
        shared: RAM that the ranks of one machine hold together; blocks that keep their home for later runs lie there.
        sharded: ranks that keep one shard of every block each and gather it when it is due; all of them run the same
            visits under the same policy. The source then is a `RangeSource`, as those of files and modules are.

    Returns:
        The engine; `detach()` or `with` leaves every block exactly as it was.

    Raises:
        ValueError: the device is not there, the policy does not fit the number of blocks, the source does not fit a
            block, or a block's weights have no data and no source. The blocks are then as they were.
        SourceError: there is not enough RAM for the blocks that have a home there. Likewise.
    """
    stacks = _named(blocks)
    counts = {name: len(stack) for name, stack in stacks.items()}
    plan_residency(policy, counts)  # refuse a policy that does not fit before anything is touched
    place = compute_device(device)
    own = source or ModuleSource(stacks)
    return OffloadEngine(
        stacks,
        policy=policy,
        device=place,
        source=own,
        follow_forward=follow_forward,
        shared=shared,
        sharded=sharded,
    )


def _named(blocks: Stacks | Sequence[nn.Module]) -> Stacks:
    if isinstance(blocks, Mapping):
        return blocks
    return {ONLY_STACK: blocks}
