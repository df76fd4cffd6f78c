"""Layers that multiply codes as stored, and the code for this on a device.

The code is chosen by capabilities, then by a test product.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from ..offload.formats import FP8, EightBit, kronecker_factors
from ..schema.refs import Arithmetic, CodeFormat
from .attention import KernelsError
from .choice import KernelChoice, Results, choose, fault_of, kitchen_refusal
from .fp8_linear import Fp8Linear, quantise_tokens_fp8
from .int8_linear import Int8Linear, quantise_tokens
from .scaled_linear import ScaledLinear

CODE_FORMATS: Mapping[torch.dtype, CodeFormat] = {torch.int8: "int8", FP8: "fp8"}
LINEARS: Mapping[CodeFormat, type[ScaledLinear]] = {"int8": Int8Linear, "fp8": Fp8Linear}

KITCHEN = "comfy-kitchen"
TORCH = "torch"
HALVES = "torch, in halves"
SCALES_INSIDE = "torch, scales inside"
CODES: Mapping[CodeFormat, tuple[str, ...]] = {
    "int8": (KITCHEN, TORCH, HALVES),
    "fp8": (SCALES_INSIDE, TORCH),
}
"""Code that can multiply matrices by format, the fastest first."""
TEST_GROUPS: Mapping[CodeFormat, tuple[int, ...]] = {"int8": (0, 256), "fp8": (0,)}
"""Column groups for rotated test matrices."""
LARGEST_ERROR: Mapping[CodeFormat, float] = {"int8": 0.03, "fp8": 0.06}
"""Relative error of a test product. Quantising costs 0.010 in int8 and 0.026 in fp8."""

logger = logging.getLogger("wanstream.kernels")


@dataclass(frozen=True, kw_only=True)
class MultiplyChoice(KernelChoice):
    """Code that multiplies matrices in one format on a device.

    `name` None: the matrices have to be decoded.
    """

    format: CodeFormat
    device: torch.device

    @property
    def words(self) -> str:
        done = f"multiplied by {self.name} on {self.device}"
        if self.name is None:
            done = f"decoded, because nothing can multiply them on {self.device}"
        return f"{self.format} matrices are {done}{self.reasons}"


@functools.cache
def choose_multiplication(
    fmt: CodeFormat, device: torch.device, dtype: torch.dtype
) -> MultiplyChoice:
    """Return the fastest code on `device` that passes a test with tokens in `dtype`.

    int8: comfy-kitchen, then torch, then torch with the weight in halves. comfy-kitchen is used if
    its CUDA kernels are active. The registry is read and never changed. fp8: torch with the scales
    inside the product, then torch.
    The choice is made and logged once per process.
    """
    tests = {name: partial(_refusal, fmt, name, device, dtype) for name in CODES[fmt]}
    choice = MultiplyChoice(format=fmt, device=device, **vars(choose(tests)))
    logger.info("%s", choice.words)
    return choice


def multiplied_formats(device: torch.device, dtype: torch.dtype) -> tuple[CodeFormat, ...]:
    """Return the formats with matrices that `device` can multiply by tokens in `dtype`."""
    return tuple(
        fmt
        for fmt in CODE_FORMATS.values()
        if choose_multiplication(fmt, device, dtype).name is not None
    )


def replace_linears(module: nn.Module, packings: Mapping[str, EightBit]) -> list[ScaledLinear]:
    """Replace layers in `module` by layers that multiply codes. Packings are by layer name."""
    replaced: list[ScaledLinear] = []
    for name, packing in packings.items():
        plain = module.get_submodule(name)
        assert isinstance(plain, nn.Linear), f"{name} is {type(plain).__name__}"
        other = LINEARS[CODE_FORMATS[packing.dtype]](plain, group=packing.group)
        replaced.append(other)
        module.set_submodule(name, other)
    return replaced


@dataclass(frozen=True, kw_only=True)
class Multiplications:
    """Code that multiplies a model's matrices on a device."""

    device: torch.device
    kitchen_dtype: int | None = None
    """See `Int8Linear.kitchen_dtype`."""
    halves: bool = False
    """See `Int8Linear.halves`."""
    scales_inside: bool = False
    """See `Fp8Linear.scales_inside`."""

    def prepare(self, layers: Iterable[ScaledLinear]) -> None:
        """Set the code for layers, and the rotation matrices on the device."""
        # All layers with equal groups share one copy on the device. Group 0 means not rotated.
        shared: dict[int, list[torch.Tensor]] = {0: []}
        for layer in layers:
            if isinstance(layer, Fp8Linear):
                layer.scales_inside = self.scales_inside
            if not isinstance(layer, Int8Linear):
                continue
            layer.kitchen_dtype = self.kitchen_dtype
            layer.halves = self.halves
            if layer.group not in shared:
                shared[layer.group] = list(kronecker_factors(layer.group, self.device))
            layer.rotation = shared[layer.group]


