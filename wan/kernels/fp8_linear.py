"""Linear layers whose weight is fp8 (e4m3fn): inputs are quantised for each token, and multiplied in fp8."""

from __future__ import annotations

import functools

import torch
from torch import nn

from ...offload import FP8
from ...schema import piece_tokens
from .block_math import Codes
from .scaled_linear import ScaledLinear, add_patch, finish_product, patch_of

LARGEST = torch.finfo(FP8).max
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


class Fp8Linear(ScaledLinear):
    """Linear layer with an fp8 weight [rows, columns] and an fp32 `weight_scale`, [rows, 1] or [1, 1].

    Args:
        plain: layer to replace; its bias is taken over.
    """

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__(plain)
        self.scales_inside = False
        """torch applies the scales of tokens and rows inside of its product."""
        _register()

    @property
    def takes_codes(self) -> bool:
        """`multiply` gives the result of `forward`: nothing next to the product needs the values of the tokens."""
        return self.scales_inside and self.patch_up is None

    def multiply(self, tokens: Codes) -> torch.Tensor:
        """Return the product [1, S, rows] with quantised tokens, in their former dtype; needs `takes_codes`."""
        product = _scaled_product(tokens, self.weight, _by_row(self.weight, self.weight_scale), self.bias)
        return product.unsqueeze(0)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        arguments = input, self.weight, self.weight_scale, self.bias, self.scales_inside
        if not torch.compiler.is_compiling():
            return fp8_linear(*arguments, *self.patch)
        result: torch.Tensor = torch.ops.wanstream.fp8_linear(*arguments, self.number)
        return result


def fp8_linear(
    tokens: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    scales_inside: bool = False,
    up: torch.Tensor | None = None,
    down: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply tokens by an fp8 matrix.

    s = max(|x|) / 448 for each token; q = x / s in fp8; y = (sums of q and the weight in fp32) * weight_scale * s +
    bias, rounded to the dtype of the tokens. ComfyUI takes 1 for the scale of a token if a file has none, so that small
    inputs lose their bits and those above 448 are cut off.

    Args:
        tokens: [..., columns], of a floating dtype.
        weight: fp8 (e4m3fn) [rows, columns].
        weight_scale: fp32 [rows, 1] or [1, 1].
        bias: [rows], or None.
        scales_inside: apply the scales inside of the product, which saves two passes over the result. Not all devices
            and dtypes can (`multiplication.choose`); the result is then rounded once more before a patch is added.
        up: [rows, rank] in the dtype of the tokens, a factor of a LoRA: adds (tokens @ down.T) @ up.T.
        down: [rank, columns], the other one.

    Returns:
        [..., rows] in the dtype of the tokens.
    """
    rows, columns = weight.shape
    flat = tokens.reshape(-1, columns).contiguous()  # CUDA takes codes row by row only
    out = flat.new_empty(len(flat), rows)
    at_once = piece_tokens(rows, columns)
    by_row = _by_row(weight, weight_scale) if scales_inside else weight_scale.view(1, -1)
    one = None if scales_inside else torch.ones((), device=flat.device)
    for start in range(0, len(flat), at_once):
        part, result = flat[start : start + at_once], out[start : start + at_once]
        codes = quantise_tokens_fp8(part)
        if one is None:
            _scaled_product(codes, weight, by_row, bias, out=result)
            add_patch(result, part, up, down)
        else:
            sums = torch._scaled_mm(codes.codes, weight.t(), one, one, out_dtype=torch.float32)
            sums.mul_(by_row).mul_(codes.scales)
            result.copy_(finish_product(sums, part, bias, up, down))
    return out.view(*tokens.shape[:-1], rows)


def _by_row(weight: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
    """Return one scale for each row of the matrix, [1, rows]."""
    return weight_scale.view(1, -1).expand(1, len(weight)).contiguous()


def _scaled_product(
    tokens: Codes,
    weight: torch.Tensor,
    by_row: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    # Hopper adds up to 128 products in fewer bits than fp32 then, which takes a quarter less time. The error is a tenth
    # of that of the codes.
    fast = weight.device.type == "cuda"
    arguments = tokens.codes, weight.t(), tokens.scales, by_row
    if out is None:
        return torch._scaled_mm(*arguments, bias=bias, out_dtype=tokens.dtype, use_fast_accum=fast)
    return torch._scaled_mm(*arguments, bias=bias, out_dtype=tokens.dtype, use_fast_accum=fast, out=out)


def quantise_tokens_fp8(tokens: torch.Tensor) -> Codes:
    """Quantise tokens [S, columns] in several passes."""
    # The largest magnitude, without a copy of all of them.
    largest = torch.linalg.vector_norm(tokens, float("inf"), dim=1, keepdim=True)
    scales = (largest.float() / LARGEST).clamp_(min=SMALLEST_SCALE)
    return Codes((tokens / scales).clamp_(-LARGEST, LARGEST).to(FP8), scales, tokens.dtype)


@functools.cache
def _register() -> None:
    """Register `fp8_linear` with torch, which then compiles blocks around it into one graph."""
    schema = (
        "(Tensor tokens, Tensor weight, Tensor weight_scale, Tensor? bias, bool scales_inside, Tensor number) -> Tensor"
    )

    def compute(
        tokens: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None,
        scales_inside: bool,
        number: torch.Tensor,
    ) -> torch.Tensor:
        return fp8_linear(tokens, weight, weight_scale, bias, scales_inside, *patch_of(number))

    operation = torch.library.custom_op("wanstream::fp8_linear", compute, mutates_args=(), schema=schema)

    @operation.register_fake
    def _(tokens: torch.Tensor, weight: torch.Tensor, *others: object) -> torch.Tensor:
        return tokens.new_empty(*tokens.shape[:-1], weight.shape[0])
