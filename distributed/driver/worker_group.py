"""Worker group: sends tasks, follows messages, explains failures, and is repaired after a loss."""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from enum import IntEnum
from typing import NamedTuple

from ...offload import GatherBrokenError
from ...sampling.steps import RunState, SamplingCancelled, SmallerPolicyError
from ...telemetry import shift_step
from ..messages import RunTask, StepReport, TaskResult
from ..plan.jobs import Assignment
from ..transport.pool import WorkerLostError
from ..worker.rendezvous import PeerLostError, WorkerTimeoutError
from .heartbeat import Heartbeat
from .rendezvous import Rendezvous
from .results import TaskLog, TaskRecord
from .stage_run import CallEnd, Inbox, JobEnd, JobEvent, Repair, report_end


class TaskOutcome(IntEnum):
    """Outcome of a task, or of one worker's part.

    A lower number explains higher ones in the same group.
    """

    PROCESS_ENDED = 0
    FAILED = 1
    """The task raises the same error on any worker."""
    SMALLER_POLICY = 2
    """The group can continue with a policy for less memory."""
    PEER_LOST = 3
    """Workers lost their connection, or one does not respond."""
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
    """Error behind the outcome; None after FINISHED."""
    place: int = 0
    """Place of the worker that raised `error`."""


def classify_failure(
    errors: Mapping[int, BaseException], *, killed: Collection[int], stopped: bool
) -> TaskEnd:
    """Return the end of a task from the workers' errors, by place in the group.

    Workers without an error finished.

    Args:
        killed: places whose processes the driver ended.
        stopped: the driver stopped the workers on request. Any error then counts as STOPPED.
    """
    if not errors:
        return TaskEnd(TaskOutcome.FINISHED)
    causes = {place: _outcome(error, was_killed=place in killed) for place, error in errors.items()}

    def rank(place: int) -> tuple[bool, int, int]:
        # After a stop, a SamplingCancelled goes first, because it has the step and block.
        return not (stopped and causes[place] is TaskOutcome.STOPPED), causes[place], place

    place = min(causes, key=rank)
    outcome = causes[place]
    if stopped:
        outcome = TaskOutcome.STOPPED
    return TaskEnd(outcome, errors[place], place)


def _outcome(error: BaseException, *, was_killed: bool) -> TaskOutcome:
    if isinstance(error, WorkerLostError) and was_killed:
        return TaskOutcome.KILLED
    if isinstance(error, WorkerLostError):
        return TaskOutcome.PROCESS_ENDED
    if isinstance(error, SamplingCancelled):
        return TaskOutcome.STOPPED
    if isinstance(error, SmallerPolicyError):
        return TaskOutcome.SMALLER_POLICY
    if isinstance(error, PeerLostError | WorkerTimeoutError | GatherBrokenError):
        return TaskOutcome.PEER_LOST
    return TaskOutcome.FAILED


HUNG_GRACE_S = 5.0
"""Time for workers to end a task after a peer waited for them in vain."""
KILL_S = 30.0
"""Longest wait for a killed process to end."""
LAST_STATE_S = 30.0
"""Longest wait for the leader's last state before a group is repaired."""


class WorkerFailedError(ValueError):
    """A task failed on a worker.

    The message has the worker, machine and error. The error is the `__cause__`.
    """


