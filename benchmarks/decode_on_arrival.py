"""Decoding rate for stored weights on arrival: one 5120 x 13824 matrix per format to bf16.

On a GPU, torch's operations and the one-pass decode kernel are measured, together with a plain copy
in card memory and the issue time per call. On a CPU, the CPU time of the one decoding thread is
measured, so that other processes have less influence, together with diffusers' functions.

The GPU, or a CPU without one, 15 s on a GPU:
    python benchmarks/decode_on_arrival.py
Other program sizes for the kernels:
    python benchmarks/decode_on_arrival.py --units 64,128,256 --warps 4,8
A check of this program:
    python benchmarks/decode_on_arrival.py --device cpu --rows 64
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from math import nan
from typing import NamedTuple

import numpy as np
import torch
from record import record

from wanstream.devices import clock_for, gpu_count
from wanstream.offload.formats import one_pass
from wanstream.offload.formats.chunk_size import CHUNK_VALUES
from wanstream.offload.formats.decode import decode_tensor
from wanstream.offload.formats.packing import (
    MXFP8,
    NVFP4,
    QUANT_FORMATS,
    EightBit,
    Packing,
    QuantFormat,
)
from wanstream.testing.quantised import random_groups

COLUMNS = 13824
REPEATS = 7
CALLS = 10
"""Calls in one GPU measurement. A single call is shorter than the time to issue it."""

FIGURES = (
    "torch_ms",
    "torch_gb_per_s",
    "torch_issue_us",
    "kernel_ms",
    "kernel_gb_per_s",
    "kernel_issue_us",
    "diffusers_ms",
)


class Case(NamedTuple):
    """Stored matrix on the device."""

    stored: torch.Tensor
    packing: Packing | None = None
    scale: torch.Tensor | None = None


def cases(rows: int, device: torch.device) -> dict[str, Case]:
    """Return a matrix per format."""
    shape = (rows, COLUMNS)
    weights = torch.randn(rows, COLUMNS)
    row_scales = torch.rand(rows, 1) * 0.01
    fp8 = weights.to(torch.float8_e4m3fn)
    packings = {
        "mxfp8": MXFP8,
        "nvfp4": NVFP4,
        "int8": EightBit(),
        "int8 blocks": EightBit(block=128),
    }
    packings |= {"int8 ConvRot": EightBit(group=256)}
    found = {
        "bf16": Case(weights.bfloat16()),
        "fp16": Case(weights.half()),
        "fp8 cast": Case(fp8),
        "fp8 e5m2 cast": Case(weights.to(torch.float8_e5m2)),
        "fp8 scaled": Case(fp8, scale=torch.tensor(0.01)),
        "fp8 rows": Case(fp8, scale=row_scales),
    }
    for name, packing in packings.items():
        # Read as fp8, these bytes are not NaN, and as scales they have a usual size.
        stored = torch.randint(100, 120, (packing.bytes_of(shape),), dtype=torch.uint8)
        if isinstance(packing, EightBit):
            packing.split(stored, shape)[1].fill_(0.01)
        found[name] = Case(stored, packing, torch.tensor(0.01) if packing is NVFP4 else None)
    found |= {
        name: Case(packs_of(packing, rows), packing) for name, packing in QUANT_FORMATS.items()
    }
    return {
        name: Case(
            case.stored.to(device),
            case.packing,
            None if case.scale is None else case.scale.to(device),
        )
        for name, case in found.items()
    }


def packs_of(packing: QuantFormat, rows: int) -> torch.Tensor:
    """Return random packs for the whole matrix."""
    from gguf import GGMLQuantizationType

    count = rows * COLUMNS // packing.values
    packs = random_groups(
        GGMLQuantizationType[packing.name], count, np.random.default_rng(0), scale=0.01
    )
    return torch.from_numpy(packs)


def seconds(work: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Return the median times for calling and issuing `work`, of `REPEATS` after a warm-up."""
    clock = clock_for(device)
    taken = []
    issued = []
    calls = 1 if device.type == "cpu" else CALLS
    for _ in range(REPEATS + 1):
        began = clock.mark()
        thread_began = time.thread_time()
        for _ in range(calls):
            work()
        ended = clock.mark()
        thread_ended = time.thread_time()
        clock.settle()
        issued.append((thread_ended - thread_began) / calls)
        taken.append(issued[-1] if device.type == "cpu" else clock.seconds(began, ended) / calls)
    return statistics.median(taken[1:]), statistics.median(issued[1:])


