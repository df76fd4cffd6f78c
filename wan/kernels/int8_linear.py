"""Linear layers whose weight is int8: inputs are quantised for each token, and multiplied in int8.

With a weight W' = W H that was rotated (ConvRot, `offload/formats/rotation.py`), the input is rotated too, because
(x H) (W H)^T = x W^T: an outlier of a token is spread over a group of columns before it sets the scale of the token.
"""

from __future__ import annotations

import functools

import torch
from torch import nn

from ...offload import quantise_int8, rotated_sums, rotation_factor
from ...schema import FEWEST_INT8_TOKENS, piece_tokens
from .scaled_linear import ScaledLinear, add_patch, finish_product, patch_of


class Int8Linear(ScaledLinear):
    """Linear layer with an int8 weight [rows, columns] and an fp32 `weight_scale` [rows, 1].

    Args:
        plain: layer to replace; its bias is taken over.
        group: columns that the weight was rotated in; 0: it was not.
    """

    def __init__(self, plain: nn.Linear, *, group: int) -> None:
        super().__init__(plain)
        self.group = group
        self.rotation: list[torch.Tensor] = []
        """The matrices of the rotation on the device of the input; all layers share them."""
        self.kitchen_dtype: int | None = None
        """comfy-kitchen's number of the dtype of the result; None: torch multiplies."""
        _register()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        matrix = self.weight, self.weight_scale, self.bias
        result: torch.Tensor
        if self.kitchen_dtype is not None:
            result = kitchen_linear(input, *matrix, self.group, self.kitchen_dtype)
            if torch.compiler.is_compiling():
                torch.ops.wanstream.add_patch(result, input, self.number)
            else:
                add_patch(result, input, *self.patch)
            return result
        assert len(self.rotation) > 0 or not self.group, "the rotation was not set"
        if not torch.compiler.is_compiling():
            return int8_linear(input, *matrix, self.rotation, *self.patch)
        result = torch.ops.wanstream.int8_linear(input, *matrix, self.rotation, self.number)
        return result


def int8_linear(
    tokens: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    rotation: list[torch.Tensor],
    up: torch.Tensor | None = None,
    down: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply tokens by an int8 matrix.

    x' = x H in fp32; s = max(|x'|) / 127 for each token; q = x' / s, rounded to even; the sums of q and the codes of
    the weight are exact; y = sums * weight_scale * s + bias in fp32, rounded once to the dtype of the tokens.

    Args:
        tokens: [..., columns], of a floating dtype.
        weight: int8 [rows, columns].
        weight_scale: fp32 [rows, 1].
        bias: [rows], or None.
        rotation: of `kronecker_factors`; empty if the weight was not rotated.
        up: [rows, rank] in the dtype of the tokens, a factor of a LoRA: adds (tokens @ down.T) @ up.T.
        down: [rank, columns], the other one.

    Returns:
        [..., rows] in the dtype of the tokens.
    """
    rows, columns = weight.shape
    flat = tokens.reshape(-1, columns).contiguous()  # CUDA takes codes row by row only
    out = flat.new_empty(len(flat), rows)
    at_once = piece_tokens(rows, columns)
    for start in range(0, len(flat), at_once):
        part = flat[start : start + at_once]
        codes, scale = quantise_tokens(part, rotation)
        sums = _multiply(codes, weight)
        # The first product makes them fp32; they are below 2^28.
        result = (sums * weight_scale.view(1, -1)).mul_(scale)
        out[start : start + at_once].copy_(finish_product(result, part, bias, up, down))
    return out.view(*tokens.shape[:-1], rows)


def kitchen_linear(
    tokens: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    group: int,
    kitchen_dtype: int,
) -> torch.Tensor:
    """Multiply as `int8_linear` does, by the kernels of comfy-kitchen, whose last digits differ.

    comfy-kitchen must be imported, and the CUDA backend of its registry active.

    Args:
        group: columns that the weight was rotated in; 0: it was not.
        kitchen_dtype: comfy-kitchen's number of the dtype of the tokens.
    """
    result: torch.Tensor = torch.ops.comfy_kitchen.int8_linear(
        tokens, weight, weight_scale, bias, kitchen_dtype, bool(group), group or 256
    )
    return result


def quantise_tokens(tokens: torch.Tensor, rotation: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 codes [tokens, columns] and their fp32 scales [tokens, 1]."""
    values = tokens.to(torch.float32, copy=True)
    if rotation:
        group = 1
        for matrix in rotation:
            group *= len(matrix)
        values = rotated_sums(values, tuple(rotation)) * rotation_factor(group)
    return quantise_int8(values)


def _multiply(codes: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the exact int32 products of the rows of both."""
    missing = FEWEST_INT8_TOKENS - len(codes)
    if missing <= 0 or codes.device.type == "cpu":
        return torch._int_mm(codes, weight.t())
    return torch._int_mm(nn.functional.pad(codes, (0, 0, 0, missing)), weight.t())[: len(codes)]


@functools.cache
def _register() -> None:
    """Register `int8_linear` and `add_patch` with torch, which then compiles blocks around them into one graph."""
    schema = (
        "(Tensor tokens, Tensor weight, Tensor weight_scale, Tensor? bias, Tensor[] rotation, Tensor number) -> Tensor"
    )

    def compute(
        tokens: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None,
        rotation: list[torch.Tensor],
        number: torch.Tensor,
    ) -> torch.Tensor:
        return int8_linear(tokens, weight, weight_scale, bias, rotation, *patch_of(number))

    operation = torch.library.custom_op("wanstream::int8_linear", compute, mutates_args=(), schema=schema)

    @operation.register_fake
    def _(tokens: torch.Tensor, weight: torch.Tensor, *others: object) -> torch.Tensor:
        return tokens.new_empty(*tokens.shape[:-1], weight.shape[0])

    def add(result: torch.Tensor, tokens: torch.Tensor, number: torch.Tensor) -> None:
        add_patch(result, tokens, *patch_of(number))

    schema = "(Tensor(a!) result, Tensor tokens, Tensor number) -> ()"
    torch.library.custom_op("wanstream::add_patch", add, mutates_args=("result",), schema=schema)
