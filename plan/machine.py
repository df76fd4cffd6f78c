"""Machine memory sizes and rates, and presets for known GPUs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal, get_args

ComputesOn = Literal["cuda", "cpu"]
"""Memory to compute in. "cuda", as in stored profiles, means any device with own memory and streams."""

LINEAR_FORMATS = ("int8", "fp8")
"""Formats other than the compute dtype for linear layer products."""

_TEXTS = ("name", "origin", "computes_on")
_TABLES = ("linear_speedups", "product_flops_per_s")
_BUS_RATES = ("h2d_bytes_per_s", "h2d_pageable_bytes_per_s", "d2h_bytes_per_s")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine: memory in bytes and rates per second.

    Raises ValueError for a figure that is not above 0, an unknown device, and a GPU without bus rates.
    """

    name: str
    origin: str
    """Source of the figures, for a reader: a measurement or a datasheet."""
    computes_on: ComputesOn
    vram_bytes: int
    """Total GPU memory. 0 on a CPU, which computes in RAM."""
    ram_bytes: int
    h2d_bytes_per_s: float | None
    """Copy rate from page-locked RAM to the device while it computes. None on a CPU, as the next two."""
    h2d_pageable_bytes_per_s: float | None
    d2h_bytes_per_s: float | None
    disk_bytes_per_s: float
    """Read rate for a weight file outside the page cache."""
    flops_per_s: float
    """Rate for a Wan block, attention included, in this machine's `auto` dtype."""
    decode_bytes_per_s: float
    """Rate for decoding stored weights in bf16 bytes written. On a CPU with all compute threads."""
    copy_bytes_per_s: float
    """Copy rate from RAM to RAM."""
    quantise_bytes_per_s: float
    """Rate for quantising weights to fp8 after reading, in bf16 bytes read."""
    linear_speedups: Mapping[str, float] = field(default_factory=dict)
    """Rate of linear layers in "int8" or "fp8", quantising their inputs included, as a multiple of `flops_per_s`.

    A missing format counts as 1. Attention is computed in the compute dtype in any case.
    """
    product_flops_per_s: Mapping[str, float] = field(default_factory=dict)
    """Rate of the matrix products of a block alone, by format; "" is the compute dtype. Empty: not measured."""
    attention_flops_per_s: float | None = None
    """Rate of the attention of a block alone. None: not measured."""

    def __post_init__(self) -> None:
        if self.computes_on not in get_args(ComputesOn):
            raise ValueError(f"computes_on is {self.computes_on!r}, choose one of {get_args(ComputesOn)}")
        may_be_none = _BUS_RATES if self.computes_on == "cpu" else ()
        for name, value in vars(self).items():
            if name in (*_TEXTS, *_TABLES):
                continue
            if name == "attention_flops_per_s" and value is None:
                continue
            if name == "vram_bytes" and self.computes_on == "cpu" and value == 0:
                continue
            if value is None and name in may_be_none:
                continue
            self._check_rate(name, value)
        for table, formats in zip(_TABLES, (LINEAR_FORMATS, ("", *LINEAR_FORMATS)), strict=True):
            for name, value in getattr(self, table).items():
                if name not in formats:
                    raise ValueError(f"{table} of {self.name} has {name!r}, choose from {formats}")
                self._check_rate(f"{table} of {name or 'the compute dtype'}", value)

    def _check_rate(self, name: str, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(f"{name} of {self.name} is {value!r}, it must be a number above 0")

    def linear_speedup(self, linear_format: str) -> float:
        """Return the speed-up of linear layers in a format, 1 for "" and without a figure."""
        return self.linear_speedups.get(linear_format, 1.0)

    def to_dict(self) -> dict[str, Any]:
        """Return plain strings and numbers, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Machine:
        """Create a machine from the result of `to_dict`.

        Raises ValueError for missing or unknown fields and for figures out of range.
        """
        tables = {name: data.get(name, {}) for name in _TABLES}
        for name, table in tables.items():
            if not isinstance(table, Mapping):
                raise ValueError(f"not a machine: {name} is {table!r}, it must be a table of numbers")
        try:
            machine = cls(**{**data, **tables})
        except TypeError as err:
            raise ValueError(f"not a machine: {err}") from err
        for name in ("name", "origin"):
            if not isinstance(getattr(machine, name), str):
                raise ValueError(f"not a machine: {name} is {getattr(machine, name)!r}, it must be text")
        return machine


GIB = 2**30
FLOPS_SHARE, HOPPER_FLOPS_SHARE = 0.55, 0.40
"""Expected share of a GPU's peak rate in a Wan block."""
INT8_QUANTISING_SHARE = 1 / 12
"""Time for quantising the inputs of int8 layers, as a share of the bf16 time of these layers.

It covers the tokens (0.02 on an RTX 4090, at 1 TB/s), their rotation, the scales after the product, and products
further below their peak rate. It assumes fused kernels, as comfy-kitchen has. Without them int8 takes 2.2 times as long
as bf16 on an H100, so `wanstream probe` measures it.
"""
FP8_QUANTISED_BYTES_PER_FLOP = 2.8e-3
"""Device memory read and written per linear layer operation while the inputs become fp8, in separate passes.

Measured on an H100: 4.5 ms at 2.98 TB/s for the 4.75 TFLOP in a block's linear layers (832x480, 17 frames).
"""
PRODUCT_SHARE = 0.8
"""Share of a GPU's peak rate for large products: 803 of 989 TFLOP/s on an H100."""
LANE_BYTES_PER_S = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9}
"""Rate per PCIe lane, by generation."""
BUS_SHARE, PAGEABLE_SHARE = 0.79, 0.19
"""Shares of the PCIe rate for copies from page-locked and from pageable RAM."""
DECODED_SHARE = 2 / 19
"""Decode rate as a share of the memory bandwidth."""
# A preset says nothing about the host: these are typical desktop rates.
COPY_BYTES_PER_S, QUANTISE_BYTES_PER_S = 10e9, 4e9


