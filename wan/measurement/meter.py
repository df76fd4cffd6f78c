"""Times of a block in each arithmetic on a device, and of the parts of its visits."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from ...devices import Clock, DeviceEvent, auto_dtype, clock_for, is_broken_device
from ...offload import FP8, EightBit, decode_tensor
from ...plan import BlockTimes
from ...schema import HEAD_DIM, TEXT_TOKENS, CodeFormat, ExpertShape
from ..kernels.block_math import Codes
from ..kernels.choice import first_line
from ..kernels.fp8_linear import Fp8Linear, quantise_tokens_fp8
from ..kernels.int8_linear import Int8Linear
from ..kernels.multiplication import multiplications, multiplied_formats, replace_linears
from ..kernels.scaled_linear import ScaledLinear
from ..transformer.block import WanBlock, changed
from .probe import MIN_TOKENS, BlockVariant, ComputeRate, block_pass, fits, median_s, random_block, tile_into

logger = logging.getLogger("wanstream.kernels")

METERED_TOKENS = 7800
"""Tokens of a video of 832 x 480 and 17 frames."""
LINEAR, ATTENTION, ACTIVATION, QUANTISING, OTHER = (
    "products",
    "attention",
    "activation",
    "quantising",
    "other",
)
PARTS = {
    "norm": "norms",
    "rms_norm": "norms",
    "normed": "gates and norms",
    "add": "gates and norms",
    "rotate": "rotary embedding",
    "quantise": QUANTISING,
}
"""Parts of a visit by the functions of `BlockMath`."""
GROUP = 256
"""Columns that int8 matrices are rotated in, as in ConvRot files."""
METERED_PASSES = 3
PRODUCTS = ("forward", "multiply", "multiply_gelu")
"""Methods of layers."""
MOST_VISIT_S = 0.05
"""Longest visit of a measurement that a user has to wait for: some fifteen visits are made in each format."""
NARROWER = 4
"""Ratio of the width of a block to that of the block that a slow device measures."""
SLOW_TOKENS = 64
"""Tokens of that block."""


def quick_case(shape: ExpertShape, rate: ComputeRate, device: torch.device) -> tuple[ExpertShape, int]:
    """Return the shape of a block and the tokens of a quick measurement of `shape`, at most `METERED_TOKENS`.

    On a slow device that is a narrower block with few tokens: ratios of times are similar there.
    """
    tokens = min(METERED_TOKENS, rate.tokens)
    while shape.block_flops(tokens) > MOST_VISIT_S * rate.flops_per_s or not fits(shape, tokens, device):
        tokens //= 2
        if tokens < MIN_TOKENS:
            width = max(HEAD_DIM, shape.width // NARROWER // HEAD_DIM * HEAD_DIM)
            return replace(shape, width=width, ffn_width=shape.ffn_width // NARROWER), SLOW_TOKENS
    return shape, tokens


@torch.inference_mode()
def measure_block(
    shape: ExpertShape,
    tokens: int,
    device: torch.device,
    *,
    formats: Sequence[CodeFormat] | None = None,
    variant: BlockVariant | None = None,
    most_s: float = 2.0,
) -> dict[str, BlockTimes]:
    """Return the times of a block of `shape` by format: "" for the compute dtype, then those that `device` multiplies.

    A format whose kernels fail with so many tokens is left out.

    Args:
        shape: shape of the block.
        tokens: tokens of the lane.
        device: device to measure.
        formats: formats to measure; None: all that the device multiplies.
        variant: of the block; None: the default one.
        most_s: seconds up to which one figure is measured again.

    Raises:
        ValueError: the tokens do not fit into the free memory.
    """
    if not fits(shape, tokens, device):
        raise ValueError(f"a block of {tokens} tokens does not fit into the free memory of {device}: use fewer tokens")
    variant = variant or BlockVariant()
    dtype = variant.dtype or auto_dtype(device)
    block = random_block(shape, device, variant)
    attention_s = _attention_s(block, shape, tokens, device, most_s)
    times = {"": _times(block, shape, tokens, device, attention_s, most_s=most_s)}
    for name in multiplied_formats(device, dtype) if formats is None else formats:
        block = random_block(shape, device, variant)  # of layers with plain weights, which are replaced
        layers = _set_codes(block, name, device, variant.lora_rank)
        try:
            multiplications([name], device, dtype).prepare(layers)
            decode_s = sum(_decode_s(layer, device, dtype, most_s) * n for layer, n in _by_size(layers))
            times[name] = _times(block, shape, tokens, device, attention_s, most_s=most_s, decode_s=decode_s)
        except RuntimeError as err:
            if is_broken_device(err):
                raise
            logger.warning("a block in %s is not measured on %s: %s", name, device, first_line(err))
    return times


def _times(
    block: WanBlock,
    shape: ExpertShape,
    tokens: int,
    device: torch.device,
    attention_s: float,
    *,
    most_s: float,
    decode_s: float = 0.0,
) -> BlockTimes:
    once = block_pass(block, shape, tokens, device)
    visit_s = median_s(once, device, most_s=most_s)
    parts, calls = _parts(block, once, device, METERED_PASSES if visit_s < MOST_VISIT_S else 1)
    products_s = 0.0
    sizes: Counter[tuple[int, int, int]] = Counter()
    examples: dict[tuple[int, int, int], nn.Linear] = {}
    for layer, rows in calls:
        size = layer.in_features, layer.out_features, rows
        sizes[size] += 1
        examples[size] = layer
    for size, count in sizes.items():
        product = _product_alone(examples[size], size[2], device, block.attn1.norm_q.weight.dtype)
        products_s += count * median_s(product, device, most_s=most_s)
    # A limit is not above what a visit reaches.
    products_s = min(products_s, parts[LINEAR])
    attention_s = min(attention_s, parts[ATTENTION])
    if isinstance(calls[0][0], ScaledLinear):
        parts[QUANTISING] = parts.get(QUANTISING, 0.0) + parts[LINEAR] - products_s
        parts[LINEAR] = products_s
    if not _fuses_activation(block):
        inner = torch.randn(tokens, shape.ffn_width, device=device, dtype=block.attn1.norm_q.weight.dtype)
        parts[ACTIVATION] = median_s(partial(torch.ops.aten.gelu_, inner, approximate="tanh"), device, most_s=most_s)
    parts[OTHER] = max(0.0, visit_s - sum(parts.values()))
    return BlockTimes(visit_s=visit_s, products_s=products_s, attention_s=attention_s, parts=parts, decode_s=decode_s)


def _fuses_activation(block: WanBlock) -> bool:
    down = block.ffn.net[2]
    if isinstance(down, Int8Linear):
        return down.takes_gelu
    return block.settings.used_math.quantises and isinstance(down, Fp8Linear) and down.takes_codes


class _Meter:
    """Marks of a clock before and after functions, by part."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.spans: list[tuple[str, DeviceEvent, DeviceEvent]] = []
        self.calls: list[tuple[nn.Linear, int]] = []

    def around(self, part: str, function: Callable[..., Any], layer: nn.Linear | None = None) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            if layer is not None:
                given = args[0]
                self.calls.append((layer, len(given.codes) if isinstance(given, Codes) else given.shape[1]))
            start = self.clock.mark()
            result = function(*args, **options)
            self.spans.append((part, start, self.clock.mark()))
            return result

        return timed

    def seconds(self) -> dict[str, float]:
        found: Counter[str] = Counter()
        for part, start, end in self.spans:
            found[part] += self.clock.seconds(start, end)  # type: ignore[assignment]
        return dict(found)


