"""Batches on several actors in this process, with kills anywhere and computing replaced by text."""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from wanstream.batch.errors import UnsuitableError
from wanstream.batch.journal.entry import State
from wanstream.batch.output_store import OutputStore
from wanstream.batch.rows.rows import BatchJob, Row
from wanstream.batch.running import failures
from wanstream.batch.running.failures import MAX_LOSSES
from wanstream.batch.running.job_queue import JobQueue
from wanstream.cli.batch import ray_backend
from wanstream.cli.options import BatchOptions
from wanstream.host.embedded.run import History, NodeFailedError, Workflow
from wanstream.tests.support.batch.command import shipped
from wanstream.tests.support.batch.fake_batch import Bench, Killed, Mishaps
from wanstream.tests.support.distributed.local_actor import (
    LocalActor,
    local_backend,
    needs_device_errors,
    row_service,
)

KINDS = ("actor", "actor while it answers", "driver", "answer")
"""Killed actors, killed drivers, and a lost response."""


def seed_of(workflow: Workflow) -> int:
    seed: int = workflow.verdict.prompt["sampler"]["inputs"]["seed"]
    return seed


def write_row(workflow: Workflow, **_: Any) -> History:
    """Replace `Workflow.run`."""
    folder = workflow.folders.output / "video"
    folder.mkdir(parents=True)
    (folder / "row.txt").write_text(f"row {seed_of(workflow)}")
    shown = {"images": [{"filename": "row.txt", "subfolder": "video", "type": "output"}]}
    return History(outputs={"save": shown}, results={}, node_errors={})


class UnluckyActor(LocalActor):
    """An actor with mishaps."""

    mishaps: Mishaps

    def serve(self, method: str, *args: Any) -> Future[Any]:
        what = "" if method == "stop" else self.mishaps.next(*KINDS)
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

    def __init__(self, options: BatchOptions, output: Path, *, actors: int, rows: int) -> None:
        super().__init__(options.output, rows=rows)
        self.planner = self._plan
        self.mishaps = Mishaps(0, 0, 0.0)
        self._options = options
        self._make = row_service(options, output)
        self._count = actors

    def run(self, *_: Any, **__: Any) -> JobQueue:
        actors = [UnluckyActor(self._make, rank) for rank in range(self._count)]
        self.servers = [local_backend(actor, self._options) for actor in actors]
        folder = OutputStore.backend_folder_of(self.folder)
        with ExitStack() as opened:
            for actor, backend in zip(actors, self.servers, strict=True):
                actor.mishaps = self.mishaps
                opened.enter_context(backend.opened(folder, lambda _: None))
            return super().run()

    def _plan(self, rows: Sequence[Row]) -> list[BatchJob]:
        return [
            BatchJob(
                prompt=shipped(sampler={"seed": row.position}), rows=(row,), saves={row.hash: None}
            )
            for row in rows
        ]


@pytest.fixture(autouse=True)
def replaced(options: BatchOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Workflow, "run", write_row)
    monkeypatch.setattr(ray_backend, "LIMIT_S", 1.0)


@pytest.mark.slow  # runs a whole batch, or waits for its servers
@pytest.mark.parametrize("shared", [True, False])
def test_fifty_mishaps_in_a_hundred_rows_cost_nothing(shared, options, tmp_path, monkeypatch):
    own = tmp_path / "of another machine"
    mishaps = Mishaps(int(shared), 50, 0.2)
    # So many mishaps may hit one row five times while the driver lives, and it would rightly fail.
    monkeypatch.setattr(failures, "MAX_LOSSES", mishaps.left + 1)
    output = OutputStore.backend_folder_of(options.output) if shared else own
    fleet = ActorFleet(options, output, actors=4, rows=100)
    fleet.mishaps = mishaps
    fleet.run_through(mishaps)
    fleet.check(range(1, 101))
    assert not fleet.reporter.failures
    assert set(mishaps.happened) == {*KINDS}
    assert mishaps.left == 0
    assert [path for path in (tmp_path / "temporary").rglob("*") if path.is_file()] == []


Fault = Callable[[Workflow], Exception | None]
"""Return a node's error for a workflow, or None."""


@pytest.fixture
def faulty_fleet(
    options: BatchOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Fault], ActorFleet]:
    """Create a fleet with three actors on separate machines and 40 rows, some with faults."""

    def make(fault: Fault) -> ActorFleet:
        fleet = ActorFleet(options, tmp_path / "of another machine", actors=3, rows=40)

        def run(workflow: Workflow, **given: Any) -> History:
            if (error := fault(workflow)) is not None:
                raise NodeFailedError("save", "WanStreamSaveVideo", error) from error
            time.sleep(0.02)
            return write_row(workflow, **given)

        monkeypatch.setattr(Workflow, "run", run)
        return fleet

    return make


def test_batch_ends_when_the_disks_of_all_actors_are_full(faulty_fleet):
    full = OSError(errno.ENOSPC, "No space left on device")
    fleet = faulty_fleet(lambda _: full)
    reason = r"actor \d: its disk is full: on .*bytes are free.*No space left on device"
    with pytest.raises(UnsuitableError, match=reason):
        fleet.run()
    whole = re.compile(rf"{reason}; it gets no more rows")
    assert len([told for told in fleet.reporter.told if whole.fullmatch(told)]) == 2
    assert State.failed not in fleet.states()


@needs_device_errors
def test_row_that_breaks_every_device_fails_alone(faulty_fleet):
    raised = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    fleet = faulty_fleet(lambda workflow: raised if seed_of(workflow) == 4 else None)
    fleet.run()
    fleet.check(number for number in range(1, 41) if number != 4)
    (failed,) = fleet.reporter.failures
    node = "node save (WanStreamSaveVideo): Acc"
    assert failed.startswith(f"failed 4: lost {MAX_LOSSES} times while running: {node}")
    assert any(f"has lost a row: {node}" in told for told in fleet.reporter.told)