class WorkerGroup:
    """Workers that compute the jobs of one run together; implements `StageGroup`.

    The leader keeps a job's state. It hands the state over at intervals, when the job ends, and
    after another worker's failure. So losing the leader costs the steps since the last handover,
    and any other loss costs one step at most.

    Args:
        tasks: whole task for each item.
        states: each item's present state, updated by the run.
        log: the run's log.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        tasks: Sequence[RunTask],
        states: Sequence[RunState | None],
        log: TaskLog,
    ) -> None:
        self.rendezvous = rendezvous
        self._tasks = tasks
        self._states = states
        self._log = log

    def start(self, assignment: Assignment, inbox: Inbox) -> WorkerJob:
        """See `StageGroup.start`."""
        task = replace(
            self._tasks[assignment.item],
            # Unique, because reports from an earlier try may still arrive.
            run_id=uuid.uuid4().hex,
            resume=self._states[assignment.item],
            until=assignment.steps.stop,
            generation=self.rendezvous.generation,
        )
        return WorkerJob(self, task, self._log.add_task(assignment, self.rendezvous.ranks), inbox)

    def repair(self, inbox: Inbox) -> Repair:
        """See `StageGroup.repair`."""
        return Repair(inbox, self.rendezvous.repair)

    def explain(self, end: TaskEnd, record: TaskRecord) -> JobEnd:
        """Return a job's end for the run.

        Logs a failure. After a memory shortage, later jobs use the smaller policy.
        """
        error = end.error
        if error is None or end.outcome is TaskOutcome.STOPPED:
            return JobEnd(error=error)
        worker = self._describe(end.place)
        if end.outcome is TaskOutcome.FAILED:
            failure = WorkerFailedError(f"{worker} failed: {error}")
            failure.__cause__ = error
            return JobEnd(error=failure)
        if isinstance(error, SmallerPolicyError):
            # Also for later jobs, which would run out of memory again.
            self._tasks = [replace(task, policy=error.policy) for task in self._tasks]
        reason = f"{worker}: {error}"
        if isinstance(error, WorkerLostError):
            reason = str(error)  # has the worker
        # The first line only: the rest is the end of the worker's log.
        self._log.add_change(
            f"{reason.splitlines()[0]}; its video goes on from step {record.next_step}"
        )
        return JobEnd(error=error, can_resume=True, counts_as_failure=end.outcome.is_loss)

    def _describe(self, place: int) -> str:
        """Return for example "worker 2 (node-b, cuda:0)"."""
        worker = f"worker {self.rendezvous.ranks[place]}"
        if not self.rendezvous.facts:
            return worker
        facts = self.rendezvous.facts[place]
        return f"{worker} ({facts.node}, {facts.device})"


class WorkerJob:
    """Job for all workers in a group, sent at creation; implements `Job`.

    The pool's threads only put messages into the inbox. All state changes on the run's thread. So
    no lock is needed, and no caller's code runs on a thread of the pool.
    """

    def __init__(self, group: WorkerGroup, task: RunTask, record: TaskRecord, inbox: Inbox) -> None:
        self.run_id = task.run_id
        self._group = group
        self._rendezvous = group.rendezvous
        self._workers = group.rendezvous.workers
        self._timeout_s = group.rendezvous.timeout_s
        self._record = record
        self._inbox = inbox
        self._pending = set(range(len(self._workers)))
        """Places of workers with an unfinished task."""
        self._errors: dict[int, BaseException] = {}
        self._killed: set[int] = set()
        self._is_stopped = False
        self._awaited: tuple[TaskEnd, Future[RunState | None]] | None = None
        """End of the task, while the job waits for the leader's last state."""
        self._deadline_s: float | None = None
        """Time limit for the workers, then for the last state; None while the task is computed.
        Late workers are killed."""
        self._silence: WorkerTimeoutError | None = None
        self._heartbeat = Heartbeat(self._workers, self._timeout_s)
        for place, worker in enumerate(self._workers):
            report_end(worker.run(task, inbox.put), inbox, self.run_id, place)

    def receive(self, message: StepReport | CallEnd) -> JobEvent | None:
        """See `Job.receive`. The leader's steps are events."""
        if self._awaited is not None:
            end, request = self._awaited
            if isinstance(message, CallEnd) and message.future is request:
                return self._ended(end, request)
            return None
        if isinstance(message, CallEnd):
            return self._take_end(message.place, message.future)
        self._heartbeat.record_sign(message.record.wall_s)
        self._record.steps[message.place].append(message.record)
        if message.place != 0:
            return None
        report = replace(message, record=shift_step(message.record, self._record.start_s))
        return JobEvent(report=report, next_step=self._handed_over(message.state))

    def check_time(self) -> JobEvent | None:
        """See `Job.check_time`.

        Ends a silent task, and kills workers that miss the deadline.
        """
        if self._deadline_s is not None:
            if time.monotonic() <= self._deadline_s:
                return None
            if self._awaited is None:
                return self._kill_pending()
            return self._ended(self._awaited[0])
        if self._heartbeat.is_overdue():
            ranks = ", ".join(map(str, self._rendezvous.ranks))
            self._silence = WorkerTimeoutError(
                f"no sign of life from worker {ranks} for {self._heartbeat.limit_s:g} s"
            )
            self._rendezvous.leave()
            self._end_within(min(HUNG_GRACE_S, self._timeout_s))
        return None

    def stop(self) -> None:
        """Make all workers stop before their next block.

        On several machines before their next step.
        """
        self._is_stopped = True
        if self._deadline_s is not None:
            return
        if self._rendezvous.spans_machines:
            # Without a deadline: a step may take longer than the timeout. The heartbeat finds hung
            # workers.
            self._send_stop()
        else:
            self._end_within(self._timeout_s)

    def _take_end(self, place: int, ended: Future[TaskResult]) -> JobEvent | None:
        self._heartbeat.record_sign()
        self._pending.discard(place)
        error = ended.exception()
        if error is None:
            self._record.results[place] = ended.result()
        else:
            self._errors[place] = error
        if not self._pending:
            return self._finish()
        if error is not None:
            # A cancelled group stays joined, and the next run needs no rendezvous.
            if not isinstance(error, SamplingCancelled):
                self._rendezvous.leave()
            grace_s = self._timeout_s
            # The peer has waited for the whole timeout already.
            if isinstance(error, WorkerTimeoutError):
                grace_s = min(HUNG_GRACE_S, grace_s)
            self._end_within(grace_s)
        return None

    def _end_within(self, seconds: float) -> None:
        """Stop the remaining workers, and set the deadline for killing them."""
        if self._deadline_s is None:
            self._send_stop()
        self._deadline_s = time.monotonic() + seconds

    def _send_stop(self) -> None:
        for place in self._pending:
            self._workers[place].call("stop", self.run_id)

    def _kill_pending(self) -> JobEvent | None:
        """Kill remaining workers. Give up on workers killed `KILL_S` ago."""
        for place in self._pending & self._killed:
            rank = self._workers[place].rank
            message = f"worker {rank} was killed, but its end was not reported within {KILL_S:g} s"
            self._errors[place] = WorkerLostError(message, rank)
        self._pending -= self._killed
        for place in self._pending:
            self._workers[place].kill()
        self._killed |= self._pending
        self._deadline_s = time.monotonic() + KILL_S
        if self._pending:
            return None
        return self._finish()

    def _finish(self) -> JobEvent | None:
        """End the task. No worker computes it any more.

        Request the last state if the task is to be resumed.
        """
        end = classify_failure(self._errors, killed=self._killed, stopped=self._is_stopped)
        is_explained = end.outcome in (TaskOutcome.FAILED, TaskOutcome.SMALLER_POLICY)
        if self._silence is not None and not self._is_stopped and not is_explained:
            # Workers that react to the stop after all raise SamplingCancelled, as if the user had
            # stopped them.
            end = end._replace(outcome=TaskOutcome.PEER_LOST, error=self._silence)
        # After any other end, the group's workers may stand at different steps.
        if not all(isinstance(error, SamplingCancelled) for error in self._errors.values()):
            self._rendezvous.is_joined = False
        is_resumed = end.outcome.is_loss or end.outcome is TaskOutcome.SMALLER_POLICY
        if not is_resumed or isinstance(self._errors.get(0), WorkerLostError):
            return self._ended(end)
        request = self._workers[0].call("last_state", self.run_id)
        self._awaited = end, request
        self._deadline_s = time.monotonic() + LAST_STATE_S
        report_end(request, self._inbox, self.run_id)
        return None

    def _ended(self, end: TaskEnd, request: Future[RunState | None] | None = None) -> JobEvent:
        """Return the job's end, with the leader's last state if `request` returned a new one."""
        state = None
        # On an error the leader is lost. This only costs the steps since the last handover.
        if request is not None and request.exception() is None:
            state = request.result()
        if state is not None and state.next_step <= self._record.next_step:
            state = None
        next_step = self._handed_over(state)
        return JobEvent(
            report=state, next_step=next_step, end=self._group.explain(end, self._record)
        )

    def _handed_over(self, state: RunState | None) -> int | None:
        """Record a new state, and return the first step after it."""
        if state is None:
            return None
        self._record.next_step = state.next_step
        return state.next_step
