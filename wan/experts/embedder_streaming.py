"""Brings the weights that embed time and text to the device for a moment, and takes them away again.

They are read like blocks, one flat piece for each part: on a reading thread into page-locked memory, from there to the
device in one copy, where they are decoded. Nothing of them stays, neither there nor in RAM.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from ...offload import CudaPageLock, FileSource, FileTensor, HostPages, WeightPatch, tensor_views
from ...plan import BlockKey
from ..checkpoint.meta_model import parameter_dtype, placed, set_parameters
from ..checkpoint.open import Expert
from ..lora.apply import put_patched
from .embedder_cache import PARTS, EmbedderPart, part_of

if TYPE_CHECKING:
    from diffusers import WanTransformer3DModel


class EmbedderWeights:
    """The embedders' weights of several experts; all calls come from one thread.

    Args:
        models: by expert name, with the parameters of their embedders on meta.
        reader: where reading runs, one job at a time.
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
        self._coming: dict[BlockKey, Future[torch.Tensor]] = {}
        self._patches: Mapping[str, Mapping[str, WeightPatch]] = {}
        self.bytes_read = 0
        """Bytes of the parts that were read and used."""

    @property
    def host_bytes(self) -> int:
        """Bytes of RAM that parts take which were read and not used yet."""
        return self._slots.nbytes

    def start(self, name: str, part: EmbedderPart) -> None:
        """Begin to read a part, unless that was begun."""
        key = self._keys[name, part]
        if key not in self._coming:
            self._coming[key] = self._reader.submit(self._read, key)

    def arrived(self, name: str, part: EmbedderPart) -> bool:
        """Whether a part was read and waits to be used."""
        key = self._keys[name, part]
        return key in self._coming and self._coming[key].done()

    def drop(self, name: str, part: EmbedderPart) -> None:
        """Take a part away that nobody needs; what is being read is read to its end first."""
        key = self._keys[name, part]
        coming = self._coming.pop(key, None)
        if coming is not None and not coming.cancel():
            coming.exception()
        self._slots.drop(key)

    def set_patches(self, patches: Mapping[str, Mapping[str, WeightPatch]]) -> None:
        """Replace what is added to the weights when they come, by expert and parameter name."""
        self._patches = patches

    @contextmanager
    def there(self, name: str, part: EmbedderPart) -> Iterator[None]:
        """The context in which the model computes with that part; waits until it is read.

        Raises:
            OSError: it could not be read; the next time it is read again.
        """
        key, model = self._keys[name, part], self._models[name]
        self.start(name, part)
        try:
            stored = self._read_in(key)
            weights = self._on_device(key, stored)
            patches = self._patches.get(name, {})
            for full in weights.keys() & set(patches):
                put_patched(weights[full], patches[full], weights[full])
            absent = {full: model.get_parameter(full) for full in weights}
            set_parameters(model, weights)
            del weights, stored
            try:
                yield
            finally:
                set_parameters(model, absent)
        finally:
            self._slots.drop(key)

    def close(self) -> None:
        """Drop everything; the reader has ended. Closing twice is allowed."""
        self._coming.clear()
        self._slots.close()
        self._source.close()

    def _read_in(self, key: BlockKey) -> torch.Tensor:
        coming = self._coming.pop(key)
        if coming.done() and coming.exception() is not None:
            coming = self._reader.submit(self._read, key)  # failed when nobody needed it: the file may be back
        return coming.result()

    def _read(self, key: BlockKey) -> torch.Tensor:
        stored = self._source.block_format(key).stored
        self._source.scales(key)
        with self._slots.reserve(key, key, stored.nbytes) as reservation:
            self._source.read_block(key, reservation.view)
        return reservation.memory

    def _on_device(self, key: BlockKey, stored: torch.Tensor) -> dict[str, torch.Tensor]:
        """One tensor after the other, so that its stored form and the decoded one are not there twice for all."""
        fmt, scales = self._source.block_format(key), self._source.scales(key)
        self.bytes_read += sum(tensor.nbytes for tensor in fmt.stored.tensors)
        views = tensor_views(stored, fmt.stored)
        weights = {}
        for tensor, computed in zip(fmt.stored.tensors, fmt.computed.tensors, strict=True):
            name, packing = tensor.name, tensor.packing
            weights[name] = placed(
                views[name], tensor.shape, computed.dtype, self._device, packing=packing, scale=scales.get(name)
            )
        return weights


def _names(expert: Expert, part: EmbedderPart) -> list[str]:
    return [name for name in expert.weights if part_of(name) == part]
