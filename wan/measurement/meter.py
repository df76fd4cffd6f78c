"""Block times on a device for each arithmetic, and for the parts of a visit."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch
from torch import nn

from ...block_kernels import (
    Codes,
    Fp8Linear,
    Int8Linear,
    ScaledLinear,
    first_line,
    multiplications,
    multiplied_formats,
    quantise_tokens_fp8,
    replace_linears,
)
from ...devices import Clock, DeviceEvent, auto_dtype, clock_for, is_broken_device
from ...offload.formats import FP8, EightBit, decode_tensor
from ...schema.refs import CodeFormat
from ...shapes import HEAD_DIM, TEXT_TOKENS, BlockTimes, ExpertShape
from ..transformer.block import WanBlock, changed
from . import probe

logger = logging.getLogger("wanstream.kernels")

LayerT = TypeVar("LayerT", bound=nn.Linear)

METERED_TOKENS = 7800
"""Tokens in a video with 832 x 480 pixels and 17 frames."""
LINEAR = "products"
ATTENTION = "attention"
ACTIVATION = "activation"
QUANTISING = "quantising"
OTHER = "other"
PARTS = {
    "norm": "norms",
    "rms_norm": "norms",
    "normed": "gates and norms",
    "add": "gates and norms",
    "rotate": "rotary embedding",
    "quantise": QUANTISING,
}
"""Visit parts by `BlockMath` function."""
GROUP = 256
"""Columns per rotation in int8 matrices, as in ConvRot files."""
METERED_PASSES = 3
PRODUCTS = ("forward", "multiply", "multiply_gelu")
"""Layer methods."""
MOST_VISIT_S = 0.05
"""Longest visit in a measurement that a user waits for. Each format takes some fifteen visits."""
SLOWEST_VISIT_S = 2.0
"""Longest visit that is measured in a format. Some CPUs multiply fp8 a thousand times slower."""
FEW_TOKENS = 16
"""Tokens in a first product, from which the time of a visit is estimated."""
NARROWER = 4
"""Width of the full block divided by that of the block for slow devices."""
SLOW_TOKENS = 64
"""Tokens for that block."""


def quick_case(
    shape: ExpertShape, rate: probe.ComputeRate, device: torch.device
) -> tuple[ExpertShape, int]:
    """Return block shape and tokens, at most `METERED_TOKENS`, for a quick measurement of `shape`.

    On a slow device this is a narrower block with few tokens. Its time ratios are similar.
    """
    tokens = min(METERED_TOKENS, rate.tokens)
    while shape.block_flops(tokens) > MOST_VISIT_S * rate.flops_per_s or not probe.fits(
        shape, tokens, device
    ):
        tokens //= 2
        if tokens < probe.MIN_TOKENS:
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
    variant: probe.BlockVariant = probe.USUAL_BLOCK,
    most_s: float = 2.0,
) -> dict[str, BlockTimes]:
    """Return `shape` block times by format: "" (compute dtype), and all formats for `device`.

    A format is left out if its kernels fail with so many tokens, or on a CPU if a visit would take
    more than `SLOWEST_VISIT_S`.

    Args:
        shape: block shape.
        tokens: tokens in the lane.
        device: device to measure.
        formats: formats to measure. None: all that the device multiplies.
        variant: block variant.
        most_s: seconds up to which one figure is measured again.

    Raises:
        ValueError: the tokens do not fit into free memory.
    """
    if not probe.fits(shape, tokens, device):
        raise ValueError(
            f"a block of {tokens} tokens does not fit into the free memory of {device}: use fewer "
            "tokens"
        )
    dtype = variant.dtype or auto_dtype(device)
    case = _Case(shape=shape, tokens=tokens, device=device, dtype=dtype, most_s=most_s)
    block = probe.random_block(shape, device, variant)
    attention_s = _attention_s(block, case)
    times = {"": _times(block, case, attention_s)}
    if formats is None:
        formats = multiplied_formats(device, dtype)
    for name in formats:
        # A new block, because its plain weights are replaced.
        block = probe.random_block(shape, device, variant)
        layers = _set_codes(block, name, variant.lora_rank)
        try:
            multiplications([name], device, dtype).prepare(layers)
            estimate_s = _estimated_s(layers, case)
            if estimate_s > SLOWEST_VISIT_S:
                logger.warning(
                    "a block in %s would take %.0f s on %s, and is not measured",
                    name, estimate_s, device,
                )  # fmt: skip
                continue
            sizes = _by_size([(layer, 0) for layer in layers])
            decode_s = sum(_decode_s(layer, case) * count for layer, _, count in sizes)
            times[name] = _times(block, case, attention_s, decode_s=decode_s)
        except RuntimeError as err:
            if is_broken_device(err):
                raise
            logger.warning("a block in %s is not measured on %s: %s", name, device, first_line(err))
    return times


@dataclass(frozen=True, kw_only=True)
class _Case:
    """Block to measure."""

    shape: ExpertShape
    tokens: int
    device: torch.device
    dtype: torch.dtype
    most_s: float

    def seconds(self, function: Callable[[], object]) -> float:
        return probe.median_s(function, self.device, most_s=self.most_s)

    def random(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, device=self.device, dtype=self.dtype)


def _estimated_s(layers: Sequence[ScaledLinear], case: _Case) -> float:
    """Return the seconds of a visit's products on a CPU, from a small one. 0 on other devices."""
    if case.device.type != "cpu":
        return 0.0
    layer = min(layers, key=lambda each: each.weight.numel())
    alone = _product_alone(layer, FEW_TOKENS, case)
    start = time.perf_counter()
    alone()
    share = FEW_TOKENS * layer.weight.numel() / sum(each.weight.numel() for each in layers)
    return (time.perf_counter() - start) * case.tokens / share


