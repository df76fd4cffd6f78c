"""Cost of fp8 and int8 storage: time to quantise while a RAM slot is filled, and precision.

Speed: `quantise_rows` on one core, and one A14B block (0.70 GB in bf16) read from a warm page cache
into a RAM slot, as stored and quantised. Precision: relative weight error with one scale per row
and with one scale per matrix, and a whole run's latent error compared to bf16.

python benchmarks/quantise_while_filling.py [folder for a 0.7 GB file]
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from record import record
from safetensors.torch import save_file

from wanstream.offload.formats.layout import allocate_flat
from wanstream.offload.formats.quantise import (
    FP8,
    LARGEST_FP8,
    QUANTISABLE_DTYPES,
    quantise_rows,
    work_memory,
)
from wanstream.offload.formats.safetensors_header import read_header
from wanstream.offload.sources.file import FileSource
from wanstream.offload.sources.quantised import QUANTISED_BYTES, QuantisedSource
from wanstream.plan.programs import BlockKey
from wanstream.sampling import denoise
from wanstream.sampling.inputs import DenoiseRequest
from wanstream.schema import OffloadPolicy
from wanstream.testing.experts import save_expert_file
from wanstream.testing.quantised import scaled_fp8
from wanstream.testing.weights import TinyShape, make_expert
from wanstream.wan.experts.open import open_experts

WIDTH = 5120
FFN = 13824
BLOCK = {
    **{f"attn{i}.weight": (WIDTH, WIDTH) for i in range(8)},
    "up.weight": (FFN, WIDTH),
    "down.weight": (WIDTH, FFN),
}
KEY = BlockKey("high", 0)
THREADS = (1, 2, 4)
REPEATS = 7
SMALL = TinyShape(layers=8, heads=6, ffn_dim=3072)


def per_core() -> dict[str, float]:
    """Return GB of stored values per CPU second on one thread, in pieces as blocks are read."""
    figures = {}
    for dtype in QUANTISABLE_DTYPES:
        for columns in (WIDTH, FFN):
            values = torch.randn(QUANTISED_BYTES // (columns * dtype.itemsize), columns).to(dtype)
            into = torch.empty(values.shape, dtype=FP8)
            scales = torch.empty(len(values), 1)
            work = work_memory(columns)
            taken = []
            for _ in range(10 * REPEATS):
                began = time.thread_time()
                quantise_rows(values, into, scales, work)
                taken.append(time.thread_time() - began)
            name = f"{str(dtype).removeprefix('torch.')}, rows of {columns}"
            figures[name] = round(values.nbytes / statistics.median(taken) / 1e9, 2)
    return figures


def filling(folder: Path) -> dict[str, dict[str, float]]:
    """Measure wall and CPU seconds for reading one block into its RAM slot.

    It is read as stored and quantised in turn.
    """
    path = folder / "block.safetensors"
    save_file({name: torch.randn(shape).bfloat16() for name, shape in BLOCK.items()}, path)
    blocks = {KEY: read_header(path).tensors}
    sources: dict[str, Any] = {
        "as stored": FileSource(blocks, computed_dtypes=torch.bfloat16, direct=False)
    }
    for storage, threads in itertools.product(("fp8", "int8 ConvRot"), THREADS):
        files = FileSource(blocks, computed_dtypes=torch.bfloat16, direct=False)
        sources[f"{storage}, {threads} threads"] = QuantisedSource(files, storage, threads=threads)
    # Each way keeps one slot, so only the first round faults pages in.
    slots = {
        name: allocate_flat(source.formats[KEY].stored.nbytes, "cpu")
        for name, source in sources.items()
    }
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in sources}
    # All ways in turns, because the machine's speed changes.
    for _ in range(REPEATS + 1):
        for name, source in sources.items():
            # The lambda is called before the loop continues, so the names are still this round's.
            taken[name].append(seconds(lambda: source.read_block(KEY, slots[name])))  # noqa: B023
    for source in sources.values():
        source.close()
    nbytes = path.stat().st_size
    return {name: summary(times[1:], nbytes) for name, times in taken.items()}


def seconds(work: Callable[[], None]) -> tuple[float, float]:
    wall = time.perf_counter()
    cpu = time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def summary(times: list[tuple[float, float]], nbytes: int) -> dict[str, float]:
    wall, cpu = (statistics.median(column) for column in zip(*times, strict=True))
    return {
        "wall_s": round(wall, 3),
        "cpu_s": round(cpu, 3),
        "file_gb_per_s": round(nbytes / wall / 1e9, 2),
    }


def weight_errors() -> dict[str, dict[str, float]]:
    """Return |error| / |weights| for one matrix, and for its worst row."""
    normal = torch.randn(1024, WIDTH) * 0.02
    rows = torch.randn(1024, 1).exp()  # row norms that differ by a factor of e on average
    spikes = torch.where(torch.rand(normal.shape) < 1e-4, 50.0, 1.0)
    cases = {
        "normal": normal,
        "rows of different size": normal * rows,
        "rare values 50 times as large": normal * spikes,
    }
    return {name: errors_of(values.bfloat16()) for name, values in cases.items()}


def errors_of(values: torch.Tensor) -> dict[str, float]:
    exact = values.float()
    into = torch.empty(values.shape, dtype=FP8)
    scales = torch.empty(len(values), 1)
    quantise_rows(values, into, scales, work_memory(values.shape[1]))
    # One scale for the matrix, as in most published fp8 files.
    one = exact.abs().max() / LARGEST_FP8
    found = {"row": into.float() * scales, "matrix": (exact / one).to(FP8).float() * one}
    figures = {}
    for name, decoded in found.items():
        error = decoded - exact
        figures[f"scale for each {name}"] = round((error.norm() / exact.norm()).item(), 4)
        figures[f"scale for each {name}, worst row"] = round(
            (error.norm(dim=1) / exact.norm(dim=1)).max().item(), 4
        )
    return figures


def latent_errors(folder: Path) -> dict[str, float]:
    """Return |difference| / |latents| after a run, relative to a bf16 file computed in bf16."""
    files = {"bf16": [], "fp8_scaled": []}
    for seed in (1, 2):
        expert = make_expert(SMALL, seed=seed)
        for fmt, fp8 in (("bf16", None), ("fp8_scaled", scaled_fp8)):
            files[fmt].append(folder / f"{fmt}_{seed}.safetensors")
            save_expert_file(expert, files[fmt][-1], dtype=torch.bfloat16, quantised=fp8)
    plain = latents(files["bf16"])
    others = {
        "storage fp8, a scale for each row": latents(files["bf16"], storage="fp8"),
        "fp8_scaled file, a scale for each matrix": latents(files["fp8_scaled"]),
        "bf16 file that computes in fp32": latents(files["bf16"], compute_dtype=torch.float32),
    }
    return {
        name: round(((other - plain).norm() / plain.norm()).item(), 5)
        for name, other in others.items()
    }


def latents(files: list[Path], **options: Any) -> torch.Tensor:
    shape = torch.Generator().manual_seed(0)
    request = DenoiseRequest(
        noise=torch.randn(1, 16, 3, 16, 16, generator=shape),
        positive=torch.randn(1, 20, 4096, generator=shape),
        negative=torch.randn(1, 20, 4096, generator=shape),
        steps=8,
        flow_shift=5.0,
        switch_step=4,
        guidance=(3.5, 3.5),
    )
    with open_experts(*files, **options) as pair:
        return denoise(
            pair, request, policy=OffloadPolicy.layerwise(1), device="cpu"
        ).latents.float()


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as name:
        figures = {
            "gb_per_s_of_one_core": per_core(),
            "fill_one_block": filling(Path(name)),
            "weight_error": weight_errors(),
            "latent_error": latent_errors(Path(name)),
        }
    method = (
        f"gb_per_s_of_one_core: quantise_rows of one piece of {QUANTISED_BYTES / 2**20:.1f} MiB, "
        f"CPU time, medians of {10 * REPEATS} runs; fill_one_block: the matrices of one A14B block "
        "(0.70 GB in bf16), warm page cache, into memory that was touched before, medians of "
        f"{REPEATS} rounds after one that is not counted, the ways take turns; weight_error: norm "
        "of the error by norm of the weights, bf16 weights of standard deviation 0.02; "
        "latent_error: the same of the latents after 8 steps with CFG 3.5 and a switch after 4, "
        f"random experts of {SMALL.layers} blocks, {SMALL.heads} heads x 128, against a bf16 file "
        "that computes in bf16"
    )
    for case, values in figures.items():
        print(case, values)
    print(record("quantise-while-filling", method=method, figures=figures))


if __name__ == "__main__":
    main()
