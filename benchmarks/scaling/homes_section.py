"""Where a cell keeps its weights: what each home costs where blocks are small and workers many."""

from __future__ import annotations

from dataclasses import replace

from wanstream.plan import DoesNotFitError, Mesh, simulate_fleet
from wanstream.plan.memory_needs import VRAM_RESERVE, VRAM_SHARE

from ..performance.markdown import NOTHING, number, table
from .setups import SETUPS, Setup, job_of

SIZES = ("832x480x17", "832x480x81", "1280x720x81")
COUNTS = (2, 4, 8)
STEPS = 4
GIVEN_GB = 12


def homes_section() -> str:
    """A table per setup: stall of a usual step, by video, GPUs and home."""
    parts = [
        "## Where the weights are kept (simulated)\n",
        "Seconds of a step on one cell with Ulysses, and how many of them are waited for weights: all in RAM for each "
        "worker, a share of each block and a gather, or the shares in device memory. Short videos on many GPUs compute "
        f"less than the bus brings. {STEPS} steps, the second video of a queue, on GPUs with {GIVEN_GB} GB to spare.\n",
    ]
    for setup in SETUPS:
        rows = [_row(setup, size, count) for size in SIZES for count in COUNTS]
        parts += [f"{setup.name}:\n", table(("video", "GPUs", "full", "sharded", "sharded in VRAM"), rows)]
    return "\n".join(parts)


def _row(setup: Setup, size: str, count: int) -> tuple[str, ...]:
    machine = replace(setup.machine, vram_bytes=int((GIVEN_GB * 1e9 + VRAM_RESERVE) / VRAM_SHARE))
    job, mesh = job_of(size, STEPS, STEPS // 2), Mesh(ulysses=count)
    cells = []
    for home in ("full", "sharded", "sharded in VRAM"):
        try:
            (stage,) = simulate_fleet(job, machine, setup.links, mesh, weights=(home,)).stages
        except DoesNotFitError:
            cells.append(NOTHING)
            continue
        cells.append(f"{number(stage.next_s / STEPS, 2)} ({number(stage.stall_s / STEPS, 2)})")
    return (size, str(count), *cells)
