"""Choice of the code that multiplies int8 matrices on a device: by its capabilities, then by a test product."""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

from ...devices import is_out_of_memory
from ...offload import kronecker_factors, quantise_int8, rotated_sums, rotation_factor
from .int8_linear import int8_linear, kitchen_linear
from .kernels import KernelsError

if TYPE_CHECKING:
    from types import ModuleType

Int8Backend = Literal["comfy-kitchen", "torch"]

KITCHEN: Int8Backend = "comfy-kitchen"
TORCH: Int8Backend = "torch"
FIRST_CUDA = 13
"""Lowest CUDA version of torch with which ComfyUI lets comfy-kitchen use its CUDA kernels."""
TEST_GROUPS = (0, 256)
LARGEST_ERROR = 0.03
"""Relative error of a test product: quantising its tokens costs 0.011."""

Product: TypeAlias = Callable[..., torch.Tensor]

logger = logging.getLogger("wanstream.kernels")


@dataclass(frozen=True, kw_only=True)
class Int8Choice:
    """Code that multiplies int8 matrices on a device, and why no better one does."""

    device: torch.device
    backend: Int8Backend | None
    """None: the matrices have to be decoded."""
    refusals: Mapping[str, str]
    """Reasons by the name of the code."""

    @property
    def words(self) -> str:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.refusals.items())
        if self.backend is None:
            return f"int8 matrices are decoded, because nothing can multiply them on {self.device} ({reasons})"
        return f"int8 matrices are multiplied by {self.backend} on {self.device}" + (f" ({reasons})" if reasons else "")


@functools.cache
def choose_int8(device: torch.device, dtype: torch.dtype) -> Int8Choice:
    """Return the fastest code on `device` for tokens of `dtype` that passes its test: comfy-kitchen, then torch.

    comfy-kitchen is used where its CUDA kernels are active; its registry is read and never changed. The choice is made
    and logged once per process.
    """
    tests: dict[Int8Backend, Callable[[], str | None]] = {
        KITCHEN: lambda: kitchen_refusal(device, registry_refusal) or test_fault(_multiply_by_kitchen, device, dtype),
        TORCH: lambda: test_fault(_multiply_by_torch, device, dtype),
    }
    refusals: dict[str, str] = {}
    chosen = None
    for backend, test in tests.items():
        fault = test()
        if fault is None:
            chosen = backend
            break
        refusals[backend] = fault
    choice = Int8Choice(device=device, backend=chosen, refusals=refusals)
    logger.log(logging.WARNING if chosen is None else logging.INFO, "%s", choice.words)
    return choice


def kitchen_dtype(device: torch.device, dtype: torch.dtype) -> int | None:
    """Return comfy-kitchen's number of `dtype` where `choose_int8` chooses it, else None.

    Raises:
        KernelsError: nothing can multiply int8 matrices on `device`.
    """
    choice = choose_int8(device, dtype)
    if choice.backend is None:
        raise KernelsError(f'{choice.words}: open the model with arithmetic "decoded"')
    if choice.backend != KITCHEN:
        return None
    import comfy_kitchen

    return int(comfy_kitchen.DTYPE_TO_CODE[dtype])


def kitchen_refusal(device: torch.device, refusal: Callable[[ModuleType], str | None]) -> str | None:
    """Return why comfy-kitchen's CUDA kernels cannot be used on `device`; None if they can.

    Args:
        refusal: returns why the imported package lacks a kernel; None: it has it.
    """
    if device.type != "cuda":
        return "its kernels are for NVIDIA GPUs"
    if importlib.util.find_spec("comfy_kitchen") is None:
        return "not installed"
    if torch.version.cuda is None or int(torch.version.cuda.partition(".")[0]) < FIRST_CUDA:
        return f"needs torch for CUDA {FIRST_CUDA} or later, and this one is for {torch.version.cuda or 'no CUDA'}"
    try:
        import comfy_kitchen
    except (ImportError, OSError) as err:
        return f"cannot be imported ({_line(err)})"
    return refusal(comfy_kitchen)


