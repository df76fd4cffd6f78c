"""Memory sizes and rates for one machine, and presets for known GPUs."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Any

LINEAR_FORMATS = ("int8", "fp8")
"""Formats other than the compute dtype for matrix products in linear layers."""

_TABLES = {"linear_speedups": LINEAR_FORMATS, "product_flops_per_s": ("", *LINEAR_FORMATS)}
_COMPUTES_ON = ("cuda", "cpu")
"""Values in stored profiles. "cuda" means any device with dedicated memory and streams."""


@dataclass(frozen=True, kw_only=True)
class Bus:
    """Copy rates between RAM and device memory."""

    h2d_bytes_per_s: float
    """From page-locked RAM to the device while it computes."""
    h2d_pageable_bytes_per_s: float
    d2h_bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class BlockRates:
    """Rates for the parts of a block."""

    linear_speedups: Mapping[str, float] = field(default_factory=dict)
    """Linear layer rate in "int8" or "fp8", as a multiple of `Machine.flops_per_s`.

    It includes input quantisation. A missing format counts as 1. Attention always runs in the
    compute dtype.
    """
    product_flops_per_s: Mapping[str, float] = field(default_factory=dict)
    """Rate of a block's matrix products alone, by format. "" is the compute dtype. Empty: not
    measured."""
    attention_flops_per_s: float | None = None
    """Rate of a block's attention alone. None: not measured."""

    def linear_speedup(self, linear_format: str) -> float:
        """Return the linear layer speed-up in a format, 1 for "" and without a figure."""
        return self.linear_speedups.get(linear_format, 1.0)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine with memory in bytes and rates per second.

    Raises ValueError for figures of 0 or less, and for unknown formats in a table.
    """

    name: str
    origin: str
    """Source of the figures, for a reader: a measurement or a datasheet."""
    vram_bytes: int
    """Total GPU memory. 0 on a CPU: it computes in RAM."""
    ram_bytes: int
    bus: Bus | None
    """None on a CPU."""
    disk_bytes_per_s: float
    """Read rate for a weight file outside the page cache."""
    flops_per_s: float
    """Rate for a Wan block, including attention, in this machine's `auto` dtype."""
    decode_bytes_per_s: float
    """Rate for decoding stored weights, in bf16 bytes written. On a CPU with all compute
    threads."""
    copy_bytes_per_s: float
    """RAM to RAM copy rate."""
    quantise_bytes_per_s: float
    """Rate for quantising weights to fp8 after reading, in bf16 bytes read."""
    block: BlockRates = BlockRates()

    def __post_init__(self) -> None:
        figures = self.to_dict()
        for name in ("name", "origin", "computes_on"):
            del figures[name]
        tables = {name: figures.pop(name) for name in _TABLES}
        missing: dict[str, Any] = {"attention_flops_per_s": None}
        if not self.has_bus:
            # A CPU lacks these figures, and these values stand for them. Other values are checked.
            missing |= {"vram_bytes": 0, **dict.fromkeys(_BUS)}
        for name, value in figures.items():
            if name not in missing or value != missing[name]:
                self._check_rate(name, value)
        for table, rates in tables.items():
            for name, value in rates.items():
                if name not in _TABLES[table]:
                    raise ValueError(
                        f"{table} of {self.name} has {name!r}, choose from {_TABLES[table]}"
                    )
                self._check_rate(f"{table} of {name or 'the compute dtype'}", value)

    def _check_rate(self, name: str, value: object) -> None:
        if (
            # bool is a subclass of int, so True would pass as 1.
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value < math.inf
        ):
            raise ValueError(f"{name} of {self.name} is {value!r}, it must be a number above 0")

    @property
    def has_bus(self) -> bool:
        """True for a device with dedicated memory. False for a CPU."""
        return self.bus is not None

    @property
    def load_bytes_per_s(self) -> float:
        """Copy rate from RAM to where blocks are computed."""
        if self.bus is None:
            return self.copy_bytes_per_s
        return self.bus.h2d_bytes_per_s

    def to_dict(self) -> dict[str, Any]:
        """Return a flat table ready for JSON: plain strings, numbers and rate tables."""
        computes_on = "cuda" if self.has_bus else "cpu"
        figures: dict[str, Any] = {
            "name": self.name,
            "origin": self.origin,
            "computes_on": computes_on,
            **asdict(self),
        }
        bus = figures.pop("bus") or dict.fromkeys(_BUS)
        block: dict[str, Any] = figures.pop("block")
        return figures | bus | block

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Machine:
        """Create a machine from a `to_dict` result.

        Raises ValueError for missing or unknown fields, and for figures out of range.
        """
        for name in _TABLES:
            table = data.get(name, {})
            if not isinstance(table, Mapping):
                raise ValueError(
                    f"not a machine: {name} is {table!r}, it must be a table of numbers"
                )
        figures = dict(data)
        try:
            computes_on = figures.pop("computes_on")
            if computes_on not in _COMPUTES_ON:
                raise ValueError(f"computes_on is {computes_on!r}, choose one of {_COMPUTES_ON}")
            # A CPU's data must have these fields, too, and `cls` does not take them.
            bus: Bus | None = Bus(**{name: figures.pop(name) for name in _BUS})
            # Profiles from older versions lack some of these.
            rates = {name: figures.pop(name) for name in _BLOCK if name in figures}
            if computes_on == "cpu":
                bus = None
            machine = cls(**figures, bus=bus, block=BlockRates(**rates))
        except KeyError as err:
            raise ValueError(f"not a machine: it has no {err.args[0]}") from err
        except TypeError as err:
            raise ValueError(f"not a machine: {err}") from err
        for name in ("name", "origin"):
            if not isinstance(figures[name], str):
                raise ValueError(f"not a machine: {name} is {figures[name]!r}, it must be text")
        return machine

    def with_figures(self, **figures: Any) -> Machine:
        """Return the machine with some `to_dict` figures replaced."""
        return self.from_dict({**self.to_dict(), **figures})