def _parts(
    block: WanBlock, once: Callable[[], None], device: torch.device, passes: int
) -> tuple[dict[str, float], list[tuple[nn.Linear, int]]]:
    """Return the seconds of each part of a visit, and the layers of its products with their rows."""
    seen: list[dict[str, float]] = []
    calls: list[tuple[nn.Linear, int]] = []
    for _ in range(passes):
        meter = _Meter(clock_for(device))
        once()  # keeps the device busy, so that no span waits for a launch
        with _metered(block, meter):
            once()
        meter.clock.settle()
        seen.append(meter.seconds())
        calls = meter.calls
    return {part: median(each[part] for each in seen) for part in seen[0]}, calls


@contextmanager
def _metered(block: WanBlock, meter: _Meter) -> Iterator[None]:
    settings, math = block.settings, block.settings.used_math
    functions = {name: meter.around(part, getattr(math, name)) for name, part in PARTS.items()}
    counted = SimpleNamespace(name=math.name, quantises=math.quantises, **functions)
    linears = [layer for layer in block.modules() if isinstance(layer, nn.Linear)]
    for layer in linears:
        for name in PRODUCTS:
            if hasattr(layer, name):
                object.__setattr__(layer, name, meter.around(LINEAR, getattr(layer, name), layer))
    attention = {name: meter.around(ATTENTION, getattr(settings, name)) for name in ("dispatch", "dispatch_self")}
    try:
        with changed(settings, math=cast(Any, counted), **attention):
            yield
    finally:
        for layer in linears:
            for name in PRODUCTS:
                vars(layer).pop(name, None)


