"""Runs items through stages: states, and groups that compute; independent of the model.

An item's state is handed from one stage to the next; several items are on their way at once.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, Protocol, TypeAlias, TypeVar

from ...sampling import SamplingCancelled
from ..transport.pool import WorkerLostError
from ..transport.threads import on_own_thread
from .schedule import Assignment, GroupId, JobSchedule, Outcome, StageJob

S = TypeVar("S")

POLL_S = 0.05
"""How often `should_stop` is asked and the groups are looked after while nothing happens."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StageStepped(Generic[S]):
    """A group has taken a step; `state` is what its item has become."""

    group: GroupId
    job: StageJob
    next_step: int
    state: S


@dataclass(frozen=True, kw_only=True)
class StageFinished:
    """A group has taken all steps of its job."""

    group: GroupId


@dataclass(frozen=True, kw_only=True)
class StageDropped:
    """A group cannot go on before it is mended; its job goes on from the last state, here or elsewhere."""

    group: GroupId
    error: Exception
    counts: bool
    """Whether it is a loss; otherwise the group only has to begin anew."""


@dataclass(frozen=True, kw_only=True)
class StageFailed:
    """A job cannot be done by anybody, or was stopped."""

    group: GroupId
    error: BaseException


@dataclass(frozen=True, kw_only=True)
class _Mended:
    group: GroupId
    error: BaseException | None


Event: TypeAlias = "StageStepped[S] | StageFinished | StageDropped | StageFailed"
Tell: TypeAlias = "Callable[[Event[S]], None]"
"""May be called from any thread."""


class StageGroup(Protocol[S]):
    """Who computes one job at a time, elsewhere. Every job ends in one Finished, Dropped or Failed."""

    def start(self, given: Assignment, state: S | None, tell: Tell[S]) -> None:
        """Begin with a job and return at once. A state of None: the item is at its very beginning."""

    def stop(self) -> None:
        """End the job soon, if there is one. Returns at once."""

    def look(self) -> None:
        """Asked several times a second while it has a job: has it been silent for too long?"""

    def mend(self) -> None:
        """Make it usable after Dropped; may take long. Raises WorkerLostError where that was lost too."""


class RestartLimitError(OSError):
    """More workers were lost in one run than may be replaced; with what is known of the last loss."""

    @classmethod
    def after(cls, error: BaseException, max_restarts: int) -> RestartLimitError:
        """After that loss, one more than the `max_restarts` that are made good."""
        return cls(f"{error}\n{max_restarts} losses of one run are made good; this was one more")


class RunPhase(Enum):
    """Where a run through stages is; the value completes the sentence "this run ..."."""

    NEW = "was not started"
    GOING = "is going on"
    ENDING = "gives out no more jobs"
    OVER = "is over"


class StageRun(Generic[S]):
    """One run through stages. Used once, on one thread.

    Args:
        on_done: told (item, its last state) on this thread, as soon as it is done; what it raises ends the run. The
            state is its own then: nothing of it is kept here, and `go` returns none of those that were told.
    """

    def __init__(
        self,
        schedule: JobSchedule,
        groups: Mapping[GroupId, StageGroup[S]],
        states: Sequence[S | None],
        *,
        on_step: Callable[[StageStepped[S]], None] | None = None,
        on_done: Callable[[int, S], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        self.schedule = schedule
        self._groups, self._states = groups, list(states)
        self._on_step, self._on_done, self._should_stop = on_step, on_done, should_stop
        self._events: queue.SimpleQueue[Event[S] | _Mended] = queue.SimpleQueue()
        self._phase = RunPhase.NEW
        self._ended: list[BaseException] = []
        """What came out of jobs that were stopped."""

    def go(self) -> list[S]:
        """Run to the end, and return the states of all items after their last steps.

        Raises:
            Cancelled: `should_stop` returned True. As after any error, no group has a job any more.
            GivenUpError: more was lost than the restarts of the schedule.
        """
        assert self._phase is RunPhase.NEW, f"this run {self._phase.value}"
        self._phase = RunPhase.GOING
        try:
            while not (stopped := self._is_stopped()) and self.schedule.outcome is Outcome.GOING:
                self._hand_out()
                self._take_event()
        finally:
            self._settle()
        if stopped:
            raise self._cancelled()
        return [state for state in self._states if state is not None]

    def _is_stopped(self) -> bool:
        return self._should_stop is not None and self._should_stop()

    def _hand_out(self) -> None:
        while (given := self.schedule.next()) is not None:
            self._groups[given.group].start(given, self._states[given.job.item], self._events.put)
            self.schedule = self.schedule.taken(given)

    def _take_event(self) -> None:
        for group, _ in self.schedule.busy:
            self._groups[group].look()
        try:
            event = self._events.get(timeout=POLL_S)
        except queue.Empty:
            return
        if isinstance(event, StageStepped):
            self.schedule = self.schedule.stepped(event.group, event.next_step)
            self._states[event.job.item] = event.state
            if self._on_step is not None and self._phase is RunPhase.GOING:
                self._on_step(event)
        elif isinstance(event, StageFinished):
            item = self.schedule.item_of(event.group)
            self.schedule = self.schedule.finished(event.group)
            self._tell_done(item)
        elif isinstance(event, _Mended):
            self._take_mended(event.group, event.error)
        else:
            self._take_ended(event)

    def _take_ended(self, event: StageDropped | StageFailed) -> None:
        counts = isinstance(event, StageDropped) and event.counts
        item = self.schedule.item_of(event.group)
        self.schedule = self.schedule.dropped(event.group, counts=counts)
        self._tell_done(item)
        if self._phase is RunPhase.ENDING:
            self._ended.append(event.error)
        elif isinstance(event, StageFailed):
            raise event.error
        else:
            self._mend(event.group, event.error)

    def _tell_done(self, item: int) -> None:
        """Tell an item that has just become done."""
        state = self._states[item]
        if self.schedule.items[item].is_done and self._on_done is not None and self._phase is RunPhase.GOING:
            assert state is not None
            self._states[item] = None
            self._on_done(item, state)

    def _take_mended(self, group: GroupId, error: BaseException | None) -> None:
        if error is None:
            self.schedule = self.schedule.mended(group)
        elif self._phase is RunPhase.ENDING:
            self._ended.append(error)
        elif isinstance(error, WorkerLostError):
            self.schedule = self.schedule.lost_again(group)
            self._mend(group, error)
        else:
            raise error

    def _mend(self, group: GroupId, error: BaseException) -> None:
        """Mend a group beside the others, or say that this was one loss too many."""
        if self.schedule.outcome is Outcome.GIVEN_UP:
            raise RestartLimitError.after(error, self.schedule.max_restarts)
        # Should the run end before, the group is mended all the same, and its next user waits for that.
        future = on_own_thread("wanstream-mend", self._groups[group].mend)
        future.add_done_callback(lambda done: self._events.put(_Mended(group=group, error=done.exception())))

    def _settle(self) -> None:
        """Let no job go on."""
        self._phase = RunPhase.ENDING
        for group, _ in self.schedule.busy:
            self._groups[group].stop()
        while self.schedule.busy:
            self._take_event()
        self._phase = RunPhase.OVER

    def _cancelled(self) -> SamplingCancelled:
        """Where the run was stopped; between two jobs it is before the first block of a step."""
        for error in self._ended:
            if isinstance(error, SamplingCancelled):
                return error
        return SamplingCancelled(min(item.next_step for item in self.schedule.items), 0)
