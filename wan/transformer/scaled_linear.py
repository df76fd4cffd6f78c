"""Base of linear layers whose weight is codes of one byte with scales, which the layer multiplies as they are."""

from __future__ import annotations

import torch
from torch import nn


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
    if up is not None:
        assert down is not None, "up without down"
        sums.add_(nn.functional.linear(nn.functional.linear(tokens, down), up))
    return sums
