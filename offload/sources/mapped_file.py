"""Tensors of a safetensors file as views of its mapped memory, and the place of a view in the file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from ..formats.safetensors_header import FileTensor, read_header


class MappedFile:
    """A safetensors file whose tensors can be renamed, sliced along rows and reshaped without reading them.

    Pages are read when a tensor is used, and cost no RAM of the process: the system can drop them. A write into a
    tensor copies its pages, and never reaches the file.

    Args:
        path: the file.

    Attributes:
        tensors: views by their names in the file; valid as long as one of them exists.
        metadata: free-form metadata of the file.

    Raises:
        CheckpointFileError: as `read_header`.
    """

    def __init__(self, path: Path) -> None:
        header = read_header(path)
        self.metadata: Mapping[str, str] = header.metadata
        self._memory = np.memmap(path, dtype=np.uint8, mode="c")
        self._start: int = self._memory.ctypes.data
        self.tensors = {name: self._view(tensor) for name, tensor in header.tensors.items()}
        # Every tensor of a file has the same path and version.
        self._version = next((tensor.version for tensor in header.tensors.values()), None)
        self._path = header.path

    def locate(self, view: torch.Tensor) -> FileTensor | None:
        """Return the place in the file of a contiguous view; None for a tensor that is not in this mapping."""
        offset = view.data_ptr() - self._start
        if not view.numel() or not 0 <= offset < self._memory.size or not view.is_contiguous():
            return None
        return FileTensor(
            path=self._path,
            offset=offset,
            nbytes=view.nbytes,
            dtype=view.dtype,
            shape=tuple(view.shape),
            version=self._version,
        )

    def _view(self, tensor: FileTensor) -> torch.Tensor:
        values = math.prod(tensor.shape)
        if not values:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        # `frombuffer`, because `view` refuses offsets that are not multiples of the dtype's size, which files may have.
        flat = torch.frombuffer(self._memory, dtype=tensor.dtype, count=values, offset=tensor.offset)
        return flat.reshape(tensor.shape)
