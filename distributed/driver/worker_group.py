"""Worker group: assigns tasks, polls their events, explains their failures, and repairs the group after a loss."""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial

from ...offload import GatherBrokenError
from ...sampling import DenoiseRequest, SamplingCancelled, SmallerPolicyError
from ...schema import ExpertsRef, Mesh, OffloadPolicy, PathMap
from ..messages import RunTask, StepReport, TaskResult, WorkerFacts
from ..transport.pool import Pool, WorkerHandle, WorkerLostError
from ..transport.threads import run_in_thread
from ..worker.rendezvous import PeerLostError, WorkerTimeoutError
from .heartbeat import Heartbeat, silence_limit
from .rendezvous import ANSWER_S, Rendezvous
from .results import TaskLog, TaskRecord, shifted
from .schedule import Assignment, GroupId
from .stage_run import GroupEvent, JobEnded, RepairEnded, StepTaken


class TaskOutcome(IntEnum):
    """Outcome of a task, or of one worker's part. A lower number explains higher ones in the same group."""

    PROCESS_ENDED = 0
    FAILED = 1
    """The task raises the same error on any worker."""
    SMALLER_POLICY = 2
    """The group can continue with a policy that needs less memory."""
    PEER_LOST = 3
    """The connection between workers was lost, or a worker does not respond."""
    KILLED = 4
    """The driver ended the process because it did not stop in time."""
    STOPPED = 5
    """The driver stopped the workers on request."""
    FINISHED = 6

    @property
    def is_loss(self) -> bool:
        return self in (TaskOutcome.PROCESS_ENDED, TaskOutcome.PEER_LOST, TaskOutcome.KILLED)


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskEnd:
    """End of a task: its outcome, and the results or the error of its workers."""

    outcome: TaskOutcome
    results: Mapping[int, TaskResult]
    """Results of the workers that finished, by their place in the group."""
    error: BaseException | None = None
    """Error that explains the outcome; None after FINISHED."""
    place: int = 0
    """Place of the worker that raised `error`."""


def classify_failure(
    outcomes: Mapping[int, TaskResult | BaseException], *, killed: Collection[int], stopped: bool
) -> TaskEnd:
    """Return the end of a task from the result or error of each place of its group.

    Args:
        killed: places whose processes the driver ended.
        stopped: the driver stopped the workers on request. Any error then counts as STOPPED.
    """
    results = {place: each for place, each in outcomes.items() if isinstance(each, TaskResult)}
    errors = {place: each for place, each in outcomes.items() if isinstance(each, BaseException)}
    if not errors:
        return TaskEnd(outcome=TaskOutcome.FINISHED, results=results)
    causes = {place: _outcome(error, was_killed=place in killed) for place, error in errors.items()}

    def rank(place: int) -> tuple[bool, int, int]:
        # After a stop, a SamplingCancelled goes first: it has the step and block.
        return not (stopped and causes[place] is TaskOutcome.STOPPED), causes[place], place

    place = min(causes, key=rank)
    outcome = TaskOutcome.STOPPED if stopped else causes[place]
    return TaskEnd(outcome=outcome, results=results, error=errors[place], place=place)


def _outcome(error: BaseException, *, was_killed: bool) -> TaskOutcome:
    if isinstance(error, WorkerLostError):
        return TaskOutcome.KILLED if was_killed else TaskOutcome.PROCESS_ENDED
    if isinstance(error, SamplingCancelled):
        return TaskOutcome.STOPPED
    if isinstance(error, SmallerPolicyError):
        return TaskOutcome.SMALLER_POLICY
    is_peer = isinstance(error, PeerLostError | WorkerTimeoutError | GatherBrokenError)
    return TaskOutcome.PEER_LOST if is_peer else TaskOutcome.FAILED


HUNG_GRACE_S = 5.0
"""Longest time that workers get to end a task after a peer waited for them in vain."""
KILL_S = 30.0
"""Longest wait for the end of a killed process."""


