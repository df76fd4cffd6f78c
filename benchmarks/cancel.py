"""Latency of a cancel: from the request until every worker is ready for another run.

python benchmarks/cancel.py [cancels]

Runs on 1, 2 and 4 workers behind Ray on this machine are cancelled at seeded random times, in the
middle of some block. The time is measured on the driver, from the request until `Driver.denoise`
raises Cancelled, once all workers have ended their task. After each cancel, a short run must return
the same latents as before.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from record import record

from wanstream.cli.bench.cases import SMALL, bench_request, small_experts
from wanstream.distributed.driver.driver import Driver
from wanstream.distributed.ray.pool import RayPool
from wanstream.sampling.inputs import DenoiseRequest
from wanstream.sampling.steps import SamplingCancelled, StepProgress
from wanstream.schema import Mesh, OffloadPolicy
from wanstream.schema.refs import ExpertsRef, WorkersRef
from wanstream.shapes import VideoShape
from wanstream.wan.latents import tensor_digest

MESHES = (Mesh(), Mesh(cfg=2), Mesh(ulysses=2), Mesh(cfg=2, ulysses=2))
VIDEO = VideoShape(width=64, height=64, frames=9)
POLICY = OffloadPolicy.layerwise(1)
SHORT, LONG = 2, 1000
"""Steps in the run after a cancel, and in the cancelled run."""
WITHIN = 2
"""The cancel happens within this number of steps after the first one."""


def cancel_once(
    driver: Driver, experts: ExpertsRef, request: DenoiseRequest, after_s: float
) -> dict[str, Any]:
    """Cancel a run `after_s` seconds after the first step.

    Return the last step and block, and the latency.
    """
    stop = threading.Event()
    requested_s = list[float]()

    def request_stop() -> None:
        # The time comes before `stop.set`: the run may end before this thread continues.
        requested_s.append(time.perf_counter())
        stop.set()

    timer = threading.Timer(after_s, request_stop)

    def on_step(step: StepProgress) -> None:
        if step.done == 1:
            timer.start()

    try:
        driver.denoise(experts, request, POLICY, on_step=on_step, should_stop=stop.is_set)
    except SamplingCancelled as cancelled:
        took_s = time.perf_counter() - requested_s[0]
        return {"step": cancelled.step, "block": cancelled.block, "seconds": round(took_s, 4)}
    raise AssertionError(f"{LONG} steps were over within {after_s:g} s of the first one")


def measure(
    mesh: Mesh, pool: RayPool, ref: WorkersRef, experts: ExpertsRef, cancels: int
) -> dict[str, Any]:
    driver = Driver(pool, ref, mesh)
    chance = random.Random(0)
    request = bench_request(VIDEO, videos=1, guidance=4.0, in_channels=16)
    short = request.with_steps(SHORT)
    long = request.with_steps(LONG)
    # This run opens the experts on the workers. Otherwise the next run's times would include this.
    driver.denoise(experts, short, POLICY)
    calm = driver.denoise(experts, request.with_steps(2 * SHORT), POLICY)
    wanted = tensor_digest(driver.denoise(experts, short, POLICY).latents)
    # The first step waits for a cold block, so it is left out.
    step_s = statistics.median(step.wall_s for step in calm.timeline.steps[1:])
    found = []
    equal = 0
    loaded = os.getloadavg()[0]
    for number in range(cancels):
        # Each run has other noise, so that the previous run's result cannot pass for this one's.
        noise = replace(long, noise=long.noise.roll(number + 1, -1))
        found.append(cancel_once(driver, experts, noise, chance.uniform(0, WITHIN * step_s)))
        equal += tensor_digest(driver.denoise(experts, short, POLICY).latents) == wanted
    seconds = sorted(each["seconds"] for each in found)
    return {
        "workers": mesh.size,
        "layout": str(mesh),
        "seconds": {
            "median": round(statistics.median(seconds), 4),
            "min": seconds[0],
            "max": seconds[-1],
        },
        "within_a_second": f"{sum(each <= 1 for each in seconds)} of {cancels}",
        "block_s": round(step_s / SMALL.layers, 4),
        "runs_after_it_that_are_equal": f"{equal} of {cancels}",
        "load_average": [round(load, 1) for load in (loaded, os.getloadavg()[0])],
        "cancels": found,
    }


def main(cancels: int) -> None:
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        experts = small_experts(Path(folder))
        for count in sorted({mesh.size for mesh in MESHES}):
            ref = WorkersRef(count=count, threads=1, timeout_s=120.0)
            with RayPool(ref, store_bytes=256 << 20) as pool:
                for mesh in (mesh for mesh in MESHES if mesh.size == count):
                    figures.append(measure(mesh, pool, ref, experts, cancels))
                    print(
                        figures[-1]["layout"], figures[-1]["seconds"], file=sys.stderr, flush=True
                    )
    method = (
        f"{cancels} cancels for each layout, each at a moment drawn uniformly from the {WITHIN} "
        f"steps after the first one of a run of {LONG}; seconds on the driver from the request to "
        "stop until denoise raises Cancelled, when every worker has ended its task; "
        f"{SMALL.layers} blocks, {SMALL.heads} heads, {VIDEO.width}x{VIDEO.height}, {VIDEO.frames} "
        "frames, guidance 4, workers behind Ray on this machine with one thread each. The driver "
        "looks every 50 ms, workers stop before their next block, so that what is left of a block "
        f"(block_s: a median step by {SMALL.layers} blocks) is part of the time. After each cancel "
        f"a run of {SHORT} steps on the same workers is compared with the same run before the "
        "cancels; the load average before and after says how busy this was"
    )
    print(record("cancel", method=method, figures={"layouts": figures}).read_text(encoding="utf-8"))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