_BUS = tuple(each.name for each in fields(Bus))
_BLOCK = tuple(each.name for each in fields(BlockRates))

GIB = 2**30
FLOPS_SHARE, HOPPER_FLOPS_SHARE = 0.55, 0.40
"""Expected share of a GPU's peak rate in a Wan block."""
INT8_QUANTISING_SHARE = 1 / 12
"""Time for quantising int8 layer inputs, as a share of bf16 time in these layers.

It covers the tokens (0.02 on an RTX 4090, at 1 TB/s), their rotation, the scales after the product,
and products further below their peak rate. It assumes fused kernels, as comfy-kitchen has. Without
them int8 takes 2.2 times as long as bf16 on an H100, so `wanstream probe` measures it.
"""
FP8_QUANTISED_BYTES_PER_FLOP = 2.8e-3
"""Bytes read and written per linear layer operation while the inputs become fp8.

Quantising takes separate passes over device memory. Measured on an H100: 4.5 ms at 2.98 TB/s for
the 4.75 TFLOP in a block's linear layers (832x480, 17 frames).
"""
PRODUCT_SHARE = 0.8
"""Share of a GPU's peak rate reached in large products: 803 of 989 TFLOP/s on an H100."""
LANE_BYTES_PER_S = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9}
"""Rate per PCIe lane, by generation."""
BUS_SHARE, PAGEABLE_SHARE = 0.79, 0.19
"""Shares of the PCIe rate for copies from page-locked and from pageable RAM."""
DECODED_SHARE = 2 / 19
"""Decode rate as a share of the memory bandwidth."""
# A preset says nothing about the host. These rates are typical for desktops.
COPY_BYTES_PER_S = 10e9
QUANTISE_BYTES_PER_S = 4e9


class UnknownGpuError(ValueError):
    """GPU name missing in `GPUS`. The message lists all names."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Datasheet figures for a GPU."""

    vram_gib: int
    pcie: int
    tflops: float
    memory_gb_s: float
    source: str
    flops_share: float = FLOPS_SHARE
    """Expected share of `tflops` in a Wan block."""
    lanes: int = 16
    int8: float = 4.0
    """int8 product rate as a multiple of bf16's, from the datasheet where nothing was measured.

    It is higher on GeForce, where fp32 sums halve the bf16 rate.
    """
    fp8: float | None = 2.0
    """The same for fp8 with fp32 sums. None: no fp8 units."""

    @property
    def linear_speedups(self) -> dict[str, float]:
        """Linear layer speed-up in each 8-bit format, including input quantisation."""
        relative = {"int8": 1 / self.int8 + INT8_QUANTISING_SHARE}
        if self.fp8 is not None:
            bytes_per_s = FP8_QUANTISED_BYTES_PER_FLOP * PRODUCT_SHARE * self.tflops * 1e12
            # Bytes to quantise per second of bf16 products, over bytes per second: a share of time.
            relative["fp8"] = 1 / self.fp8 + bytes_per_s / (self.memory_gb_s * 1e9)
        return {name: 1 / time for name, time in relative.items()}


