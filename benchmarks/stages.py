"""Makespan of two pipelined workers for several videos: predicted from step times, and measured.

python benchmarks/stages.py [videos]

The workers are processes behind Ray on this machine with one thread and one expert each. A
calibration queue measures a video's time in each stage while the other stage computes too. These
two times predict the measured queue: the first video passes both stages, each later one takes the
slower stage's time. The machine's load may change, so each measured queue runs between two
calibration queues and is predicted from the mean of both.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from record import record

from wanstream.distributed.driver.driver import Driver
from wanstream.distributed.driver.results import DistributedResult
from wanstream.distributed.ray.pool import RayPool
from wanstream.sampling.inputs import DenoiseRequest
from wanstream.sampling.steps import seeded_noise
from wanstream.schema import Mesh, OffloadPolicy
from wanstream.schema.records import Timeline
from wanstream.schema.refs import ExpertsRef, WorkersRef
from wanstream.testing.experts import save_expert_folder
from wanstream.testing.weights import TinyShape, make_expert

STEPS, SWITCH = 6, 3
"""Both stages have as many steps."""
CALIBRATED = 5
"""Videos in a calibration queue. The first and the last one are excluded, as the other stage is
idle then."""
RUNS = 4
LATENT = (16, 3, 20, 20)
SHAPE = TinyShape(heads=4, ffn_dim=2048)
POLICY = OffloadPolicy.resident()


def make_experts(folder: Path) -> ExpertsRef:
    for seed, name in enumerate(("high", "low"), 1):
        (folder / name).mkdir()
        save_expert_folder(make_expert(SHAPE, seed=seed), folder / name, dtype=torch.float32)
    return ExpertsRef(high_noise=folder / "high", low_noise=folder / "low", compute_dtype="float32")


def queue_of(videos: int) -> DenoiseRequest:
    texts = torch.Generator().manual_seed(0)
    positive, negative = (torch.randn(1, 32, 4096, generator=texts) for _ in range(2))
    return DenoiseRequest(
        noise=seeded_noise((videos, *LATENT), 0),
        positive=positive,
        negative=negative,
        steps=STEPS,
        switch_step=SWITCH,
        flow_shift=5.0,
        guidance=(4.0, 3.0),
    )


def calibrate(driver: Driver, experts: ExpertsRef) -> list[float]:
    """Return a video's median seconds by stage while both stages compute."""
    timelines = driver.denoise(experts, queue_of(CALIBRATED), POLICY).timelines
    return [
        statistics.median(seconds_of_videos(each)[1:-1]) for _, each in sorted(timelines.items())
    ]


def seconds_of_videos(timeline: Timeline) -> list[float]:
    """Return the seconds by video in the stage of a worker that computes them one by one."""
    seconds = [step.wall_s for step in timeline.steps]
    return [sum(seconds[first : first + SWITCH]) for first in range(0, len(seconds), SWITCH)]


def queue_figures(
    before: list[float], result: DistributedResult, after: list[float]
) -> dict[str, Any]:
    """Return the figures for one measured queue and the prediction."""
    seconds = [(one + other) / 2 for one, other in zip(before, after, strict=True)]
    videos = len(result.latents)
    measured = result.wall_s
    # The first video takes both stages. Each further video adds the slower stage.
    predicted = sum(seconds) + (videos - 1) * max(seconds)
    experts = [[step.expert for step in result.timelines[rank].steps] for rank in range(2)]
    return {
        "stage_s": [round(each, 3) for each in seconds],
        "predicted_s": round(predicted, 2),
        "measured_s": round(measured, 2),
        "measured_to_predicted": round(measured / predicted, 3),
        "one_after_the_other_s": round(videos * sum(seconds), 2),
        "expert_switches": sum(one != other for names in experts for one, other in pairwise(names)),
        "experts": [sorted(set(names)) for names in experts],
    }


def measure(driver: Driver, experts: ExpertsRef, videos: int) -> list[dict[str, Any]]:
    driver.denoise(experts, queue_of(1), POLICY)  # opens the experts
    before = calibrate(driver, experts)
    runs = []
    for _ in range(RUNS):
        result = driver.denoise(experts, queue_of(videos), POLICY)
        after = calibrate(driver, experts)
        runs.append(queue_figures(before, result, after))
        # One calibration serves the queue before and the queue behind it.
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
        f"{videos} videos of {STEPS} steps ({SWITCH} high-noise) over two workers behind Ray, one "
        f"thread and one expert each, all blocks resident; latents {list(LATENT)}, {SHAPE.heads} "
        f"heads, {SHAPE.layers} blocks, fp32. {RUNS} times, each between two queues of "
        f"{CALIBRATED} that give the seconds of a video in each stage (median of those in the "
        "middle, while both stages compute): both stages once and the slower one for every other "
        "video predict the makespan, with the mean of both, and the queue is measured from its "
        "start to its last step"
    )
    print(record("stages", method=method, figures=figures).read_text(encoding="utf-8"))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 8)
