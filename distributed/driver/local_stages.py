"""Stages of any model that has a step function, each on a thread of this process.

    cells = {Cell(0, 0): StepCell(high_step), Cell(0, 1): StepCell(low_step)}
    ended = run_stages([[range(0, 4), range(4, 9)]] * 8, cells, starts)

No model of ours runs here yet.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Generic, TypeAlias, TypeVar

from ...sampling import Cancelled
from ..transport.pool import WorkerLostError
from ..transport.threads import on_own_thread
from .schedule import Assignment, Cell, Schedule
from .stage_run import Dropped, Failed, Finished, StageCell, StageRun, Stepped, Tell

S = TypeVar("S")

StepFunction: TypeAlias = "Callable[[S, int], S]"
"""(state, step) -> the state after that step, another value; what is handed in stays as it is."""


class StepCell(Generic[S]):
    """Computes jobs by `step`, on a thread of its own; see `StageCell`.

    A step that raises WorkerLostError is taken again from the state before it, as often as the run allows.
    """

    def __init__(self, step: StepFunction[S]) -> None:
        self._step = step
        self._stop = threading.Event()

    def start(self, given: Assignment, state: S | None, tell: Tell[S]) -> None:
        """See `StageCell.start`. The state may not be None: a step function needs one."""
        assert state is not None, "nothing to start from"
        self._stop.clear()
        done = on_own_thread("wanstream-stage", self._compute, given, state, tell)
        done.add_done_callback(partial(_tell_end, given.cell, tell))

    def stop(self) -> None:
        """See `StageCell.stop`: before the next step."""
        self._stop.set()

    def look(self) -> None:
        """See `StageCell.look`: a thread cannot be ended from outside."""

    def mend(self) -> None:
        """See `StageCell.mend`: nothing is held between jobs."""

    def _compute(self, given: Assignment, state: S, tell: Tell[S]) -> None:
        for step in given.steps:
            if self._stop.is_set():
                raise Cancelled(step, 0)
            state = self._step(state, step)
            tell(Stepped(cell=given.cell, job=given.job, next_step=step + 1, state=state))


def _tell_end(cell: Cell, tell: Tell[S], done: Future[None]) -> None:
    error = done.exception()
    if error is None:
        tell(Finished(cell=cell))
    elif isinstance(error, WorkerLostError):
        tell(Dropped(cell=cell, error=error, counts=True))
    else:
        tell(Failed(cell=cell, error=error))


def run_stages(
    steps: Sequence[Sequence[range]],
    cells: Mapping[Cell, StageCell[S]],
    states: Sequence[S | None],
    *,
    max_restarts: int = 0,
    on_step: Callable[[Stepped[S]], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> list[S]:
    """The states of all items after their last steps.

    Args:
        steps: of each item, by stage.
        cells: one for every place of the grid of data and stages.
        states: what each item starts from.
        max_restarts: how often a cell that lost a worker is mended.
        on_step: called on this thread; what it raises ends the run.
        should_stop: asked often, on this thread.

    Raises:
        Cancelled: `should_stop` returned True. Like after any error, no cell has a job any more.
        GivenUpError: more was lost than `max_restarts`, with what was said of the last one.
    """
    data = 1 + max(cell.data for cell in cells)
    schedule = Schedule.of(steps, data=data, max_restarts=max_restarts)
    assert set(schedule.cells()) == set(cells), "the cells do not fill their grid"
    return StageRun(schedule, cells, states, on_step=on_step, should_stop=should_stop).go()
