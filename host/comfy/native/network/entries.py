"""Parameters and buffers in a model, one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from .layers import is_joined

Dtypes: TypeAlias = Mapping[tuple[int, str], torch.dtype]
"""Dtype in which ComfyUI keeps each model tensor, by `Entry.place`."""


class Entry(NamedTuple):
    """One parameter or buffer in a model."""

    module: nn.Module
    name: str
    """Name within the module."""
    tensor: torch.Tensor

    @property
    def place(self) -> tuple[int, str]:
        """Module `id` and name."""
        return id(self.module), self.name

    def replace(self, tensor: torch.Tensor) -> None:
        if self.name in self.module._buffers:
            self.module._buffers[self.name] = tensor
        else:
            store: dict[str, Any] = self.module._parameters
            store[self.name] = (
                # `nn.Parameter` would copy the scales of a joined weight. See `joined`.
                tensor if is_joined(tensor) else nn.Parameter(tensor, requires_grad=False)
            )


def parameters(root: nn.Module) -> Iterator[Entry]:
    for module in root.modules():
        yield from (
            Entry(module, name, tensor) for name, tensor in module.named_parameters(recurse=False)
        )


def entries(root: nn.Module) -> Iterator[Entry]:
    yield from parameters(root)
    for module in root.modules():
        yield from (
            Entry(module, name, tensor) for name, tensor in module.named_buffers(recurse=False)
        )


def dtype_of(entry: Entry, dtypes: Dtypes) -> torch.dtype:
    """Return the dtype in which ComfyUI keeps a tensor.

    Mixed-precision layers choose it while loading.
    """
    loaded: torch.dtype = vars(entry.module).get("loaded_dtype", entry.tensor.dtype)
    return dtypes.get(entry.place, loaded)
