"""Worker group: assigns tasks, polls their events, explains their failures, and repairs the group after a loss."""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from enum import IntEnum
from functools import partial
from typing import NamedTuple

from ...offload import GatherBrokenError
from ...plan import Assignment
from ...sampling import RunState, SamplingCancelled, SmallerPolicyError
from ...telemetry import shift_step
from ..messages import RunTask, StepReport, TaskResult
from ..transport.pool import WorkerLostError
from ..transport.threads import run_in_thread
from ..worker.rendezvous import PeerLostError, WorkerTimeoutError
from .heartbeat import Heartbeat
from .rendezvous import Rendezvous
from .results import TaskLog, TaskRecord
from .stage_run import GroupEnd, GroupEvent, StepTaken


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


class TaskEnd(NamedTuple):
    """End of a task."""

    outcome: TaskOutcome
    error: BaseException | None = None
    """Error that explains the outcome; None after FINISHED."""
    place: int = 0
    """Place of the worker that raised `error`."""


def classify_failure(errors: Mapping[int, BaseException], *, killed: Collection[int], stopped: bool) -> TaskEnd:
    """Return the end of a task from the errors of its workers, by their place in the group; the others finished.

    Args:
        killed: places whose processes the driver ended.
        stopped: the driver stopped the workers on request. Any error then counts as STOPPED.
    """
    if not errors:
        return TaskEnd(TaskOutcome.FINISHED)
    causes = {place: _outcome(error, was_killed=place in killed) for place, error in errors.items()}

    def rank(place: int) -> tuple[bool, int, int]:
        # After a stop, a SamplingCancelled goes first: it has the step and block.
        return not (stopped and causes[place] is TaskOutcome.STOPPED), causes[place], place

    place = min(causes, key=rank)
    return TaskEnd(TaskOutcome.STOPPED if stopped else causes[place], errors[place], place)


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
LAST_STATE_S = 30.0
"""Longest wait for the last state of a leader whose group has to be repaired."""


class WorkerFailedError(ValueError):
    """A task failed on a worker. The message has the worker, its machine and its error, which is the `__cause__`."""


