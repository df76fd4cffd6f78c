"""Where the workers of a group keep their weights, decided by what was measured between them.

Three homes: every worker has whole blocks (full), 1/N of each in host memory and gathers it (sharded), or 1/N in device
memory (sharded in VRAM). One block is due for every visit, so the question is which home leaves the device waiting
least:

* full: one block over the own bus, with all others doing the same. Where every device has a link of its own that is as
  fast as alone; behind a shared uplink, or where RAM or the way between two sockets is the limit, it is not.
* sharded: 1/N of it over the bus, then a gather. Two blocks are under way at once, one on the bus and one between the
  devices, so the slower of the two counts; both are measured while the other one goes on. Over NVLink the gather costs
  the bus nothing. Over PCIe without P2P it goes through host memory and back, which shows as a slow gather.
* sharded in VRAM: a gather and nothing else, where the shards of all blocks fit beside what a run needs.

Full is kept wherever nothing is faster by more than what the figures are worth: it needs nobody else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from ...schema import ON_DEVICE, SHARDED, WHOLE_WEIGHTS, WeightPlacement, need_text, rate_text, size_text

WORTH = 0.05
"""Share of a visit by which another home has to be faster: probes of two seconds tell no less apart."""


@dataclass(frozen=True, kw_only=True)
class WeightFigures:
    """What was measured in one group, of the slowest worker; seconds are those of one block, whatever its size.

    Raises ValueError for a figure that is not above 0.
    """

    workers: int
    block_bytes: int
    """Stored bytes of one block, as they cross a bus."""
    blocks: int
    """Of both experts together."""
    visit_s: float
    """Computing of one visit, on one of these workers."""
    h2d_s: float
    """A whole block from host memory to a device, alone."""
    h2d_together_s: float
    """The same with all workers at once."""
    shard_h2d_s: float
    """1/N of it with all workers at once, while they gather another block."""
    gather_s: float
    """Gathering a block whose shards lie on the devices, alone."""
    gather_beside_h2d_s: float
    """The same while all of them copy the shards of another block."""
    free_bytes: int
    """Device memory that a run leaves free beside everything it needs with full weights."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), 0 if field.name == "free_bytes" else None
            if not (0 < value < math.inf or value == least):
                raise ValueError(f"{field.name} is {value!r}, it must be a number above 0")

    @property
    def shards_bytes(self) -> int:
        """Device memory for one worker's shards of all blocks."""
        return -(-self.block_bytes * self.blocks // self.workers)


@dataclass(frozen=True, kw_only=True)
class PlacementChoice:
    """A home and why."""

    home: WeightPlacement
    reason: str
    block_s: float
    """From one block to the next: computing, or fetching where that takes longer."""


def choose_placement(figures: WeightFigures) -> PlacementChoice:
    """The home that leaves the devices of a group waiting least; never "auto"."""
    if figures.workers == 1:
        reason = "one worker has nobody to gather with: full weights"
        return PlacementChoice(home=WHOLE_WEIGHTS, reason=reason, block_s=max(figures.visit_s, figures.h2d_s))
    fetches: dict[WeightPlacement, float] = {WHOLE_WEIGHTS: figures.h2d_together_s}
    fetches[SHARDED] = max(figures.shard_h2d_s, figures.gather_beside_h2d_s)
    fits = figures.shards_bytes <= figures.free_bytes
    if fits:
        fetches[ON_DEVICE] = figures.gather_s
    due = {home: max(figures.visit_s, fetch_s) for home, fetch_s in fetches.items()}
    best = min(due, key=lambda home: (due[home], fetches[home]))
    if due[WHOLE_WEIGHTS] - due[best] <= WORTH * figures.visit_s:
        best = WHOLE_WEIGHTS
    return PlacementChoice(home=best, reason=_reason(figures, fetches, best, fits=fits), block_s=due[best])


def _reason(figures: WeightFigures, fetches: dict[WeightPlacement, float], best: WeightPlacement, *, fits: bool) -> str:
    hidden = "which computing hides" if fetches[best] <= figures.visit_s else "which computing does not hide"
    costs = ", ".join(f"{home} {_ms(fetch_s)}" for home, fetch_s in fetches.items())
    slower = figures.h2d_together_s / figures.h2d_s
    bus = f"its bus gives {rate_text(figures.block_bytes / figures.h2d_s)} to one of {figures.workers} workers"
    if slower > 1.1:
        bus += f" and {rate_text(figures.block_bytes / figures.h2d_together_s)} to each of them at once"
    else:
        bus += " and as much to each of them at once"
    shards = f"; shards in VRAM need {need_text(figures.shards_bytes)}, {need_text(figures.free_bytes)} are free"
    return (
        f"{best} weights: a block of {size_text(figures.block_bytes)} in {_ms(fetches[best])}, {hidden} "
        f"({_ms(figures.visit_s)} for each); {costs}; {bus}, a gather moves "
        f"{rate_text(figures.block_bytes / figures.gather_s)}{'' if fits else shards}"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
