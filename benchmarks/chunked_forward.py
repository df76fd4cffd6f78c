"""Time and peak activation memory for one Wan block on the CPU: whole, in chunks, by diffusers.

python benchmarks/chunked_forward.py

All are measured in turn within one process, so that ratios are valid on a busy machine.
"""

from __future__ import annotations

import statistics
import time
import weakref
from functools import partial
from typing import Any

import torch
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from record import record
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wanstream.block_kernels import choose_math
from wanstream.wan.transformer.block import BlockSettings, WanBlock

WIDTH, FFN, HEADS = 1024, 2816, 8
"""A fifth of A14B's width, with the same proportions."""
TOKENS = (1000, 4000)
CHUNKS = (256, 1024)
REPEATS = 5


class PeakTensorBytes(TorchDispatchMode):
    """Peak bytes of tensors that operations returned and that live at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.untyped_storage()._cdata not in self._sizes
            ):
                storage = tensor.untyped_storage()
                self._sizes[storage._cdata] = storage.nbytes()
                # A storage's Python object lives as long as the memory, from torch 2.1 on.
                weakref.finalize(storage, self._sizes.pop, storage._cdata)
        self.peak = max(self.peak, sum(self._sizes.values()))
        return result


def inputs_of(tokens: int) -> tuple[Any, ...]:
    draw = torch.Generator().manual_seed(tokens)
    angles = torch.rand(1, tokens, 1, 128, generator=draw)
    hidden, text, modulation = (
        torch.randn(1, count, WIDTH, generator=draw).bfloat16() for count in (tokens, 512, 6)
    )
    return hidden, text, modulation, (angles.cos(), angles.sin())


def measure(original: WanTransformerBlock, tokens: int) -> dict[str, float]:
    """Return median times, and ratios of every other call to our previous whole block."""
    inputs = inputs_of(tokens)
    settings = BlockSettings(math=choose_math("auto", torch.device("cpu"), torch.bfloat16, WIDTH))
    ours = WanBlock(original, settings)
    rotation = settings.used_math.rotation(*inputs[3])
    calls = {size: partial(ours, *inputs[:3], rotation) for size in (None, *CHUNKS)} | {
        0: partial(original, *inputs)
    }
    seconds: dict[int | None, list[float]] = {size: [] for size in calls}
    peaks: dict[int | None, int] = {}
    for _ in range(REPEATS):
        for size, call in calls.items():
            # 0 stands for diffusers' block, without this setting, and None for a whole one.
            settings.chunk_tokens = size or None
            began = time.perf_counter()
            call()
            seconds[size].append(time.perf_counter() - began)
            if size not in peaks:
                # The mode slows each operation, so memory is measured in a separate call.
                with PeakTensorBytes() as alive:
                    call()
                peaks[size] = alive.peak
    figures = {"whole_s": statistics.median(seconds[None]), "whole_peak_mb": peaks[None] / 1e6}
    for size, name in ((0, "diffusers"), *((size, f"chunks_of_{size}") for size in CHUNKS)):
        ratios = [other / whole for other, whole in zip(seconds[size], seconds[None], strict=True)]
        figures[f"{name}_time_ratio"] = statistics.median(ratios)
        figures[f"{name}_peak_ratio"] = peaks[size] / peaks[None]
    return {name: round(figure, 3) for name, figure in figures.items()}


def main() -> None:
    torch.manual_seed(0)
    block = (
        WanTransformerBlock(WIDTH, FFN, HEADS, cross_attn_norm=True)
        .eval()
        .requires_grad_(False)
        .bfloat16()
    )
    # diffusers loads these in fp32, whatever the dtype of the model.
    for name in ("norm2", "scale_shift_table"):
        part = getattr(block, name)
        part.data = part.data.float() if isinstance(part, torch.nn.Parameter) else part.float()
    with torch.inference_mode():
        # Libraries initialise at the first call, so this one is not measured.
        block(*inputs_of(256))
        figures = {f"{tokens}_tokens": measure(block, tokens) for tokens in TOKENS}
    method = (
        f"one block of width {WIDTH}, {HEADS} heads, feed-forward {FFN}, bf16, text of 512 tokens; "
        f"diffusers, whole and chunked in turns, {REPEATS} rounds; medians of times and of ratios "
        "within a round; peak: bytes of tensors made by operations that are alive at once"
    )
    print(record("chunked-forward", method=method, figures=figures).read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
