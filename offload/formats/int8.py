"""Quantisation of rows to int8 with one fp32 scale each."""

from __future__ import annotations

import torch

LARGEST = 127
SMALLEST_SCALE = 1e-30
"""Scale of a row of zeros."""


def quantise_int8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes, int8 [rows, columns], and scales, fp32 [rows, 1], of fp32 values, which are overwritten.

    scale = max(|row|) / 127, at least `SMALLEST_SCALE`; code = value / scale, rounded to even.
    """
    scales = (values.abs().amax(1, keepdim=True) / LARGEST).clamp_(min=SMALLEST_SCALE)
    return values.div_(scales).round_().clamp_(-LARGEST - 1, LARGEST).to(torch.int8), scales