# Measured on an H100: int8 products reach 1.0 to 1.13 times the bf16 rate, a block's fp8 products
# 1.4 times.
_hopper = partial(Gpu, pcie=5, flops_share=HOPPER_FLOPS_SHARE, int8=1.0, fp8=1.4)
_ampere = partial(Gpu, pcie=4, fp8=None)
_a100 = partial(_ampere, tflops=312, int8=2.0)
_ada = partial(Gpu, pcie=4)
_blackwell = partial(Gpu, pcie=5)
_AMPERE = "NVIDIA Ampere GA102 GPU Architecture whitepaper"
_ADA = "NVIDIA Ada GPU Architecture whitepaper"
_BLACKWELL = "NVIDIA RTX Blackwell GPU Architecture whitepaper"
_BY_CORES = "NVIDIA product page, TFLOP/s derived: cores x boost clock x 4"

GPUS = {
    "RTX 3060 12GB": _ampere(vram_gib=12, tflops=25.5, memory_gb_s=360, source=_BY_CORES),
    "RTX 3090": _ampere(vram_gib=24, tflops=71.0, memory_gb_s=936, source=_AMPERE),
    "RTX 4060 Ti 16GB": _ada(vram_gib=16, lanes=8, tflops=44.1, memory_gb_s=288, source=_BY_CORES),
    "RTX 4070": _ada(vram_gib=12, tflops=58.3, memory_gb_s=504, source=_BY_CORES),
    "RTX 4080": _ada(vram_gib=16, tflops=97.5, memory_gb_s=717, source=_ADA),
    "RTX 4090": _ada(vram_gib=24, tflops=165.2, memory_gb_s=1008, source=_ADA),
    "RTX 5060 Ti 16GB": _blackwell(
        vram_gib=16, lanes=8, tflops=47.4, memory_gb_s=448, source=_BY_CORES
    ),
    "RTX 5070 Ti": _blackwell(vram_gib=16, tflops=87.9, memory_gb_s=896, source=_BLACKWELL),
    "RTX 5080": _blackwell(vram_gib=16, tflops=112.6, memory_gb_s=960, source=_BLACKWELL),
    "RTX 5090": _blackwell(vram_gib=32, tflops=209.5, memory_gb_s=1792, source=_BLACKWELL),
    "A100 40GB": _a100(vram_gib=40, memory_gb_s=1555, source="NVIDIA A100 datasheet"),
    "A100 80GB": _a100(vram_gib=80, memory_gb_s=2039, source="NVIDIA A100 datasheet (SXM)"),
    "L40S": _ada(
        vram_gib=48, tflops=362, int8=2.0, memory_gb_s=864, source="NVIDIA L40S datasheet"
    ),
    "H100": _hopper(
        vram_gib=80, tflops=989, memory_gb_s=3350, source="NVIDIA H100 datasheet (SXM)"
    ),
    "H100 PCIe": _hopper(
        vram_gib=80, tflops=756, memory_gb_s=2039, source="NVIDIA H100 datasheet (PCIe)"
    ),
    "H200": _hopper(
        vram_gib=141, tflops=989, memory_gb_s=4800, source="NVIDIA H200 datasheet (SXM)"
    ),
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
        origin=f"{gpu.source}; {gpu.flops_share:.0%} of {gpu.tflops:g} TFLOP/s is derived from "
        f"published times of Wan2.2, {BUS_SHARE:.0%} of PCIe {gpu.pcie}.0 x{gpu.lanes} from "
        "rates that engines reach",
        vram_bytes=gpu.vram_gib * GIB,
        ram_bytes=ram_bytes,
        bus=Bus(
            h2d_bytes_per_s=BUS_SHARE * lanes,
            h2d_pageable_bytes_per_s=PAGEABLE_SHARE * lanes,
            d2h_bytes_per_s=BUS_SHARE * lanes,
        ),
        disk_bytes_per_s=disk_bytes_per_s,
        flops_per_s=gpu.flops_share * gpu.tflops * 1e12,
        decode_bytes_per_s=DECODED_SHARE * gpu.memory_gb_s * 1e9,
        copy_bytes_per_s=COPY_BYTES_PER_S,
        quantise_bytes_per_s=QUANTISE_BYTES_PER_S,
        block=BlockRates(linear_speedups=gpu.linear_speedups),
    )


def _plain(name: str) -> str:
    return re.sub("nvidia|geforce|[ -]", "", name.lower())
