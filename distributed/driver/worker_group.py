"""A group of workers, which computes stages of videos; see `StageGroup`."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from functools import partial

from ...sampling import DenoiseRequest
from ...schema import ExpertsRef, Mesh, OffloadPolicy, PathMap
from ..messages import RunTask, StepReport, WorkerFacts
from ..transport.pool import Pool, WorkerLostError
from .rendezvous import ANSWER_S, Rendezvous
from .results import TaskLog, TaskRecord, moved
from .schedule import Assignment, GroupId
from .stage_run import StageDropped, StageFailed, StageFinished, StageStepped, Tell
from .task_run import TaskEnd, TaskRun, TaskVerdict


class WorkerFailedError(ValueError):
    """A task failed on a worker; says which one, on which machine, and what it raised, which is the cause."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Work:
    """What the groups of one run compute."""

    requests: Sequence[DenoiseRequest]
    """Of each item."""
    experts: ExpertsRef
    paths: tuple[PathMap, ...]
    """Where their files lie on the machines of workers."""
    policy: OffloadPolicy
    notes: TaskLog


class WorkerGroup:
    """The workers of one data and one stage coordinate. What it is handed, and hands on, is what its leader told last.

    Args:
        place: the two coordinates.
        ranks: of the workers in `pool`; the first one leads.
        layout: of these workers: data and stage are 1.
    """

    def __init__(
        self, place: GroupId, pool: Pool, ranks: Sequence[int], layout: Mesh, rendezvous: Rendezvous, timeout_s: float
    ) -> None:
        self.place, self.ranks = place, tuple(ranks)
        self.facts: tuple[WorkerFacts, ...] = ()
        """Of the workers that met last, by place."""
        self._pool, self._layout, self._rendezvous, self._timeout_s = pool, layout, rendezvous, timeout_s
        self._mending = threading.Lock()
        self._together = self._retired = False
        self._generation = 0
        self._work: Work | None = None
        self._policy: OffloadPolicy | None = None
        self._task: TaskRun | None = None

    def take_up(self, work: Work) -> None:
        """Compute jobs of another run from now on."""
        self._work, self._policy = work, work.policy

    def gather(self, paths: Sequence[str]) -> tuple[WorkerFacts, ...]:
        """Make it usable whatever happened since its last run; what its workers are, and which `paths` they miss.

        Blocks. Raises WorkerLostError where workers are lost on the way.
        """
        with self._mending:
            self._together = self._together and self._are_together()
        self.mend()
        self.facts = tuple(self._rendezvous.facts(self.ranks, paths))
        return self.facts

    def start(self, given: Assignment, state: StepReport | None, tell: Tell[StepReport]) -> None:
        """See `StageGroup.start`."""
        assert self._work is not None, "no run was taken up"
        assert self._policy is not None
        work, run_id = self._work, uuid.uuid4().hex
        tasks = [
            RunTask(
                run_id=run_id,
                experts=work.experts,
                paths=work.paths,
                request=work.requests[given.job.item],
                policy=self._policy,
                resume=None if state is None else state.state,
                until=given.steps.stop,
                generation=self._generation,
            )
            for _ in self.ranks
        ]
        notes = work.notes.sent(given, self.ranks)
        self._task = TaskRun(
            [self._pool.workers[rank] for rank in self.ranks],
            tasks,
            timeout_s=self._timeout_s,
            on_told=partial(self._take_told, notes, tell),
            on_over=partial(self._take_over, notes, tell),
        )
        self._task.begin()

    def stop(self) -> None:
        """See `StageGroup.stop`: before the next block."""
        if self._task is not None:
            self._task.stop()

    def look(self) -> None:
        """See `StageGroup.look`."""
        if self._task is not None:
            self._task.look()

    def mend(self) -> None:
        """See `StageGroup.mend`: replaces who is gone, and lets all meet. Does nothing for workers that are
        together.
        """
        with self._mending:
            if not self._together and not self._retired:
                if self._task is not None:
                    wait(self._task.leaving, timeout=ANSWER_S)
                self._generation = self._rendezvous.meet(self.ranks, self._layout)
                self.facts = tuple(self._rendezvous.facts(self.ranks, ()))
                self._together = True

    def retire(self) -> None:
        """Mend nothing any more; waits for what is being mended now."""
        with self._mending:
            self._retired = True

    def _are_together(self) -> bool:
        """Whether all of them still are in the rendezvous that they had; others may have asked them to leave it."""
        try:
            facts = self._rendezvous.facts(self.ranks, ())
        except WorkerLostError:
            return False
        return all(each.generation == self._generation for each in facts)

    def _take_told(self, notes: TaskRecord, tell: Tell[StepReport], place: int, told: StepReport) -> None:
        assert self._work is not None
        self._work.notes.told(notes, place, told)
        if place > 0:
            return
        assert told.state is not None, "the leader of a group tells the state of every step"
        in_run = replace(told, record=moved(told.record, notes.start_s))
        tell(StageStepped(group=self.place, job=notes.job, next_step=told.state.next_step, state=in_run))

    def _take_over(self, notes: TaskRecord, tell: Tell[StepReport], end: TaskEnd) -> None:
        assert self._work is not None
        assert self._task is not None
        self._work.notes.ended(notes, end)
        self._together = self._task.together
        if end.verdict is TaskVerdict.ENDED:
            tell(StageFinished(group=self.place))
            return
        assert end.error is not None
        if end.verdict is TaskVerdict.STOPPED:
            tell(StageFailed(group=self.place, error=end.error))
        elif end.verdict is TaskVerdict.FAILED:
            tell(StageFailed(group=self.place, error=self._failure(end)))
        else:
            tell(self._dropped(notes, end))

    def _dropped(self, notes: TaskRecord, end: TaskEnd) -> StageDropped:
        """The group goes on from the last state, after a loss or in less memory."""
        assert self._work is not None
        assert isinstance(end.error, Exception)
        item, named = notes.job.item, self._named(end.place)
        is_loss = end.verdict is TaskVerdict.LOST
        if not is_loss:
            self._policy = end.policy
        said = str(end.error).splitlines()[0]
        self._work.notes.changed(item, f"{named}: {said}; its video goes on from step {notes.next_step}")
        return StageDropped(group=self.place, error=end.error, counts=is_loss)

    def _failure(self, end: TaskEnd) -> WorkerFailedError:
        error = WorkerFailedError(f"{self._named(end.place)} failed: {end.error}")
        error.__cause__ = end.error
        return error

    def _named(self, place: int) -> str:
        """ "worker 2 (node-b, cuda:0)"."""
        rank = self.ranks[place]
        if not self.facts:
            return f"worker {rank}"
        return f"worker {rank} ({self.facts[place].node}, {self.facts[place].device})"
