"""Copies of safetensors and GGUF files with some tensors changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from gguf import GGUFWriter
from safetensors import safe_open
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Edits = Mapping[str, torch.Tensor | None]
"""Tensors to set by key. None removes the key."""
Change = Edits | Callable[[Tensors], Edits]
"""Edits, or a function that makes them from the file's tensors."""


def rewrite(source, target, change, metadata=None) -> Path:
    """Write a changed copy of a safetensors file, and return its path.

    `metadata` adds entries to the header.
    """
    with safe_open(source, framework="pt") as opened:
        header = {**(opened.metadata() or {}), **(metadata or {})}
    tensors = load_file(source)
    edits = change(tensors) if callable(change) else change
    kept = {key: tensor for key, tensor in {**tensors, **edits}.items() if tensor is not None}
    save_file({key: tensor.contiguous() for key, tensor in kept.items()}, target, header)
    return target


def renamed(rename: Callable[[str], str]) -> Callable[[Tensors], Edits]:
    """Return a change that gives every tensor another key."""
    return lambda tensors: dict.fromkeys(tensors) | {rename(key): tensors[key] for key in tensors}


def prefixed(prefix: str) -> Callable[[Tensors], Edits]:
    """Return a change that puts a prefix before every key."""
    return renamed(lambda key: prefix + key)


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return zeros."""
    return torch.zeros(shape, dtype=dtype)


def close_gguf(writer: GGUFWriter) -> None:
    """Write the header and all tensors that were added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
