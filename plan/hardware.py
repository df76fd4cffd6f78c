"""How fast one machine is in one run: what the simulator has to know about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Speeds of one machine for one run.

    Raises ValueError for a bandwidth of 0 or less and for negative times or bytes.
    """

    bus_bytes_per_s: float
    block_bytes: Mapping[str, int]
    """Bytes that one fetch of a block of this expert moves."""
    visit_s: Mapping[str, float]
    """Seconds that all lanes together spend in one block of this expert."""
    step_visit_s: Mapping[int, float] = field(default_factory=dict)
    """The same of single steps, by number, which is then not that of their expert."""
    step_overhead_s: float = 0.0
    """Seconds of each step outside the blocks (output layers, solver), spent after the last block."""
    disk_bytes_per_s: float | None = None
    """None where nothing is read from files."""
    file_bytes: Mapping[str, int] | None = None
    """Bytes that one read of a block of this expert takes from its file; None: as many as the bus moves."""
    decode_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of decoding and patching one block of this expert on arrival; 0 for experts that are not named."""
    decode_computes: bool = False
    """The computing thread decodes, between stall and compute, and reads the RAM slot itself, without a bus: a CPU.
    Otherwise decoding is a queue of its own between the bus and the buffers: a GPU."""

    def __post_init__(self) -> None:
        for name, rate in (("bus_bytes_per_s", self.bus_bytes_per_s), ("disk_bytes_per_s", self.disk_bytes_per_s)):
            if rate is not None and not rate > 0:
                raise ValueError(f"{name} is {rate}, it must be above 0")
        sizes = (*self.block_bytes.values(), *(self.file_bytes or {}).values())
        times = (self.step_overhead_s, *self.visit_s.values(), *self.step_visit_s.values(), *self.decode_s.values())
        smallest = min((*sizes, *times))
        if smallest < 0:
            raise ValueError(f"bytes and seconds must be 0 or more, one is {smallest}")

    def read_bytes(self, expert: str) -> int:
        """Bytes that one read of a block takes from its file."""
        return (self.file_bytes or {}).get(expert, self.block_bytes[expert])