def backend_refusal(kitchen: ModuleType) -> str | None:
    """Return why the registry of comfy-kitchen would use no CUDA kernel; None if it would."""
    backend = kitchen.list_backends().get("cuda")
    if backend is None:
        return "has no CUDA backend: update it"
    if not backend["available"]:
        return f"its CUDA backend is not available ({backend['unavailable_reason'] or 'no reason given'})"
    if backend["disabled"]:
        return "its CUDA backend is disabled in this process"
    return None


def registry_refusal(kitchen: ModuleType) -> str | None:
    """Return why the registry of comfy-kitchen would not use CUDA kernels for int8 matrices; None if it would."""
    reason = backend_refusal(kitchen)
    if reason is not None:
        return reason
    if "int8_linear" not in kitchen.list_backends()["cuda"]["capabilities"]:
        return "its CUDA backend has no int8_linear: update it"
    operation = getattr(torch.ops.comfy_kitchen, "int8_linear", None)
    known = () if operation is None else [argument.name for argument in operation.default._schema.arguments]
    if "convrot_groupsize" not in known:
        return "its int8_linear takes no rotated matrices: update it"
    return None


@torch.inference_mode()
def test_fault(multiply: Product, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return what is wrong with products of `multiply` on `device`; None if they are right.

    Args:
        multiply: function of tokens, codes, scales, bias and rotated columns.
    """
    generator = torch.Generator().manual_seed(0)
    tokens, matrix, bias = (torch.randn(*size, generator=generator) for size in ((48, 512), (256, 512), (256,)))
    expected = tokens.to(dtype).double() @ matrix.double().T + bias.to(dtype).double()
    for group in TEST_GROUPS:
        values = matrix.clone()
        if group:
            values = rotated_sums(values, kronecker_factors(group, values.device)) * rotation_factor(group)
        codes, scales = quantise_int8(values)
        arguments = tokens.to(dtype), codes, scales, bias.to(dtype)
        fault = result_fault(multiply, arguments, group, expected=expected, device=device, largest=LARGEST_ERROR)
        if fault is not None:
            return fault
    return None


def result_fault(
    compute: Callable[..., torch.Tensor],
    tensors: Iterable[torch.Tensor],
    *others: object,
    expected: torch.Tensor,
    device: torch.device,
    largest: float,
) -> str | None:
    """Return what is wrong with `compute` of `tensors` on `device`; None if its relative error is at most `largest`.

    Args:
        others: further arguments of `compute`.
        expected: float64 tensor on the CPU.
    """
    try:
        found = compute(*(each.to(device) for each in tensors), *others).to("cpu", torch.float64)
    except (RuntimeError, ValueError, TypeError) as err:
        if isinstance(err, RuntimeError) and is_out_of_memory(err):
            raise
        return f"fails ({_line(err)})"
    error = float((found - expected).norm() / expected.norm())
    if not error <= largest:
        return f"computes wrongly (error {error:.2g} of {largest:g} allowed)"
    return None


def _multiply_by_torch(
    tokens: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor, group: int
) -> torch.Tensor:
    rotation = list(kronecker_factors(group, tokens.device)) if group else []
    return int8_linear(tokens, codes, scales, bias, rotation)


def _multiply_by_kitchen(
    tokens: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor, group: int
) -> torch.Tensor:
    import comfy_kitchen

    arguments = {"x": tokens, "weight": codes, "weight_scale": scales, "bias": bias, "out_dtype": tokens.dtype}
    found = comfy_kitchen.registry.get_capable_backend("int8_linear", arguments)
    if found != "cuda":
        raise KernelsError(f"its registry chooses {found}")
    return kitchen_linear(tokens, codes, scales, bias, group, comfy_kitchen.DTYPE_TO_CODE[tokens.dtype])


def _line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
