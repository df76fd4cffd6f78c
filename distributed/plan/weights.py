"""Weight placement in a worker group: choice and reason.

A worker has whole blocks (full), or 1/N of each block in host memory (sharded) or in device memory
(sharded in VRAM) and gathers the rest. A visit needs one block, so the choice is the placement with
the shortest stall:

* full: one block over the worker's bus while all other workers copy too. If each device has a
  separate link, this is as fast as alone. A shared uplink, slow RAM or a slow link between two
  sockets makes it slower.
* sharded: 1/N block over the bus, then a gather. Two blocks are in flight at once, one on the bus
  and one between the devices, so the slower transfer counts. Each is measured during the other.
  Over NVLink the gather does not use the bus. Over PCIe without P2P it goes to host memory and
  back, visible as a slow gather.
* sharded in VRAM: only a gather. VRAM must hold the shards of all blocks in addition to the needs
  of a run.

Full needs no communication. Another placement is chosen only if it is faster by more than the
measurement error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...schema.refs import ON_DEVICE, SHARDED, WHOLE_WEIGHTS, WeightPlacement
from ...schema.text import format_need, format_rate, format_size

MIN_GAIN = 0.05
"""Minimum gain from a sharded placement, as a fraction of a visit. The probe does not resolve
less in two seconds."""


@dataclass(frozen=True, kw_only=True)
class WeightFigures:
    """Measurements of one worker group, each from the slowest worker.

    All times are seconds per block and above 0.
    """

    workers: int
    block_bytes: int
    """Stored bytes per block, copied over the bus."""
    blocks: int
    """Number of blocks in both experts."""
    visit_s: float
    """Compute time for one visit on one worker."""
    h2d_s: float
    """Copy time for a whole block from host to device memory, with one worker alone."""
    h2d_concurrent_s: float
    """Copy time for a whole block while all workers copy."""
    shard_h2d_s: float
    """Copy time for 1/N block while all workers copy and gather another block."""
    gather_s: float
    """Gather time for a block from shards in device memory, without other transfers."""
    gather_during_h2d_s: float
    """Gather time for a block while all workers copy shards of another one."""
    free_bytes: int
    """Free device memory in a run with full weights."""

    @property
    def shards_bytes(self) -> int:
        """Device memory on one worker for the shards of all blocks."""
        return -(-self.block_bytes * self.blocks // self.workers)


class PlacementChoice(NamedTuple):
    """Chosen placement and the reason."""

    placement: WeightPlacement
    reason: str


def choose_weight_placement(figures: WeightFigures) -> PlacementChoice:
    """Choose the placement with the shortest stall; never "auto"."""
    fetches: dict[WeightPlacement, float] = {
        WHOLE_WEIGHTS: figures.h2d_concurrent_s,
        SHARDED: max(figures.shard_h2d_s, figures.gather_during_h2d_s),
    }
    fits = figures.shards_bytes <= figures.free_bytes
    if fits:
        fetches[ON_DEVICE] = figures.gather_s
    block_s = {placement: max(figures.visit_s, fetch_s) for placement, fetch_s in fetches.items()}
    # Among placements with a hidden fetch, choose the shortest fetch.
    best = min(block_s, key=lambda placement: (block_s[placement], fetches[placement]))
    if block_s[WHOLE_WEIGHTS] - block_s[best] <= MIN_GAIN * figures.visit_s:
        best = WHOLE_WEIGHTS
    return PlacementChoice(best, _reason(figures, fetches, best, fits=fits))


def _reason(
    figures: WeightFigures,
    fetches: dict[WeightPlacement, float],
    best: WeightPlacement,
    *,
    fits: bool,
) -> str:
    hidden = "hidden behind compute"
    if fetches[best] > figures.visit_s:
        hidden = "not hidden behind compute"
    costs = ", ".join(f"{placement} {_ms(fetch_s)}" for placement, fetch_s in fetches.items())
    alone = format_rate(figures.block_bytes / figures.h2d_s)
    at_once = format_rate(figures.block_bytes / figures.h2d_concurrent_s)
    if figures.h2d_concurrent_s <= 1.1 * figures.h2d_s:
        at_once = "as much"
    bus = (
        f"the bus gives {alone} to one of {figures.workers} workers and {at_once} to each of them "
        "at once"
    )
    shards = ""
    if not fits:
        shards = (
            f"; shards in VRAM need {format_need(figures.shards_bytes)}, "
            f"{format_need(figures.free_bytes)} are free"
        )
    return (
        f"{best} weights: a block of {format_size(figures.block_bytes)} in {_ms(fetches[best])}, "
        f"{hidden} ({_ms(figures.visit_s)} for each); {costs}; {bus}, a gather moves "
        f"{format_rate(figures.block_bytes / figures.gather_s)}{shards}"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