class WorkerFailedError(ValueError):
    """A task failed on a worker. The message has the worker, its machine and its error, which is the `__cause__`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Work:
    """Inputs of one run, for all groups."""

    requests: Sequence[DenoiseRequest]
    """Request of each item."""
    experts: ExpertsRef
    paths: tuple[PathMap, ...]
    """Maps from paths of the driver's machine to paths of workers' machines."""
    policy: OffloadPolicy
    log: TaskLog


class WorkerGroup:
    """Workers with the same data and stage coordinates. The state of a job is the last report of the group's leader.

    `connect` and `disable` may be called from any thread, all other methods from the thread of the run.

    Args:
        group: data and stage coordinates.
        ranks: ranks of the workers in `pool`, the leader's first.
        layout: mesh of these workers alone; its data and stage degrees are 1.
        timeout_s: how long workers wait for each other.
    """

    def __init__(
        self, group: GroupId, pool: Pool, ranks: Sequence[int], layout: Mesh, rendezvous: Rendezvous, timeout_s: float
    ) -> None:
        self.group, self.ranks = group, tuple(ranks)
        self.facts: tuple[WorkerFacts, ...] = ()
        """Facts of the workers at the last rendezvous, the leader's first."""
        self._pool, self._layout, self._rendezvous, self._timeout_s = pool, layout, rendezvous, timeout_s
        self._repair_lock = threading.Lock()
        self.is_joined = False
        """True if the workers can compute another task without a new rendezvous."""
        self._is_disabled = False
        self._generation = 0
        self._leaving: Sequence[Future[None]] = ()
        self._repairing: Future[None] | None = None
        self._work: Work | None = None
        self._policy: OffloadPolicy | None = None
        self._task: _Task | None = None

    def connect(self, paths: Sequence[str]) -> tuple[WorkerFacts, ...]:
        """Replace lost workers and join all of them. Blocks. Returns their facts, with those of `paths` they lack.

        Raises WorkerLostError if a worker is lost during the rendezvous.
        """
        with self._repair_lock:
            self.is_joined = self.is_joined and self._are_joined()
        self._repair()
        self.facts = tuple(self._rendezvous.facts(self.ranks, paths))
        return self.facts

    def assign(self, work: Work) -> None:
        """Compute jobs of this run from now on."""
        self._work, self._policy = work, work.policy
        # A repair of a former run may still be in progress, and a second Ctrl-C may have interrupted the wait for its
        # last task. Their ends are not events of this run.
        self._repairing = self._task = None

    def start(self, assignment: Assignment, state: StepReport | None, wake: threading.Event) -> None:
        """See `StageGroup.start`."""
        assert self._task is None, f"group {tuple(self.group)} has not finished its last task"
        assert self._work is not None, "`assign` was not called"
        assert self._policy is not None
        work = self._work
        task = RunTask(
            run_id=uuid.uuid4().hex,
            experts=work.experts,
            paths=work.paths,
            request=work.requests[assignment.item],
            policy=self._policy,
            resume=None if state is None else state.state,
            until=assignment.steps.stop,
            generation=self._generation,
        )
        record = work.log.add_task(assignment, self.ranks)
        self._task = _Task([self._pool.workers[rank] for rank in self.ranks], task, record, self._timeout_s, wake)

    def poll(self) -> list[GroupEvent[StepReport]]:
        """See `StageGroup.poll`."""
        events: list[GroupEvent[StepReport]] = []
        if self._repairing is not None and self._repairing.done():
            events.append(RepairEnded(group=self.group, error=self._repairing.exception()))
            self._repairing = None
        if (task := self._task) is None:
            return events
        assert self._work is not None
        for place, report in task.poll():
            task.record.steps[place].append(report.record)
            if place == 0:
                events.append(self._step_taken(task.record, report))
        if task.end is not None:
            events.append(self._job_ended(task, task.end))
        return events

    def stop(self) -> None:
        """See `StageGroup.stop`. Workers stop before their next block."""
        if self._task is not None:
            self._task.stop()

    def repair(self, wake: threading.Event) -> None:
        """See `StageGroup.repair`."""
        self._repairing = run_in_thread("wanstream-repair", self._repair)
        self._repairing.add_done_callback(lambda _: wake.set())

    def disable(self) -> None:
        """Make all later repairs do nothing. Blocks until a repair in progress has ended."""
        with self._repair_lock:
            self._is_disabled = True

    def _repair(self) -> None:
        """Replace lost workers and join all of them, unless they are joined."""
        with self._repair_lock:
            if self.is_joined or self._is_disabled:
                return
            # A worker that leaves late would leave the new rendezvous.
            wait(self._leaving, timeout=ANSWER_S)
            self._generation = self._rendezvous.join(self.ranks, self._layout)
            self.facts = tuple(self._rendezvous.facts(self.ranks, ()))
            self.is_joined = True

    def _are_joined(self) -> bool:
        """Return True if all workers are in this group's last rendezvous; another driver may have joined them since."""
        try:
            facts = self._rendezvous.facts(self.ranks, ())
        except WorkerLostError:
            return False
        return all(each.generation == self._generation for each in facts)

    def _step_taken(self, record: TaskRecord, report: StepReport) -> StepTaken[StepReport]:
        assert report.state is not None, "the leader of a group reports the state after every step"
        return StepTaken(
            group=self.group,
            item=record.assignment.item,
            next_step=report.state.next_step,
            state=replace(report, record=shifted(report.record, record.start_s)),
        )

    def _job_ended(self, task: _Task, end: TaskEnd) -> JobEnded:
        assert self._work is not None
        self._task, self._leaving, self.is_joined = None, task.leaving, task.is_joined
        # Latents are returned with the steps. Kept here, those of many videos would fill the RAM.
        task.record.results = {place: replace(each, latents=None) for place, each in end.results.items()}
        item, error = task.record.assignment.item, end.error
        if error is None or end.outcome is TaskOutcome.STOPPED:
            return JobEnded(group=self.group, item=item, error=error)
        worker = self._describe(end.place)
        if end.outcome is TaskOutcome.FAILED:
            failure = WorkerFailedError(f"{worker} failed: {error}")
            failure.__cause__ = error
            return JobEnded(group=self.group, item=item, error=failure)
        if isinstance(error, SmallerPolicyError):
            self._policy = error.policy
        reason = str(error).splitlines()[0]
        self._work.log.add_change(f"{worker}: {reason}; its video goes on from step {task.record.next_step}")
        return JobEnded(
            group=self.group, item=item, error=error, can_resume=True, counts_as_failure=end.outcome.is_loss
        )

    def _describe(self, place: int) -> str:
        """Return for example "worker 2 (node-b, cuda:0)"."""
        rank = self.ranks[place]
        if not self.facts:
            return f"worker {rank}"
        return f"worker {rank} ({self.facts[place].node}, {self.facts[place].device})"


