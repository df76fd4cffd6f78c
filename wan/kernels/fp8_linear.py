"""Linear layers whose weight is fp8 (e4m3fn): inputs are quantised for each token, and multiplied in fp8."""

from __future__ import annotations

import torch

from ...offload import FP8
from .block_math import Codes
from .scaled_linear import NO_PATCH, Patch, ScaledLinear, add_patch, by_pieces, finish_product

LARGEST = torch.finfo(FP8).max
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


class Fp8Linear(ScaledLinear):
    """Linear layer with an fp8 weight [rows, columns] and an fp32 `weight_scale`, [rows, 1] or [1, 1]."""

    scales_inside = False
    """torch applies the scales of tokens and rows inside of its product."""

    @property
    def takes_codes(self) -> bool:
        """`multiply` gives the result of `forward`: nothing next to the product needs the values of the tokens."""
        return self.scales_inside and self.patch_up is None

    def multiply(self, tokens: Codes) -> torch.Tensor:
        """Return the product [1, S, rows] with quantised tokens, in their former dtype; needs `takes_codes`."""
        return _scaled_product(tokens, self.weight, _by_row(self.weight, self.weight_scale), self.bias).unsqueeze(0)

    def compute(self, tokens: torch.Tensor) -> torch.Tensor:
        return fp8_linear(tokens, self.weight, self.weight_scale, self.bias, self.scales_inside, self.patch)


def fp8_linear(
    tokens: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    scales_inside: bool = False,
    patch: Patch = NO_PATCH,
) -> torch.Tensor:
    """Multiply tokens by an fp8 matrix.

    s = max(|x|) / 448 for each token; q = x / s in fp8; y = (sums of q and the weight) * weight_scale * s + bias,
    rounded to the dtype of the tokens. The sums are in fp32, but on CUDA with the scales inside in fewer bits. ComfyUI
    takes 1 for the scale of a token if a file has none, so that small inputs lose their bits and those above 448 are
    cut off.

    Args:
        tokens: [..., columns], of a floating dtype.
        weight: fp8 (e4m3fn) [rows, columns].
        weight_scale: fp32 [rows, 1] or [1, 1].
        bias: [rows], or None.
        scales_inside: apply the scales inside of the product, which saves two passes over the result. Not all devices
            and dtypes can (`choose_multiplication`); the result is then rounded once more before a patch is added.
        patch: factors of a LoRA.

    Returns:
        [..., rows] in the dtype of the tokens.
    """
    by_row = _by_row(weight, weight_scale) if scales_inside else weight_scale.view(1, -1)
    one = None if scales_inside else torch.ones((), device=tokens.device)

    def write(part: torch.Tensor, out: torch.Tensor) -> None:
        codes = quantise_tokens_fp8(part)
        if one is None:
            _scaled_product(codes, weight, by_row, bias, out=out)
            add_patch(out, part, patch)
        else:
            sums = torch._scaled_mm(codes.codes, weight.t(), one, one, out_dtype=torch.float32)
            out.copy_(finish_product(sums.mul_(by_row).mul_(codes.scales), part, bias, patch))

    return by_pieces(tokens, weight, write)


def _by_row(weight: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
    """Return one scale for each row of the matrix, [1, rows]."""
    return weight_scale.view(1, -1).expand(1, len(weight)).contiguous()


def _scaled_product(
    tokens: Codes,
    weight: torch.Tensor,
    by_row: torch.Tensor,
    bias: torch.Tensor | None,
    **out: torch.Tensor,
) -> torch.Tensor:
    # Hopper adds up to 128 products in fewer bits than fp32 then, which takes a quarter less time. The error is a tenth
    # of that of the codes.
    fast = weight.device.type == "cuda"
    arguments = tokens.codes, weight.t(), tokens.scales, by_row
    return torch._scaled_mm(*arguments, bias=bias, out_dtype=tokens.dtype, use_fast_accum=fast, **out)


def quantise_tokens_fp8(tokens: torch.Tensor) -> Codes:
    """Quantise tokens [S, columns] in several passes."""
    # The largest magnitude, without a copy of all of them.
    largest = torch.linalg.vector_norm(tokens, float("inf"), dim=1, keepdim=True)
    scales = (largest.float() / LARGEST).clamp_(min=SMALLEST_SCALE)
    return Codes((tokens / scales).clamp_(-LARGEST, LARGEST).to(FP8), scales, tokens.dtype)
