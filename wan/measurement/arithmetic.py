"""Arithmetic "auto": the faster one of multiplying 8-bit matrices as they are stored and of decoding them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import replace

import torch

from ...devices import AUTO, dtype_name, is_out_of_memory, resolve_dtype, runtime_for
from ...plan import ArithmeticChoice, BlockTimes, choose_arithmetic
from ...schema import CodeFormat, ExpertShape, ExpertsRef
from ..experts.open import arithmetic_of, open_pair, set_loras
from ..kernels import multiplied_formats
from ..lora.fit import MultipliedWeightError
from .meter import METERED_TOKENS, measure_block, metered_tokens
from .probe import probe_block

MOST_S = 0.2

logger = logging.getLogger("wanstream.kernels")


def with_resolved_precision(ref: ExpertsRef, device: torch.device) -> ExpertsRef:
    """Return `ref` as it is computed on `device`, the compute device of this process.

    The compute dtype "auto" becomes the `auto_dtype` of the device. The arithmetic "auto" becomes the fastest one, and
    "as stored" becomes "int8", "fp8" or "decoded" where nothing multiplies matrices in the other formats. References
    that mean the same are then equal. Workers resolve "auto" together.

    Raises:
        OSError: as `open_pair` and `set_loras`, with the arithmetic "auto".
        ValueError: as `open_pair` and `set_loras`, with the arithmetic "auto".
    """
    if ref.compute_dtype == AUTO:
        ref = replace(ref, compute_dtype=dtype_name(resolve_dtype(AUTO, device)))
    if ref.arithmetic == AUTO:
        return replace(ref, arithmetic=arithmetic_of(measured_arithmetic(ref, device).multiplied))
    if ref.arithmetic != "as stored":
        return ref
    return replace(ref, arithmetic=arithmetic_of(multiplied_formats(device, getattr(torch, ref.compute_dtype))))


def measured_arithmetic(ref: ExpertsRef, device: torch.device) -> ArithmeticChoice:
    """Return the formats of the matrices of `ref` that `device` multiplies faster than it computes in `compute_dtype`.

    The first call for a width, a dtype and a device measures one block, which takes about a second on a GPU. A CPU is
    not measured: matrices are decoded.

    Raises:
        OSError: as `open_pair` and `set_loras`.
        ValueError: as `open_pair` and `set_loras`.
    """
    if runtime_for(device) is None:
        return ArithmeticChoice(multiplied=(), words="8-bit matrices are decoded on a CPU")
    with open_pair(replace(ref.opened, arithmetic="as stored")) as pair:
        usable = multiplied_formats(device, pair.compute_dtype)
        formats = tuple(name for name in pair.code_formats if name in usable)
        if not formats:
            return ArithmeticChoice(multiplied=(), words=f"no matrix of these files can be multiplied on {device}")
        try:
            times = _block_times(pair.high.config.shape, device, pair.compute_dtype, formats)
        except (ValueError, RuntimeError) as err:
            if isinstance(err, RuntimeError) and not is_out_of_memory(err):
                raise
            return ArithmeticChoice(multiplied=(), words=f"8-bit matrices are decoded, because {err}")
        choice = choose_arithmetic(times)
        if not choice.multiplied:
            return choice
        try:
            set_loras(pair, ref.loras)
        except MultipliedWeightError as err:
            words = f"8-bit matrices are decoded, because {err.path.name} cannot be computed beside them"
            logger.info("arithmetic auto: %s", words)
            return ArithmeticChoice(multiplied=(), words=words)
    return choice


@functools.cache
def _block_times(
    shape: ExpertShape, device: torch.device, dtype: torch.dtype, formats: tuple[CodeFormat, ...]
) -> Mapping[str, BlockTimes]:
    """Measure once per process.

    Raises:
        ValueError: the device is too slow or has too little free memory.
    """
    rate = probe_block(shape, METERED_TOKENS, device, dtype=dtype, most_s=MOST_S)
    tokens = metered_tokens(shape, rate, device)
    if tokens is None:
        raise ValueError(f"one block cannot be measured quickly on {device}")
    times = measure_block(shape, tokens, device, formats=formats, dtype=dtype, most_s=MOST_S)
    logger.info("arithmetic, measured with %d tokens on %s: %s", tokens, device, choose_arithmetic(times).words)
    return times