def measure(name: str, case: Case, into: torch.Tensor) -> dict[str, float]:
    """Measure every way to decode a matrix."""
    stored, packing, scale = case
    moved = (stored.nbytes + into.nbytes) / 1e9

    def decode() -> None:
        decode_tensor(stored, into, packing=packing, scale=scale)

    def by_torch() -> None:
        families = one_pass.FAMILIES
        # Without device families, `decode_tensor` uses no kernel but torch's operations.
        one_pass.FAMILIES = ()
        decode()
        one_pass.FAMILIES = families

    took, issued = seconds(by_torch, into.device)
    figures = {
        "torch_ms": took * 1e3,
        "torch_gb_per_s": moved / took,
        "torch_issue_us": issued * 1e6,
    }
    form = one_pass.StoredForm(dtype=stored.dtype, packing=packing, scaled=scale is not None)
    if form.has_kernel and one_pass.unavailable(into.device) is None:
        took, issued = seconds(decode, into.device)
        figures |= {
            "kernel_ms": took * 1e3,
            "kernel_gb_per_s": moved / took,
            "kernel_issue_us": issued * 1e6,
        }
    if isinstance(packing, QuantFormat) and into.device.type == "cpu":
        took, _ = seconds(lambda: decode_by_diffusers(stored, packing, into), into.device)
        figures["diffusers_ms"] = took * 1e3
    figures = {key: round(value, 3) for key, value in figures.items()}
    print(f"{name:14}" + "".join(f"{figures.get(key, nan):>17.3f}" for key in FIGURES), flush=True)
    return figures


def decode_by_diffusers(packs: torch.Tensor, packing: QuantFormat, into: torch.Tensor) -> None:
    """Decode with diffusers' functions, in pieces of the same size."""
    from diffusers.quantizers.gguf.utils import dequantize_functions
    from gguf import GGMLQuantizationType

    function = dequantize_functions[GGMLQuantizationType[packing.name]]
    count = CHUNK_VALUES // packing.values
    for part, values in zip(
        packs.split(count), into.view(-1, packing.values).split(count), strict=True
    ):
        values.copy_(function(part, packing.values, packing.nbytes, torch.float32))


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description="Rate at which stored weights are decoded.")
    parser.add_argument("--device", default="cuda:0" if gpu_count() else "cpu")
    parser.add_argument(
        "--rows", type=int, default=5120, help="rows of the matrix; no file is written if not 5120"
    )
    parser.add_argument(
        "--units",
        type=numbers,
        default=[one_pass.UNITS_AT_ONCE],
        help="units of 16 values of a program",
    )
    parser.add_argument("--warps", type=numbers, default=[one_pass.WARPS])
    options = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device(options.device)
    if device.type == "cpu":
        # `thread_time` counts this thread only, so no other may share the work.
        torch.set_num_threads(1)
    into = torch.empty(options.rows, COLUMNS, dtype=torch.bfloat16, device=device)
    source = torch.zeros_like(into)
    took, _ = seconds(lambda: into.copy_(source), device)
    copy = round(2 * into.nbytes / took / 1e9, 1)
    print(
        f"a copy in the memory of the device: {copy} GB/s; rates are of stored bytes and values, "
        "too"
    )
    print(f"kernels on {device}: {one_pass.unavailable(device) or 'Triton'}")
    stored = cases(options.rows, device)
    figures = {}
    # The loops assign the module's constants, and Triton compiles again for each pair.
    for one_pass.UNITS_AT_ONCE in options.units:
        for one_pass.WARPS in options.warps:
            title = f"{one_pass.UNITS_AT_ONCE}/{one_pass.WARPS}"  # units and warps of a program
            print(f"{title:14}" + "".join(f"{key:>17}" for key in FIGURES))
            figures = {name: measure(name, case, into) for name, case in stored.items()}
    method = (
        f"decode_tensor of one 5120 x {COLUMNS} matrix that lies in the memory of the device, to "
        f"bf16, by torch and by the kernels; CPU time of one thread, or CUDA events around {CALLS} "
        f"calls; medians of {REPEATS} runs after one that is not counted; GB are stored bytes and "
        "values, each once; issue_us is the CPU time of the calling thread; diffusers_ms is the "
        "same in pieces of the same size by the functions of diffusers"
    )
    if options.rows == 5120:
        print(
            record("decode-on-arrival", method=method, figures={"copy_gb_per_s": copy, **figures})
        )


if __name__ == "__main__":
    main()
