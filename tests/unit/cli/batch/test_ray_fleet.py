"""Batches on several actors in this process, with kills anywhere and computing replaced by text."""

from __future__ import annotations

import errno
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from wanstream.batch.errors import (
    UnsuitableError,
)
from wanstream.batch.journal.entry import State
from wanstream.batch.output_store import OutputStore
from wanstream.batch.rows.rows import BatchJob, Row
from wanstream.batch.running import failures
from wanstream.batch.running.failures import (
    MAX_LOSSES,
)
from wanstream.batch.running.job_queue import (
    JobQueue,
)
from wanstream.cli.batch import ray_backend
from wanstream.cli.batch.row_service import RowService
from wanstream.cli.options import BatchOptions, LocalOptions
from wanstream.host.embedded.run import History, NodeFailedError, Workflow
from wanstream.tests.faults.replaced import named_models
from wanstream.tests.support.fake_batch import Bench, Killed, Mishaps, rows_of
from wanstream.tests.support.local_actor import LocalActor, local_backend, row_service, rows_ended

T2V = Path(__file__).parents[4] / "workflows" / "api" / "t2v.json"
KINDS = ("actor", "actor while it answers", "driver", "answer")
"""Killed actors, killed drivers, and a lost response."""


def plan(rows: Sequence[Row]) -> list[BatchJob]:
    jobs = []
    for row in rows:
        prompt = json.loads(T2V.read_text(encoding="utf-8"))
        prompt["sampler"]["inputs"]["seed"] = row.position
        jobs.append(BatchJob(prompt=prompt, rows=(row,), saves={row.hash: None}))
    return jobs


def write_row(workflow: Workflow, **_: Any) -> History:
    """Replace `Workflow.run`."""
    folder = workflow.folders.output / "video"
    folder.mkdir(parents=True)
    (folder / "row.txt").write_text(f"row {workflow.verdict.prompt['sampler']['inputs']['seed']}")
    shown = {"images": [{"filename": "row.txt", "subfolder": "video", "type": "output"}]}
    return History(outputs={"save": shown}, results={}, node_errors={})


class UnluckyActor(LocalActor):
    """An actor with mishaps."""

    def __init__(self, make: Callable[[], RowService], rank: int, mishaps: Mishaps) -> None:
        super().__init__(make, rank)
        self._mishaps = mishaps

    def serve(self, method: str, *args: Any) -> Future[Any]:
        what = "" if method == "stop" else self._mishaps.next(*KINDS)
        if what == "actor":
            self.kill()
        if what == "driver":
            raise Killed
        answer = super().serve(method, *args)
        if what == "actor while it answers":
            self.kill()
        return Future() if what == "answer" else answer


class ActorFleet(Bench):
    """A driver restarted at will on one folder, along with its actors."""

    def __init__(
        self, folder: Path, make: Callable[[], Sequence[LocalActor]], options: BatchOptions
    ) -> None:
        super().__init__(folder, rows=100)
        self.planner, self._make, self._options = plan, make, options

    def run(self, *_: Any, **__: Any) -> JobQueue:
        self.servers = [local_backend(actor, self._options) for actor in self._make()]
        with ExitStack() as opened:
            for backend in self.servers:
                opened.enter_context(
                    backend.opened(OutputStore.backend_folder_of(self.folder), lambda _: None)
                )
            return super().run()


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BatchOptions]:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(Workflow, "run", write_row)
    monkeypatch.setattr(ray_backend, "LIMIT_S", 1.0)
    models = named_models(tmp_path / "models", json.loads(T2V.read_text(encoding="utf-8")))
    with rows_ended():
        yield BatchOptions(
            jobs=Path(),
            workflow=Path(),
            output=tmp_path / "out",
            local=LocalOptions(models=models, input=tmp_path),
        )


