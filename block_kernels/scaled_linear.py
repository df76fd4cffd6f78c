"""Base for linear layers with weights as one-byte codes and scales, multiplied as stored."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable

import torch
from torch import nn

from ..shapes import piece_tokens

_numbers = itertools.count()
# Weak, so the layers in a closed model are freed.
_layers: weakref.WeakValueDictionary[int, ScaledLinear] = weakref.WeakValueDictionary()


class ScaledLinear(nn.Linear):
    """Linear layer with codes as weight [rows, columns] and an fp32 `weight_scale`.

    Both are bound to the layer. The scale is [rows, 1] or [1, 1]. A LoRA with two factors is bound
    as `patch_up` [rows, rank] and `patch_down` [rank, columns] in the tokens' dtype, and adds
    (tokens @ down.T) @ up.T to the result.

    Args:
        plain: layer to replace. The bias is reused.
        group: column group of the weight's rotation. 0: not rotated.
    """

    weight_scale: torch.Tensor
    patch_up: torch.Tensor | None
    patch_down: torch.Tensor | None

    def __init__(self, plain: nn.Linear, *, group: int = 0) -> None:
        # On meta, because the codes are bound to the layer later.
        super().__init__(
            plain.in_features,
            plain.out_features,
            bias=False,
            device="meta",
            dtype=plain.weight.dtype,
        )
        self.bias = plain.bias
        self.group = group
        self.register_buffer(
            "weight_scale", torch.empty(plain.out_features, 1, device="meta"), persistent=False
        )
        self.register_buffer("patch_up", None, persistent=False)
        self.register_buffer("patch_down", None, persistent=False)
        # A patch as input of a compiled block would need another graph without a patch, and for
        # each rank. The operation in these layers gets this number instead: a CPU tensor whose
        # value no graph depends on.
        self.number = torch.tensor(next(_numbers))
        _layers[int(self.number)] = self
        _register()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            return self.compute(input)
        result: torch.Tensor = torch.ops.wanstream.scaled_linear(
            input, self.out_features, self.number
        )
        return result

    def compute(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the product [..., rows] with tokens [..., columns], in their dtype."""
        raise NotImplementedError

    def by_pieces(
        self, tokens: torch.Tensor, write: Callable[[torch.Tensor, torch.Tensor], object]
    ) -> torch.Tensor:
        """Return the product, computed by `write` for pieces of the tokens."""
        rows, columns = self.weight.shape
        flat = tokens.reshape(-1, columns).contiguous()  # CUDA takes codes row by row only
        out = flat.new_empty(len(flat), rows)
        # In pieces, because sums in 32 bits and copies of all tokens would take too much memory.
        at_once = piece_tokens(rows, columns)
        for start in range(0, len(flat), at_once):
            write(flat[start : start + at_once], out[start : start + at_once])
        return out.view(*tokens.shape[:-1], rows)

    def finish(self, sums: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Add the bias, and any patch, to fp32 products [tokens, rows] in place."""
        if self.bias is not None:
            sums.add_(self.bias)
        return self.add_patch(sums, tokens)

    def add_patch(self, result: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Add the patch, if any, to the product with `tokens` in place."""
        if self.patch_up is not None:
            assert self.patch_down is not None, "up without down"
            # In this order: `up @ down` would be as large as the weight.
            result.add_(
                nn.functional.linear(nn.functional.linear(tokens, self.patch_down), self.patch_up)
            )
        return result


@functools.cache
def _register() -> None:
    """Register `scaled_linear` with torch, which then compiles blocks around it into one graph."""

    def compute(tokens: torch.Tensor, rows: int, number: torch.Tensor) -> torch.Tensor:
        # The number is on the CPU, so reading it does not wait for the device.
        return _layers[int(number)].compute(tokens)

    schema = "(Tensor tokens, int rows, Tensor number) -> Tensor"
    operation = torch.library.custom_op(
        "wanstream::scaled_linear", compute, mutates_args=(), schema=schema
    )

    @operation.register_fake
    def _(tokens: torch.Tensor, rows: int, number: torch.Tensor) -> torch.Tensor:
        return tokens.new_empty(*tokens.shape[:-1], rows)