def _product_alone(layer: nn.Linear, rows: int, device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    """Return a function that multiplies tokens that are quantised already."""
    tokens = torch.randn(rows, layer.in_features, device=device, dtype=dtype)
    if isinstance(layer, Fp8Linear):
        codes = quantise_tokens_fp8(tokens)
        if layer.takes_codes:
            return partial(layer.multiply, codes)
        one = torch.ones((), device=device)
        return partial(torch._scaled_mm, codes.codes, layer.weight.t(), one, one, out_dtype=torch.float32)
    if isinstance(layer, Int8Linear):
        whole = tokens.mul_(40).clamp_(-127, 127).to(torch.int8)
        return partial(torch._int_mm, whole, layer.weight.t())
    return partial(layer, tokens.unsqueeze(0))


def _attention_s(block: WanBlock, shape: ExpertShape, tokens: int, device: torch.device, most_s: float) -> float:
    heads = shape.width // HEAD_DIM
    query, key, value = (
        torch.randn(1, tokens, heads, HEAD_DIM, device=device, dtype=block.attn1.norm_q.weight.dtype) for _ in range(3)
    )
    settings, options = block.settings, {"attn_mask": None, "dropout_p": 0.0, "is_causal": False}
    alone = partial(settings.dispatch_self, query, key, value, backend=settings.self_backend, **options)
    text = (each[:, :TEXT_TOKENS].contiguous() for each in (key, value))
    beside = partial(settings.dispatch, query, *text, backend=settings.backend, **options)
    return sum(median_s(each, device, most_s=most_s) for each in (alone, beside))


def _set_codes(block: WanBlock, name: CodeFormat, device: torch.device, lora_rank: int) -> list[ScaledLinear]:
    """Replace the layers of `block` by those that multiply random codes."""
    dtype = block.attn1.norm_q.weight.dtype
    layers = {path: layer for path, layer in block.named_modules() if isinstance(layer, nn.Linear)}
    packings = {
        path: EightBit(dtype=torch.int8, group=0 if layer.in_features % GROUP else GROUP)
        if name == "int8"
        else EightBit(dtype=FP8)
        for path, layer in layers.items()
    }
    replaced = replace_linears({"0": block}, {"0": packings})
    tile = torch.randn(2**16, device=device).mul_(40).clamp_(-127, 127)
    codes = tile.to(torch.int8 if name == "int8" else FP8).view(torch.uint8)
    for layer in replaced:
        stored = torch.empty(layer.out_features, layer.in_features, dtype=torch.uint8, device=device)
        tile_into(stored.view(-1), codes)
        layer.weight = nn.Parameter(stored.view(torch.int8 if name == "int8" else FP8), requires_grad=False)
        layer.weight_scale = torch.full((layer.out_features, 1), 5e-4, device=device)
        if lora_rank:
            layer.patch_up = torch.zeros(layer.out_features, lora_rank, device=device, dtype=dtype)
            layer.patch_down = torch.zeros(lora_rank, layer.in_features, device=device, dtype=dtype)
    return replaced


def _by_size(layers: Sequence[ScaledLinear]) -> Iterator[tuple[ScaledLinear, int]]:
    """Yield one layer of each size, and their number."""
    sizes = Counter((layer.out_features, layer.in_features) for layer in layers)
    for size, count in sizes.items():
        yield next(layer for layer in layers if (layer.out_features, layer.in_features) == size), count


def _decode_s(layer: ScaledLinear, device: torch.device, dtype: torch.dtype, most_s: float) -> float:
    into = torch.empty(layer.out_features, layer.in_features, device=device, dtype=dtype)
    if isinstance(layer, Int8Linear):
        bytes_of = (layer.weight.view(torch.uint8).view(-1), layer.weight_scale.view(torch.uint8).view(-1))
        packing = EightBit(dtype=torch.int8, group=layer.group)
        decode = partial(decode_tensor, torch.cat(bytes_of), into, packing=packing, constants={})
    else:
        decode = partial(decode_tensor, layer.weight.data, into, scale=layer.weight_scale)
    return median_s(decode, device, most_s=most_s)
