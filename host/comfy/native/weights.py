"""Weights of a native model on its device: blocks that stream, and the tensors outside them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import nn

from ....devices import compute_device, runtime_for
from ....offload import FileSource, FileTensor, OffloadEngine, TensorSource, attach_offload, copy_together, piece_name
from ....plan import RAW_SLOTS, BlockKey, MeasuredBlocks
from ....schema import OffloadPolicy
from .layers import inner_tensors, joined

STACK = "model"
"""Name of the one stack of all blocks: lists of a model may run interleaved."""


class NativeWeights:
    """Weights of one native model: matrices of the blocks stream from the file, all other tensors are loaded.

    Args:
        blocks: modules of the blocks by path in the diffusion model; their streamed tensors are on `meta`.
        matrices: place of each streamed tensor in its file, by name within its block.
        dtypes: dtype of each of them to compute with.
        quantised: quantised weights by name within their block, which are joined from pieces in `matrices`.
        outside_bytes: bytes of all tensors that do not stream.
        device: device to compute on.

    Attributes:
        blocks, outside_bytes: as above.
        buffer_bytes: bytes of one buffer.
        formats: stored and computed layout of each block.
    """

    def __init__(
        self,
        blocks: Mapping[str, nn.Module],
        matrices: Mapping[BlockKey, Mapping[str, FileTensor]],
        dtypes: Mapping[str, torch.dtype],
        quantised: Mapping[BlockKey, Mapping[str, torch.Tensor]],
        *,
        outside_bytes: int,
        device: torch.device,
    ) -> None:
        self.blocks = blocks
        self._matrices, self._dtypes, self._quantised = matrices, dtypes, quantised
        self.outside_bytes = outside_bytes
        self._engine: OffloadEngine | None = None
        self._policy: OffloadPolicy | None = None
        source = self._source()
        self.formats = source.formats
        source.close()
        formats = self.formats.values()
        self.buffer_bytes = max(fmt.computed.nbytes for fmt in formats)
        self._stored_bytes = max(fmt.stored.nbytes for fmt in formats)
        self._decodes = not all(fmt.is_raw for fmt in formats)
        self._has_bus = runtime_for(device) is not None
        # A device keeps the stored bytes of the blocks that are decoded next to the buffers.
        decoded = RAW_SLOTS * max((fmt.stored.nbytes for fmt in formats if not fmt.is_raw), default=0)
        self._decoding_bytes = decoded if self._has_bus else 0

    @property
    def block_counts(self) -> dict[str, int]:
        return {STACK: len(self.blocks)}

    @property
    def running(self) -> bool:
        return self._engine is not None and self._engine.running

    @property
    def loaded_bytes(self) -> int:
        return 0 if self._engine is None else self._engine.loaded_bytes + self.outside_bytes

    @property
    def pinned_bytes(self) -> int:
        return 0 if self._engine is None else self._engine.pinned_bytes

    @property
    def loaded_engine(self) -> OffloadEngine:
        """The engine; ComfyUI must have loaded the model."""
        assert self._engine is not None, "ComfyUI has not loaded the model"
        return self._engine

    @property
    def measured_blocks(self) -> MeasuredBlocks:
        """Sizes of the blocks, for a policy that is chosen by measuring."""
        return MeasuredBlocks(
            stack=STACK,
            blocks=len(self.blocks),
            stored_bytes=self._stored_bytes,
            buffer_bytes=self.buffer_bytes,
            outside_bytes=self.outside_bytes,
            decodes=self._decodes,
            decoding_bytes=self._decoding_bytes,
            has_bus=self._has_bus,
        )

    def device_bytes(self, policy: OffloadPolicy) -> int:
        return self.measured_blocks.device_bytes(policy)

    def engine(self, policy: OffloadPolicy, device: torch.device) -> OffloadEngine:
        """Return the engine for `policy` on `device`; an existing one is changed and keeps its blocks.

        Raises:
            ValueError: the policy does not fit the number of blocks.
            OSError: there is not enough RAM for the RAM-resident blocks.
        """
        device = compute_device(device)
        if self._engine is not None and self._engine.device != device:
            self.close()
        if self._engine is None:
            # The engine outlives the run that creates it, and inference tensors could not be written in later runs.
            with torch.inference_mode(False):
                self._engine = attach_offload(
                    {STACK: list(self.blocks.values())},
                    policy=policy,
                    device=device,
                    source=self._source(),
                    follow_forward=False,
                    join=partial(_join, self._quantised, self._scales_on(device)),
                )
        elif self._policy != policy:
            self._engine.set_policy(policy)
        self._policy = policy
        return self._engine

    def release_memory(self, nbytes: int) -> int:
        return 0 if self._engine is None else self._engine.release_memory(nbytes)

    def release_idle_buffers(self) -> int:
        return 0 if self._engine is None else self._engine.release_idle_buffers()

    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.detach()

    def _source(self) -> FileSource | TensorSource:
        return FileSource(self._matrices, computed_dtypes=self._dtypes)

    def _scales_on(self, device: torch.device) -> Mapping[str, torch.Tensor]:
        """Return the tensors of quantised weights that do not stream: scales of whole matrices."""
        return copy_together(
            {
                _resident_name(key, name, inner): tensor
                for key, weights in self._quantised.items()
                for name, weight in weights.items()
                for inner, tensor in inner_tensors(weight).items()
                if piece_name(name, inner) not in self._matrices[key]
            },
            device,
        )


def _resident_name(key: BlockKey, name: str, inner: str) -> str:
    return piece_name(f"{key.block}.{name}", inner)


def _join(
    quantised: Mapping[BlockKey, Mapping[str, torch.Tensor]],
    scales: Mapping[str, torch.Tensor],
    key: BlockKey,
    name: str,
    pieces: Mapping[str, torch.Tensor],
) -> torch.Tensor:
    """Return the quantised weight `name` of a block over its pieces, which are bytes, and its scales on the device."""
    weight, inner = quantised[key][name], {}
    for each, tensor in inner_tensors(weight).items():
        piece = pieces.get(each)
        inner[each] = (
            scales[_resident_name(key, name, each)] if piece is None else piece.view(tensor.dtype).view(tensor.shape)
        )
    return joined(weight, inner)
