"""Choice of the row-wise functions of blocks on a device: by what is installed, then by a test."""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from ...devices import is_broken_device
from ...schema import KernelSet
from .attention import KernelsError
from .block_math import EXACT, BlockMath, Gate, Norm, Rms, TorchMath
from .multiplication import backend_refusal, first_line, kitchen_refusal

if TYPE_CHECKING:
    from types import ModuleType

TEST_TOKENS = 5
TEST_HEAD = 128
LARGEST_ERROR: Mapping[torch.dtype, float] = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Relative error of a test result: about two units in the last place."""
LARGEST_CODES_ERROR = 0.05
"""Relative error of quantised tokens: fp8 has 3 bits of mantissa."""
INSTALL: Mapping[str, str] = {
    "triton": "install triton (on Windows triton-windows) and a C compiler",
    "comfy-kitchen": "install comfy-kitchen",
}

logger = logging.getLogger("wanstream.kernels")


@dataclass(frozen=True, kw_only=True)
class MathChoice:
    """Functions of the blocks on a device, and the reasons against faster ones."""

    math: BlockMath
    refusals: Mapping[str, str]
    """Reasons by the name of the functions."""

    @property
    def words(self) -> str:
        """One line for logs and reports."""
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.refusals.items())
        return f"blocks compute with {self.math.name} functions" + (f" ({reasons})" if reasons else "")


@functools.cache
def choose_math(name: KernelSet, device: torch.device, dtype: torch.dtype, width: int) -> MathChoice:
    """Return the functions `name` for tokens of `dtype` and `width` on `device`.

    "auto" takes triton on a GPU where its test passes, else torch. comfy-kitchen is only chosen by name: a step of 8
    blocks and 7,800 tokens takes 0.099 s with it, 0.092 s with torch and 0.081 s with triton (H100). The choice is made
    and logged once per process. Its test compiles what blocks of this width need.

    Raises:
        KernelsError: the functions were chosen by name and do not work there.
    """
    makers: dict[str, Callable[[], BlockMath]] = {
        "triton": functools.partial(_triton_math, device),
        "comfy-kitchen": functools.partial(_kitchen_math, device),
        "torch": TorchMath,
        "exact": lambda: EXACT,
    }
    names: Sequence[str] = (name,)
    if name == "auto":
        # On a CPU Triton interprets its kernels, for tests.
        names = ("torch", "exact") if device.type == "cpu" else ("triton", "torch", "exact")
    refusals: dict[str, str] = {}
    for tried in names:
        try:
            math = makers[tried]()
            fault = None if math is EXACT else math_fault(math, device, dtype, width)
            if fault is None and math.quantises:
                # Not on cards without fp8 units: nothing multiplies codes there either.
                math.quantises = _fault_of(_codes_difference, math, device, dtype, width) is None
        except KernelsError as err:
            fault = str(err)
        if fault is None:
            choice = MathChoice(math=math, refusals=refusals)
            (logger.warning if refusals else logger.info)("%s on %s", choice.words, device)
            return choice
        refusals[tried] = fault
    remedy = INSTALL.get(name)
    raise KernelsError(
        f"blocks cannot compute with {name} functions on {device}: {refusals[name]}; "
        f"{f'{remedy}, or ' if remedy else ''}choose 'auto'"
    )


def _triton_math(device: torch.device) -> BlockMath:
    if device.type == "cpu" and not _interprets():
        raise KernelsError("its kernels are for GPUs")
    if importlib.util.find_spec("triton") is None:
        raise KernelsError("not installed")
    try:
        from .triton_math import TritonMath
    except (ImportError, OSError, RuntimeError) as err:
        raise KernelsError(f"cannot be imported ({first_line(err)})") from err
    return TritonMath()


def _interprets() -> bool:
    """Return True if Triton interprets kernels, which it does on a CPU."""
    if importlib.util.find_spec("triton") is None:
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


def _kitchen_math(device: torch.device) -> BlockMath:
    if device.type != "cpu":
        reason = kitchen_refusal(device, _operations_refusal)
        if reason is not None:
            raise KernelsError(reason)
    elif importlib.util.find_spec("comfy_kitchen") is None:
        raise KernelsError("not installed")
    import comfy_kitchen  # noqa: F401  (registers the operations)

    from .kitchen_math import KitchenMath

    return KitchenMath()


def _operations_refusal(kitchen: ModuleType) -> str | None:
    """Return why comfy-kitchen has no active CUDA kernels of the operations; None if it has."""
    reason = backend_refusal(kitchen)
    if reason is not None:
        return reason
    missing = {"adaln", "apply_rope1"} - set(kitchen.list_backends()["cuda"]["capabilities"])
    if missing:
        return f"its CUDA backend has no {' and '.join(sorted(missing))}: update it"
    return None


def math_fault(math: BlockMath, device: torch.device, dtype: torch.dtype, width: int) -> str | None:
    """Return what is wrong with the results of `math` on `device`, against exact ones; None if they are right."""
    return _fault_of(_results_difference, math, device, dtype, width)


@torch.inference_mode()
def _fault_of(difference: Callable[..., str | None], *arguments: Any) -> str | None:
    try:
        return difference(*arguments)
    except Exception as err:  # compilers and drivers raise kinds of their own
        if is_broken_device(err):  # no other set would work there
            raise
        return f"fails ({first_line(err)})"


def _results_difference(math: BlockMath, device: torch.device, dtype: torch.dtype, width: int) -> str | None:
    exact = _results(EXACT, torch.device("cpu"), dtype, width)
    for (name, found), (_, expected) in zip(_results(math, device, dtype, width), exact, strict=True):
        difference = _difference(found, expected, LARGEST_ERROR[dtype])
        if difference is not None:
            return f"{name} {difference}"
    return None


def _results(math: BlockMath, device: torch.device, dtype: torch.dtype, width: int) -> Iterator[tuple[str, Any]]:
    """Yield the result of each function for the same random tokens, some of which are large."""
    tokens, update = (_tokens(seed, width).to(device, dtype) for seed in (0, 1))
    shift, scale, gate = (0.1 * _tokens(seed, width)[:, :2].transpose(0, 1).to(device) for seed in (2, 3, 4))
    rms = Rms(scale[0, 0].to(dtype), 1e-6)
    angles = _tokens(5, TEST_HEAD).view(1, TEST_TOKENS, 1, TEST_HEAD).to(device)
    rotation = math.rotation(angles.cos(), angles.sin())
    rows = Norm(scale, shift, 1e-6, True, spans=((0, 2, 1), (2, TEST_TOKENS, 0)))
    modulated = rows.of_row(0)
    yield "norm", math.norm(tokens, modulated)
    yield "norm of several rows", math.norm(tokens, rows)
    yield "RMS norm", math.rms_norm(tokens.clone(), rms)
    yield "rotary embedding", math.rotate(tokens.clone(), rms, rotation)
    yield "gated sum", math.add(tokens, update.clone(), Gate(gate[:1]), out=torch.empty_like(tokens))
    state = torch.empty_like(tokens)
    affine = modulated._replace(modulated=False)
    yield "norm of a gated sum", math.normed(tokens, affine, update, Gate(gate[:1]), state)
    yield "gated sum before a norm", state
    yield "norm of a sum", math.normed(tokens, modulated, update, None, state)
    yield "sum before a norm", state


def _codes_difference(math: BlockMath, device: torch.device, dtype: torch.dtype, width: int) -> str | None:
    tokens = _tokens(0, width).to(device, dtype)
    for gelu in (False, True):
        found = math.quantise(tokens, gelu=gelu)
        values = F.gelu(tokens.float(), approximate="tanh") if gelu else tokens.float()
        difference = _difference(found.codes.float() * found.scales, values[0].cpu(), LARGEST_CODES_ERROR)
        if difference is not None:
            return difference
    return None


def _tokens(seed: int, width: int) -> torch.Tensor:
    """Return random tokens [1, TEST_TOKENS, width] on the CPU; some columns are 50 times as large, as in models."""
    tokens = torch.randn(1, TEST_TOKENS, width, generator=torch.Generator().manual_seed(seed))
    tokens[..., ::97] *= 50
    return tokens


def _difference(found: torch.Tensor, expected: torch.Tensor, largest: float) -> str | None:
    values = expected.double()
    error = float((found.to("cpu", torch.float64) - values).norm() / values.norm())
    return None if error <= largest else f"is wrong (error {error:.2g} of {largest:g} allowed)"
