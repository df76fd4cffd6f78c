"""Arithmetic "auto": the faster of multiplying stored 8-bit matrices and decoding them."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...block_kernels import (
    arithmetic_of,
    choose_math,
    choose_multiplication,
    first_line,
    multiplied_formats,
)
from ...devices import AUTO, dtype_name, is_broken_device, resolve_dtype, runtime_for
from ...devices.machine import cache_folder, write_json
from ...schema import VERSION
from ...schema.refs import CodeFormat, ExpertsRef
from ...shapes import ArithmeticChoice, BlockTimes, ExpertShape, choose_arithmetic
from ..experts.open import open_pair, set_loras
from ..lora.fit import MultipliedWeightError
from .meter import METERED_TOKENS, measure_block, quick_case
from .probe import BlockVariant, probe_block

MOST_S = 0.2
LORA_RANK = 64
"""Factor rank in a measurement for a model with LoRAs."""

logger = logging.getLogger("wanstream.kernels")
_lock = threading.Lock()
_measured: dict[str, MeasuredBlock | str] = {}
"""Measured blocks, or the reason why one cannot be measured, for the rest of the process."""


@dataclass(frozen=True, kw_only=True)
class MeasuredBlock:
    """Block times by format, "" for the compute dtype, for one lane."""

    tokens: int
    times: Mapping[str, BlockTimes]

    @property
    def choice(self) -> ArithmeticChoice:
        choice = choose_arithmetic(self.times)
        return replace(choice, words=f"{choice.words}; measured with {self.tokens} tokens")


def with_resolved_precision(
    ref: ExpertsRef, device: torch.device, make_room: Callable[[], object] = lambda: None
) -> ExpertsRef:
    """Return `ref` as computed on `device`, this process's compute device.

    The compute dtype "auto" becomes the device's `auto_dtype`. The arithmetic "auto" becomes the
    fastest one. "as stored" becomes "int8", "fp8" or "decoded" where no kernel multiplies the other
    formats. References with the same meaning are then equal. Workers resolve "auto" together.

    Args:
        ref: experts.
        device: the compute device.
        make_room: called before a measurement, to free device memory.

    Raises:
        OSError: as in `open_pair` and `set_loras`, with the arithmetic "auto".
        ValueError: as in `open_pair` and `set_loras`, with the arithmetic "auto".
    """
    if ref.compute_dtype == AUTO:
        ref = replace(ref, compute_dtype=dtype_name(resolve_dtype(AUTO, device)))
    if ref.arithmetic == AUTO:
        formats = measured_arithmetic(ref, device, make_room).multiplied
    elif ref.arithmetic == "as stored":
        formats = multiplied_formats(device, getattr(torch, ref.compute_dtype))
    else:
        return ref
    return replace(ref, arithmetic=arithmetic_of(formats))


def measured_arithmetic(
    ref: ExpertsRef, device: torch.device, make_room: Callable[[], object] = lambda: None
) -> ArithmeticChoice:
    """Return the matrix formats in `ref` that `device` multiplies faster than `compute_dtype`.

    Measures one block with the kernels in `ref`, and with LoRA factors if it has LoRAs. This takes
    about a second on a GPU. The times are stored in the user's cache folder, so a later process
    makes the same choice. On a CPU and in compiled blocks, matrices are decoded.

    Raises:
        OSError: as in `open_pair` and `set_loras`.
        ValueError: as in `open_pair` and `set_loras`.
    """
    if runtime_for(device) is None or ref.compile:
        where = "in compiled blocks, which are not measured" if ref.compile else "on a CPU"
        return _decoded(f"8-bit matrices are decoded {where}")
    # With "as stored", `set_loras` below refuses a LoRA that multiplied matrices cannot apply.
    with open_pair(replace(ref.opened, arithmetic="as stored")) as pair:
        usable = multiplied_formats(device, pair.compute_dtype)
        formats = tuple(name for name in pair.code_formats if name in usable)
        if not formats:
            return _decoded(f"no matrix of these files can be multiplied on {device}")
        shape = pair.high.config.shape
        variant = BlockVariant(
            dtype=pair.compute_dtype, kernels=ref.kernels, lora_rank=LORA_RANK if ref.loras else 0
        )
        measured = _measure_once(shape, device, variant, formats, make_room)
        if isinstance(measured, str):
            return _decoded(f"8-bit matrices are decoded, because {measured}")
        choice = measured.choice
        if not choice.multiplied:
            return choice
        try:
            set_loras(pair, ref.loras)
        except MultipliedWeightError as err:
            because = f"{err.path.name} cannot be computed beside them"
            logger.info("arithmetic auto: 8-bit matrices are decoded, because %s", because)
            return _decoded(f"8-bit matrices are decoded, because {because}")
    return choice


def _decoded(words: str) -> ArithmeticChoice:
    return ArithmeticChoice(multiplied=(), words=words)


def _measure_once(
    shape: ExpertShape,
    device: torch.device,
    variant: BlockVariant,
    formats: tuple[CodeFormat, ...],
    make_room: Callable[[], object],
) -> MeasuredBlock | str:
    """Return a block's stored times, or measure it now.

    Returns the reason if it cannot be measured.

    Raises:
        KernelsError: the device does not support the chosen kernels.
    """
    runtime = runtime_for(device)
    dtype = resolve_dtype(variant.dtype or AUTO, device)
    name = "" if runtime is None else runtime.name()
    # Other kernels, as from a package installed since, take other times.
    math = choose_math(variant.kernels, device, dtype, shape.width).name
    codes = [f"{fmt} by {choose_multiplication(fmt, device, dtype).name}" for fmt in formats]
    versions = f"torch {torch.__version__}", VERSION
    parts = (name, *versions, shape.width, shape.ffn_width, variant, math, *codes)
    key = ", ".join(map(str, parts))
    # Held while measuring, because two measurements at once would slow each other.
    with _lock:
        if key not in _measured:
            _measured.update(_stored())
        if key in _measured:
            return _measured[key]
        make_room()
        try:
            # Hosts run nodes in inference mode. Code outside it could not write to such tensors.
            with torch.inference_mode(False):
                rate = probe_block(
                    shape, METERED_TOKENS, device, dtype=variant.dtype, most_s=MOST_S
                )
                small, tokens = quick_case(shape, rate, device)
                times = measure_block(
                    small, tokens, device, formats=formats, variant=variant, most_s=MOST_S
                )
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
    """Return the times measured by earlier processes, or none if the file cannot be read."""
    try:
        data: dict[str, Any] = json.loads(_file().read_text(encoding="utf-8"))
        return {
            key: MeasuredBlock(
                tokens=int(each["tokens"]),
                times={name: BlockTimes(**times) for name, times in each["times"].items()},
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
        # Read again, because another process may have added times.
        write_json(
            _file(), {name: asdict(each) for name, each in {**_stored(), key: measured}.items()}
        )
    except OSError as err:
        logger.warning("cannot write %s (%s): the next process measures again", _file(), err)