class WorkerGroup:
    """Workers that compute jobs together; implements `StageGroup`.

    Their leader keeps the state of a job, and hands it over at intervals, at the end of the job, and after a failure of
    another worker. So the loss of the leader costs the steps since the last handover, any other loss one step at most.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.rendezvous = rendezvous
        self._tasks: Sequence[RunTask] = ()
        self._log = TaskLog()
        self._repairing: Future[None] | None = None
        self._task: _Task | None = None

    def assign(self, tasks: Sequence[RunTask], log: TaskLog) -> None:
        """Compute jobs of this run from now on, given by the whole task of each item."""
        self._tasks, self._log = tasks, log
        # A repair of a former run may still be in progress, and a second Ctrl-C may have interrupted the wait for its
        # last task. Their ends are not events of this run.
        self._repairing = self._task = None

    def start(self, assignment: Assignment, state: RunState | None, wake: threading.Event) -> None:
        """See `StageGroup.start`."""
        assert self._task is None, "this group has not finished its last task"
        task = replace(
            self._tasks[assignment.item],
            run_id=uuid.uuid4().hex,
            resume=state,
            until=assignment.steps.stop,
            generation=self.rendezvous.generation,
        )
        self._task = _Task(self.rendezvous, task, self._log.add_task(assignment, self.rendezvous.ranks), wake)

    def poll(self) -> list[GroupEvent[RunState]]:
        """See `StageGroup.poll`."""
        events: list[GroupEvent[RunState]] = []
        if self._repairing is not None and self._repairing.done():
            error, self._repairing = self._repairing.exception(), None
            is_loss = isinstance(error, WorkerLostError)
            events.append(GroupEnd(error=error, can_resume=is_loss, counts_as_failure=is_loss))
        if (task := self._task) is not None:
            events.extend(task.poll())
            if task.end is not None:
                self._task = None
                events.append(self._job_end(task.record, *task.end))
        return events

    def stop(self) -> None:
        """See `StageGroup.stop`. Workers stop before their next block; on several machines before their next step."""
        if self._task is not None:
            self._task.stop()

    def repair(self, wake: threading.Event) -> None:
        """See `StageGroup.repair`."""
        self._repairing = run_in_thread("wanstream-repair", self.rendezvous.repair)
        self._repairing.add_done_callback(lambda _: wake.set())

    def _job_end(self, record: TaskRecord, outcome: TaskOutcome, error: BaseException | None, place: int) -> GroupEnd:
        if error is None or outcome is TaskOutcome.STOPPED:
            return GroupEnd(error=error)
        worker = self._describe(place)
        if outcome is TaskOutcome.FAILED:
            failure = WorkerFailedError(f"{worker} failed: {error}")
            failure.__cause__ = error
            return GroupEnd(error=failure)
        if isinstance(error, SmallerPolicyError):
            self._tasks = [replace(task, policy=error.policy) for task in self._tasks]
        # The message of a loss has the worker.
        reason = (str(error) if isinstance(error, WorkerLostError) else f"{worker}: {error}").splitlines()[0]
        self._log.add_change(f"{reason}; its video goes on from step {record.next_step}")
        return GroupEnd(error=error, can_resume=True, counts_as_failure=outcome.is_loss)

    def _describe(self, place: int) -> str:
        """Return for example "worker 2 (node-b, cuda:0)"."""
        rank, facts = self.rendezvous.ranks[place], self.rendezvous.facts
        return f"worker {rank} ({facts[place].node}, {facts[place].device})" if facts else f"worker {rank}"


class _Task:
    """Task that all workers of a group compute; sent when it is created.

    Threads of the pool only put messages into the inbox. All state changes in `poll` and `stop`, on the thread of the
    run, so that no lock is needed and no code of the caller runs on a thread of the pool.
    """

    def __init__(self, rendezvous: Rendezvous, task: RunTask, record: TaskRecord, wake: threading.Event) -> None:
        self.record = record
        self.end: TaskEnd | None = None
        """Set when no worker computes the task any more, and the leader's last state has arrived if it is needed."""
        self._before_state: tuple[TaskEnd, Future[RunState | None]] | None = None
        """End of the task while the leader's last state is awaited."""
        self._rendezvous, self._run_id, self._timeout_s = rendezvous, task.run_id, rendezvous.timeout_s
        self._workers = rendezvous.workers
        self._pending = set(range(len(self._workers)))
        self._errors: dict[int, BaseException] = {}
        self._killed: set[int] = set()
        self._is_stopped = False
        self._deadline_s: float | None = None
        """Time after which pending workers are killed; None while the task is computed."""
        self._silence: WorkerTimeoutError | None = None
        self._heartbeat = Heartbeat(self._workers, self._timeout_s)
        self._wake = wake
        # One inbox per task: a worker that was given up may still send messages, which must not reach the next task.
        self._inbox: queue.SimpleQueue[tuple[int, StepReport | Future[TaskResult]]] = queue.SimpleQueue()
        for place, worker in enumerate(self._workers):
            worker.run(task, partial(self._put, place)).add_done_callback(partial(self._put, place))

    def poll(self) -> list[StepTaken[RunState]]:
        """Return the leader's new steps, update `record` and `end`, and end the task if workers are hung."""
        steps: list[StepTaken[RunState]] = []
        while self.end is None:
            if self._before_state is not None:
                return [*steps, *self._last_state(*self._before_state)]
            try:
                place, message = self._inbox.get_nowait()
            except queue.Empty:
                self._check_time()
                break
            if isinstance(message, Future):
                self._heartbeat.record_sign()
                self._take_end(place, message)
                continue
            self._heartbeat.record_sign(message.record.wall_s)
            self.record.steps[place].append(message.record)
            if place == 0:
                report = replace(message, record=shift_step(message.record, self.record.start_s), state=None)
                steps.append(self._taken(message.record.index + 1, message.state, report))
        return steps

    def _taken(self, next_step: int, state: RunState | None, report: StepReport | None = None) -> StepTaken[RunState]:
        if state is not None:
            self.record.next_step = next_step
        return StepTaken(next_step=next_step, state=state, report=report)

    def _last_state(self, end: TaskEnd, request: Future[RunState | None]) -> list[StepTaken[RunState]]:
        """End the task when the leader has answered, or not in time; return the state if it is a new one."""
        if not request.done() and time.monotonic() < (self._deadline_s or 0.0):
            return []
        self.end = end
        # An error is the leader's loss, which only costs the steps since its last handover.
        state = request.result() if request.done() and request.exception() is None else None
        if state is None or state.next_step <= self.record.next_step:
            return []
        return [self._taken(state.next_step, state)]

    def stop(self) -> None:
        """Make all workers stop before their next block; on several machines before their next step."""
        self._is_stopped = True
        if self._deadline_s is not None:
            return
        if self._rendezvous.spans_machines:
            # Without a deadline: a step may take longer than the timeout. The heartbeat finds workers that hang.
            self._send_stop()
        else:
            self._end_within(self._timeout_s)

    def _put(self, place: int, message: StepReport | Future[TaskResult]) -> None:
        self._inbox.put((place, message))
        self._wake.set()

    def _take_end(self, place: int, ended: Future[TaskResult]) -> None:
        self._pending.discard(place)
        error = ended.exception()
        if error is None:
            self.record.results[place] = ended.result()
        else:
            self._errors[place] = error
        if not self._pending:
            self._finish()
        elif error is not None:
            if not isinstance(error, SamplingCancelled):
                self._rendezvous.leave()
            is_hung = isinstance(error, WorkerTimeoutError)
            self._end_within(min(HUNG_GRACE_S, self._timeout_s) if is_hung else self._timeout_s)

    def _check_time(self) -> None:
        """End the task if its workers are silent for too long; kill workers that do not end by the deadline."""
        if self._deadline_s is not None:
            if time.monotonic() > self._deadline_s:
                self._kill_pending()
        elif self._heartbeat.is_overdue():
            ranks = ", ".join(map(str, self._rendezvous.ranks))
            self._silence = WorkerTimeoutError(f"no sign of life from worker {ranks} for {self._heartbeat.limit_s:g} s")
            self._rendezvous.leave()
            self._end_within(min(HUNG_GRACE_S, self._timeout_s))

    def _end_within(self, seconds: float) -> None:
        """Stop the workers that still compute, and set the deadline after which they are killed."""
        if self._deadline_s is None:
            self._send_stop()
        self._deadline_s = time.monotonic() + seconds

    def _send_stop(self) -> None:
        for place in self._pending:
            self._workers[place].call("stop", self._run_id)

    def _kill_pending(self) -> None:
        """Kill workers that have not ended; give up those that were killed `KILL_S` ago."""
        for place in self._pending & self._killed:
            rank = self._workers[place].rank
            message = f"worker {rank} was killed, but its end was not reported within {KILL_S:g} s"
            self._errors[place] = WorkerLostError(message, rank)
        self._pending -= self._killed
        for place in self._pending:
            self._workers[place].kill()
        self._killed |= self._pending
        self._deadline_s = time.monotonic() + KILL_S
        if not self._pending:
            self._finish()

    def _finish(self) -> None:
        end = classify_failure(self._errors, killed=self._killed, stopped=self._is_stopped)
        is_explained = end.outcome in (TaskOutcome.FAILED, TaskOutcome.SMALLER_POLICY)
        if self._silence is not None and not self._is_stopped and not is_explained:
            # Workers that react to the stop after all raise SamplingCancelled, which would pass for a stop by the user.
            end = end._replace(outcome=TaskOutcome.PEER_LOST, error=self._silence)
        # After any other end, the workers of a group may stand at different points of the run.
        if not all(isinstance(error, SamplingCancelled) for error in self._errors.values()):
            self._rendezvous.is_joined = False
        is_resumed = end.outcome.is_loss or end.outcome is TaskOutcome.SMALLER_POLICY
        if is_resumed and not isinstance(self._errors.get(0), WorkerLostError):
            request = self._workers[0].call("last_state", self._run_id)
            self._before_state, self._deadline_s = (end, request), time.monotonic() + LAST_STATE_S
            request.add_done_callback(lambda _: self._wake.set())
        else:
            self.end = end
