"""Bytes between workers and driver, before and after states stayed at the workers.

python benchmarks/workers/driver_bytes.py

Counts pickled reports and tasks in a run of the small test experts: with state and preview in every
report, as in an earlier version, and with the present intervals. Estimates the same for
1280x720x81, where nothing is computed.
"""

from __future__ import annotations

import math
import pickle  # noqa: TID251 - the transports of workers pickle; nothing is read here
import tempfile
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from wanstream.benchmarks.record import record
from wanstream.cli.bench.cases import bench_request, small_experts
from wanstream.distributed.driver.driver import handover_interval_s
from wanstream.distributed.messages import RunTask, StepReport
from wanstream.distributed.worker.worker import Worker
from wanstream.nodes.runs.run_experts import LATENT_PREVIEW_S
from wanstream.sampling.saved_states import STATE_TENSORS
from wanstream.schema import OffloadPolicy
from wanstream.shapes import VideoShape

SMALL = VideoShape(width=64, height=64, frames=9)
STEPS = 8
H100_STEP_S = 33.0
"""Seconds per 1280x720x81 step with guidance on an H100, as simulated in docs/scaling.md."""
RECORD_BYTES = 1000
"""Upper bound for a pickled step record, measured by `count`."""
LATENT_BYTES = 4 * 16 * 21 * 90 * 160
"""Bytes of a 1280x720x81 latent in fp32."""
TEXT_BYTES = 4 * 512 * 4096
"""Bytes of a text embedding in fp32."""


@dataclass(frozen=True, kw_only=True)
class DriverBytes:
    """Bytes that the driver receives per step from all groups, and sends per run to one machine."""

    received_per_step: float
    received_per_s: float
    sent_per_run: int


def estimate(
    *, groups: int, step_s: float, preview: bool, ranks: int = 2, jobs: int = 1
) -> dict[str, DriverBytes]:
    """Return the bytes before and after, for runs with one 1280x720x81 video per group.

    Args:
        preview: the host shows previews.
        ranks: workers per group.
        jobs: tasks per worker in the run: stages, and restarts.
    """
    state = STATE_TENSORS * LATENT_BYTES
    request = LATENT_BYTES + 2 * TEXT_BYTES
    steps = math.ceil(
        handover_interval_s(state, groups) / step_s
    )  # a state is handed over at the end of a step
    shown = (
        LATENT_BYTES * min(1.0, step_s / LATENT_PREVIEW_S) if preview else 0.0
    )  # of the first video
    before = groups * (state + LATENT_BYTES + RECORD_BYTES)
    # Every `steps`-th report has a state, and each report has a record.
    after = groups * (state / steps + RECORD_BYTES) + shown
    return {
        "before": _bytes(before, step_s, request * ranks * jobs * groups),
        "after": _bytes(after, step_s, request * groups),
    }


def _bytes(received: float, step_s: float, sent: int) -> DriverBytes:
    return DriverBytes(
        received_per_step=received, received_per_s=received / step_s, sent_per_run=sent
    )


def count(folder: Path) -> dict[str, Any]:
    """Return the leader's pickled report bytes for each step of the small experts."""
    request = bench_request(SMALL, videos=1, guidance=4.0, in_channels=16).with_steps(STEPS)
    task = RunTask(
        experts=small_experts(folder), request=request, policy=OffloadPolicy.layerwise(1)
    )
    interval_s = handover_interval_s(STATE_TENSORS * request.noise.nbytes, 1)
    found: dict[str, Any] = {"latent": request.noise.nbytes, "request": len(pickle.dumps(request))}
    with closing(Worker("cpu", threads=1)) as worker:
        for name, (handover_s, preview_s) in {
            "before": (0.0, 0.0),
            "after": (interval_s, None),
            "after, with previews": (interval_s, LATENT_PREVIEW_S),
        }.items():
            sizes: list[int] = []

            # The default argument binds this round's list.
            def on_report(report: StepReport, sizes: list[int] = sizes) -> None:
                # Pickled, as on the way to the driver.
                sizes.append(len(pickle.dumps(report)))

            worker.run(replace(task, handover_s=handover_s, preview_s=preview_s), on_report)
            found[name] = {
                "bytes_of_each_step": sizes,
                "bytes_per_step": round(sum(sizes) / len(sizes)),
            }
    found["ratio"] = round(found["before"]["bytes_per_step"] / found["after"]["bytes_per_step"], 1)
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        counted = count(Path(folder))
    estimated = []
    for groups in (1, 8, 64):
        for preview in (False, True):
            found = estimate(groups=groups, step_s=H100_STEP_S, preview=preview)
            ratio = found["before"].received_per_step / found["after"].received_per_step
            each = {
                name: {key: round(value) for key, value in asdict(sums).items()}
                for name, sums in found.items()
            }
            estimated.append(
                {"groups": groups, "preview": preview, **each, "ratio": round(ratio, 1)}
            )
    method = (
        f"counted: pickled reports of the leader in a run of {STEPS} steps of small experts, "
        f"{SMALL.width}x{SMALL.height}, {SMALL.frames} frames, in this process; before: state and "
        "preview in every report. The last report has the state in any case. estimated_720p: bytes "
        "that the driver receives per step of all groups and per second, and sends per run, for "
        f"one video of 1280x720x81 in each group of two workers, {H100_STEP_S:g} s a step "
        "(simulated for an H100), a state of the solver UniPC, two texts of 512 tokens; nothing "
        "was computed for it"
    )
    figures = {"counted": counted, "estimated_720p": estimated}
    print(record("driver-bytes", method=method, figures=figures).read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
