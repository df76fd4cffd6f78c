"""Base of linear layers whose weight is codes of one byte with scales, which the layer multiplies as they are."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import nn

from ...schema import piece_tokens

Patch: TypeAlias = "tuple[torch.Tensor | None, torch.Tensor | None]"
"""`up` [rows, rank] and `down` [rank, columns] of a LoRA in the dtype of the tokens, or None twice."""
NO_PATCH: Patch = (None, None)

_numbers = itertools.count()
_layers: weakref.WeakValueDictionary[int, ScaledLinear] = weakref.WeakValueDictionary()


class ScaledLinear(nn.Linear):
    """Linear layer with codes as its weight [rows, columns] and an fp32 `weight_scale`, which are bound to it.

    The scale is [rows, 1] or [1, 1]. A LoRA of two factors is bound as `patch_up` [rows, rank] and `patch_down`
    [rank, columns] in the dtype of the tokens, and adds (tokens @ down.T) @ up.T to the result.

    Args:
        plain: layer to replace; its bias is taken over.
    """

    weight_scale: torch.Tensor
    patch_up: torch.Tensor | None
    patch_down: torch.Tensor | None

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__(plain.in_features, plain.out_features, bias=False, device="meta", dtype=plain.weight.dtype)
        self.bias = plain.bias
        self.register_buffer("weight_scale", torch.empty(plain.out_features, 1, device="meta"), persistent=False)
        self.register_buffer("patch_up", None, persistent=False)
        self.register_buffer("patch_down", None, persistent=False)
        # A patch that is an input of a compiled block would need another graph where there is none, and for each rank.
        # The operation of these layers gets this number instead, a tensor of the CPU whose value no graph depends on.
        self.number = torch.tensor(next(_numbers))
        _layers[int(self.number)] = self
        _register()

    @property
    def patch(self) -> Patch:
        return self.patch_up, self.patch_down

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            return self.compute(input)
        result: torch.Tensor = torch.ops.wanstream.scaled_linear(input, self.out_features, self.number)
        return result

    def compute(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the product [..., rows] with tokens [..., columns], in their dtype."""
        raise NotImplementedError


def by_pieces(
    tokens: torch.Tensor, weight: torch.Tensor, write: Callable[[torch.Tensor, torch.Tensor], object]
) -> torch.Tensor:
    """Return the product of tokens [..., columns] and a matrix [rows, columns], which `write` writes piece by piece."""
    rows, columns = weight.shape
    flat = tokens.reshape(-1, columns).contiguous()  # CUDA takes codes row by row only
    out = flat.new_empty(len(flat), rows)
    at_once = piece_tokens(rows, columns)
    for start in range(0, len(flat), at_once):
        write(flat[start : start + at_once], out[start : start + at_once])
    return out.view(*tokens.shape[:-1], rows)


def finish_product(sums: torch.Tensor, tokens: torch.Tensor, bias: torch.Tensor | None, patch: Patch) -> torch.Tensor:
    """Add the bias, and the patch of the layer if it has one, to fp32 products [tokens, rows] in place."""
    if bias is not None:
        sums.add_(bias)
    return add_patch(sums, tokens, patch)


def add_patch(result: torch.Tensor, tokens: torch.Tensor, patch: Patch) -> torch.Tensor:
    """Add the patch of a layer, if it has one, to its result in place."""
    up, down = patch
    if up is not None:
        assert down is not None, "up without down"
        result.add_(nn.functional.linear(nn.functional.linear(tokens, down), up))
    return result


@functools.cache
def _register() -> None:
    """Register `scaled_linear` with torch, which then compiles blocks around it into one graph."""

    def compute(tokens: torch.Tensor, rows: int, number: torch.Tensor) -> torch.Tensor:
        return _layers[int(number)].compute(tokens)

    schema = "(Tensor tokens, int rows, Tensor number) -> Tensor"
    operation = torch.library.custom_op("wanstream::scaled_linear", compute, mutates_args=(), schema=schema)

    @operation.register_fake
    def _(tokens: torch.Tensor, rows: int, number: torch.Tensor) -> torch.Tensor:
        return tokens.new_empty(*tokens.shape[:-1], rows)
