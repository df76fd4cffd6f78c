"""Row-wise functions for a transformer block: diffusers' arithmetic, and torch's fused kernels.

Tokens are [1, S, D] with contiguous rows. Each function rounds the result to the tokens' dtype.
Some also round a norm before the modulation or the rotation. `choice.py` chooses a set of functions
to use together.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn import functional as F

Spans: TypeAlias = "tuple[tuple[int, int, int], ...]"
"""First token, end and row, for consecutive tokens with the same row."""


class Gate(NamedTuple):
    """Factors for an update."""

    rows: torch.Tensor
    """[R, 1, D], or [1, S, D] with one row per token."""
    spans: Spans = ()
    """Empty with one row for all tokens, or one per token."""


class Norm(NamedTuple):
    """Layer norm with a scale and a shift."""

    scale: torch.Tensor
    """Rows as in a `Gate`."""
    shift: torch.Tensor
    eps: float
    modulated: bool
    """True: normalised tokens are multiplied by 1 + scale. False: by scale."""
    spans: Spans = ()

    def of_row(self, row: int) -> Norm:
        return self._replace(
            scale=self.scale[row : row + 1], shift=self.shift[row : row + 1], spans=()
        )


class Codes(NamedTuple):
    """Tokens quantised to fp8: value = code x scale."""

    codes: torch.Tensor
    """fp8 (e4m3fn) [S, D]."""
    scales: torch.Tensor
    """fp32 [S, 1]."""
    dtype: torch.dtype
    """Dtype of the tokens."""


Out: TypeAlias = "torch.Tensor | None"
"""Tensor for the result. None: the function returns a new one."""


class BlockMath:
    """Functions in the order and dtypes of diffusers' block.

    The results are bit-equal, at the cost of fp32 copies of all tokens.
    """

    name = "exact"
    quantises = False
    """True if `quantise` is available: one pass over the tokens."""

    def rotation(self, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """Return the last argument of `rotate` for rotary tables [1, S, 1, 2 P].

        The tables contain each value twice. Dimension 1 of the result is the token.
        """
        # As in diffusers: cosines at even places, sines at odd ones. The result is [1, S, P, 2].
        return torch.stack((cosines[:, :, 0, 0::2], sines[:, :, 0, 1::2]), dim=-1)

    def norm(self, tokens: torch.Tensor, norm: Norm, out: Out = None) -> torch.Tensor:
        """Return the layer norm of `tokens`."""
        if not norm.spans:
            return self._norm(tokens, norm, out)
        out = torch.empty_like(tokens) if out is None else out
        for start, end, row in norm.spans:
            self._norm(tokens[:, start:end], norm.of_row(row), out[:, start:end])
        return out

    def add(
        self, tokens: torch.Tensor, update: torch.Tensor, gate: Gate | None, out: torch.Tensor
    ) -> torch.Tensor:
        """Write `tokens + update * gate` to `out`, which may be either of them."""
        if gate is None:
            return torch.add(tokens, update, out=out)
        if not gate.spans:
            return self._add(tokens, update, gate.rows, out)
        for start, end, row in gate.spans:
            at = slice(start, end)
            self._add(tokens[:, at], update[:, at], gate.rows[row : row + 1], out[:, at])
        return out

    def normed(
        self,
        tokens: torch.Tensor,
        norm: Norm,
        update: torch.Tensor | None = None,
        gate: Gate | None = None,
        state: Out = None,
        codes: bool = False,
    ) -> torch.Tensor | Codes:
        """Return the layer norm of `tokens`.

        With an update, the norm of `tokens + update * gate`. This sum is written to `state`.

        Args:
            tokens: not written to, unless the tensor is `state`.
            norm: the norm.
            update: residual.
            gate: factors for the update. None: 1.
            state: receives the sum.
            codes: return fp8 codes. Needs `quantises`.
        """
        if update is not None:
            assert state is not None, "a sum without a place"
            tokens = self.add(tokens, update, gate, state)
        result = self.norm(tokens, norm)
        return self.quantise(result) if codes else result

    def rms_norm(self, tokens: torch.Tensor, rms: nn.RMSNorm, out: Out = None) -> torch.Tensor:
        """Return the RMS norm of `tokens`, which may be overwritten."""
        return written(F.rms_norm(tokens, tokens.shape[-1:], rms.weight, rms.eps), out)

    def rotate(
        self, tokens: torch.Tensor, rms: nn.RMSNorm, rotation: torch.Tensor, out: Out = None
    ) -> torch.Tensor:
        """Return the RMS norm of `tokens` with rotary embedding. `tokens` may be overwritten."""
        # Before the heads are split: Wan has one norm for all heads of a token.
        normed = F.rms_norm(tokens, tokens.shape[-1:], rms.weight, rms.eps)
        cosine, sine = rotation.unsqueeze(2).unbind(-1)
        real, imaginary = normed.unflatten(-1, (-1, cosine.shape[-1], 2)).unbind(-1)
        out = torch.empty_like(normed) if out is None else out
        # A view, so the two lines below fill `out`.
        pairs = out.unflatten(-1, (-1, cosine.shape[-1], 2))
        pairs[..., 0] = real * cosine - imaginary * sine
        pairs[..., 1] = real * sine + imaginary * cosine
        return out

    def quantise(self, tokens: torch.Tensor, *, gelu: bool = False) -> Codes:
        """Return fp8 codes for `tokens`, or for their GELU (tanh), with one scale per token."""
        raise NotImplementedError(f"{self.name} quantises no tokens")

    def _norm(self, tokens: torch.Tensor, norm: Norm, out: Out) -> torch.Tensor:
        width = tokens.shape[-1:]
        if norm.modulated:
            # diffusers' order: norm and modulation in fp32, then one rounding.
            plain = F.layer_norm(tokens.float(), width, None, None, norm.eps)
            return written((plain * (1 + norm.scale) + norm.shift).type_as(tokens), out)
        scale = norm.scale.view(-1).float()
        shift = norm.shift.view(-1).float()
        return written(
            F.layer_norm(tokens.float(), width, scale, shift, norm.eps).type_as(tokens), out
        )

    def _add(
        self, tokens: torch.Tensor, update: torch.Tensor, gate: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        # The sum is a separate tensor, because `out` may be `tokens` or `update`.
        return out.copy_(tokens.float() + update.float() * gate)


class TorchMath(BlockMath):
    """Torch's own kernels, which compute in fp32 inside and make no fp32 copy."""

    name = "torch"

    def rotate(
        self, tokens: torch.Tensor, rms: nn.RMSNorm, rotation: torch.Tensor, out: Out = None
    ) -> torch.Tensor:
        normed = F.rms_norm(tokens, tokens.shape[-1:], rms.weight, rms.eps)
        # torch has no complex bf16, so the pairs are turned in fp32.
        turns = torch.view_as_complex(rotation).unsqueeze(2)
        pairs = torch.view_as_complex(normed.float().unflatten(-1, (-1, turns.shape[-1], 2)))
        rotated = torch.view_as_real(pairs * turns).flatten(-3)
        if out is None:
            return rotated.type_as(tokens)
        return out.copy_(rotated)

    def _norm(self, tokens: torch.Tensor, norm: Norm, out: Out) -> torch.Tensor:
        width = tokens.shape[-1:]
        scale = 1 + norm.scale if norm.modulated else norm.scale
        # On a CPU the kernel takes half-precision tokens with an fp32 scale, elsewhere only tensors
        # with one dtype.
        if tokens.device.type == "cpu" or tokens.dtype == scale.dtype:
            return written(
                F.layer_norm(tokens, width, scale.view(-1), norm.shift.view(-1), norm.eps), out
            )
        plain = F.layer_norm(tokens, width, eps=norm.eps)
        return torch.addcmul(norm.shift, plain, scale, out=plain if out is None else out)

    def _add(
        self, tokens: torch.Tensor, update: torch.Tensor, gate: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        return torch.addcmul(tokens, update, gate, out=out)


EXACT = BlockMath()


def written(result: torch.Tensor, out: Out) -> torch.Tensor:
    """Return `result`, or `out` with its values."""
    return result if out is None else out.copy_(result)