def _times(
    block: WanBlock, case: _Case, attention_s: float, *, decode_s: float = 0.0
) -> BlockTimes:
    once = probe.block_pass(block, case.shape, case.tokens, case.device)
    visit_s = case.seconds(once)
    passes = METERED_PASSES if visit_s < MOST_VISIT_S else 1
    parts, calls = _parts(block, once, case.device, passes)
    products_s = sum(
        count * case.seconds(_product_alone(layer, rows, case))
        for layer, rows, count in _by_size(calls)
    )
    # A limit may not be above the time measured in a visit.
    products_s = min(products_s, parts[LINEAR])
    attention_s = min(attention_s, parts[ATTENTION])
    if isinstance(calls[0][0], ScaledLinear):
        parts[QUANTISING] = parts.get(QUANTISING, 0.0) + parts[LINEAR] - products_s
        parts[LINEAR] = products_s
    if not _fuses_activation(block):
        inner = case.random(case.tokens, case.shape.ffn_width)
        parts[ACTIVATION] = case.seconds(partial(torch.ops.aten.gelu_, inner, approximate="tanh"))
    parts[OTHER] = max(0.0, visit_s - sum(parts.values()))
    return BlockTimes(
        visit_s=visit_s,
        products_s=products_s,
        attention_s=attention_s,
        parts=parts,
        decode_s=decode_s,
    )


def _fuses_activation(block: WanBlock) -> bool:
    down = block.ffn.net[2]
    if isinstance(down, Int8Linear):
        return down.takes_gelu
    return block.settings.used_math.quantises and isinstance(down, Fp8Linear) and down.takes_codes


