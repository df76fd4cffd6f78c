"""Stages of any model with a step function, each on a thread of this process.

    groups = {GroupId(0, 0): StepGroup(high_step), GroupId(0, 1): StepGroup(low_step)}
    states = StageRun([[range(0, 4), range(4, 9)]] * 8, groups, initial_states).run()

No model of this package uses it yet.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeAlias, TypeVar

from ...sampling import SamplingCancelled
from ..transport.pool import WorkerLostError
from ..transport.threads import run_in_thread
from .schedule import Assignment
from .stage_run import GroupEnd, GroupEvent, StepTaken

S = TypeVar("S")

StepFunction: TypeAlias = "Callable[[S, int], S]"
"""(state, step) -> the state after that step, as a new value; the given state is not changed."""


class StepGroup(Generic[S]):
    """Compute jobs by `step` on a thread; implements `StageGroup`.

    A step that raises WorkerLostError is repeated from the state before it, as often as the run permits.
    """

    def __init__(self, step: StepFunction[S]) -> None:
        self._step = step
        self._is_stopped = threading.Event()
        self._inbox: queue.SimpleQueue[GroupEvent[S]] = queue.SimpleQueue()

    def start(self, assignment: Assignment, state: S | None, wake: threading.Event) -> None:
        """See `StageGroup.start`. The state may not be None: a step function needs one."""
        assert state is not None, "a step function needs an initial state"
        self._is_stopped.clear()
        run_in_thread("wanstream-stage", self._compute, assignment, state, wake)

    def poll(self) -> list[GroupEvent[S]]:
        """See `StageGroup.poll`."""
        # Only this thread takes events out, so that as many as were counted can be taken without waiting.
        return [self._inbox.get() for _ in range(self._inbox.qsize())]

    def stop(self) -> None:
        """See `StageGroup.stop`. The job ends before its next step."""
        self._is_stopped.set()

    def repair(self, wake: threading.Event) -> None:
        """See `StageGroup.repair`. There is nothing to repair: a group has no state between jobs."""
        self._inbox.put(GroupEnd())
        wake.set()

    def _compute(self, assignment: Assignment, state: S, wake: threading.Event) -> None:
        try:
            for step in assignment.steps:
                if self._is_stopped.is_set():
                    raise SamplingCancelled(step, 0)
                state = self._step(state, step)
                self._inbox.put(StepTaken(next_step=step + 1, state=state))
                wake.set()
        except BaseException as err:  # noqa: BLE001 - the run raises it
            is_loss = isinstance(err, WorkerLostError)
            self._inbox.put(GroupEnd(error=err, can_resume=is_loss, counts_as_failure=is_loss))
        else:
            self._inbox.put(GroupEnd())
        wake.set()