class UnknownGpuError(ValueError):
    """GPU name missing in `GPUS`. The message lists all names."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """GPU datasheet figures."""

    vram_gib: int
    pcie: int
    tflops: float
    memory_gb_s: float
    source: str
    flops_share: float = FLOPS_SHARE
    """Expected share of `tflops` in a Wan block."""
    lanes: int = 16
    int8: float = 4.0
    """Rate of int8 products as a multiple of bf16's, by the datasheet where no product was measured.

    It is higher on GeForce, where fp32 sums halve the bf16 rate.
    """
    fp8: float | None = 2.0
    """The same for fp8 with fp32 sums. None: no fp8 units."""

    @property
    def linear_speedups(self) -> dict[str, float]:
        """Speed-up of linear layers in each 8-bit format, including the time for quantising their inputs."""
        relative = {"int8": 1 / self.int8 + INT8_QUANTISING_SHARE}
        if self.fp8 is not None:
            bytes_per_s = FP8_QUANTISED_BYTES_PER_FLOP * PRODUCT_SHARE * self.tflops * 1e12
            relative["fp8"] = 1 / self.fp8 + bytes_per_s / (self.memory_gb_s * 1e9)
        return {name: 1 / time for name, time in relative.items()}


# Measured on an H100: int8 products reach 1.0 to 1.13 times the bf16 rate, a block's fp8 products 1.4 times.
_hopper = partial(Gpu, pcie=5, flops_share=HOPPER_FLOPS_SHARE, int8=1.0, fp8=1.4)
_ampere = partial(Gpu, pcie=4, fp8=None)
_a100 = partial(_ampere, tflops=312, int8=2.0)
_AMPERE = "NVIDIA Ampere GA102 GPU Architecture whitepaper"
_ADA = "NVIDIA Ada GPU Architecture whitepaper"
_BLACKWELL = "NVIDIA RTX Blackwell GPU Architecture whitepaper"
_BY_CORES = "NVIDIA product page, TFLOP/s derived: cores x boost clock x 4"

GPUS = {
    "RTX 3060 12GB": _ampere(vram_gib=12, tflops=25.5, memory_gb_s=360, source=_BY_CORES),
    "RTX 3090": _ampere(vram_gib=24, tflops=71.0, memory_gb_s=936, source=_AMPERE),
    "RTX 4060 Ti 16GB": Gpu(vram_gib=16, pcie=4, lanes=8, tflops=44.1, memory_gb_s=288, source=_BY_CORES),
    "RTX 4070": Gpu(vram_gib=12, pcie=4, tflops=58.3, memory_gb_s=504, source=_BY_CORES),
    "RTX 4080": Gpu(vram_gib=16, pcie=4, tflops=97.5, memory_gb_s=717, source=_ADA),
    "RTX 4090": Gpu(vram_gib=24, pcie=4, tflops=165.2, memory_gb_s=1008, source=_ADA),
    "RTX 5060 Ti 16GB": Gpu(vram_gib=16, pcie=5, lanes=8, tflops=47.4, memory_gb_s=448, source=_BY_CORES),
    "RTX 5070 Ti": Gpu(vram_gib=16, pcie=5, tflops=87.9, memory_gb_s=896, source=_BLACKWELL),
    "RTX 5080": Gpu(vram_gib=16, pcie=5, tflops=112.6, memory_gb_s=960, source=_BLACKWELL),
    "RTX 5090": Gpu(vram_gib=32, pcie=5, tflops=209.5, memory_gb_s=1792, source=_BLACKWELL),
    "A100 40GB": _a100(vram_gib=40, memory_gb_s=1555, source="NVIDIA A100 datasheet"),
    "A100 80GB": _a100(vram_gib=80, memory_gb_s=2039, source="NVIDIA A100 datasheet (SXM)"),
    "L40S": Gpu(vram_gib=48, pcie=4, tflops=362, int8=2.0, memory_gb_s=864, source="NVIDIA L40S datasheet"),
    "H100": _hopper(vram_gib=80, tflops=989, memory_gb_s=3350, source="NVIDIA H100 datasheet (SXM)"),
    "H100 PCIe": _hopper(vram_gib=80, tflops=756, memory_gb_s=2039, source="NVIDIA H100 datasheet (PCIe)"),
    "H200": _hopper(vram_gib=141, tflops=989, memory_gb_s=4800, source="NVIDIA H200 datasheet (SXM)"),
}


def expected_machine(name: str, *, ram_bytes: int, disk_bytes_per_s: float) -> Machine:
    """Return a machine with the GPU `name`. Ignores case, spaces, hyphens and "NVIDIA GeForce".

    Raises UnknownGpuError for a GPU missing in `GPUS`.
    """
    preset = next((preset for preset in GPUS if _plain(preset) == _plain(name)), None)
    if preset is None:
        raise UnknownGpuError(f"no figures for the GPU {name!r}: choose one of {', '.join(GPUS)}")
    gpu = GPUS[preset]
    lanes = gpu.lanes * LANE_BYTES_PER_S[gpu.pcie]
    return Machine(
        name=preset,
        origin=f"{gpu.source}; "
        f"{gpu.flops_share:.0%} of {gpu.tflops:g} TFLOP/s is derived from published times of Wan2.2, "
        f"{BUS_SHARE:.0%} of PCIe {gpu.pcie}.0 x{gpu.lanes} from rates that engines reach",
        computes_on="cuda",
        vram_bytes=gpu.vram_gib * GIB,
        ram_bytes=ram_bytes,
        h2d_bytes_per_s=BUS_SHARE * lanes,
        h2d_pageable_bytes_per_s=PAGEABLE_SHARE * lanes,
        d2h_bytes_per_s=BUS_SHARE * lanes,
        disk_bytes_per_s=disk_bytes_per_s,
        flops_per_s=gpu.flops_share * gpu.tflops * 1e12,
        decode_bytes_per_s=DECODED_SHARE * gpu.memory_gb_s * 1e9,
        copy_bytes_per_s=COPY_BYTES_PER_S,
        quantise_bytes_per_s=QUANTISE_BYTES_PER_S,
        linear_speedups=gpu.linear_speedups,
    )


def _plain(name: str) -> str:
    return name.lower().replace("nvidia", "").replace("geforce", "").replace(" ", "").replace("-", "")
