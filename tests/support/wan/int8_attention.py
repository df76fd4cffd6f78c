"""Attention in int8 on a CPU, and a module that offers it under comfy-kitchen's name."""

from __future__ import annotations

import math
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch.nn import functional

QUERY_ROWS, KEY_ROWS = 32, 64
"""Rows per scale."""
ACTIVE = {"available": True, "disabled": False, "unavailable_reason": None, "capabilities": []}


def quantised_attention(query, key, value, scale=None):
    """Attention [B, H, S, D] in fp32, rounded as comfy-kitchen describes for `int8_attention`.

    Rotated q and k in signed 8 bits with a scale per rows, v with a scale per column, softmax in
    unsigned 8 bits.
    """
    rotation = _hadamard(query.shape[-1])
    queries = _by_rows(query.float() @ rotation, QUERY_ROWS)
    keys = _by_rows(key.float() @ rotation, KEY_ROWS)
    scores = queries @ keys.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    summed = (weights * 255).round() / 255 @ _rounded(value.float(), (-2,))
    return (summed / weights.sum(-1, keepdim=True)).to(query.dtype)


def exact_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(query, key, value)


def kitchen(attention=quantised_attention, *, capable=True, **registry):
    """A module with the kernel `attention`.

    The CUDA backend is active unless `registry` says otherwise.
    """
    module: Any = ModuleType("comfy_kitchen")
    module.__spec__ = ModuleSpec("comfy_kitchen", None)
    module.list_backends = lambda: {"cuda": {**ACTIVE, **registry}}
    module.int8_attention = attention
    module.int8_attention_is_available = lambda device: capable
    return module


def _hadamard(size: int) -> torch.Tensor:
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(size)


def _by_rows(values: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([_rounded(part, (-1, -2)) for part in values.split(rows, dim=-2)], dim=-2)


def _rounded(values: torch.Tensor, shared: tuple[int, ...]) -> torch.Tensor:
    scale = values.abs().amax(shared, keepdim=True) / 127
    return (values / scale).round() * scale
