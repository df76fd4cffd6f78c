"""Layers that multiply codes as they are stored, and the code that does it on a device.

The code is chosen by capabilities, then by a test product.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import nn

from ...devices import is_out_of_memory
from ...offload import (
    FP8,
    EightBit,
    kronecker_factors,
    quantise_int8,
    rotated_sums,
    rotation_factor,
)
from ...schema import CodeFormat
from .attention import KernelsError
from .fp8_linear import Fp8Linear, fp8_linear, quantise_tokens_fp8
from .int8_linear import Int8Linear, int8_linear, kitchen_linear
from .scaled_linear import ScaledLinear

if TYPE_CHECKING:
    from types import ModuleType

CODE_FORMATS: Mapping[torch.dtype, CodeFormat] = {torch.int8: "int8", FP8: "fp8"}

Code = Literal["comfy-kitchen", "torch", "torch, scales inside"]
KITCHEN: Code = "comfy-kitchen"
TORCH: Code = "torch"
SCALES_INSIDE: Code = "torch, scales inside"
FIRST_CUDA = 13
"""Lowest CUDA version of torch with which ComfyUI lets comfy-kitchen use its CUDA kernels."""
TEST_GROUPS = (0, 256)
LARGEST_ERROR: Mapping[CodeFormat, float] = {"int8": 0.03, "fp8": 0.08}
"""Relative error of a test product: quantising its tokens costs 0.011 in int8; in fp8 0.027, and its matrix as much."""

Product: TypeAlias = Callable[..., torch.Tensor]

logger = logging.getLogger("wanstream.kernels")


@dataclass(frozen=True, kw_only=True)
class MultiplyChoice:
    """Code that multiplies matrices of one format on a device, and why no better one does."""

    format: CodeFormat
    device: torch.device
    code: Code | None
    """None: the matrices have to be decoded."""
    refusals: Mapping[str, str]
    """Reasons by the name of the code."""

    @property
    def words(self) -> str:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.refusals.items())
        if self.code is None:
            return f"{self.format} matrices are decoded, because nothing can multiply them on {self.device} ({reasons})"
        return f"{self.format} matrices are multiplied by {self.code} on {self.device}" + (
            f" ({reasons})" if reasons else ""
        )


@functools.cache
def choose_multiplication(fmt: CodeFormat, device: torch.device, dtype: torch.dtype) -> MultiplyChoice:
    """Return the fastest code on `device` for tokens of `dtype` that passes its test.

    int8: comfy-kitchen, then torch. comfy-kitchen is used where its CUDA kernels are active; its registry is read and
    never changed. fp8: torch with the scales inside of its product, then torch. The choice is made and logged once per
    process.
    """
    tests: dict[Code, Callable[[], str | None]] = (
        {
            KITCHEN: lambda: (
                kitchen_refusal(device, registry_refusal) or test_fault(_multiply_by_kitchen, device, dtype)
            ),
            TORCH: lambda: test_fault(_multiply_by_torch, device, dtype),
        }
        if fmt == "int8"
        else {
            SCALES_INSIDE: lambda: fp8_fault(device, dtype, scales_inside=True),
            TORCH: lambda: fp8_fault(device, dtype, scales_inside=False),
        }
    )
    refusals: dict[str, str] = {}
    chosen = None
    for code, test in tests.items():
        fault = test()
        if fault is None:
            chosen = code
            break
        refusals[code] = fault
    choice = MultiplyChoice(format=fmt, device=device, code=chosen, refusals=refusals)
    logger.info("%s", choice.words)
    return choice


def multiplied_formats(device: torch.device, dtype: torch.dtype) -> tuple[CodeFormat, ...]:
    """Return the formats whose matrices can be multiplied by tokens of `dtype` on `device`."""
    return tuple(fmt for fmt in CODE_FORMATS.values() if choose_multiplication(fmt, device, dtype).code is not None)


def replace_linears(
    blocks: Mapping[str, nn.Module], layers: Mapping[str, Mapping[str, EightBit]]
) -> list[ScaledLinear]:
    """Replace layers of blocks by those that multiply codes.

    Args:
        blocks: blocks by name.
        layers: packing of the codes by the name of a layer within the block, by name of the block.
    """
    replaced: list[ScaledLinear] = []
    for name, packings in layers.items():
        for layer, packing in packings.items():
            plain = blocks[name].get_submodule(layer)
            assert isinstance(plain, nn.Linear), f"{layer} is {type(plain).__name__}"
            other = Int8Linear(plain, group=packing.group) if packing.dtype == torch.int8 else Fp8Linear(plain)
            replaced.append(other)
            blocks[name].set_submodule(layer, other)
    return replaced


@dataclass(frozen=True, kw_only=True)
class Multiplications:
    """Code that multiplies the matrices of a model on a device."""

    device: torch.device
    kitchen_dtype: int | None = None
    """See `Int8Linear.kitchen_dtype`."""
    scales_inside: bool = False
    """See `Fp8Linear.scales_inside`."""

    def prepare(self, layers: Iterable[ScaledLinear]) -> None:
        """Set the code of layers, and the matrices of their rotations on the device."""
        shared: dict[int, list[torch.Tensor]] = {0: []}
        for layer in layers:
            if isinstance(layer, Fp8Linear):
                layer.scales_inside = self.scales_inside
            if not isinstance(layer, Int8Linear):
                continue
            layer.kitchen_dtype = self.kitchen_dtype
            if layer.group not in shared:
                shared[layer.group] = list(kronecker_factors(layer.group, self.device))
            layer.rotation = shared[layer.group]


def multiplications(formats: Iterable[CodeFormat], device: torch.device, dtype: torch.dtype) -> Multiplications:
    """Choose the code for tokens of `dtype` and matrices in these formats on `device`.

    Raises:
        KernelsError: nothing can multiply the matrices of one of the formats on `device`.
    """
    codes: dict[CodeFormat, Code] = {}
    for fmt in formats:
        choice = choose_multiplication(fmt, device, dtype)
        if choice.code is None:
            raise KernelsError(f'{choice.words}: open the model with arithmetic "decoded"')
        codes[fmt] = choice.code
    number = None
    if codes.get("int8") == KITCHEN:
        import comfy_kitchen

        number = int(comfy_kitchen.DTYPE_TO_CODE[dtype])
    return Multiplications(device=device, kitchen_dtype=number, scales_inside=codes.get("fp8") == SCALES_INSIDE)


def kitchen_refusal(device: torch.device, refusal: Callable[[ModuleType], str | None]) -> str | None:
    """Return why comfy-kitchen's CUDA kernels cannot be used on `device`; None if they can.

    Args:
        device: device to compute on.
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
        return f"cannot be imported ({first_line(err)})"
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
    tokens, matrix, bias, expected = _test_product(dtype)
    for group in TEST_GROUPS:
        values = matrix.clone()
        if group:
            values = rotated_sums(values, kronecker_factors(group, values.device)) * rotation_factor(group)
        codes, scales = quantise_int8(values)
        arguments = tokens, codes, scales, bias
        largest = LARGEST_ERROR["int8"]
        fault = result_fault(multiply, arguments, group, expected=expected, device=device, largest=largest)
        if fault is not None:
            return fault
    return None


