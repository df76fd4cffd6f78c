"""Block functions with the Triton kernels in `triton_rows.py`: one launch and one pass each."""

from __future__ import annotations

import torch
import triton
from torch import nn

from ..devices import made_current
from ..offload.formats import FP8
from .block_math import BlockMath, Codes, Gate, Norm, Out
from .triton_rows import rotated_rows, rows

VALUES_PER_WARP = 1024
"""Values per warp: 8 warps per Wan2.2 A14B row were the fastest of 4, 8 and 16 (H100)."""


class TritonMath(BlockMath):
    """Kernels that read and write every token once."""

    name = "triton"
    quantises = True

    def normed(
        self,
        tokens: torch.Tensor,
        norm: Norm,
        update: torch.Tensor | None = None,
        gate: Gate | None = None,
        state: Out = None,
        codes: bool = False,
    ) -> torch.Tensor | Codes:
        # A launch reads one row of factors, so several rows take one launch each.
        if norm.spans or (gate is not None and gate.spans):
            return super().normed(tokens, norm, update, gate, state, codes)
        if codes:
            return _codes(tokens, norm, update, gate, state)
        return _launch(tokens, norm, update, gate, state, torch.empty_like(tokens))

    def rms_norm(self, tokens: torch.Tensor, rms: nn.RMSNorm, out: Out = None) -> torch.Tensor:
        return _launch(tokens, rms, out=tokens if out is None else out)

    def rotate(
        self, tokens: torch.Tensor, rms: nn.RMSNorm, rotation: torch.Tensor, out: Out = None
    ) -> torch.Tensor:
        out = tokens if out is None else out
        count, width = tokens.shape[1:]
        assert all(each.is_contiguous() for each in (tokens, rotation, out)), "rows with gaps"
        blocks = _blocks(width)
        # Triton launches on the current device, wherever the tensors are.
        with made_current(tokens.device):
            rotated_rows[count,](
                tokens, rms.weight, rotation, out, width, rms.eps, pairs=rotation.shape[2], **blocks
            )
        return out

    def quantise(self, tokens: torch.Tensor, *, gelu: bool = False) -> Codes:
        return _codes(tokens, gelu=gelu)

    def _norm(self, tokens: torch.Tensor, norm: Norm, out: Out) -> torch.Tensor:
        return _launch(tokens, norm, out=torch.empty_like(tokens) if out is None else out)

    def _add(
        self, tokens: torch.Tensor, update: torch.Tensor, gate: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        return _launch(tokens, None, update, Gate(gate), out)


def _codes(
    tokens: torch.Tensor,
    norm: Norm | None = None,
    update: torch.Tensor | None = None,
    gate: Gate | None = None,
    state: Out = None,
    gelu: bool = False,
) -> Codes:
    out = torch.empty_like(tokens, dtype=FP8)
    scales = torch.empty(tokens.shape[1], 1, dtype=torch.float32, device=tokens.device)
    _launch(tokens, norm, update, gate, state, out, scales, gelu)
    return Codes(out[0], scales, tokens.dtype)


def _launch(
    tokens: torch.Tensor,
    norm: Norm | nn.RMSNorm | None,
    update: torch.Tensor | None = None,
    gate: Gate | None = None,
    state: Out = None,
    out: Out = None,
    scales: Out = None,
    gelu: bool = False,
) -> torch.Tensor:
    """Write `tokens + update * gate` to `state`, and its norm or GELU, or codes of these, to `out`.

    Returns:
        `out`, or `state` without `out`.
    """
    count, width = tokens.shape[1:]
    assert all(each is None or each.is_contiguous() for each in (tokens, update, state, out)), (
        "rows with gaps"
    )
    weight = None
    bias = None
    eps = 0.0
    modulated = False
    if isinstance(norm, Norm):
        weight = norm.scale
        bias = norm.shift
        eps = norm.eps
        modulated = norm.modulated
    elif norm is not None:
        assert norm.eps is not None
        weight = norm.weight
        eps = norm.eps
    factors = None if gate is None else gate.rows
    assert all(each is None or each.numel() == width for each in (factors, weight, bias)), (
        "one row for all tokens"
    )
    pointers = tokens, update, factors, state, weight, bias, out, scales
    with made_current(tokens.device):
        rows[count,](*pointers, width, eps, modulated=modulated, gelu=gelu, **_blocks(width))
    result = state if out is None else out
    assert result is not None, "no result"
    return result


def _blocks(width: int) -> dict[str, int]:
    # `tl.arange` and `num_warps` take powers of two only.
    block = triton.next_power_of_2(width)
    return {"block": block, "num_warps": max(1, min(16, block // VALUES_PER_WARP))}
