"""Runs items through stages: states, and cells that compute; independent of the model.

An item's state is handed from one stage to the next; several items are on their way at once.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, Protocol, TypeAlias, TypeVar

from ...sampling import Cancelled
from ..transport.pool import WorkerLostError
from ..transport.threads import on_own_thread
from .schedule import Assignment, Cell, Job, Outcome, Schedule

S = TypeVar("S")

POLL_S = 0.05
"""How often `should_stop` is asked and the cells are looked after while nothing happens."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Stepped(Generic[S]):
    """A cell has taken a step; `state` is what its item has become."""

    cell: Cell
    job: Job
    next_step: int
    state: S


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A cell has taken all steps of its job."""

    cell: Cell


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """A cell cannot go on before it is mended; its job goes on from the last state, here or elsewhere."""

    cell: Cell
    error: Exception
    counts: bool
    """Whether it is a loss; otherwise the cell only has to begin anew."""


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A job cannot be done by anybody, or was stopped."""

    cell: Cell
    error: BaseException


@dataclass(frozen=True, kw_only=True)
class _Mended:
    cell: Cell
    error: BaseException | None


Event: TypeAlias = "Stepped[S] | Finished | Dropped | Failed"
Tell: TypeAlias = "Callable[[Event[S]], None]"
"""May be called from any thread."""


class StageCell(Protocol[S]):
    """Who computes one job at a time, elsewhere. Every job ends in one Finished, Dropped or Failed."""

    def start(self, given: Assignment, state: S | None, tell: Tell[S]) -> None:
        """Begin with a job and return at once. A state of None: the item is at its very beginning."""

    def stop(self) -> None:
        """End the job soon, if there is one. Returns at once."""

    def look(self) -> None:
        """Asked several times a second while it has a job: has it been silent for too long?"""

    def mend(self) -> None:
        """Make it usable after Dropped; may take long. Raises WorkerLostError where that was lost too."""


class GivenUpError(OSError):
    """More workers were lost in one run than may be replaced; with what is known of the last loss."""

    @classmethod
    def after(cls, error: BaseException, max_restarts: int) -> GivenUpError:
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
        schedule: Schedule,
        cells: Mapping[Cell, StageCell[S]],
        states: Sequence[S | None],
        *,
        on_step: Callable[[Stepped[S]], None] | None = None,
        on_done: Callable[[int, S], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        self.schedule = schedule
        self._cells, self._states = cells, list(states)
        self._on_step, self._on_done, self._should_stop = on_step, on_done, should_stop
        self._events: queue.SimpleQueue[Event[S] | _Mended] = queue.SimpleQueue()
        self._phase = RunPhase.NEW
        self._ended: list[BaseException] = []
        """What came out of jobs that were stopped."""

    def go(self) -> list[S]:
        """Run to the end, and return the states of all items after their last steps.

        Raises:
            Cancelled: `should_stop` returned True. As after any error, no cell has a job any more.
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
            self._cells[given.cell].start(given, self._states[given.job.item], self._events.put)
            self.schedule = self.schedule.taken(given)

    def _take_event(self) -> None:
        for cell, _ in self.schedule.busy:
            self._cells[cell].look()
        try:
            event = self._events.get(timeout=POLL_S)
        except queue.Empty:
            return
        if isinstance(event, Stepped):
            self.schedule = self.schedule.stepped(event.cell, event.next_step)
            self._states[event.job.item] = event.state
            if self._on_step is not None and self._phase is RunPhase.GOING:
                self._on_step(event)
        elif isinstance(event, Finished):
            item = self.schedule.item_of(event.cell)
            self.schedule = self.schedule.finished(event.cell)
            self._tell_done(item)
        elif isinstance(event, _Mended):
            self._take_mended(event.cell, event.error)
        else:
            self._take_ended(event)

    def _take_ended(self, event: Dropped | Failed) -> None:
        counts = isinstance(event, Dropped) and event.counts
        item = self.schedule.item_of(event.cell)
        self.schedule = self.schedule.dropped(event.cell, counts=counts)
        self._tell_done(item)
        if self._phase is RunPhase.ENDING:
            self._ended.append(event.error)
        elif isinstance(event, Failed):
            raise event.error
        else:
            self._mend(event.cell, event.error)

    def _tell_done(self, item: int) -> None:
        """Tell an item that has just become done."""
        state = self._states[item]
        if self.schedule.items[item].is_done and self._on_done is not None and self._phase is RunPhase.GOING:
            assert state is not None
            self._states[item] = None
            self._on_done(item, state)

    def _take_mended(self, cell: Cell, error: BaseException | None) -> None:
        if error is None:
            self.schedule = self.schedule.mended(cell)
        elif self._phase is RunPhase.ENDING:
            self._ended.append(error)
        elif isinstance(error, WorkerLostError):
            self.schedule = self.schedule.lost_again(cell)
            self._mend(cell, error)
        else:
            raise error

    def _mend(self, cell: Cell, error: BaseException) -> None:
        """Mend a cell beside the others, or say that this was one loss too many."""
        if self.schedule.outcome is Outcome.GIVEN_UP:
            raise GivenUpError.after(error, self.schedule.max_restarts)
        # Should the run end before, the cell is mended all the same, and its next user waits for that.
        future = on_own_thread("wanstream-mend", self._cells[cell].mend)
        future.add_done_callback(lambda done: self._events.put(_Mended(cell=cell, error=done.exception())))

    def _settle(self) -> None:
        """Let no job go on."""
        self._phase = RunPhase.ENDING
        for cell, _ in self.schedule.busy:
            self._cells[cell].stop()
        while self.schedule.busy:
            self._take_event()
        self._phase = RunPhase.OVER

    def _cancelled(self) -> Cancelled:
        """Where the run was stopped; between two jobs it is before the first block of a step."""
        for error in self._ended:
            if isinstance(error, Cancelled):
                return error
        return Cancelled(min(item.next_step for item in self.schedule.items), 0)
