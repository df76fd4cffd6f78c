"""Weights of an expert's embedders, on the device only while the run's embeddings are computed.

They are read like blocks, one flat buffer per part: a reader thread reads them into page-locked memory, from which they
are copied to the device and decoded there. They are resident neither on the device nor in RAM.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from ...offload import CudaPageLock, FileSource, FileTensor, HostPages, WeightPatch, tensor_views
from ...plan import BlockKey
from ..checkpoint.meta_model import materialise, parameter_dtype, set_parameters
from ..checkpoint.open import Expert
from ..lora.apply import write_patched
from .embedder_parts import PARTS, EmbedderPart, embedder_part

if TYPE_CHECKING:
    from diffusers import WanTransformer3DModel


class EmbedderWeights:
    """Embedder weights of several experts. All calls must come from one thread.

    Args:
        experts: opened checkpoints by expert name.
        models: models by expert name, with embedder parameters on meta.
        compute_dtype: dtype of the decoded weights, except those that diffusers keeps in fp32.
        device: device on which the rows are computed.
        reader: executor that reads the files, one job at a time.
    """

    def __init__(
        self,
        experts: Mapping[str, Expert],
        models: Mapping[str, WanTransformer3DModel],
        *,
        compute_dtype: torch.dtype,
        device: torch.device,
        reader: Executor,
    ) -> None:
        self._models, self._device, self._reader = models, device, reader
        names = {name: {part: _names(expert, part) for part in PARTS} for name, expert in experts.items()}
        self._keys = {(name, part): BlockKey(name, index) for name in experts for index, part in enumerate(PARTS)}
        blocks: dict[BlockKey, dict[str, FileTensor]] = {}
        scales: dict[BlockKey, dict[str, FileTensor]] = {}
        for (name, part), key in self._keys.items():
            expert = experts[name]
            blocks[key] = {full: expert.weights[full] for full in names[name][part]}
            scales[key] = {full: expert.scales[full] for full in blocks[key] if full in expert.scales}
        dtypes = {full: parameter_dtype(full, compute_dtype) for tensors in blocks.values() for full in tensors}
        self._source = FileSource(blocks, computed_dtypes=dtypes, scales=scales, direct=False)
        self._slots = HostPages(lock=CudaPageLock(device) if device.type == "cuda" else None)
        self._pending: dict[BlockKey, Future[torch.Tensor]] = {}
        self._patches: Mapping[str, Mapping[str, WeightPatch]] = {}
        self.bytes_read = 0
        """Bytes of the parts that were read and loaded."""

    @property
    def host_bytes(self) -> int:
        """Bytes of RAM of parts that were read and not used yet."""
        return self._slots.nbytes

    def start_reading(self, name: str, part: EmbedderPart) -> None:
        """Start reading a part unless that has started."""
        key = self._keys[name, part]
        if key not in self._pending:
            self._pending[key] = self._reader.submit(self._read, key)

    def is_read(self, name: str, part: EmbedderPart) -> bool:
        """Return True if a part was read and is not used yet."""
        key = self._keys[name, part]
        return key in self._pending and self._pending[key].done()

    def drop(self, name: str, part: EmbedderPart) -> None:
        """Discard a part that is not needed; waits for a read in progress."""
        key = self._keys[name, part]
        pending = self._pending.pop(key, None)
        if pending is not None and not pending.cancel():
            # Wait, because the read still writes into the slot. Its error is irrelevant: the part is not needed.
            pending.exception()
        self._slots.drop(key)

    def set_patches(self, patches: Mapping[str, Mapping[str, WeightPatch]]) -> None:
        """Replace the patches that are added to loaded weights, by expert and parameter name."""
        self._patches = patches

    @contextmanager
    def loaded(self, name: str, part: EmbedderPart) -> Iterator[None]:
        """Context in which the model has the weights of that part on the device; waits until they are read.

        Raises:
            OSError: reading failed; the next call reads the part again.
        """
        key, model = self._keys[name, part], self._models[name]
        self.start_reading(name, part)
        try:
            stored = self._wait_for_read(key)
            weights = self._on_device(key, stored)
            patches = self._patches.get(name, {})
            for full in weights.keys() & set(patches):
                write_patched(weights[full], patches[full], weights[full])
            meta_parameters = {full: model.get_parameter(full) for full in weights}
            set_parameters(model, weights)
            # Keep no references: leaving the context has to free the device memory, and `drop` the RAM of the slot.
            del weights, stored
            try:
                yield
            finally:
                set_parameters(model, meta_parameters)
        finally:
            self._slots.drop(key)

    def close(self) -> None:
        """Free all memory and close the files, after the reader has shut down. Closing twice is allowed."""
        self._pending.clear()
        self._slots.close()
        self._source.close()

    def _wait_for_read(self, key: BlockKey) -> torch.Tensor:
        pending = self._pending.pop(key)
        if pending.done() and pending.exception() is not None:
            # The read failed ahead of time, when its rows were not needed yet: the file may be back.
            pending = self._reader.submit(self._read, key)
        return pending.result()

    def _read(self, key: BlockKey) -> torch.Tensor:
        stored = self._source.block_format(key).stored
        self._source.scales(key)  # read on this thread and cached by the source
        with self._slots.reserve(key, key, stored.nbytes) as reservation:
            self._source.read_block(key, reservation.view)
        return reservation.memory

    def _on_device(self, key: BlockKey, stored: torch.Tensor) -> dict[str, torch.Tensor]:
        """Copy and decode the tensors one by one, so that the device has both forms of only one tensor at a time."""
        fmt, scales = self._source.block_format(key), self._source.scales(key)
        self.bytes_read += sum(tensor.nbytes for tensor in fmt.stored.tensors)
        views = tensor_views(stored, fmt.stored)
        weights = {}
        for tensor, computed in zip(fmt.stored.tensors, fmt.computed.tensors, strict=True):
            name, packing = tensor.name, tensor.packing
            weights[name] = materialise(
                views[name], tensor.shape, computed.dtype, self._device, packing=packing, scale=scales.get(name)
            )
        return weights


def _names(expert: Expert, part: EmbedderPart) -> list[str]:
    return [name for name in expert.weights if embedder_part(name) == part]
