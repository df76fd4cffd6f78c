"""Makespan of a pipeline of two workers for several videos: predicted from its step times, and measured.

python benchmarks/stages.py [videos]

The workers are processes behind Ray on this machine with one thread and one expert each. A calibration queue measures
the time of a video in each stage while the other stage computes too. These two times predict the measured queue: the
first video passes both stages, each later one takes the time of the slower stage. Because the load of the machine may
change, each measured queue runs between two calibration queues and is predicted from the mean of both.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from record import record

from wanstream.distributed.driver.driver import Driver
from wanstream.distributed.driver.results import DistributedResult
from wanstream.distributed.ray.pool import RayPool
from wanstream.sampling import DenoiseRequest, seeded_noise
from wanstream.schema import ExpertsRef, Mesh, OffloadPolicy, Timeline, WorkersRef
from wanstream.testing.experts import save_expert_folder
from wanstream.testing.weights import TinyShape, make_expert

STEPS, SWITCH = 6, 3
CALIBRATED = 5
"""Videos of a calibration queue; the first and the last one are excluded, as the other stage is idle then."""
RUNS = 4
LATENT = (16, 3, 20, 20)
SHAPE = TinyShape(heads=4, ffn_dim=2048)
POLICY = OffloadPolicy.resident()


def make_experts(folder: Path) -> ExpertsRef:
    for seed, name in enumerate(("high", "low"), 1):
        (folder / name).mkdir()
        save_expert_folder(make_expert(SHAPE, seed=seed), folder / name, dtype=torch.float32)
    return ExpertsRef(high_noise=folder / "high", low_noise=folder / "low", compute_dtype="float32")


def queue_of(videos: int) -> list[DenoiseRequest]:
    texts = torch.Generator().manual_seed(0)
    positive, negative = (torch.randn(1, 32, 4096, generator=texts) for _ in range(2))
    return [
        DenoiseRequest(
            noise=seeded_noise((1, *LATENT), seed),
            positive=positive,
            negative=negative,
            steps=STEPS,
            switch_step=SWITCH,
            flow_shift=5.0,
            guidance=(4.0, 3.0),
        )
        for seed in range(videos)
    ]


def calibrate(driver: Driver, experts: ExpertsRef) -> list[float]:
    """Return the median seconds of a video in each stage while both stages compute."""
    results = driver.queue(experts, queue_of(CALIBRATED), POLICY)
    of_stage: dict[int, list[float]] = {}
    for each in results[1:-1]:
        for rank, timeline in each.timelines.items():
            of_stage.setdefault(rank, []).append(timeline.wall_s)
    return [statistics.median(seconds) for _, seconds in sorted(of_stage.items())]


def experts_of(timelines: list[Timeline]) -> list[str]:
    return sorted({step.expert for timeline in timelines for step in timeline.steps})


def queue_figures(
    before: list[float], results: list[DistributedResult], after: list[float], *, switches: int
) -> dict[str, Any]:
    """Return the figures of one measured queue and its prediction."""
    seconds = [(one + other) / 2 for one, other in zip(before, after, strict=True)]
    predicted = sum(seconds) + (len(results) - 1) * max(seconds)
    measured = max(each.wall_s for each in results)
    return {
        "stage_s": [round(each, 3) for each in seconds],
        "predicted_s": round(predicted, 2),
        "measured_s": round(measured, 2),
        "measured_to_predicted": round(measured / predicted, 3),
        "one_after_the_other_s": round(len(results) * sum(seconds), 2),
        "expert_switches": switches,
        "experts": [experts_of([each.timelines[rank] for each in results]) for rank in range(2)],
    }


def measure(driver: Driver, experts: ExpertsRef, videos: int) -> list[dict[str, Any]]:
    (opened,) = driver.queue(experts, queue_of(1), POLICY)
    switches, before, runs = dict(opened.expert_switches), calibrate(driver, experts), []
    for _ in range(RUNS):
        results = driver.queue(experts, queue_of(videos), POLICY)
        after = calibrate(driver, experts)
        changed = sum(results[-1].expert_switches[rank] - count for rank, count in switches.items())
        runs.append(queue_figures(before, results, after, switches=changed))
        before = after
    return runs


def main(videos: int) -> None:
    mesh = Mesh(stage=2)
    ref = WorkersRef(count=mesh.size, threads=1, timeout_s=120.0)
    with tempfile.TemporaryDirectory() as folder, RayPool(ref, store_bytes=256 << 20) as pool:
        runs = measure(Driver(pool, ref, mesh), make_experts(Path(folder)), videos)
    ratios = [run["measured_to_predicted"] for run in runs]
    spread = {"median": round(statistics.median(ratios), 3), "min": min(ratios), "max": max(ratios)}
    figures = {"videos": videos, "measured_to_predicted": spread, "runs": runs}
    method = (
        f"{videos} videos of {STEPS} steps ({SWITCH} high-noise) over two workers behind Ray, one thread and one "
        f"expert each, all blocks resident; latents {list(LATENT)}, {SHAPE.heads} heads, {SHAPE.layers} blocks, fp32. "
        f"{RUNS} times, each between two queues of {CALIBRATED} that give the seconds of a video in each stage (median "
        "of those in the middle, while both stages compute): both stages once and the slower one for every other video "
        "predict the makespan, with the mean of both, and the queue is measured from its start to its last step"
    )
    print(record("stages", method=method, figures=figures).read_text(encoding="utf-8"))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 8)
