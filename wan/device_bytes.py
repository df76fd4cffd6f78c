"""How much device memory the weights of a pair take, known before anything is read."""

from __future__ import annotations

import math

import torch

from ..offload.layout import BlockFormat, block_format, flat_layout
from ..plan import OffloadPolicy, plan_residency
from .checkpoint import Expert
from .detect import WanConfig
from .meta_model import FIRST_BLOCK, block_streams, parameter_dtype, parameter_shapes, table_bytes

EXPERTS = ("high", "low")


def device_bytes(config: WanConfig, *, compute_dtype: torch.dtype, policy: OffloadPolicy) -> int:
    """Bytes of two experts of that shape: the pool of buffers, and everything that does not stream.

    Raises ValueError when the policy does not fit the number of blocks.
    """
    _, buffers = plan_residency(policy, dict.fromkeys(EXPERTS, config.num_layers))
    shapes, streams = parameter_shapes(config), block_streams(config)
    buffer = flat_layout((name, shapes[FIRST_BLOCK + name], compute_dtype) for name in streams)
    streamed = {f"blocks.{index}.{name}" for index in range(config.num_layers) for name in streams}
    staying = sum(
        math.prod(shape) * parameter_dtype(name, compute_dtype).itemsize
        for name, shape in shapes.items()
        if name not in streamed
    )
    return buffers * buffer.nbytes + len(EXPERTS) * (staying + table_bytes(config))


def decoding_bytes(expert: Expert, compute_dtype: torch.dtype) -> int:
    """Bytes that a GPU keeps beside the buffers for the stored form of the block that arrives; 0 if none is decoded."""
    formats = (_block_format(expert, index, compute_dtype) for index in range(expert.config.num_layers))
    return max((fmt.stored.nbytes for fmt in formats if not fmt.is_raw), default=0)


def _block_format(expert: Expert, index: int, compute_dtype: torch.dtype) -> BlockFormat:
    names = {name: f"blocks.{index}.{name}" for name in block_streams(expert.config)}
    tensors = {name: expert.weights[full] for name, full in names.items()}
    return block_format(
        {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()},
        compute_dtype,
        scaled=[name for name, full in names.items() if full in expert.scales],
        packings={name: tensor.packing for name, tensor in tensors.items() if tensor.packing is not None},
    )