@pytest.mark.slow  # runs a whole batch, or waits for its servers
@pytest.mark.parametrize("shared", [True, False])
def test_fifty_mishaps_in_a_hundred_rows_on_four_actors_cost_nothing(
    shared: bool, options: BatchOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mishaps = Mishaps(int(shared), 50, 0.2)
    # So many mishaps may hit one row five times while the driver lives, and it would rightly fail.
    monkeypatch.setattr(failures, "MAX_LOSSES", mishaps.left + 1)
    output = (
        OutputStore.backend_folder_of(options.output) if shared else tmp_path / "of another machine"
    )

    def actors() -> list[LocalActor]:
        make = row_service(options, output)
        return [UnluckyActor(make, rank, mishaps) for rank in range(4)]

    fleet = ActorFleet(options.output, actors, options)
    fleet.run_through(mishaps)
    fleet.check(range(1, 101))
    assert not fleet.reporter.failures
    assert set(mishaps.happened) == {*KINDS}
    assert mishaps.left == 0
    assert [path for path in (tmp_path / "temporary").rglob("*") if path.is_file()] == []


Fault = Callable[[Workflow, LocalActor], Exception | None]
"""Return a node's error for a workflow on an actor, or None."""


def full_disk() -> Exception:
    return OSError(errno.ENOSPC, "No space left on device")


def broken_device() -> Exception:
    if not hasattr(torch, "AcceleratorError"):
        pytest.skip("torch before 2.8 has no class for errors of a device")
    return torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def faulty_fleet(
    options: BatchOptions, folder: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> ActorFleet:
    """Return a fleet with three actors on separate machines and 40 rows, some with faults."""
    actors: list[LocalActor] = []

    def run(workflow: Workflow, **given: Any) -> History:
        (actor,) = [actor for actor in actors if actor.service._host is workflow.host]
        error = fault(workflow, actor)
        if error is not None:
            raise NodeFailedError("save", "WanStreamSaveVideo", error) from error
        time.sleep(0.02)
        return write_row(workflow, **given)

    def make() -> list[LocalActor]:
        actors[:] = [
            LocalActor(row_service(options, folder / "of another machine"), rank)
            for rank in range(3)
        ]
        return actors

    monkeypatch.setattr(Workflow, "run", run)
    fleet = ActorFleet(options.output, make, options)
    fleet.rows = rows_of(40)
    return fleet


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            full_disk,
            r"actor 0: its disk is full: on .*bytes are free.*No space left on device; it gets no "
            r"more rows",
        ),
        (
            broken_device,
            r"actor 0: its device has failed 6 times in a row.*illegal memory.*; it gets no more "
            r"rows",
        ),
    ],
)
def test_an_actor_without_a_disk_or_a_device_costs_no_row(
    options: BatchOptions,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Callable[[], Exception],
    reason: str,
) -> None:
    raised = error()
    fleet = faulty_fleet(
        options, tmp_path, monkeypatch, lambda _, actor: None if actor.rank else raised
    )
    fleet.run()
    fleet.check(range(1, 41))
    assert [told for told in fleet.reporter.told if told.startswith("failed")] == []
    assert len([told for told in fleet.reporter.told if re.fullmatch(reason, told)]) == 1


def test_the_batch_ends_when_the_disks_of_all_actors_are_full(
    options: BatchOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = faulty_fleet(options, tmp_path, monkeypatch, lambda *_: full_disk())
    with pytest.raises(UnsuitableError, match="its disk is full"):
        fleet.run()
    assert len([told for told in fleet.reporter.told if told.endswith("it gets no more rows")]) == 2
    assert State.failed not in fleet.states()


def test_a_row_that_breaks_every_device_fails_and_the_others_are_done(
    options: BatchOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised = broken_device()

    def fault(workflow: Workflow, actor: LocalActor) -> Exception | None:
        return raised if workflow.verdict.prompt["sampler"]["inputs"]["seed"] == 4 else None

    fleet = faulty_fleet(options, tmp_path, monkeypatch, fault)
    fleet.run()
    fleet.check(number for number in range(1, 41) if number != 4)
    (failed,) = fleet.reporter.failures
    assert failed.startswith(
        f"failed 4: lost {MAX_LOSSES} times while running: node save (WanStreamSaveVideo): Acc"
    )
    assert any(
        "has lost a row: node save (WanStreamSaveVideo): Acc" in told
        for told in fleet.reporter.told
    )
