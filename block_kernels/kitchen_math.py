"""comfy-kitchen's kernels for the modulated norm and the rotary embedding, torch's for the rest."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from .block_math import Norm, Out, TorchMath, written


class KitchenMath(TorchMath):
    """Kernels chosen by comfy-kitchen's registry: CUDA, Triton, HIP, or eager ones.

    The modulation of a norm is rounded to the dtype of the tokens, because the CUDA kernel reads
    all tensors in one dtype. The package must be imported to register the operations.
    """

    name = "comfy-kitchen"

    def rotation(self, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        cosine = cosines[:, :, :, 0::2]
        sine = sines[:, :, :, 1::2]
        # A rotation matrix for each pair: [1, S, 1, P, 2, 2].
        matrices: torch.Tensor = torch.stack((cosine, -sine, sine, cosine), dim=-1).unflatten(
            -1, (2, 2)
        )
        return matrices

    def rotate(
        self, tokens: torch.Tensor, rms: nn.RMSNorm, rotation: torch.Tensor, out: Out = None
    ) -> torch.Tensor:
        normed = F.rms_norm(tokens, tokens.shape[-1:], rms.weight, rms.eps)
        heads = normed.unflatten(-1, (-1, 2 * rotation.shape[-3]))  # [1, S, heads, 2 P]
        rotated: torch.Tensor = torch.ops.comfy_kitchen.apply_rope1(heads, rotation).flatten(-2)
        return written(rotated, out)

    def _norm(self, tokens: torch.Tensor, norm: Norm, out: Out) -> torch.Tensor:
        if not norm.modulated:
            return super()._norm(tokens, norm, out)
        scale = norm.scale.to(tokens.dtype)
        shift = norm.shift.to(tokens.dtype)
        normed: torch.Tensor = torch.ops.comfy_kitchen.adaln(tokens, scale, shift, norm.eps)
        return written(normed, out)