class _Task:
    """Task that all workers of a group compute; sent when it is created.

    Threads of the pool only put messages into the inbox. All state changes in `poll` and `stop`, on the thread of the
    run, so that no lock is needed and no code of the caller runs on a thread of the pool.
    """

    def __init__(
        self,
        workers: Sequence[WorkerHandle],
        task: RunTask,
        record: TaskRecord,
        timeout_s: float,
        wake: threading.Event,
    ) -> None:
        self.record = record
        self.end: TaskEnd | None = None
        """Set when no worker computes the task any more."""
        self.leaving: Sequence[Future[None]] = ()
        """Requests to leave the rendezvous; they must be done before the next one."""
        self.is_joined = False
        """True if the workers can compute another task without a new rendezvous; set with `end`."""
        self._workers, self._run_id, self._timeout_s = workers, task.run_id, timeout_s
        self._grace_s = min(HUNG_GRACE_S, timeout_s)
        self._outcomes: dict[int, TaskResult | BaseException] = {}
        self._killed: set[int] = set()
        self._is_ending = self._is_stopped = False
        self._deadline_s = 0.0
        self._silence: WorkerTimeoutError | None = None
        self._heartbeat = Heartbeat(workers, timeout_s)
        self._slowest_s = 0.0
        self._wake = wake
        # One inbox per task: a worker that was given up may still send messages, which must not reach the next task.
        self._inbox: queue.SimpleQueue[tuple[int, StepReport | Future[TaskResult]]] = queue.SimpleQueue()
        for place, worker in enumerate(workers):
            worker.run(task, partial(self._put, place)).add_done_callback(partial(self._put, place))

    def poll(self) -> list[tuple[int, StepReport]]:
        """Return new reports with their place in the group, update `end`, and end the task if workers are hung."""
        reports: list[tuple[int, StepReport]] = []
        while self.end is None:
            try:
                place, message = self._inbox.get_nowait()
            except queue.Empty:
                self._check_time()
                break
            self._heartbeat.record_sign()
            if isinstance(message, StepReport):
                self._slowest_s = max(self._slowest_s, message.record.wall_s)
                reports.append((place, message))
            else:
                self._take_end(place, message)
        return reports

    def stop(self) -> None:
        """Make all workers stop before their next block."""
        self._is_stopped = True
        if not self._is_ending:
            self._end_within(self._timeout_s)

    def _put(self, place: int, message: StepReport | Future[TaskResult]) -> None:
        self._inbox.put((place, message))
        self._wake.set()

    def _take_end(self, place: int, ended: Future[TaskResult]) -> None:
        error = ended.exception()
        self._outcomes[place] = ended.result() if error is None else error
        if len(self._outcomes) == len(self._workers):
            self._finish()
        elif error is not None:
            if not isinstance(error, SamplingCancelled):
                self._leave()
            self._end_within(self._grace_s if isinstance(error, WorkerTimeoutError) else self._timeout_s)

    def _check_time(self) -> None:
        """End the task if its workers are silent for too long; kill workers that do not end by the deadline."""
        if self._is_ending:
            if time.monotonic() > self._deadline_s:
                self._kill_pending()
            return
        self._heartbeat.poll()
        limit = silence_limit(self._timeout_s, begun=self._heartbeat.begun, slowest_s=self._slowest_s)
        if self._heartbeat.silence_s > limit:
            ranks = ", ".join(str(worker.rank) for worker in self._workers)
            self._silence = WorkerTimeoutError(f"no sign of life from worker {ranks} for {limit:g} s")
            self._leave()
            self._end_within(self._grace_s)

    @property
    def _pending(self) -> list[int]:
        return [place for place in range(len(self._workers)) if place not in self._outcomes]

    def _end_within(self, seconds: float) -> None:
        """Stop the workers that still compute, and set the deadline after which they are killed."""
        self._deadline_s = time.monotonic() + seconds
        if self._is_ending:
            return
        self._is_ending = True
        for place in self._pending:
            self._workers[place].call("stop", self._run_id)

    def _leave(self) -> None:
        """Make all workers leave the rendezvous, so that none of them waits for a peer."""
        self.leaving = self.leaving or [worker.call("leave") for worker in self._workers]

    def _kill_pending(self) -> None:
        """Kill workers that have not ended; give up those that were killed `KILL_S` ago."""
        for place in self._pending:
            worker = self._workers[place]
            if place in self._killed:
                message = f"worker {worker.rank} was killed, but its end was not reported within {KILL_S:g} s"
                self._outcomes[place] = WorkerLostError(message, worker.rank)
                continue
            self._killed.add(place)
            worker.kill()
        self._deadline_s = time.monotonic() + KILL_S
        if not self._pending:
            self._finish()

    def _finish(self) -> None:
        end = classify_failure(self._outcomes, killed=self._killed, stopped=self._is_stopped)
        is_explained = end.outcome in (TaskOutcome.FAILED, TaskOutcome.SMALLER_POLICY)
        if self._silence is not None and not self._is_stopped and not is_explained:
            # Workers that react to the stop after all raise SamplingCancelled, which would pass for a stop by the user.
            end = replace(end, outcome=TaskOutcome.PEER_LOST, error=self._silence)
        # After any other end, the workers of a group may stand at different points of the run.
        is_alike = all(isinstance(each, TaskResult | SamplingCancelled) for each in self._outcomes.values())
        self.is_joined = not self.leaving and is_alike
        self.end = end
