"""Rate at which stored weights are decoded on arrival: one 5120 x 13824 matrix of every format to bf16.

On a CPU the CPU time of the one decoding thread is measured, so that other processes have less influence.

python benchmarks/decode_on_arrival.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from diffusers.quantizers.gguf.utils import dequantize_functions
from gguf import GGMLQuantizationType
from record import record

from wanstream.devices import clock_for
from wanstream.offload.formats.decode import CHUNK_VALUES, decode_tensor
from wanstream.offload.formats.packing import QUANT_FORMATS, QuantFormat
from wanstream.testing.quantised import random_groups

SHAPE = (5120, 13824)
REPEATS = 7
PLAIN = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8 cast": torch.float8_e4m3fn}


def packs_of(packing: QuantFormat) -> torch.Tensor:
    """Return random packs of the whole matrix."""
    count = SHAPE[0] * SHAPE[1] // packing.values
    packs = random_groups(GGMLQuantizationType[packing.name], count, np.random.default_rng(0), scale=0.01)
    return torch.from_numpy(packs)


def cases(device: torch.device) -> dict[str, tuple[torch.Tensor, QuantFormat | None, torch.Tensor | None]]:
    """Return stored bytes, format and scale of each case."""
    weights = torch.randn(SHAPE)
    plain = {name: (weights.to(dtype), None, None) for name, dtype in PLAIN.items()}
    scaled = {"fp8 scaled": (weights.to(torch.float8_e4m3fn), None, torch.tensor(0.01))}
    packed = {name: (packs_of(packing), packing, None) for name, packing in QUANT_FORMATS.items()}
    return {
        name: (stored.to(device), packing, None if scale is None else scale.to(device))
        for name, (stored, packing, scale) in {**plain, **scaled, **packed}.items()
    }


def seconds(work: Callable[[], None], device: torch.device) -> float:
    """Return the median of `REPEATS` runs after one warm-up."""
    clock, taken = clock_for(device), []
    for _ in range(REPEATS + 1):
        began, thread_began = clock.mark(), time.thread_time()
        work()
        ended, thread_ended = clock.mark(), time.thread_time()
        clock.settle()
        taken.append(thread_ended - thread_began if device.type == "cpu" else clock.seconds(began, ended))
    return statistics.median(taken[1:])


def measure(device: torch.device) -> dict[str, dict[str, float]]:
    """Measure every format."""
    into = torch.empty(SHAPE, dtype=torch.bfloat16, device=device)
    figures = {}
    for name, (stored, packing, scale) in cases(device).items():
        taken = seconds(lambda: decode_tensor(stored, into, packing=packing, scale=scale), device)  # noqa: B023
        figures[name] = rates(stored, taken)
        if packing is not None:
            taken = seconds(lambda: decode_by_diffusers(stored, packing, into), device)  # noqa: B023
            figures[name]["diffusers_ms"] = rates(stored, taken)["ms"]
        print(name, figures[name], flush=True)
    return figures


def rates(stored: torch.Tensor, taken: float) -> dict[str, float]:
    values = SHAPE[0] * SHAPE[1]
    return {
        "ms": round(taken * 1e3, 2),
        "stored_gb_per_s": round(stored.nbytes / taken / 1e9, 2),
        "gvalues_per_s": round(values / taken / 1e9, 2),
    }


def decode_by_diffusers(packs: torch.Tensor, packing: QuantFormat, into: torch.Tensor) -> None:
    """Decode with the functions of diffusers, in pieces of the same size."""
    function = dequantize_functions[GGMLQuantizationType[packing.name]]
    count = CHUNK_VALUES // packing.values
    for part, values in zip(packs.split(count), into.view(-1, packing.values).split(count), strict=True):
        values.copy_(function(part, packing.values, packing.nbytes, torch.float32))


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    figures = {name: measure(torch.device(name)) for name in devices}
    method = (
        f"decode_tensor of one {SHAPE[0]} x {SHAPE[1]} matrix that lies in the memory of the device, to bf16; "
        f"CPU time of one thread, or CUDA events; medians of {REPEATS} runs after one that is not counted; GB are "
        "stored bytes; diffusers_ms is the same in pieces of the same size by the functions of diffusers"
    )
    print(record("decode-on-arrival", method=method, figures=figures))


if __name__ == "__main__":
    main()
