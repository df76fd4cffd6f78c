"""The figures of one machine that decide how weights are best streamed on it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

ComputesOn = Literal["cuda", "cpu"]

# Rates that a machine without a bus does not have.
_OF_THE_BUS = ("h2d_bytes_per_s", "h2d_pageable_bytes_per_s", "d2h_bytes_per_s")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine: its memory in bytes and its rates per second. `origin` says in words how they are known.

    Raises ValueError for a figure that is not above 0, an unknown device, and a GPU without the rates of its bus.
    """

    name: str
    origin: str
    computes_on: ComputesOn
    vram_bytes: int
    """All memory of the GPU; 0 on a CPU, which computes in RAM."""
    ram_bytes: int
    h2d_bytes_per_s: float | None
    """RAM to device from page-locked memory while the device computes; None without a bus, as the next two."""
    h2d_pageable_bytes_per_s: float | None
    d2h_bytes_per_s: float | None
    disk_bytes_per_s: float
    """Reading a file of weights that is not in the page cache."""
    flops_per_s: float
    """Rate measured on a Wan block, its attention included, in the dtype that is `auto` there."""
    decode_bytes_per_s: float
    """Computed bytes (bf16 values) that decoding of stored weights makes; on a CPU with every thread that computes."""
    copy_bytes_per_s: float
    """RAM to RAM."""
    quantise_bytes_per_s: float
    """bf16 bytes that are turned into fp8 on arrival from the file."""

    def __post_init__(self) -> None:
        if self.computes_on not in get_args(ComputesOn):
            raise ValueError(f"computes_on is {self.computes_on!r}, choose one of {get_args(ComputesOn)}")
        may_be_none = _OF_THE_BUS if self.computes_on == "cpu" else ()
        for name in _figures():
            value = getattr(self, name)
            if name == "vram_bytes" and self.computes_on == "cpu" and value == 0:
                continue
            if value is None and name in may_be_none:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"{name} of {self.name} is {value!r}, it must be a number above 0")

    def to_dict(self) -> dict[str, Any]:
        """Plain strings and numbers, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Machine:
        """The inverse of `to_dict`. Raises ValueError for missing or unknown fields and for figures out of range."""
        try:
            machine = cls(**data)
        except TypeError as err:
            raise ValueError(f"not a machine: {err}") from err
        for name in ("name", "origin"):
            if not isinstance(getattr(machine, name), str):
                raise ValueError(f"not a machine: {name} is {getattr(machine, name)!r}, it must be text")
        return machine


def _figures() -> list[str]:
    return [field.name for field in fields(Machine) if field.name not in ("name", "origin", "computes_on")]
