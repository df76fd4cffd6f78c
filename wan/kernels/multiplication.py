"""Layers that multiply codes as they are stored, and the code that does it on a device.

The code is chosen by capabilities, then by a test product.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from ...offload import FP8, EightBit, kronecker_factors, quantise_int8, rotated_sums, rotation_factor
from ...schema import CodeFormat
from .attention import KernelsError
from .choice import Choice, Results, choose, fault_of, kitchen_refusal
from .fp8_linear import Fp8Linear, quantise_tokens_fp8
from .int8_linear import Int8Linear
from .scaled_linear import ScaledLinear

CODE_FORMATS: Mapping[torch.dtype, CodeFormat] = {torch.int8: "int8", FP8: "fp8"}

KITCHEN = "comfy-kitchen"
TORCH = "torch"
SCALES_INSIDE = "torch, scales inside"
TEST_GROUPS = (0, 256)
"""Columns that a test matrix is rotated in."""
LARGEST_ERROR: Mapping[CodeFormat, float] = {"int8": 0.03, "fp8": 0.08}
"""Relative error of a test product: quantising its tokens costs 0.011 in int8; in fp8 0.027, and its matrix as much."""

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
    names = (KITCHEN, TORCH) if fmt == "int8" else (SCALES_INSIDE, TORCH)
    tests = {name: partial(_refusal, fmt, name, device, dtype) for name in names}
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
    names = []
    for fmt in formats:
        choice = choose_multiplication(fmt, device, dtype)
        if choice.name is None:
            raise KernelsError(f'{choice.words}: open the model with arithmetic "decoded"')
        names.append(choice.name)
    return _code(names, device, dtype)


def _code(names: Collection[str], device: torch.device, dtype: torch.dtype) -> Multiplications:
    number = None
    if KITCHEN in names:
        import comfy_kitchen

        number = int(comfy_kitchen.DTYPE_TO_CODE[dtype])
    return Multiplications(device=device, kitchen_dtype=number, scales_inside=SCALES_INSIDE in names)


def _refusal(fmt: CodeFormat, name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the code `name` cannot multiply matrices in `fmt`; None if it can."""
    reason = kitchen_int8_refusal(device, dtype) if name == KITCHEN else None
    return reason or product_fault(fmt, _code([name], device, dtype), dtype)


def kitchen_int8_refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why comfy-kitchen would not multiply int8 matrices by its CUDA kernels; None if it would."""
    reason = kitchen_refusal(device, "int8_linear")
    if reason is not None:
        return reason
    import comfy_kitchen

    known = {argument.name for argument in torch.ops.comfy_kitchen.int8_linear.default._schema.arguments}
    if not {"convrot_groupsize", "input_act"} <= known:
        return "its int8_linear takes no activation: update it"
    tokens, codes = (torch.zeros(64, 512, dtype=each, device=device) for each in (dtype, torch.int8))
    arguments = {"x": tokens, "weight": codes, "weight_scale": torch.ones(64, 1, device=device), "bias": tokens[:, 0]}
    found = comfy_kitchen.registry.get_capable_backend("int8_linear", {**arguments, "out_dtype": dtype})
    return None if found == "cuda" else f"its registry chooses {found}"


def product_fault(fmt: CodeFormat, code: Multiplications, dtype: torch.dtype) -> str | None:
    """Return what is wrong with products of layers in `fmt` for tokens of `dtype`; None if they are right."""
    return fault_of(partial(_products, fmt, code, dtype), LARGEST_ERROR[fmt])


def _products(fmt: CodeFormat, code: Multiplications, dtype: torch.dtype) -> Results:
    generator = torch.Generator().manual_seed(0)
    tokens, matrix, bias = (torch.randn(*size, generator=generator) for size in ((48, 512), (256, 512), (256,)))
    tokens = tokens.to(dtype)
    bias = bias.to(dtype)
    device = code.device

    def product(values: torch.Tensor) -> torch.Tensor:
        return values.double() @ matrix.double().T + bias.double()

    for group in TEST_GROUPS if fmt == "int8" else (0,):
        plain = nn.Linear(512, 256, device="meta", dtype=dtype)
        plain.bias = nn.Parameter(bias.to(device), requires_grad=False)
        layer = Int8Linear(plain, group=group) if fmt == "int8" else Fp8Linear(plain)
        values = matrix.clone()
        if group:
            values = rotated_sums(values, kronecker_factors(group, values.device)) * rotation_factor(group)
        codes, scales = quantise_int8(values) if fmt == "int8" else quantise_tokens_fp8(values)[:2]
        layer.weight = nn.Parameter(codes.to(device), requires_grad=False)
        layer.weight_scale = scales.to(device)
        code.prepare([layer])
        yield "product", layer.compute(tokens.to(device)), product(tokens)
        if isinstance(layer, Int8Linear) and layer.takes_gelu:
            activated = nn.functional.gelu(tokens.double(), approximate="tanh")
            yield "product of the activation", layer.multiply_gelu(tokens.to(device)), product(activated)
