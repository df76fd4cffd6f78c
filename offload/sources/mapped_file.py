"""Tensors of a file that are renamed, sliced and reshaped without reading them, and their places in the file."""

from __future__ import annotations

import math
import mmap
import os
import sys
import warnings
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch

from ..formats.gguf_header import read_gguf_header
from ..formats.packing import QuantFormat
from ..formats.safetensors_header import FileTensor, read_header

GGUF = ".gguf"

MAP_NORESERVE = 0x4000
"""A flag of Linux that Python 3.11 does not name."""

COPIES_WRITES = os.name != "nt"
"""False on Windows: it reserves the whole size of a mapping whose writes are copied, and files are larger than RAM."""


class MappedFile:
    """A safetensors or GGUF file whose tensors can be renamed, sliced along rows and reshaped without reading them.

    Plain tensors are views of the mapped file. Pages are read when a tensor is used, and cost no RAM of the process:
    the system can drop them. A write into a tensor never reaches the file: it copies the page, or fails on Windows.

    Packed tensors of GGUF have the shape of their values, have no values (they are on `meta`), and share one storage,
    in which a view has its place like in the mapped file.

    Args:
        path: the file.
        packed_dtype: dtype that packed tensors have here.

    Attributes:
        tensors: views by their names in the file; valid as long as one of them exists.
        places: places of these tensors in the file.
        metadata: free-form metadata of the file.
        is_packed: True if a tensor is packed.

    Raises:
        CheckpointFileError: as `read_header` or `read_gguf_header`.
    """

    def __init__(self, path: Path, packed_dtype: torch.dtype = torch.bfloat16) -> None:
        header = read_gguf_header(path) if path.suffix.lower() == GGUF else read_header(path)
        self.metadata: Mapping[str, str] = header.metadata
        self.places: Mapping[str, FileTensor] = header.tensors
        self._memory = np.frombuffer(_map(path), np.uint8)
        self._start: int = self._memory.ctypes.data
        packed = [tensor for tensor in header.tensors.values() if tensor.packing is not None]
        self.is_packed = bool(packed)
        *starts, values = accumulate((math.prod(tensor.shape) for tensor in packed), initial=0)
        self._packed, self._starts = packed, starts
        self._packed_dtype = packed_dtype
        self._layers: dict[int, tuple[torch.Tensor, FileTensor]] = {}
        self._values = torch.empty(values, dtype=packed_dtype, device="meta")
        virtual = {id(tensor): self._values[start:] for tensor, start in zip(packed, starts, strict=True)}
        self.tensors = {
            name: virtual[id(tensor)][: math.prod(tensor.shape)].view(tensor.shape)
            if tensor.packing is not None
            else self._view(tensor)
            for name, tensor in header.tensors.items()
        }
        # Every tensor of a file has the same path and version.
        self._version = next((tensor.version for tensor in header.tensors.values()), None)
        self._path = header.path

    def pack(self, layer: FileTensor) -> torch.Tensor:
        """Return a tensor without values for codes and scales of this file; only as a whole it has a place."""
        values = torch.empty(layer.shape, dtype=self._packed_dtype, device="meta")
        self._layers[values.untyped_storage()._cdata] = values, layer
        self.is_packed = True
        return values

    def locate(self, view: torch.Tensor) -> FileTensor | None:
        """Return the place in the file of a contiguous view; None for a tensor that is not in this file.

        A part of a packed tensor that is not a number of whole groups has no place either.
        """
        if not view.numel() or not view.is_contiguous():
            return None
        if view.is_meta:
            return self._locate_packed(view)
        offset = view.data_ptr() - self._start
        if not 0 <= offset < self._memory.size:
            return None
        return FileTensor(
            path=self._path,
            offset=offset,
            nbytes=view.nbytes,
            dtype=view.dtype,
            shape=tuple(view.shape),
            version=self._version,
        )

    def has(self, view: torch.Tensor) -> bool:
        """Return True for a tensor of this file, contiguous or not."""
        if view.is_meta:
            storage = view.untyped_storage()._cdata
            return storage in self._layers or bool(storage == self._values.untyped_storage()._cdata)
        return 0 <= view.data_ptr() - self._start < self._memory.size

    def _locate_packed(self, view: torch.Tensor) -> FileTensor | None:
        if not self.has(view):
            return None
        if (packed := self._layers.get(view.untyped_storage()._cdata)) is not None:
            whole, layer = packed
            return layer if view.shape == whole.shape else None
        index = bisect_right(self._starts, view.storage_offset()) - 1
        tensor, start = self._packed[index], view.storage_offset() - self._starts[index]
        packing = tensor.packing
        assert isinstance(packing, QuantFormat), f"{tensor} is not packed in a format of GGUF"
        if start % packing.values or view.numel() % packing.values:
            return None
        offset, nbytes = (count // packing.values * packing.nbytes for count in (start, view.numel()))
        return replace(tensor, offset=tensor.offset + offset, nbytes=nbytes, shape=tuple(view.shape))

    def _view(self, tensor: FileTensor) -> torch.Tensor:
        values = math.prod(tensor.shape)
        if not values:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        # `frombuffer`, because `view` refuses offsets that are not multiples of the dtype's size, which files may have.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            flat = torch.frombuffer(self._memory, dtype=tensor.dtype, count=values, offset=tensor.offset)
        return flat.reshape(tensor.shape)


def _map(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        if not COPIES_WRITES:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if sys.platform != "linux":
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        # Linux refuses such a mapping of a file that is larger than its RAM, unless nothing is to be reserved for it.
        flags, access = mmap.MAP_PRIVATE | MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
        return mmap.mmap(file.fileno(), 0, flags=flags, prot=access)
