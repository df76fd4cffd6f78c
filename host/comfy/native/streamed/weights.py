"""Native model weights on their device: streamed blocks, and the tensors outside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import nn

from .....devices import compute_device, runtime_for
from .....offload import OffloadEngine, StreamedWeights, attach_offload
from .....offload.formats import copy_together, piece_name
from .....offload.sources import BlockSource, TensorSource, joined_source
from .....plan import BlockCosts, Candidates, memory_needs
from .....plan.programs import BlockKey, BlockSize
from .....schema import OffloadPolicy
from ..network.layers import inner_tensors, joined

Quantised: TypeAlias = Mapping[BlockKey, Mapping[str, torch.Tensor]]
"""Quantised weights for each block, by name within the block."""

DIFFUSION_MODEL = "diffusion_model"
"""Path to the network in a ComfyUI model."""

STACK = "model"
"""Name for the single stack with all blocks, because a model's lists may run interleaved. A MODEL
with two experts has one stack per expert."""


class NativeWeights(StreamedWeights):
    """Weights for one native model: block matrices stream from the file, other tensors are loaded.

    Args:
        stacks: block modules by path in the network, for each model. Their streamed tensors are on
            `meta`. All models have the same paths.
        source: opens the source for streamed tensors.
        quantised: quantised weights by name within a block, joined from streamed pieces.
        outside_bytes: total bytes in tensors that do not stream.
        device: compute device.
        network: path to the network in each ComfyUI model, or "" for the model itself.

    Attributes:
        stacks, outside_bytes, network: as above.
        buffer_bytes: size of the largest buffer.
        formats: stored and computed layout for each block.
        costs: block sizes, for the planner.
        patch_bytes: device memory needed while patches are added to a block.
        has_bus: True for a device with separate memory, False for a CPU.
    """

    def __init__(
        self,
        stacks: Mapping[str, Mapping[str, nn.Module]],
        source: Callable[[], BlockSource],
        *,
        quantised: Quantised,
        outside_bytes: int,
        device: torch.device,
        network: str = DIFFUSION_MODEL,
    ) -> None:
        self.stacks = stacks
        self.network = network
        self._source = source
        self._quantised = quantised
        self.outside_bytes = outside_bytes
        self._policy: OffloadPolicy | None = None
        self._scales: Mapping[str, torch.Tensor] = {}
        self.patch_bytes = 0
        # Only the layout is needed before the model is loaded. The engine opens the source again.
        opened = source()
        self.formats = opened.formats
        self._in_memory = isinstance(opened, TensorSource)
        opened.close()
        formats = self.formats.values()
        self.buffer_bytes = max(fmt.computed.nbytes for fmt in formats)
        stored_bytes = max(fmt.stored.nbytes for fmt in formats)
        self.costs = BlockCosts(
            stacks=tuple(stacks),
            blocks=len(self.blocks),
            file_bytes=stored_bytes,
            stored_bytes=stored_bytes,
            computed_bytes=self.buffer_bytes,
            decoded_bytes=max((fmt.stored.nbytes for fmt in formats if not fmt.is_raw), default=0),
            outside_bytes=outside_bytes,
            sizes=tuple(map(self._largest, range(len(self.blocks)))),
        )
        self.has_bus = runtime_for(device) is not None

    @classmethod
    def joined(
        cls,
        parts: Mapping[str, NativeWeights],
        stacks: Mapping[str, Mapping[str, nn.Module]],
        *,
        outside_bytes: int,
        device: torch.device,
    ) -> NativeWeights:
        """Return weights for several models with one shared buffer pool.

        Args:
            parts: weights for each model, with one stack each.
            stacks: modules that get the streamed weights.
            outside_bytes, device: as above.
        """
        quantised = {
            BlockKey(stack, key.block, key.patch): weights
            for stack, part in parts.items()
            for key, weights in part._quantised.items()
        }
        sources = {stack: part._source for stack, part in parts.items()}
        return cls(
            stacks,
            lambda: joined_source({stack: source() for stack, source in sources.items()}),
            quantised=quantised,
            outside_bytes=outside_bytes,
            device=device,
        )

    @property
    def blocks(self) -> Mapping[str, nn.Module]:
        """Blocks in the first stack by path."""
        return next(iter(self.stacks.values()))

    @property
    def prefix(self) -> str:
        """Key prefix for the network in the ComfyUI model's state dict."""
        return f"{self.network}." if self.network else ""

    @property
    def block_counts(self) -> dict[str, int]:
        return {stack: len(blocks) for stack, blocks in self.stacks.items()}

    @property
    def loaded_bytes(self) -> int:
        """Device memory for all weights now, in bytes, in and outside the blocks."""
        if self._engine is None:
            return 0
        return self._engine.loaded_bytes + self.outside_bytes

    @property
    def loaded_engine(self) -> OffloadEngine:
        """The engine. ComfyUI must have loaded the model."""
        assert self._engine is not None, "ComfyUI has not loaded the model"
        return self._engine

    def device_bytes(self, policy: OffloadPolicy) -> int:
        blocks = memory_needs(self.costs, policy, has_bus=self.has_bus).device_bytes
        return blocks + self.patch_bytes

    def first_policy(self, ram_bytes: int) -> OffloadPolicy:
        """Return the policy for a first model call, when no rates are known.

        Models with tensors in RAM stream from there.
        """
        if not self.has_bus or self._in_memory:
            return OffloadPolicy.layerwise()
        return Candidates.first_policy(self.costs, ram_bytes)

    def is_on(self, device: torch.device) -> bool:
        """Return True if the engine is loaded on this device."""
        return self._engine is not None and self._engine.device == compute_device(device)

    def engine(self, policy: OffloadPolicy, device: torch.device) -> OffloadEngine:
        """Return the engine for `policy` on `device`.

        An existing engine is changed and keeps the blocks.

        Raises:
            ValueError: the policy does not fit the number of blocks.
            OSError: there is not enough RAM for the RAM-resident blocks.
        """
        device = compute_device(device)
        if self._engine is not None and self._engine.device != device:
            self.close()
        if self._engine is None:
            # The engine outlives the run that creates it, and later runs could not write to
            # inference tensors.
            with torch.inference_mode(False):
                self._scales = self._scales_on(device)
                self._engine = attach_offload(
                    {stack: list(blocks.values()) for stack, blocks in self.stacks.items()},
                    policy=policy,
                    device=device,
                    source=self._source(),
                    follow_forward=False,
                    join=self.join,
                )
        elif self._policy != policy:
            self._engine.set_policy(policy)
        self._policy = policy
        return self._engine

    def close(self) -> None:
        if self._engine is not None:
            engine = self._engine
            self._engine = None  # also if it cannot be detached
            self._scales = {}
            engine.detach()

    def join(self, key: BlockKey, name: str, pieces: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return a block's quantised weight `name`, joined over its pieces on the device.

        Streamed pieces are bytes. Absent pieces come from the file. Others are used unchanged: with
        a patch, scales per row become one scale for the matrix.
        """
        weight = self._quantised[key][name]
        inner = {}
        for each, tensor in inner_tensors(weight).items():
            piece = pieces.get(each)
            if piece is None:
                inner[each] = self._scales[_resident_name(key, name, each)]
            elif piece.dtype == torch.uint8:
                inner[each] = piece.view(tensor.dtype).view(tensor.shape)
            else:
                inner[each] = piece
        return joined(weight, inner)

    def _largest(self, block: int) -> BlockSize:
        """Return the block sizes in the stack where the block is largest."""
        formats = [self.formats[BlockKey(stack, block)] for stack in self.stacks]
        stored = max(fmt.stored.nbytes for fmt in formats)
        return BlockSize(stored, stored, max(fmt.computed.nbytes for fmt in formats))

    def _scales_on(self, device: torch.device) -> Mapping[str, torch.Tensor]:
        """Return the quantised weights' tensors that do not stream: scales for whole matrices."""
        scales = {}
        for key, weights in self._quantised.items():
            streamed = {tensor.name for tensor in self.formats[key].stored.tensors}
            for name, weight in weights.items():
                for inner, tensor in inner_tensors(weight).items():
                    if piece_name(name, inner) not in streamed:
                        scales[_resident_name(key, name, inner)] = tensor
        return copy_together(scales, device)


def _resident_name(key: BlockKey, name: str, inner: str) -> str:
    return piece_name(f"{key.expert}.{key.block}.{name}", inner)
