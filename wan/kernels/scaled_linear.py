"""Base of linear layers whose weight is codes of one byte with scales, which the layer multiplies as they are."""

from __future__ import annotations

import itertools
import weakref
from typing import TypeAlias

import torch
from torch import nn

Patch: TypeAlias = "tuple[torch.Tensor | None, torch.Tensor | None]"
"""`up` [rows, rank] and `down` [rank, columns] of a LoRA in the dtype of the tokens, or None twice."""

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
        # The operations of these layers get this number instead, a tensor of the CPU whose value no graph depends on.
        self.number = torch.tensor(next(_numbers))
        _layers[int(self.number)] = self

    @property
    def patch(self) -> Patch:
        return self.patch_up, self.patch_down


def patch_of(number: torch.Tensor) -> Patch:
    """Return the patch of the layer with that number, which must exist."""
    return _layers[int(number)].patch


def finish_product(
    sums: torch.Tensor,
    tokens: torch.Tensor,
    bias: torch.Tensor | None,
    up: torch.Tensor | None,
    down: torch.Tensor | None,
) -> torch.Tensor:
    """Add the bias, and the patch of the layer if it has one, to fp32 products [tokens, rows] in place."""
    if bias is not None:
        sums.add_(bias)
    add_patch(sums, tokens, up, down)
    return sums


def add_patch(result: torch.Tensor, tokens: torch.Tensor, up: torch.Tensor | None, down: torch.Tensor | None) -> None:
    """Add the patch of a layer, if it has one, to its result in place."""
    if up is not None:
        assert down is not None, "up without down"
        result.add_(nn.functional.linear(nn.functional.linear(tokens, down), up))
