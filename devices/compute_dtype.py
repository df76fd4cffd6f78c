"""Default compute dtype: the narrowest one a device is fast in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

import torch

from .clock import compute_device
from .registry import runtime_for

AUTO: Literal["auto"] = "auto"

ComputeDtype: TypeAlias = "torch.dtype | Literal['auto']"

CPU_UNITS = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
"""torch's queries for bf16 units in the processor. A query missing in an old torch counts as
False."""

DTYPE_WITHOUT_STREAMS = torch.float16
"""Dtype for devices without streams. torch cannot query their units: every Apple GPU has fp16
units, and none before M2 has bf16 units."""

WIDENING = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes in widening order. A device that is fast in one of them is fast in all after it."""


def auto_dtype(device: torch.device | str | None = None) -> torch.dtype:
    """Return bf16 where `device` has bf16 units, else fp16 where it has fp16 units, else fp32.

    `device` None is the GPU if there is one, otherwise the CPU.

    A CPU without such units emulates both dtypes: a block takes three to four times as long in bf16
    as in fp32, and a single matrix product up to a hundred times. With AVX512-BF16, a block takes a
    quarter of the fp32 time (width 1536, one thread).
    """
    device = compute_device() if device is None else torch.device(device)
    runtime = runtime_for(device)
    if runtime is not None:
        return runtime.auto_dtype()
    if device.type == "cpu":
        return _cpu_dtype()
    return DTYPE_WITHOUT_STREAMS


def resolve_dtype(
    compute_dtype: ComputeDtype, device: torch.device | str | None = None
) -> torch.dtype:
    """Return `compute_dtype` itself, or `auto_dtype(device)` for "auto"."""
    if isinstance(compute_dtype, str) and compute_dtype == AUTO:
        return auto_dtype(device)
    return compute_dtype


def common_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return the widest `auto_dtype` among several devices that compute one run."""
    return max(dtypes, key=WIDENING.index)


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's dtype name, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def _cpu_dtype() -> torch.dtype:
    """Return bf16 if the processor has bf16 units that torch and oneDNN may use, else fp32."""
    # All three checks are needed: the queries report the processor, `get_cpu_capability` respects
    # ATEN_CPU_CAPABILITY, and oneDNN's check respects ONEDNN_MAX_CPU_ISA, but returns True for
    # AVX-512 without BF16, which it emulates.
    has_units = any(getattr(torch.cpu, query, bool)() for query in CPU_UNITS)
    usable = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    if has_units and usable and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.bfloat16
    return torch.float32
