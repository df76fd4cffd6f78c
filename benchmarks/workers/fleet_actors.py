"""Rows per minute in `wanstream batch --ray` with one and two actors, and idle time between rows.

python benchmarks/workers/fleet_actors.py [real queue]

`real` runs Ray actors on this machine, on the small test model. In `queue`, an actor in this
process waits instead of computing, and saves a 832x480x81 video. Queue, journal, transfer and file
check are real.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from wanstream.batch.journal.journal import Journal
from wanstream.batch.output_store import OutputStore
from wanstream.batch.progress import BatchBar
from wanstream.batch.resume import resume
from wanstream.batch.rows.rows import BatchJob, Row
from wanstream.batch.running.fleet import run_all
from wanstream.batch.running.job_queue import (
    JobQueue,
)
from wanstream.batch.running.runner import (
    Runner,
)
from wanstream.batch.running.stop_request import StopRequest
from wanstream.benchmarks.record import record
from wanstream.cli import main as command_line
from wanstream.cli.batch.ray_backend import RayBackend
from wanstream.cli.options import BatchOptions, LocalOptions
from wanstream.host.embedded.run import History, Workflow
from wanstream.nodes.runs.video_file import write_video
from wanstream.testing import write_tiny_model
from wanstream.tests.faults.campaign import small_workflow
from wanstream.tests.faults.replaced import named_models
from wanstream.tests.support.distributed.local_actor import LocalActor, local_backend, row_service

REAL_ROWS = 12
REAL_STEPS = 12
REPEATS = 2
WAIT_S = 4.0
QUEUE_ROWS = 6
SIZE = (81, 480, 832)


def run_batch(
    folder: Path, models: Path, workflow: Mapping[str, Any], actors: int
) -> tuple[float, float]:
    """Run a batch on this many actors in this process.

    Return the seconds, and the rows per minute between files.

    The rate leaves out the start of Ray and of the actors, and each actor's first row.
    """
    folder.mkdir()
    rows = "\n".join(json.dumps({"sampler.seed": seed}) for seed in range(REAL_ROWS))
    (folder / "jobs.jsonl").write_text(rows, encoding="utf-8")
    (folder / "workflow.json").write_text(json.dumps(workflow), encoding="utf-8")
    files = [
        str(folder / "jobs.jsonl"),
        "--workflow",
        str(folder / "workflow.json"),
        "--out",
        str(folder / "out"),
    ]
    more = ["--models", str(models), "--ray", "--device", "cpu", "--workers", str(actors)]
    began = time.perf_counter()
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as told:
        code = command_line(["batch", *files, *more])
    seconds = time.perf_counter() - began
    assert code == 0, told.getvalue()[-3000:]
    ends = sorted(path.stat().st_mtime for path in (folder / "out").glob("*.mp4"))
    assert len(ends) == REAL_ROWS
    return seconds, 60 * (REAL_ROWS - actors) / (ends[-1] - ends[actors - 1])


def real(folder: Path) -> dict[str, Any]:
    """Measure one and two actors by turns."""
    workflow = small_workflow()
    workflow["sampler"]["inputs"]["steps"] = REAL_STEPS
    models = write_tiny_model(folder / "models").folder
    found: dict[int, list[tuple[float, float]]] = {1: [], 2: []}
    for repeat in range(REPEATS):
        for count in (1, 2):
            found[count].append(run_batch(folder / f"run{repeat}-{count}", models, workflow, count))
            print(count, found[count][-1], os.getloadavg(), file=sys.stderr, flush=True)
    rates = {count: statistics.median(rate for _, rate in runs) for count, runs in found.items()}
    return {
        "rows": REAL_ROWS,
        "seconds_of_the_command": {
            f"{count} actors": [round(run[0], 1) for run in runs] for count, runs in found.items()
        },
        "rows_per_minute": {
            f"{count} actors": [round(run[1], 1) for run in runs] for count, runs in found.items()
        },
        "two_actors_to_one": round(rates[2] / rates[1], 2),
    }


def queue(folder: Path) -> dict[str, Any]:
    """Measure an actor with one and with two rows at a time, with and without a shared folder."""
    video = folder / "video.mp4"
    frames = torch.rand(
        SIZE[0], SIZE[1] // 16, SIZE[2] // 16, 3, generator=torch.Generator().manual_seed(0)
    )
    large = frames.repeat_interleave(16, dim=1).repeat_interleave(16, dim=2)
    write_video(video, (large * 255).to(torch.uint8), fps=16, crf=20, metadata={})

    def wait(workflow: Workflow, **_: Any) -> History:
        time.sleep(WAIT_S)
        saved = workflow.folders.output / "video"
        saved.mkdir(parents=True)
        shutil.copyfile(video, saved / "video.mp4")
        return History(
            outputs={
                "save": {
                    "images": [{"filename": "video.mp4", "subfolder": "video", "type": "output"}]
                }
            },
            results={},
            node_errors={},
        )

    figures: dict[str, Any] = {"bytes_of_a_video": video.stat().st_size, "seconds_of_a_row": WAIT_S}
    # Only the computing is replaced. All other code is the product's own.
    with mock.patch.object(Workflow, "run", wait):
        for shared in (True, False):
            for window in (1, 2):
                run = folder / f"{shared}-{window}"
                seconds = queue_run(
                    run, window, run / "out" if shared else folder / f"elsewhere-{window}"
                )
                name = f"{'shared folder' if shared else 'pieces'}, window {window}"
                figures[name] = {
                    "seconds": round(seconds, 1),
                    "idle_s_per_row": round(seconds / QUEUE_ROWS - WAIT_S, 2),
                }
                print(name, figures[name], file=sys.stderr, flush=True)
    return figures


def queue_run(folder: Path, window: int, output: Path) -> float:
    """Run rows on an actor in this process.

    Return the seconds from the first post to the last finished file.
    """
    workflow = small_workflow()
    models = named_models(folder / "models", workflow)
    options = BatchOptions(
        jobs=Path(),
        workflow=Path(),
        output=folder / "out",
        local=LocalOptions(models=models, input=folder),
    )
    rows = [
        Row(line=number, position=number, hash=f"hash {number}")
        for number in range(1, QUEUE_ROWS + 1)
    ]

    def plan(rows: Sequence[Row]) -> list[BatchJob]:
        return [BatchJob(prompt=workflow, rows=(row,), saves={row.hash: None}) for row in rows]

    (folder / "out").mkdir()
    store = OutputStore(folder / "out")
    made = store.backend_folder if output == folder / "out" else output
    backend: RayBackend = local_backend(LocalActor(row_service(options, made)), options)
    backend.window = window
    with ExitStack() as opened:
        opened.enter_context(redirect_stderr(StringIO()))
        bar = opened.enter_context(BatchBar(rows=QUEUE_ROWS, ended=0))
        journal = opened.enter_context(Journal(folder / "journal.sqlite", workflow="w"))
        resume(journal, store, rows)
        opened.enter_context(backend.opened(store.backend_folder, lambda _: None))
        jobs = JobQueue(
            journal=journal, planner=plan, reporter=bar, stop=StopRequest(), backends=[backend]
        )
        jobs.enter(rows)
        began = time.perf_counter()
        run_all(
            [Runner(backend=backend, queue=jobs, store=store, sleep=time.sleep)],
            jobs,
            lambda: time.sleep(0.01),
        )
        return time.perf_counter() - began


PARTS: dict[str, Callable[[Path], Any]] = {"queue": queue, "real": real}

METHOD = (
    f"real, measured: {REAL_ROWS} rows of {REAL_STEPS} steps on the small test model, on one and "
    f"on two actors of a Ray on this machine by turns, {REPEATS} times each; rows per minute "
    "between the first file of the last actor and the last file, which leaves out the start of Ray "
    f"and of the actors. queue: an actor in this process that waits {WAIT_S:g} s instead of "
    "computing a row (simulated), and saves a video of 832x480x81; posts, polls, transfer, check "
    f"and journal of {QUEUE_ROWS} rows are real and measured; idle is the time per row beyond the "
    "wait. The load average at the start and at the end shows how busy the machine was"
)


def main(parts: Sequence[str]) -> None:
    figures: dict[str, Any] = {}
    loaded = os.getloadavg()[0]
    for name in parts:
        with tempfile.TemporaryDirectory() as folder:
            figures[name] = PARTS[name](Path(folder))
    figures["load_average"] = [round(loaded, 1), round(os.getloadavg()[0], 1)]
    print(record("fleet-actors", method=METHOD, figures=figures).read_text(encoding="utf-8"))


if __name__ == "__main__":
    main(sys.argv[1:] or [*PARTS])
