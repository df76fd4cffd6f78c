"""Choice of the placement of weights in a worker group, from measurements between its workers.

A worker has whole blocks (full), or 1/N of each block in host memory (sharded) or in device memory (sharded in VRAM)
and gathers the rest. One block is needed per visit, so the placement with the shortest stall is chosen:

* full: one block over the worker's bus while all other workers copy too. If each device has its own link, this is as
  fast as alone; behind a shared uplink, or if RAM or the link between two sockets is the limit, it is slower.
* sharded: 1/N of a block over the bus, then a gather. Two blocks are in flight at once, one on the bus and one between
  the devices, so the slower transfer counts; each is measured during the other. Over NVLink the gather does not use
  the bus. Over PCIe without P2P it goes to host memory and back, which shows as a slow gather.
* sharded in VRAM: only a gather. The shards of all blocks must fit into VRAM in addition to the needs of a run.

Full is chosen unless another placement is faster by more than the error of the measurements, because it needs no
communication.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from ...schema import ON_DEVICE, SHARDED, WHOLE_WEIGHTS, WeightPlacement, need_text, rate_text, size_text

MIN_GAIN = 0.05
"""Fraction of a visit by which a sharded placement must be faster; the probe does not resolve less in two seconds."""


@dataclass(frozen=True, kw_only=True)
class WeightFigures:
    """Measurements of one worker group, each from its slowest worker; all times are seconds per block.

    Raises:
        ValueError: a figure is not above 0 (`free_bytes`: negative) or not finite.
    """

    workers: int
    block_bytes: int
    """Stored bytes of one block, which are copied over the bus."""
    blocks: int
    """Number of blocks of both experts."""
    visit_s: float
    """Compute time of one visit on one worker."""
    h2d_s: float
    """Copy of a whole block from host to device memory, by one worker alone."""
    h2d_concurrent_s: float
    """Copy of a whole block while all workers copy."""
    shard_h2d_s: float
    """Copy of 1/N of a block while all workers copy and gather another block."""
    gather_s: float
    """Gather of a block from shards in device memory, without other transfers."""
    gather_during_h2d_s: float
    """Gather of a block while all workers copy shards of another block."""
    free_bytes: int
    """Device memory left free by a run with full weights."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), 0 if field.name == "free_bytes" else None
            if not (0 < value < math.inf or value == least):
                raise ValueError(f"{field.name} is {value!r}, it must be a number above 0")

    @property
    def shards_bytes(self) -> int:
        """Device memory for the shards of all blocks on one worker."""
        return -(-self.block_bytes * self.blocks // self.workers)


@dataclass(frozen=True, kw_only=True)
class PlacementChoice:
    """Chosen placement and the reason."""

    placement: WeightPlacement
    reason: str
    block_s: float
    """Seconds per block: the larger one of compute and fetch time."""


def choose_placement(figures: WeightFigures) -> PlacementChoice:
    """Choose the placement with the shortest stall; never "auto"."""
    if figures.workers == 1:
        reason = "full weights: a single worker has no peers to gather from"
        return PlacementChoice(placement=WHOLE_WEIGHTS, reason=reason, block_s=max(figures.visit_s, figures.h2d_s))
    fetches: dict[WeightPlacement, float] = {WHOLE_WEIGHTS: figures.h2d_concurrent_s}
    fetches[SHARDED] = max(figures.shard_h2d_s, figures.gather_during_h2d_s)
    fits = figures.shards_bytes <= figures.free_bytes
    if fits:
        fetches[ON_DEVICE] = figures.gather_s
    block_s = {placement: max(figures.visit_s, fetch_s) for placement, fetch_s in fetches.items()}
    # Among placements whose fetch is hidden, the one with the shortest fetch.
    best = min(block_s, key=lambda placement: (block_s[placement], fetches[placement]))
    if block_s[WHOLE_WEIGHTS] - block_s[best] <= MIN_GAIN * figures.visit_s:
        best = WHOLE_WEIGHTS
    return PlacementChoice(placement=best, reason=_reason(figures, fetches, best, fits=fits), block_s=block_s[best])


def _reason(figures: WeightFigures, fetches: dict[WeightPlacement, float], best: WeightPlacement, *, fits: bool) -> str:
    hidden = "hidden behind compute" if fetches[best] <= figures.visit_s else "not hidden behind compute"
    costs = ", ".join(f"{placement} {_ms(fetch_s)}" for placement, fetch_s in fetches.items())
    slower = figures.h2d_concurrent_s / figures.h2d_s
    bus = f"the bus gives {rate_text(figures.block_bytes / figures.h2d_s)} to one of {figures.workers} workers"
    if slower > 1.1:
        bus += f" and {rate_text(figures.block_bytes / figures.h2d_concurrent_s)} to each of them at once"
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