@torch.inference_mode()
def fp8_fault(device: torch.device, dtype: torch.dtype, *, scales_inside: bool) -> str | None:
    """Return what is wrong with products of `fp8_linear` on `device`; None if they are right."""
    tokens, matrix, bias, expected = _test_product(dtype)
    quantised = quantise_tokens_fp8(matrix)
    arguments, largest = (tokens, quantised.codes, quantised.scales, bias), LARGEST_ERROR["fp8"]
    return result_fault(fp8_linear, arguments, scales_inside, expected=expected, device=device, largest=largest)


def _test_product(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens of `dtype`, an fp32 matrix, a bias of `dtype`, and their product in float64."""
    generator = torch.Generator().manual_seed(0)
    tokens, matrix, bias = (torch.randn(*size, generator=generator) for size in ((48, 512), (256, 512), (256,)))
    tokens, bias = tokens.to(dtype), bias.to(dtype)
    return tokens, matrix, bias, tokens.double() @ matrix.double().T + bias.double()


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
        compute: function to test.
        tensors: its first arguments, on the CPU.
        others: further arguments of `compute`.
        expected: float64 tensor on the CPU.
        device: device to compute on.
        largest: largest relative error.
    """
    try:
        found = compute(*(each.to(device) for each in tensors), *others).to("cpu", torch.float64)
    except (RuntimeError, ValueError, TypeError, AttributeError) as err:
        if isinstance(err, RuntimeError) and is_out_of_memory(err):
            raise
        return f"fails ({first_line(err)})"
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


def first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
