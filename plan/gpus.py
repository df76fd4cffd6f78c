"""GPUs that one does not own: their makers' figures, and the machine that is expected of them.

`tflops` is dense bf16 with fp32 accumulation, memory and lanes as the maker states them. From a product page it is
derived: cores x boost clock x 4, twice the fp32 rate, as of the GeForces whose whitepaper is named: 3584 x
1.777 GHz (RTX 3060), 4352 x 2.535 (4060 Ti), 5888 x 2.475 (4070), 4608 x 2.572 (5060 Ti).

What a Wan block reaches of it is derived from published times of Wan2.2 A14B. Where these do not say what was made,
they are taken for the defaults of its program, 1280x720x81 and 40 steps with CFG, 522 PFLOP by `block_flops`:

* A100 80 GB, 2735.7 s (the efficiency table of Wan-Video/Wan2.2; its issue 284): 191 TFLOP/s, 0.61 of 312;
* RTX 5090, 4549 s (evaluation of thu-ml/TurboDiffusion, its "original"): 115 TFLOP/s, 0.55 of 209.5;
* H800, 1600 s with loading and offloading (Wan-Video/Wan2.2, issue 88): more than 326 TFLOP/s, 0.33 of 989.

From these 0.55 is taken for all, and 0.40 for Hopper. The bus: 25 GB/s of 31.5 is what engines see of PCIe 4.0 x16 from
page-locked memory, so 0.79 of the lanes' rate; 6 GB/s of it from ordinary memory. Decoding moves 19 bytes of device
memory for every 2 that come out.
"""

from __future__ import annotations

from dataclasses import dataclass

from .machine import Machine

GIB = 2**30
REACHED, REACHED_BY_HOPPER = 0.55, 0.40
LANE_BYTES_PER_S = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9}
BUS_SHARE, PAGEABLE_SHARE = 0.79, 0.19
DECODED_SHARE = 2 / 19
# What is in front of the GPU nobody knows: a usual desktop of its time.
COPY_BYTES_PER_S, QUANTISE_BYTES_PER_S = 10e9, 4e9


class UnknownGpuError(ValueError):
    """A name that is none of `GPUS`; the message lists them."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """What its maker says of a GPU."""

    vram_gib: int
    pcie: int
    lanes: int
    tflops: float
    memory_gb_s: float
    source: str
    reached: float = REACHED
    """Share of `tflops` that a Wan block is expected to reach."""


_AMPERE = "NVIDIA Ampere GA102 GPU Architecture whitepaper"
_ADA = "NVIDIA Ada GPU Architecture whitepaper"
_BLACKWELL = "NVIDIA RTX Blackwell GPU Architecture whitepaper"
_BY_CORES = "NVIDIA product page, TFLOP/s derived: cores x boost clock x 4"

GPUS = {
    "RTX 3060 12GB": Gpu(vram_gib=12, pcie=4, lanes=16, tflops=25.5, memory_gb_s=360, source=_BY_CORES),
    "RTX 3090": Gpu(vram_gib=24, pcie=4, lanes=16, tflops=71.0, memory_gb_s=936, source=_AMPERE),
    "RTX 4060 Ti 16GB": Gpu(vram_gib=16, pcie=4, lanes=8, tflops=44.1, memory_gb_s=288, source=_BY_CORES),
    "RTX 4070": Gpu(vram_gib=12, pcie=4, lanes=16, tflops=58.3, memory_gb_s=504, source=_BY_CORES),
    "RTX 4080": Gpu(vram_gib=16, pcie=4, lanes=16, tflops=97.5, memory_gb_s=717, source=_ADA),
    "RTX 4090": Gpu(vram_gib=24, pcie=4, lanes=16, tflops=165.2, memory_gb_s=1008, source=_ADA),
    "RTX 5060 Ti 16GB": Gpu(vram_gib=16, pcie=5, lanes=8, tflops=47.4, memory_gb_s=448, source=_BY_CORES),
    "RTX 5070 Ti": Gpu(vram_gib=16, pcie=5, lanes=16, tflops=87.9, memory_gb_s=896, source=_BLACKWELL),
    "RTX 5080": Gpu(vram_gib=16, pcie=5, lanes=16, tflops=112.6, memory_gb_s=960, source=_BLACKWELL),
    "RTX 5090": Gpu(vram_gib=32, pcie=5, lanes=16, tflops=209.5, memory_gb_s=1792, source=_BLACKWELL),
    "A100 40GB": Gpu(vram_gib=40, pcie=4, lanes=16, tflops=312, memory_gb_s=1555, source="NVIDIA A100 datasheet"),
    "A100 80GB": Gpu(vram_gib=80, pcie=4, lanes=16, tflops=312, memory_gb_s=2039, source="NVIDIA A100 datasheet (SXM)"),
    "L40S": Gpu(vram_gib=48, pcie=4, lanes=16, tflops=362, memory_gb_s=864, source="NVIDIA L40S datasheet"),
    "H100": Gpu(
        vram_gib=80,
        pcie=5,
        lanes=16,
        tflops=989,
        memory_gb_s=3350,
        source="NVIDIA H100 datasheet (SXM)",
        reached=REACHED_BY_HOPPER,
    ),
    "H100 PCIe": Gpu(
        vram_gib=80,
        pcie=5,
        lanes=16,
        tflops=756,
        memory_gb_s=2039,
        source="NVIDIA H100 datasheet (PCIe)",
        reached=REACHED_BY_HOPPER,
    ),
    "H200": Gpu(
        vram_gib=141,
        pcie=5,
        lanes=16,
        tflops=989,
        memory_gb_s=4800,
        source="NVIDIA H200 datasheet (SXM)",
        reached=REACHED_BY_HOPPER,
    ),
}


def expected_machine(name: str, *, ram_bytes: int, disk_bytes_per_s: float) -> Machine:
    """A machine with that GPU; case and blanks do not count, nor does "NVIDIA GeForce". Raises UnknownGpuError."""
    known = {_plain(preset): preset for preset in GPUS}
    if _plain(name) not in known:
        raise UnknownGpuError(f"no figures for the GPU {name!r}; there are some for {', '.join(GPUS)}")
    preset = known[_plain(name)]
    gpu = GPUS[preset]
    lanes = gpu.lanes * LANE_BYTES_PER_S[gpu.pcie]
    return Machine(
        name=preset,
        origin=f"{gpu.source}; {gpu.reached:.0%} of {gpu.tflops:g} TFLOP/s is derived from published times of Wan2.2, "
        f"{BUS_SHARE:.0%} of PCIe {gpu.pcie}.0 x{gpu.lanes} from what engines see of it",
        computes_on="cuda",
        vram_bytes=gpu.vram_gib * GIB,
        ram_bytes=ram_bytes,
        h2d_bytes_per_s=BUS_SHARE * lanes,
        h2d_pageable_bytes_per_s=PAGEABLE_SHARE * lanes,
        d2h_bytes_per_s=BUS_SHARE * lanes,
        disk_bytes_per_s=disk_bytes_per_s,
        flops_per_s=gpu.reached * gpu.tflops * 1e12,
        decode_bytes_per_s=DECODED_SHARE * gpu.memory_gb_s * 1e9,
        copy_bytes_per_s=COPY_BYTES_PER_S,
        quantise_bytes_per_s=QUANTISE_BYTES_PER_S,
    )


def _plain(name: str) -> str:
    return name.lower().replace("nvidia", "").replace("geforce", "").replace(" ", "").replace("-", "")
