"""Layers that multiply codes as they are stored, and the code that does it on a device.

The code is chosen by capabilities, then by a test product.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import nn

from ...offload import FP8, EightBit, kronecker_factors, quantise_int8, rotated_sums, rotation_factor
from ...schema import CodeFormat
from .attention import KernelsError
from .choice import Choice, Results, choose, fault_of, kitchen_refusal
from .fp8_linear import Fp8Linear, fp8_linear, quantise_tokens_fp8
from .int8_linear import GELU, Int8Linear, int8_linear, kitchen_linear
from .scaled_linear import ScaledLinear

CODE_FORMATS: Mapping[torch.dtype, CodeFormat] = {torch.int8: "int8", FP8: "fp8"}

KITCHEN, TORCH, SCALES_INSIDE = "comfy-kitchen", "torch", "torch, scales inside"
TEST_CASES = ((0, False), (256, False), (256, True))
"""Columns that a test matrix is rotated in, and True for tokens that are activated by the code."""
LARGEST_ERROR: Mapping[CodeFormat, float] = {"int8": 0.03, "fp8": 0.08}
"""Relative error of a test product: quantising its tokens costs 0.011 in int8; in fp8 0.027, and its matrix as much."""

Product: TypeAlias = Callable[..., torch.Tensor]

logger = logging.getLogger("wanstream.kernels")


@dataclass(frozen=True, kw_only=True)
class MultiplyChoice(Choice):
    """Code that multiplies matrices of one format on a device; `name` None: the matrices have to be decoded."""

    format: CodeFormat
    device: torch.device

    @property
    def words(self) -> str:
        done = f"multiplied by {self.name} on {self.device}"
        if self.name is None:
            done = f"decoded, because nothing can multiply them on {self.device}"
        return f"{self.format} matrices are {done}{self.reasons}"


@functools.cache
def choose_multiplication(fmt: CodeFormat, device: torch.device, dtype: torch.dtype) -> MultiplyChoice:
    """Return the fastest code on `device` for tokens of `dtype` that passes its test.

    int8: comfy-kitchen, then torch. comfy-kitchen is used where its CUDA kernels are active; its registry is read and
    never changed. fp8: torch with the scales inside of its product, then torch. The choice is made and logged once per
    process.
    """
    tests: dict[str, Callable[[], str | None]] = {
        KITCHEN: lambda: kitchen_int8_refusal(device) or int8_fault(_multiply_by_kitchen, device, dtype),
        TORCH: lambda: int8_fault(_multiply_by_torch, device, dtype),
    }
    if fmt == "fp8":
        tests = {
            SCALES_INSIDE: lambda: fp8_fault(device, dtype, scales_inside=True),
            TORCH: lambda: fp8_fault(device, dtype, scales_inside=False),
        }
    choice = MultiplyChoice(format=fmt, device=device, **vars(choose(tests)))
    logger.info("%s", choice.words)
    return choice


def multiplied_formats(device: torch.device, dtype: torch.dtype) -> tuple[CodeFormat, ...]:
    """Return the formats whose matrices can be multiplied by tokens of `dtype` on `device`."""
    return tuple(fmt for fmt in CODE_FORMATS.values() if choose_multiplication(fmt, device, dtype).name is not None)


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
    codes: dict[CodeFormat, str] = {}
    for fmt in formats:
        choice = choose_multiplication(fmt, device, dtype)
        if choice.name is None:
            raise KernelsError(f'{choice.words}: open the model with arithmetic "decoded"')
        codes[fmt] = choice.name
    number = None
    if codes.get("int8") == KITCHEN:
        import comfy_kitchen

        number = int(comfy_kitchen.DTYPE_TO_CODE[dtype])
    return Multiplications(device=device, kitchen_dtype=number, scales_inside=codes.get("fp8") == SCALES_INSIDE)


def kitchen_int8_refusal(device: torch.device) -> str | None:
    """Return why comfy-kitchen cannot multiply int8 matrices on `device`; None if it can."""
    reason = kitchen_refusal(device, "int8_linear")
    if reason is not None:
        return reason
    arguments = torch.ops.comfy_kitchen.int8_linear.default._schema.arguments
    known = {argument.name for argument in arguments}
    return None if {"convrot_groupsize", "input_act"} <= known else "its int8_linear takes no activation: update it"


def int8_fault(multiply: Product, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return what is wrong with products of `multiply` on `device`; None if they are right.

    Args:
        multiply: function of tokens, codes, scales, bias, rotated columns, and True to activate the tokens.
    """
    return fault_of(partial(_int8_products, multiply, device, dtype), LARGEST_ERROR["int8"])


def _int8_products(multiply: Product, device: torch.device, dtype: torch.dtype) -> Results:
    tokens, matrix, bias = _test_product(dtype)
    for group, gelu in TEST_CASES:
        values = matrix.clone()
        if group:
            values = rotated_sums(values, kronecker_factors(group, values.device)) * rotation_factor(group)
        given = (each.to(device) for each in (tokens, *quantise_int8(values), bias))
        yield "product", multiply(*given, group, gelu), _expected(tokens, matrix, bias, gelu)


def fp8_fault(device: torch.device, dtype: torch.dtype, *, scales_inside: bool) -> str | None:
    """Return what is wrong with products of `fp8_linear` on `device`; None if they are right."""

    def products() -> Results:
        tokens, matrix, bias = _test_product(dtype)
        quantised = quantise_tokens_fp8(matrix)
        codes, scales = quantised.codes.to(device), quantised.scales.to(device)
        found = fp8_linear(tokens.to(device), codes, scales, bias.to(device), scales_inside)
        yield "product", found, _expected(tokens, matrix, bias)

    return fault_of(products, LARGEST_ERROR["fp8"])


def _test_product(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens of `dtype`, an fp32 matrix, and a bias of `dtype`."""
    generator = torch.Generator().manual_seed(0)
    tokens, matrix, bias = (torch.randn(*size, generator=generator) for size in ((48, 512), (256, 512), (256,)))
    return tokens.to(dtype), matrix, bias.to(dtype)


def _expected(tokens: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor, gelu: bool = False) -> torch.Tensor:
    values = nn.functional.gelu(tokens.double(), approximate="tanh") if gelu else tokens.double()
    return values @ matrix.double().T + bias.double()


def _multiply_by_torch(
    tokens: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor, group: int, gelu: bool
) -> torch.Tensor:
    values = nn.functional.gelu(tokens, approximate="tanh") if gelu else tokens
    rotation = list(kronecker_factors(group, tokens.device)) if group else []
    return int8_linear(values, codes, scales, bias, rotation)


def _multiply_by_kitchen(
    tokens: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor, group: int, gelu: bool
) -> torch.Tensor:
    import comfy_kitchen

    arguments = {"x": tokens, "weight": codes, "weight_scale": scales, "bias": bias, "out_dtype": tokens.dtype}
    found = comfy_kitchen.registry.get_capable_backend("int8_linear", arguments)
    if found != "cuda":
        raise KernelsError(f"its registry chooses {found}")
    number = comfy_kitchen.DTYPE_TO_CODE[tokens.dtype]
    return kitchen_linear(tokens, codes, scales, bias, group, number, GELU if gelu else None)
