"""Linear layers whose weight is int8: inputs are quantised for each token, and multiplied in int8.

With a weight W' = W H that was rotated (ConvRot, `offload/formats/rotation.py`), the input is rotated too, because
(x H) (W H)^T = x W^T: an outlier of a token is spread over a group of columns before it sets the scale of the token.
"""

from __future__ import annotations

import torch
from torch import nn

from ...offload import quantise_int8, rotated_sums, rotation_factor
from ...schema import FEWEST_INT8_TOKENS
from .scaled_linear import NO_PATCH, Patch, ScaledLinear, add_patch, by_pieces, finish_product


class Int8Linear(ScaledLinear):
    """Linear layer with an int8 weight [rows, columns] and an fp32 `weight_scale` [rows, 1].

    Args:
        plain: layer to replace; its bias is taken over.
        group: columns that the weight was rotated in; 0: it was not.
    """

    kitchen_dtype: int | None = None
    """comfy-kitchen's number of the dtype of the result; None: torch multiplies."""

    def __init__(self, plain: nn.Linear, *, group: int) -> None:
        super().__init__(plain)
        self.group = group
        self.rotation: list[torch.Tensor] = []
        """The matrices of the rotation on the device of the input; all layers share them."""

    @property
    def takes_gelu(self) -> bool:
        """`multiply_gelu` can be called: it has no operation for compiled blocks, and a patch needs the values."""
        # In this order: a compiled block would depend on the patch otherwise.
        return not torch.compiler.is_compiling() and self.kitchen_dtype is not None and self.patch_up is None

    def multiply_gelu(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the product with the GELU (tanh) of `tokens`, computed in the pass that quantises them."""
        return self._by_kitchen(tokens, "gelu_tanh")

    def compute(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.kitchen_dtype is not None:
            return add_patch(self._by_kitchen(tokens, None), tokens, self.patch)
        assert len(self.rotation) > 0 or not self.group, "the rotation was not set"
        return int8_linear(tokens, self.weight, self.weight_scale, self.bias, self.rotation, self.patch)

    def _by_kitchen(self, tokens: torch.Tensor, activation: str | None) -> torch.Tensor:
        """Multiply as `int8_linear` does, by comfy-kitchen, whose last digits differ. The package must be imported."""
        matrix = self.weight, self.weight_scale, self.bias
        result: torch.Tensor = torch.ops.comfy_kitchen.int8_linear(
            tokens, *matrix, self.kitchen_dtype, bool(self.group), self.group or 256, activation
        )
        return result


def int8_linear(
    tokens: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    rotation: list[torch.Tensor],
    patch: Patch = NO_PATCH,
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
        patch: factors of a LoRA.

    Returns:
        [..., rows] in the dtype of the tokens.
    """

    def write(part: torch.Tensor, out: torch.Tensor) -> None:
        codes, scale = quantise_tokens(part, rotation)
        # The first product makes the sums fp32; they are below 2^28.
        sums = (_multiply(codes, weight) * weight_scale.view(1, -1)).mul_(scale)
        out.copy_(finish_product(sums, part, bias, patch))

    return by_pieces(tokens, weight, write)


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
