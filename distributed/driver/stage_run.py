"""Scheduling loop for a run: assigns jobs to groups, and passes messages from workers to the jobs.

All messages go through one inbox. The run's thread reads it, and drops messages for ended jobs, for
example from an abandoned worker.
"""

from __future__ import annotations

import queue
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from ...sampling.steps import SamplingCancelled
from ..messages import StepReport
from ..plan.jobs import Assignment, GroupId, JobSchedule
from ..transport.pool import WorkerLostError
from ..transport.threads import POLL_S, run_in_thread


@dataclass(frozen=True, kw_only=True, eq=False)
class CallEnd:
    """Message: a job's call has ended."""

    run_id: str
    place: int = 0
    """Place of the worker in the group."""
    future: Future[Any]


Inbox: TypeAlias = "queue.SimpleQueue[StepReport | CallEnd]"


def report_end(call: Future[Any], inbox: Inbox, run_id: str, place: int = 0) -> None:
    """Put a call's end into the inbox, at once if it has ended."""
    call.add_done_callback(
        lambda ended: inbox.put(CallEnd(run_id=run_id, place=place, future=ended))
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class JobEnd:
    """End of a job or repair.

    Without an error, the job is complete, or the group is usable again.
    """

    error: BaseException | None = None
    can_resume: bool = False
    """After the error, the job can resume from the last state, here after a repair or in another
    group."""
    counts_as_failure: bool = False
    """The error is a loss. A run survives a limited number of them."""

    @classmethod
    def of(cls, error: BaseException | None) -> JobEnd:
        """Return the end of a call to one worker. A job can resume after a lost worker only."""
        is_loss = isinstance(error, WorkerLostError)
        return cls(error=error, can_resume=is_loss, counts_as_failure=is_loss)


@dataclass(frozen=True, kw_only=True, eq=False)
class JobEvent:
    """Progress of a job, its end, or both."""

    report: Any = None
    """Argument of `on_report`; None for a repair, and for an end without news."""
    next_step: int | None = None
    """First step after a new state; None without a new state."""
    end: JobEnd | None = None


class Job(Protocol):
    """Job or repair that a group computes elsewhere. It ends with one JobEnd. No method blocks."""

    @property
    def run_id(self) -> str:
        """Message id, unique for every try."""

    def receive(self, message: StepReport | CallEnd) -> JobEvent | None:
        """Take a message and return the event, if any."""

    def check_time(self) -> JobEvent | None:
        """Enforce the time limits; called at least every `POLL_S` while no message waits."""

    def stop(self) -> None:
        """End the job soon."""


class StageGroup(Protocol):
    """Workers for one job at a time. No method blocks."""

    def start(self, assignment: Assignment, inbox: Inbox) -> Job:
        """Start a job from the last state of the item."""

    def repair(self, inbox: Inbox) -> Job:
        """Start to make the group usable again, after an error with `can_resume`."""


class Repair:
    """Group repair by a call on a separate thread; implements `Job`."""

    def __init__(self, inbox: Inbox, function: Callable[..., object], *args: object) -> None:
        self.run_id = uuid.uuid4().hex
        self.future: Future[object] = run_in_thread("wanstream-repair", function, *args)
        report_end(self.future, inbox, self.run_id)

    def receive(self, message: StepReport | CallEnd) -> JobEvent:
        """See `Job.receive`."""
        return JobEvent(end=JobEnd.of(self.future.exception()))

    def check_time(self) -> None:
        """See `Job.check_time`. The call enforces time limits itself."""

    def stop(self) -> None:
        """See `Job.stop`. The next run waits for a repair."""


class RestartLimitError(OSError):
    """A group lost more workers than may be replaced. The message has the last loss."""

    @classmethod
    def after(cls, error: BaseException, max_restarts: int) -> RestartLimitError:
        """Return the error for a loss beyond `max_restarts`."""
        return cls(
            f"{error}\ngiving up after {max_restarts} worker restarts of one group within an hour"
        )


class StageRun:
    """One run of items through stages. Used once, on one thread.

    Args:
        steps: each item's steps, by stage.
        groups: one group for each place in the grid of data and stages.
        max_restarts: repairs per group within an hour.
        ahead: see `JobSchedule`.
    """

    def __init__(
        self,
        steps: Sequence[Sequence[range]],
        groups: Mapping[GroupId, StageGroup],
        *,
        max_restarts: int = 0,
        ahead: int = sys.maxsize,
    ) -> None:
        self.schedule = JobSchedule(steps, tuple(groups), max_restarts=max_restarts, ahead=ahead)
        self._groups = groups
        self._jobs: dict[GroupId, Job] = {}
        """Jobs and repairs in progress."""
        self._inbox: Inbox = queue.SimpleQueue()

    def run(
        self,
        on_report: Callable[[int, Any], None],
        should_stop: Callable[[], bool | None] = lambda: False,
    ) -> None:
        """Run to the end. After an error, no group has a job any more.

        Args:
            on_report: called on this thread with an item and a report from its job. An error ends
                the run.
            should_stop: called often on this thread. An error ends the run too.

        Raises:
            SamplingCancelled: `should_stop` returned True.
            RestartLimitError: a group had more losses than `max_restarts`; the message has the last
                one.
        """
        try:
            while not (stopped := should_stop()) and self.schedule.is_running:
                while (assignment := self.schedule.next()) is not None:
                    group = assignment.group
                    self._jobs[group] = self._groups[group].start(assignment, self._inbox)
                    self.schedule.start(assignment)
                for group, event in self._events():
                    # Read before `_apply`: a group whose job ends leaves `busy`.
                    item = self.schedule.busy.get(group)
                    self._apply(group, event)
                    if event.report is not None:
                        assert item is not None, "a repair reports nothing"
                        on_report(item, event.report)
                    if event.end is not None and event.end.error is not None:
                        self._repair_after(group, event.end.error, can_resume=event.end.can_resume)
        finally:
            # Also after an error: no group may compute for a run that is over.
            cancelled = self._stop()
        if stopped:
            raise cancelled

    def _events(self) -> Iterator[tuple[GroupId, JobEvent]]:
        """Yield the next message's event, and events from time limits, with their groups.

        Waits for `POLL_S` at most.
        """
        with suppress(queue.Empty):
            message = self._inbox.get(timeout=POLL_S)
            # A copy: the caller removes and adds jobs between two events.
            for group, job in tuple(self._jobs.items()):
                if job.run_id == message.run_id and (event := job.receive(message)) is not None:
                    yield group, event
        # Only when no message waits: messages may be signs of life.
        if self._inbox.empty():
            for group, job in tuple(self._jobs.items()):
                if (event := job.check_time()) is not None:
                    yield group, event

    def _apply(self, group: GroupId, event: JobEvent) -> None:
        if event.next_step is not None:
            self.schedule.step(group, event.next_step)
        if event.end is None:
            return
        del self._jobs[group]
        if event.end.error is None:
            self.schedule.finish(group)
        else:
            self.schedule.interrupt(
                group, counts_as_failure=event.end.counts_as_failure, now_s=time.monotonic()
            )

    def _repair_after(self, group: GroupId, error: BaseException, *, can_resume: bool) -> None:
        """Start a repair while the other groups compute. Raises the error if no repair can help."""
        if not can_resume:
            raise error
        # Too many losses, and not the end of the run.
        if not self.schedule.is_running and not self.schedule.is_done:
            raise RestartLimitError.after(error, self.schedule.max_restarts)
        # Not awaited if the run ends first. The next run waits for it.
        self._jobs[group] = self._groups[group].repair(self._inbox)

    def _stop(self) -> SamplingCancelled:
        """End all jobs, and wait until no group computes one.

        Returns the step and block at which a job was stopped. Between two jobs, this is the next
        step's first block.
        """
        cancelled = None
        for job in self._jobs.values():
            job.stop()
        while self.schedule.busy:
            for group, event in self._events():
                self._apply(group, event)
                error = event.end and event.end.error
                if isinstance(error, SamplingCancelled):
                    cancelled = cancelled or error
        first = min(item.next_step for item in self.schedule.items)
        return cancelled or SamplingCancelled(first, 0)
