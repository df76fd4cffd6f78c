"""What measuring costs, and how true it is: a small pair of experts, streamed from its files, every run recorded.

The cost is the time inside the calls that measure, as the recorder counts it, against the time of the steps. Steps are
held against a clock that the recorder does not use, and bytes against what the kernel counts for this process: `rchar`
through the page cache, `read_bytes` past it.

python benchmarks/measuring_cost.py [cpu|cuda] [folder for 1.2 GB of weights, kept there]
"""

from __future__ import annotations

import mmap
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from wanstream.benchmarks.offload_case.model_files import expert_folders, weight_files
from wanstream.benchmarks.offload_case.shapes import SHAPES, CaseShape
from wanstream.benchmarks.record import record
from wanstream.plan import OffloadPolicy, Timeline
from wanstream.sampling import denoise
from wanstream.wan import ExpertPair, open_experts

SHAPE = "quick"
RUNS = 5
POLICY = OffloadPolicy.layerwise(1)
ROUTES = {"through the page cache": "rchar", "past the page cache": "read_bytes"}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run, and what others say of it."""

    timeline: Timeline
    told_at: tuple[float, ...]
    """When each step was told, by a clock that nothing adjusts."""
    kernel_bytes: int

    @property
    def cost_percent(self) -> float:
        return 100 * self.timeline.measuring_s / self.timeline.wall_s

    @property
    def clock_percent(self) -> float:
        """How far the time from the end of one step to that of the next is from the other clock's, at most."""
        ends = [(step.began_s or 0.0) + step.wall_s for step in self.timeline.steps]
        ours = [after - before for before, after in pairwise(ends)]
        theirs = [after - before for before, after in pairwise(self.told_at)]
        return max(100 * abs(own - other) / other for own, other in zip(ours, theirs, strict=True))

    def bytes_percent(self, counter: str) -> float:
        """How far the bytes that were told are from the kernel's; weights outside the blocks go through the cache."""
        told = self.timeline.read_bytes + self.timeline.ahead_bytes
        if counter == "rchar":
            told += self.timeline.outer_bytes
        return 100 * (told - self.kernel_bytes) / self.kernel_bytes


def counted(name: str) -> int:
    """What the kernel has counted for this process."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(dict(line.split(": ") for line in lines)[name])


def reads_past_the_cache(file: Path) -> bool:
    """Whether this file system does so, and the kernel counts it."""
    before = counted("read_bytes")
    opened = -1
    try:
        opened = os.open(file, os.O_RDONLY | os.O_DIRECT)
        with mmap.mmap(-1, mmap.PAGESIZE) as page:
            os.preadv(opened, [page], 0)
    except OSError:
        return False
    finally:
        if opened >= 0:
            os.close(opened)
    return counted("read_bytes") > before


def one_run(pair: ExpertPair, shape: CaseShape, device: str, counter: str) -> Run:
    told_at: list[float] = []
    before = counted(counter)
    result = denoise(
        pair,
        shape.request(),
        policy=POLICY,
        device=device,
        on_step=lambda _: told_at.append(time.clock_gettime(time.CLOCK_MONOTONIC_RAW)),
    )
    return Run(timeline=result.timeline, told_at=tuple(told_at), kernel_bytes=counted(counter) - before)


def spread(values: list[float], digits: int) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
    }


def measure(folders: dict[str, Path], shape: CaseShape, device: str, route: str) -> dict[str, Any]:
    """Figures of one route."""
    counter = ROUTES[route]
    with open_experts(folders["high"], folders["low"], direct=counter == "read_bytes") as pair:
        runs = [one_run(pair, shape, device, counter) for _ in range(RUNS + 1)][1:]
    visits = shape.steps * shape.widths.blocks
    return {
        "measuring_percent_of_wall": spread([run.cost_percent for run in runs], 4),
        "measuring_microseconds_per_visit": spread([run.timeline.measuring_s / visits * 1e6 for run in runs], 2),
        "steps_against_another_clock_percent": spread([run.clock_percent for run in runs], 4),
        f"bytes_against_{counter}_percent": spread([run.bytes_percent(counter) for run in runs], 4),
        "wall_s": spread([run.timeline.wall_s for run in runs], 3),
    }


def main(device: str, work: Path) -> None:
    shape = SHAPES[SHAPE]
    folders = expert_folders(work, shape)
    figures: dict[str, Any] = {}
    for route in ROUTES:
        if route == "past the page cache" and not reads_past_the_cache(weight_files(folders["high"])[0]):
            print(f"{route}: skipped, the file system of {work} refuses O_DIRECT or the kernel counts no reads of it")
            continue
        figures[route] = measure(folders, shape, device, route)
        print(route, figures[route], flush=True)
    method = (
        f"{shape.widths.blocks} blocks of width {shape.widths.width} per expert, bf16, {shape.tokens} tokens, 2 lanes, "
        f"{shape.steps} steps, layerwise with 1 block ahead, from files; {RUNS} runs after one that is not counted, "
        "each with the recorder and its sampling thread on, as always; cost: seconds inside the calls that measure, "
        "as the recorder counts them; clock: CLOCK_MONOTONIC_RAW when each step is told; bytes: /proc/self/io"
    )
    print(record(f"measuring-cost-{device}", method=method, figures=figures))


if __name__ == "__main__":
    chosen = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    if len(sys.argv) > 2:
        main(chosen, Path(sys.argv[2]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(chosen, Path(folder))