class _Meter:
    """Clock marks before and after functions, by part."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.spans: list[tuple[str, DeviceEvent, DeviceEvent]] = []
        self.calls: list[tuple[nn.Linear, int]] = []

    def around(
        self, part: str, function: Callable[..., Any], layer: nn.Linear | None = None
    ) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            if layer is not None:
                given = args[0]
                rows = len(given.codes) if isinstance(given, Codes) else given.shape[1]
                self.calls.append((layer, rows))
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
    """Return the seconds of each part of a visit, and the layers of products with their rows."""
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
    settings = block.settings
    math = block.settings.used_math
    functions = {name: meter.around(part, getattr(math, name)) for name, part in PARTS.items()}
    counted = SimpleNamespace(name=math.name, quantises=math.quantises, **functions)
    linears = [layer for layer in block.modules() if isinstance(layer, nn.Linear)]
    for layer in linears:
        for name in PRODUCTS:
            if hasattr(layer, name):
                object.__setattr__(layer, name, meter.around(LINEAR, getattr(layer, name), layer))
    attention = {
        name: meter.around(ATTENTION, getattr(settings, name))
        for name in ("dispatch", "dispatch_self")
    }
    try:
        with changed(settings, math=cast(Any, counted), **attention):
            yield
    finally:
        for layer in linears:
            for name in PRODUCTS:
                # Without the attribute, the class's method is called again.
                vars(layer).pop(name, None)


def _product_alone(layer: nn.Linear, rows: int, case: _Case) -> Callable[[], object]:
    """Return a function that multiplies already quantised tokens."""
    tokens = case.random(rows, layer.in_features)
    if isinstance(layer, Fp8Linear):
        codes = quantise_tokens_fp8(tokens)
        if layer.takes_codes:
            return partial(layer.multiply, codes)
        one = torch.ones((), device=case.device)
        return partial(
            torch._scaled_mm, codes.codes, layer.weight.t(), one, one, out_dtype=torch.float32
        )
    if isinstance(layer, Int8Linear):
        whole = tokens.mul_(40).clamp_(-127, 127).to(torch.int8)
        return partial(layer.code_sums, whole)
    return partial(layer, tokens.unsqueeze(0))


def _attention_s(block: WanBlock, case: _Case) -> float:
    heads = case.shape.width // HEAD_DIM
    query, key, value = (case.random(1, case.tokens, heads, HEAD_DIM) for _ in range(3))
    settings = block.settings
    options = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False}
    alone = partial(
        settings.dispatch_self, query, key, value, backend=settings.self_backend, **options
    )
    text = (each[:, :TEXT_TOKENS].contiguous() for each in (key, value))
    beside = partial(settings.dispatch, query, *text, backend=settings.backend, **options)
    return case.seconds(alone) + case.seconds(beside)


def _set_codes(block: WanBlock, name: CodeFormat, lora_rank: int) -> list[ScaledLinear]:
    """Replace the layers in `block` by ones that multiply random codes."""
    dtype = {"int8": torch.int8, "fp8": FP8}[name]
    packings = {}
    for path, layer in block.named_modules():
        if isinstance(layer, nn.Linear):
            rotated = name == "int8" and layer.in_features % GROUP == 0
            packings[path] = EightBit(dtype=dtype, group=GROUP if rotated else 0)
    replaced = replace_linears(block, packings)
    like = block.attn1.norm_q.weight
    tile = torch.randn(2**16, device=like.device).mul_(40).clamp_(-127, 127)
    codes = tile.to(dtype).view(torch.uint8)
    zeros = partial(torch.zeros, device=like.device, dtype=like.dtype)
    for scaled in replaced:
        rows = scaled.out_features
        stored = torch.empty(rows, scaled.in_features, dtype=torch.uint8, device=like.device)
        probe.tile_into(stored.view(-1), codes)
        scaled.weight = nn.Parameter(stored.view(dtype), requires_grad=False)
        # Codes with a deviation of 40 times 5e-4 are as large as the weights in `random_block`.
        scaled.weight_scale = torch.full((rows, 1), 5e-4, device=like.device)
        if lora_rank:
            # Zeros, because the time does not depend on the values.
            scaled.patch_up = zeros(rows, lora_rank)
            scaled.patch_down = zeros(lora_rank, scaled.in_features)
    return replaced


def _by_size(calls: Sequence[tuple[LayerT, int]]) -> Iterator[tuple[LayerT, int, int]]:
    """Yield one layer of each size with its rows and count."""
    sizes = [(layer.out_features, layer.in_features, rows) for layer, rows in calls]
    examples = dict(zip(sizes, calls, strict=True))
    for size, count in Counter(sizes).items():
        yield (*examples[size], count)


def _decode_s(layer: ScaledLinear, case: _Case) -> float:
    into = torch.empty_like(layer.weight, device=case.device, dtype=case.dtype)
    if not isinstance(layer, Int8Linear):
        return case.seconds(
            partial(decode_tensor, layer.weight.data, into, scale=layer.weight_scale)
        )
    both = (layer.weight, layer.weight_scale)
    stored = torch.cat([each.view(torch.uint8).view(-1) for each in both])
    packing = EightBit(dtype=torch.int8, group=layer.group)
    return case.seconds(partial(decode_tensor, stored, into, packing=packing, constants={}))
