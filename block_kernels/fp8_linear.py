"""Linear layers with fp8 (e4m3fn) weights: inputs are quantised per token and multiplied in fp8."""

from __future__ import annotations

import torch

from ..offload.formats import FP8
from .block_math import Codes
from .scaled_linear import ScaledLinear

LARGEST = torch.finfo(FP8).max
# The smallest normal number. A scale of 0 would make a row of zeros NaN.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


class Fp8Linear(ScaledLinear):
    """Linear layer: fp8 weight [rows, columns], and fp32 `weight_scale`, [rows, 1] or [1, 1].

    s = max(|x|) / 448 per token. q = x / s in fp8. y = (sums of q and the weight) * weight_scale *
    s + bias, rounded to the tokens' dtype. The sums are in fp32, but in fewer bits on CUDA with the
    scales inside. Without a scale in the file, ComfyUI takes 1 as token scale, so small inputs lose
    bits and inputs above 448 are cut off.
    """

    scales_inside = False
    """torch applies token and row scales inside the product and saves two passes over the
    result. Not all devices and dtypes can (`choose_multiplication`). The result is then rounded
    once more before a patch is added."""

    @property
    def takes_codes(self) -> bool:
        """True if `multiply` gives the result of `forward`.

        Then no part of the layer needs the tokens' values.
        """
        return self.scales_inside and self.patch_up is None

    def multiply(self, tokens: Codes) -> torch.Tensor:
        """Return the product [1, S, rows] with quantised tokens, in their original dtype.

        Needs `takes_codes`.
        """
        return self._scaled_product(tokens, self._by_row()).unsqueeze(0)

    def compute(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.scales_inside:
            by_row = self._by_row()

            def write(part: torch.Tensor, out: torch.Tensor) -> None:
                self._scaled_product(quantise_tokens_fp8(part), by_row, out=out)
                self.add_patch(out, part)

            return self.by_pieces(tokens, write)
        # `_scaled_mm` requires scales. With 1 it returns bare sums, and both scales follow in fp32.
        one = torch.ones((), device=tokens.device)
        scales = self.weight_scale.view(1, -1)

        def write_sums(part: torch.Tensor, out: torch.Tensor) -> None:
            codes = quantise_tokens_fp8(part)
            # A transposed view: CUDA multiplies fp8 only by a second matrix in column order.
            sums = torch._scaled_mm(codes.codes, self.weight.t(), one, one, out_dtype=torch.float32)
            out.copy_(self.finish(sums.mul_(scales).mul_(codes.scales), part))

        return self.by_pieces(tokens, write_sums)

    def _by_row(self) -> torch.Tensor:
        """Return one scale per matrix row, [1, rows]."""
        # CUDA requires one contiguous scale per output column, even if all are equal.
        return self.weight_scale.view(1, -1).expand(1, self.out_features).contiguous()

    def _scaled_product(
        self, tokens: Codes, by_row: torch.Tensor, **out: torch.Tensor
    ) -> torch.Tensor:
        # Hopper then adds up to 128 products in fewer bits than fp32, and takes a quarter less
        # time. The error is a tenth of the codes' error.
        fast = by_row.device.type == "cuda"
        arguments = tokens.codes, self.weight.t(), tokens.scales, by_row
        return torch._scaled_mm(
            *arguments, bias=self.bias, out_dtype=tokens.dtype, use_fast_accum=fast, **out
        )


def quantise_tokens_fp8(tokens: torch.Tensor) -> Codes:
    """Quantise tokens [S, columns] in several passes."""
    # The largest magnitude, without a copy of all values.
    largest = torch.linalg.vector_norm(tokens, float("inf"), dim=1, keepdim=True)
    scales = (largest.float() / LARGEST).clamp_(min=SMALLEST_SCALE)
    return Codes((tokens / scales).clamp_(-LARGEST, LARGEST).to(FP8), scales, tokens.dtype)
