"""How much device memory the weights of a pair take, known before anything is read."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from ..offload.gather import Sharded, shard_bytes
from ..offload.layout import flat_layout
from ..plan import OffloadPolicy, plan_residency
from ..plan.memory_needs import RAW_SLOTS
from .detect import WanConfig
from .embedder_parts import part_of
from .meta_model import FIRST_BLOCK, block_streams, parameter_dtype, parameter_shapes, table_bytes

EXPERTS = ("high", "low")


def device_bytes(
    config: WanConfig, *, compute_dtype: torch.dtype, policy: OffloadPolicy, experts: Iterable[str] = EXPERTS
) -> int:
    """Bytes of these experts, all of that shape: the pool of buffers, and everything that stays.

    What embeds time and text is there for a moment only, when a step's working memory is free: see `projections.py`.

    Raises ValueError when the policy does not fit the number of blocks.
    """
    counts = dict.fromkeys(experts, config.num_layers)
    _, buffers = plan_residency(policy, counts)
    shapes, streams = parameter_shapes(config), block_streams(config)
    buffer = flat_layout((name, shapes[FIRST_BLOCK + name], compute_dtype) for name in streams)
    streamed = {f"blocks.{index}.{name}" for index in range(config.num_layers) for name in streams}
    staying = sum(
        math.prod(shape) * parameter_dtype(name, compute_dtype).itemsize
        for name, shape in shapes.items()
        if name not in streamed and part_of(name) is None
    )
    return buffers * buffer.nbytes + len(counts) * (staying + table_bytes(config))


def shards_bytes(sharded: Sharded | None, *, blocks: int, stored_bytes: int, on_gpu: bool) -> int:
    """Device memory of shards that are gathered: of all blocks where they stay there, else of those on their way."""
    if sharded is None:
        return 0
    shard = shard_bytes(stored_bytes, sharded.gather.size)
    if sharded.on_device:
        return shard * blocks
    return RAW_SLOTS * shard if on_gpu else 0
