"""Scheduling loop: assigns jobs to groups, polls them, and reports their steps. Independent of the model.

The state of an item is passed from one stage to the next; several items are computed at once.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from ...plan import Assignment, GroupId, JobSchedule
from ...sampling import SamplingCancelled

S = TypeVar("S")

POLL_S = 0.05
"""Interval at which `should_stop` is called and groups are polled while no event arrives."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepTaken(Generic[S]):
    """A group finished a step of its job, handed over the state of the item, or both."""

    next_step: int
    """First step that was not taken."""
    state: S | None
    """State before that step; None while the group keeps it."""
    report: Any = None
    """Report of the step; None if the state alone was handed over."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupEnd:
    """End of a job or of a repair. Without an error, the job is complete, or the group is usable again."""

    error: BaseException | None = None
    can_resume: bool = False
    """After the error, the job can resume from its last state, here after a repair or in another group."""
    counts_as_failure: bool = False
    """The error is a loss, of which a run survives a limited number."""


GroupEvent: TypeAlias = "StepTaken[S] | GroupEnd"


class StageGroup(Protocol[S]):
    """Computes one job at a time, elsewhere. Every job and every repair ends with one GroupEnd.

    No method blocks. `wake` is set, from any thread, when `poll` has new events to return.
    """

    def start(self, assignment: Assignment, state: S | None, wake: threading.Event) -> None:
        """Start a job. A state of None stands for an item that no step was taken of."""

    def poll(self) -> list[GroupEvent[S]]:
        """Return the events since the last call; called every `POLL_S`, so that time limits can be checked here too."""

    def stop(self) -> None:
        """End the current job soon, if there is one."""

    def repair(self, wake: threading.Event) -> None:
        """Start to make the group usable again after a GroupEnd that can be resumed."""


class RestartLimitError(OSError):
    """More workers of a group were lost than may be replaced. The message has the last loss."""

    @classmethod
    def after(cls, error: BaseException, max_restarts: int) -> RestartLimitError:
        """Return the error for a loss that exceeds `max_restarts`."""
        return cls(f"{error}\ngiving up after {max_restarts} worker restarts of one group within an hour")


class StageRun(Generic[S]):
    """One run of items through stages. Used once, on one thread.

    Args:
        steps: steps of each item, by stage.
        groups: one group for each place of the grid of data and stages.
        states: initial state of each item.
        max_restarts: how many losses of a group are repaired within an hour.
        ahead: see `JobSchedule`.
    """

    def __init__(
        self,
        steps: Sequence[Sequence[range]],
        groups: Mapping[GroupId, StageGroup[S]],
        states: Sequence[S | None],
        *,
        max_restarts: int = 0,
        ahead: int = sys.maxsize,
    ) -> None:
        self.schedule = JobSchedule(steps, tuple(groups), max_restarts=max_restarts, ahead=ahead)
        self._groups, self._states = groups, list(states)
        self._wake = threading.Event()
        self._polled: deque[tuple[GroupId, GroupEvent[S]]] = deque()

    def run(
        self,
        on_step: Callable[[int, StepTaken[S]], None] | None = None,
        should_stop: Callable[[], bool | None] | None = None,
    ) -> list[S | None]:
        """Run to the end, and return the last state of every item. After an error, no group has a job any more.

        Args:
            on_step: called on this thread with an item and its event. Its errors end the run.
            should_stop: called often on this thread. Its errors end the run too.

        Raises:
            SamplingCancelled: `should_stop` returned True.
            RestartLimitError: more than `max_restarts` losses of a group; the message has the last one.
        """
        for group in self._groups.values():
            group.poll()  # an earlier run may have ended before it took all events
        try:
            while not (stopped := should_stop is not None and should_stop()) and self.schedule.is_running:
                while (assignment := self.schedule.next()) is not None:
                    self._groups[assignment.group].start(assignment, self._states[assignment.item], self._wake)
                    self.schedule.start(assignment)
                if (polled := self._next_event()) is None:
                    continue
                place, event = polled
                self._apply(place, event)
                if isinstance(event, GroupEnd):
                    if event.error is not None:
                        self._repair_after(place, event.error, can_resume=event.can_resume)
                elif on_step is not None:
                    on_step(self.schedule.busy[place], event)
        finally:
            cancelled = self._stop()
        if stopped:
            raise cancelled
        return self._states

    def _next_event(self) -> tuple[GroupId, GroupEvent[S]] | None:
        """Return the next event and its group; None if there is none within `POLL_S`."""
        if not self._polled:
            self._wake.wait(POLL_S)
            # Clear before polling: an event that arrives in between is polled now, and wakes the next call for nothing.
            self._wake.clear()
            for place, group in self._groups.items():
                self._polled.extend((place, event) for event in group.poll())
        return self._polled.popleft() if self._polled else None

    def _apply(self, group: GroupId, event: GroupEvent[S]) -> None:
        if isinstance(event, StepTaken):
            if event.state is not None:
                self.schedule.step(group, event.next_step)
                self._states[self.schedule.busy[group]] = event.state
        elif event.error is None:
            self.schedule.finish(group)
        else:
            self.schedule.interrupt(group, counts_as_failure=event.counts_as_failure, now_s=time.monotonic())

    def _repair_after(self, group: GroupId, error: BaseException, *, can_resume: bool) -> None:
        """Start a repair while the other groups compute. Raises the error if no repair can help."""
        if not can_resume:
            raise error
        if not self.schedule.is_running and not self.schedule.is_done:
            raise RestartLimitError.after(error, self.schedule.max_restarts)
        # Not awaited if the run ends first: the next run waits for it.
        self._groups[group].repair(self._wake)

    def _stop(self) -> SamplingCancelled:
        """End all jobs, and wait until none is computed any more.

        Returns the step and block at which a job was stopped; between two jobs, the first block of the next step.
        """
        cancelled = None
        for group in self.schedule.busy:
            self._groups[group].stop()
        while self.schedule.busy:
            if (polled := self._next_event()) is None:
                continue
            group, event = polled
            self._apply(group, event)
            if cancelled is None and isinstance(event, GroupEnd) and isinstance(event.error, SamplingCancelled):
                cancelled = event.error
        return cancelled or SamplingCancelled(min(item.next_step for item in self.schedule.items), 0)
