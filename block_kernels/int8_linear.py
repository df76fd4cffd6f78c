"""Linear layers with int8 weights: inputs are quantised per token and multiplied in int8.

With a rotated weight W' = W H (ConvRot, `offload/formats/rotation.py`), the input is rotated too,
because (x H) (W H)^T = x W^T. A token's outlier is spread over a column group before it sets the
token's scale.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from ..offload.formats import quantise_int8, rotated_sums, rotation_factor
from ..shapes import FEWEST_INT8_TOKENS
from .scaled_linear import ScaledLinear


class Int8Linear(ScaledLinear):
    """Linear layer with an int8 weight [rows, columns] and an fp32 `weight_scale` [rows, 1].

    x' = x H in fp32. s = max(|x'|) / 127 per token. q = x' / s, rounded to even. The sums of q and
    the weight codes are exact. y = sums * weight_scale * s + bias in fp32, rounded once to the
    tokens' dtype.
    """

    kitchen_dtype: int | None = None
    """comfy-kitchen's number for the result dtype. None: torch multiplies."""
    halves: bool = False
    """True: torch multiplies by the upper 7 bits of the weight and by the lowest one."""

    def __init__(self, plain: nn.Linear, *, group: int = 0) -> None:
        super().__init__(plain, group=group)
        self.rotation: list[torch.Tensor] = []
        """Rotation matrices on the input's device, shared by all layers."""

    @property
    def takes_gelu(self) -> bool:
        """True if `multiply_gelu` can be called.

        It has no operation for compiled blocks, and a patch needs the values.
        """
        # In this order: otherwise a compiled block would depend on the patch.
        return (
            not torch.compiler.is_compiling()
            and self.kitchen_dtype is not None
            and self.patch_up is None
        )

    def multiply_gelu(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the product with GELU (tanh) of `tokens`, computed in the quantising pass."""
        return self._by_kitchen(tokens, "gelu_tanh")

    def compute(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.kitchen_dtype is not None:
            return self.add_patch(self._by_kitchen(tokens, None), tokens)
        return self._by_torch(tokens)

    def _by_torch(self, tokens: torch.Tensor) -> torch.Tensor:
        assert len(self.rotation) > 0 or not self.group, "the rotation was not set"
        scales = self.weight_scale.view(1, -1)

        def write(part: torch.Tensor, out: torch.Tensor) -> None:
            codes, scale = quantise_tokens(part, self.rotation)
            # The first product makes the sums fp32. They are below 2^28.
            sums = (self.code_sums(codes) * scales).mul_(scale)
            out.copy_(self.finish(sums, part))

        return self.by_pieces(tokens, write)

    def code_sums(self, codes: torch.Tensor) -> torch.Tensor:
        """Return exact int32 products of token codes with the rows of the weight.

        Without VNNI, oneDNN shifts token codes to 0 to 255 and adds two neighbouring products in
        16 bits, which saturate: 2 * 255 * 127 is too much, 2 * 255 * 64 is not.
        """
        tokens = len(codes)
        if tokens < FEWEST_INT8_TOKENS and codes.device.type != "cpu":
            # CUDA refuses fewer tokens, so zeros are added and cut off again.
            codes = nn.functional.pad(codes, (0, 0, 0, FEWEST_INT8_TOKENS - tokens))
        if self.halves:
            # w = 2 (w >> 1) + (w & 1). The shift keeps the sign, so negative codes are right too.
            sums = torch._int_mm(codes, (self.weight >> 1).t()).mul_(2)
            sums.add_(torch._int_mm(codes, (self.weight & 1).t()))
        else:
            sums = torch._int_mm(codes, self.weight.t())
        return sums if len(sums) == tokens else sums[:tokens]

    def _by_kitchen(self, tokens: torch.Tensor, activation: str | None) -> torch.Tensor:
        """Multiply with comfy-kitchen. The last digits differ. The package must be imported."""
        matrix = self.weight, self.weight_scale, self.bias
        # The group size is read for rotated weights only. 256 is the default of the operation.
        result: torch.Tensor = torch.ops.comfy_kitchen.int8_linear(
            tokens, *matrix, self.kitchen_dtype, bool(self.group), self.group or 256, activation
        )
        return result


def quantise_tokens(
    tokens: torch.Tensor, rotation: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 codes [tokens, columns] and their fp32 scales [tokens, 1]."""
    # A copy even if tokens are in fp32, because `quantise_int8` overwrites the values.
    values = tokens.to(torch.float32, copy=True)
    if rotation:
        group = math.prod(map(len, rotation))
        values = rotated_sums(values, tuple(rotation)) * rotation_factor(group)
    return quantise_int8(values)
