"""Arithmetic "auto": the faster one of multiplying 8-bit matrices as they are stored and of decoding them."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...devices import AUTO, cache_folder, dtype_name, is_broken_device, resolve_dtype, runtime_for, write_json
from ...plan import ArithmeticChoice, BlockTimes, choose_arithmetic
from ...schema import VERSION, CodeFormat, ExpertShape, ExpertsRef
from ..experts.open import arithmetic_of, open_pair, set_loras
from ..kernels.choice import first_line
from ..kernels.math_choice import choose_math
from ..kernels.multiplication import choose_multiplication, multiplied_formats
from ..lora.fit import MultipliedWeightError
from .meter import METERED_TOKENS, measure_block, quick_case
from .probe import BlockVariant, probe_block

MOST_S = 0.2
LORA_RANK = 64
"""Rank of the factors in a measurement for a model with LoRAs."""

logger = logging.getLogger("wanstream.kernels")
_lock = threading.Lock()
_measured: dict[str, MeasuredBlock | str] = {}
"""Blocks that were measured or, for the rest of the process, why they could not be."""


@dataclass(frozen=True, kw_only=True)
class MeasuredBlock:
    """Times of a block by format, "" for the compute dtype, for one lane."""

    tokens: int
    times: Mapping[str, BlockTimes]

    @property
    def choice(self) -> ArithmeticChoice:
        choice = choose_arithmetic(self.times)
        return replace(choice, words=f"{choice.words}; measured with {self.tokens} tokens")


def with_resolved_precision(
    ref: ExpertsRef, device: torch.device, make_room: Callable[[], object] = lambda: None
) -> ExpertsRef:
    """Return `ref` as it is computed on `device`, the compute device of this process.

    The compute dtype "auto" becomes the `auto_dtype` of the device. The arithmetic "auto" becomes the fastest one, and
    "as stored" becomes "int8", "fp8" or "decoded" where nothing multiplies matrices in the other formats. References
    that mean the same are then equal. Workers resolve "auto" together.

    Args:
        ref: experts.
        device: the compute device.
        make_room: called before a measurement, to free memory of the device.

    Raises:
        OSError: as `open_pair` and `set_loras`, with the arithmetic "auto".
        ValueError: as `open_pair` and `set_loras`, with the arithmetic "auto".
    """
    if ref.compute_dtype == AUTO:
        ref = replace(ref, compute_dtype=dtype_name(resolve_dtype(AUTO, device)))
    if ref.arithmetic == AUTO:
        return replace(ref, arithmetic=arithmetic_of(measured_arithmetic(ref, device, make_room).multiplied))
    if ref.arithmetic != "as stored":
        return ref
    return replace(ref, arithmetic=arithmetic_of(multiplied_formats(device, getattr(torch, ref.compute_dtype))))


def measured_arithmetic(
    ref: ExpertsRef, device: torch.device, make_room: Callable[[], object] = lambda: None
) -> ArithmeticChoice:
    """Return the formats of the matrices of `ref` that `device` multiplies faster than it computes in `compute_dtype`.

    One block is measured with the kernels of `ref`, and with LoRA factors if it has LoRAs, which takes about a second
    on a GPU. The times are stored in the user's cache folder, so that a later process chooses alike. On a CPU and in
    compiled blocks matrices are decoded.

    Raises:
        OSError: as `open_pair` and `set_loras`.
        ValueError: as `open_pair` and `set_loras`.
    """
    if runtime_for(device) is None or ref.compile:
        where = "in compiled blocks, which are not measured" if ref.compile else "on a CPU"
        return ArithmeticChoice(multiplied=(), words=f"8-bit matrices are decoded {where}")
    with open_pair(replace(ref.opened, arithmetic="as stored")) as pair:
        usable = multiplied_formats(device, pair.compute_dtype)
        formats = tuple(name for name in pair.code_formats if name in usable)
        if not formats:
            return ArithmeticChoice(multiplied=(), words=f"no matrix of these files can be multiplied on {device}")
        shape = pair.high.config.shape
        variant = BlockVariant(dtype=pair.compute_dtype, kernels=ref.kernels, lora_rank=LORA_RANK if ref.loras else 0)
        measured = _measure_once(shape, device, variant, formats, make_room)
        if isinstance(measured, str):
            return ArithmeticChoice(multiplied=(), words=f"8-bit matrices are decoded, because {measured}")
        choice = measured.choice
        if not choice.multiplied:
            return choice
        try:
            set_loras(pair, ref.loras)
        except MultipliedWeightError as err:
            words = f"8-bit matrices are decoded, because {err.path.name} cannot be computed beside them"
            logger.info("arithmetic auto: %s", words)
            return ArithmeticChoice(multiplied=(), words=words)
    return choice


def _measure_once(
    shape: ExpertShape,
    device: torch.device,
    variant: BlockVariant,
    formats: tuple[CodeFormat, ...],
    make_room: Callable[[], object],
) -> MeasuredBlock | str:
    """Return the stored times of a block, or measure it now; return the reason if it cannot be measured.

    Raises:
        KernelsError: the chosen kernels cannot be used on the device.
    """
    runtime = runtime_for(device)
    dtype = resolve_dtype(variant.dtype or AUTO, device)
    name = "" if runtime is None else runtime.name()
    # Other kernels, of a package that was installed since, take other times.
    math = choose_math(variant.kernels, device, dtype, shape.width).math.name
    codes = [f"{fmt} by {choose_multiplication(fmt, device, dtype).name}" for fmt in formats]
    parts = (name, f"torch {torch.__version__}", VERSION, shape.width, shape.ffn_width, variant, math, *codes)
    key = ", ".join(map(str, parts))
    with _lock:
        if key not in _measured:
            _measured.update(_stored())
        if key in _measured:
            return _measured[key]
        make_room()
        try:
            # Hosts run nodes in inference mode, whose tensors nothing outside of it may write to.
            with torch.inference_mode(False):
                rate = probe_block(shape, METERED_TOKENS, device, dtype=variant.dtype, most_s=MOST_S)
                small, tokens = quick_case(shape, rate, device)
                times = measure_block(small, tokens, device, formats=formats, variant=variant, most_s=MOST_S)
        except (ValueError, RuntimeError) as err:
            if is_broken_device(err):
                raise
            _measured[key] = reason = first_line(err)
            return reason
        _measured[key] = found = MeasuredBlock(tokens=tokens, times=times)
        logger.info("arithmetic auto on %s: %s", device, found.choice.words)
        _store(key, found)
        return found


def _file() -> Path:
    return cache_folder() / "arithmetic.json"


def _stored() -> dict[str, MeasuredBlock]:
    """Return the times that earlier processes measured; none if the file cannot be read."""
    try:
        data: dict[str, Any] = json.loads(_file().read_text(encoding="utf-8"))
        return {
            key: MeasuredBlock(
                tokens=int(each["tokens"]), times={name: BlockTimes(**times) for name, times in each["times"].items()}
            )
            for key, each in data.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as err:
        logger.warning("%s cannot be read (%s): blocks are measured again", _file(), err)
        return {}


def _store(key: str, measured: MeasuredBlock) -> None:
    """Add one measurement to the file."""
    try:
        write_json(_file(), {name: asdict(each) for name, each in {**_stored(), key: measured}.items()})
    except OSError as err:
        logger.warning("cannot write %s (%s): the next process measures again", _file(), err)