def multiplications(
    formats: Iterable[CodeFormat], device: torch.device, dtype: torch.dtype
) -> Multiplications:
    """Choose the code for tokens in `dtype` and matrices in these formats on `device`.

    Raises:
        KernelsError: no code can multiply the matrices in one of the formats on `device`.
    """
    names = []
    for fmt in formats:
        choice = choose_multiplication(fmt, device, dtype)
        if choice.name is None:
            raise KernelsError(f'{choice.words}: open the model with arithmetic "decoded"')
        names.append(choice.name)
    return _code(names, device, dtype)


def _code(names: Collection[str], device: torch.device, dtype: torch.dtype) -> Multiplications:
    code = Multiplications(
        device=device, halves=HALVES in names, scales_inside=SCALES_INSIDE in names
    )
    if KITCHEN not in names:
        return code
    import comfy_kitchen

    return replace(code, kitchen_dtype=int(comfy_kitchen.DTYPE_TO_CODE[dtype]))


def _refusal(fmt: CodeFormat, name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the code `name` cannot multiply matrices in `fmt`, or None if it can."""
    reason = None
    if name == KITCHEN:
        reason = kitchen_int8_refusal(device, dtype)
    return reason or product_fault(fmt, _code([name], device, dtype), dtype)


def kitchen_int8_refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why comfy-kitchen would not multiply int8 matrices with CUDA kernels.

    None if it would.
    """
    reason = kitchen_refusal(device, "int8_linear")
    if reason is not None:
        return reason
    import comfy_kitchen

    # Older versions lack these arguments, and a call with them would raise an error.
    known = {
        argument.name for argument in torch.ops.comfy_kitchen.int8_linear.default._schema.arguments
    }
    if not {"convrot_groupsize", "input_act"} <= known:
        return "its int8_linear takes no activation: update it"
    tokens, codes = (
        torch.zeros(64, 512, dtype=each, device=device) for each in (dtype, torch.int8)
    )
    arguments = {
        "x": tokens,
        "weight": codes,
        "weight_scale": torch.ones(64, 1, device=device),
        "bias": tokens[:, 0],
        "out_dtype": dtype,
    }
    found = comfy_kitchen.registry.get_capable_backend("int8_linear", arguments)
    return None if found == "cuda" else f"its registry chooses {found}"


def product_fault(fmt: CodeFormat, code: Multiplications, dtype: torch.dtype) -> str | None:
    """Return a fault in layer products in `fmt` for tokens in `dtype`.

    None if they are right.
    """
    return fault_of(partial(_products, fmt, code, dtype), LARGEST_ERROR[fmt])


def _products(fmt: CodeFormat, code: Multiplications, dtype: torch.dtype) -> Results:
    generator = torch.Generator().manual_seed(0)
    # 512 columns are two rotation groups, and 48 tokens are enough for CUDA's int8 product.
    tokens, matrix, bias = (
        torch.randn(*size, generator=generator) for size in ((48, 512), (256, 512), (256,))
    )
    # Signs have the largest codes, so sums that are cut to 16 bits are wrong.
    for values in (tokens, matrix):
        values[::2] = values[::2].sign()
    tokens = tokens.to(dtype)
    bias = bias.to(dtype)
    device = code.device

    def product(values: torch.Tensor) -> torch.Tensor:
        return values.double() @ matrix.double().T + bias.double()

    for group in TEST_GROUPS[fmt]:
        plain = nn.Linear(512, 256, device="meta", dtype=dtype)
        plain.bias = nn.Parameter(bias.to(device), requires_grad=False)
        layer = LINEARS[fmt](plain, group=group)
        rotation = list(kronecker_factors(group, matrix.device)) if group else []
        codes, scales, *_ = (
            quantise_tokens(matrix, rotation) if fmt == "int8" else quantise_tokens_fp8(matrix)
        )
        layer.weight = nn.Parameter(codes.to(device), requires_grad=False)
        layer.weight_scale = scales.to(device)
        code.prepare([layer])
        yield "product", layer.compute(tokens.to(device)), product(tokens)
        if isinstance(layer, Int8Linear) and layer.takes_gelu:
            activated = nn.functional.gelu(tokens.double(), approximate="tanh")
            yield (
                "product of the activation",
                layer.multiply_gelu(tokens.to(device)),
                product(activated),
            )


def arithmetic_of(formats: Collection[CodeFormat]) -> Arithmetic:
    """Return the meaning of "as stored" if matrices in these formats can be multiplied."""
    if len(formats) == len(CODE_FORMATS):
        return "as stored"
    return next(iter(formats), "decoded")
