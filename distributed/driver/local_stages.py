"""Stages of any model that has a step function, each on a thread of this process.

    groups = {GroupId(0, 0): StepGroup(high_step), GroupId(0, 1): StepGroup(low_step)}
    ended = run_stages([[range(0, 4), range(4, 9)]] * 8, groups, starts)

No model of ours runs here yet.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Generic, TypeAlias, TypeVar

from ...sampling import SamplingCancelled
from ..transport.pool import WorkerLostError
from ..transport.threads import on_own_thread
from .schedule import Assignment, GroupId, JobSchedule
from .stage_run import StageDropped, StageFailed, StageFinished, StageGroup, StageRun, StageStepped, Tell

S = TypeVar("S")

StepFunction: TypeAlias = "Callable[[S, int], S]"
"""(state, step) -> the state after that step, another value; what is handed in stays as it is."""


class StepGroup(Generic[S]):
    """Computes jobs by `step`, on a thread of its own; see `StageGroup`.

    A step that raises WorkerLostError is taken again from the state before it, as often as the run allows.
    """

    def __init__(self, step: StepFunction[S]) -> None:
        self._step = step
        self._stop = threading.Event()

    def start(self, given: Assignment, state: S | None, tell: Tell[S]) -> None:
        """See `StageGroup.start`. The state may not be None: a step function needs one."""
        assert state is not None, "nothing to start from"
        self._stop.clear()
        done = on_own_thread("wanstream-stage", self._compute, given, state, tell)
        done.add_done_callback(partial(_tell_end, given.group, tell))

    def stop(self) -> None:
        """See `StageGroup.stop`: before the next step."""
        self._stop.set()

    def look(self) -> None:
        """See `StageGroup.look`: a thread cannot be ended from outside."""

    def mend(self) -> None:
        """See `StageGroup.mend`: nothing is held between jobs."""

    def _compute(self, given: Assignment, state: S, tell: Tell[S]) -> None:
        for step in given.steps:
            if self._stop.is_set():
                raise SamplingCancelled(step, 0)
            state = self._step(state, step)
            tell(StageStepped(group=given.group, job=given.job, next_step=step + 1, state=state))


def _tell_end(group: GroupId, tell: Tell[S], done: Future[None]) -> None:
    error = done.exception()
    if error is None:
        tell(StageFinished(group=group))
    elif isinstance(error, WorkerLostError):
        tell(StageDropped(group=group, error=error, counts=True))
    else:
        tell(StageFailed(group=group, error=error))


def run_stages(
    steps: Sequence[Sequence[range]],
    groups: Mapping[GroupId, StageGroup[S]],
    states: Sequence[S | None],
    *,
    max_restarts: int = 0,
    on_step: Callable[[StageStepped[S]], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> list[S]:
    """The states of all items after their last steps.

    Args:
        steps: of each item, by stage.
        groups: one for every place of the grid of data and stages.
        states: what each item starts from.
        max_restarts: how often a group that lost a worker is mended.
        on_step: called on this thread; what it raises ends the run.
        should_stop: asked often, on this thread.

    Raises:
        Cancelled: `should_stop` returned True. Like after any error, no group has a job any more.
        GivenUpError: more was lost than `max_restarts`, with what was said of the last one.
    """
    data = 1 + max(group.data for group in groups)
    schedule = JobSchedule.of(steps, data=data, max_restarts=max_restarts)
    assert set(schedule.groups()) == set(groups), "the groups do not fill their grid"
    return StageRun(schedule, groups, states, on_step=on_step, should_stop=should_stop).go()
