"""Task on all workers of a group: sent, polled, stopped, and classified when all of them have ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial

from ...offload import GatherBrokenError
from ...sampling import SamplingCancelled, SmallerPolicyError
from ...schema import OffloadPolicy
from ..messages import RunTask, StepReport, TaskResult
from ..transport.pool import WorkerHandle, WorkerLostError
from ..worker.errors import PeerLostError, WorkerTimeoutError
from .heartbeat import Heartbeat, silence_limit


class TaskVerdict(Enum):
    """What became of a task; the value completes the sentence "its workers ..."."""

    ENDED = "have computed all of it"
    STOPPED = "were stopped, as they were asked to"
    LOST = "have lost one of them, or each other"
    SMALLER = "need a smaller policy to go on"
    FAILED = "cannot compute it"


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskEnd:
    """How a task ended."""

    verdict: TaskVerdict
    ended: Mapping[int, TaskResult]
    """By place in the group, of those that computed all of it."""
    error: BaseException | None = None
    """What stands for it, where it did not end well."""
    place: int = 0
    """Of the worker that raised it."""

    @property
    def policy(self) -> OffloadPolicy | None:
        """To go on with, after SMALLER."""
        return self.error.policy if isinstance(self.error, SmallerPolicyError) else None


class _Sign(Enum):
    """What an error tells, the more telling ones first."""

    GONE = TaskVerdict.LOST, "a process ended by itself"
    WRONG = TaskVerdict.FAILED, "the task cannot be done"
    SHORT = TaskVerdict.SMALLER, "memory was short"
    PEER = TaskVerdict.LOST, "another one is missed"
    LATE = TaskVerdict.LOST, "it was killed, as it did not end"
    ASKED = TaskVerdict.STOPPED, "it was asked to stop"


_TELLING = tuple(_Sign)


def classify_failure(
    outcomes: Mapping[int, TaskResult | BaseException], *, killed: Collection[int], stopped: bool
) -> TaskEnd:
    """Judge a task by what came out of each place of its group.

    Args:
        killed: places whose processes the driver has ended.
        stopped: whether the driver has asked the workers to stop; what else happened then does not matter.
    """
    ended = {place: each for place, each in outcomes.items() if isinstance(each, TaskResult)}
    errors = {place: each for place, each in outcomes.items() if isinstance(each, BaseException)}
    if not errors:
        return TaskEnd(verdict=TaskVerdict.ENDED, ended=ended)
    signs = {place: _sign(error, was_killed=place in killed) for place, error in errors.items()}
    order = [_Sign.ASKED, *_TELLING] if stopped else _TELLING
    place = min(signs, key=lambda each: (order.index(signs[each]), each))
    verdict = TaskVerdict.STOPPED if stopped else signs[place].value[0]
    return TaskEnd(verdict=verdict, ended=ended, error=errors[place], place=place)


def _sign(error: BaseException, *, was_killed: bool) -> _Sign:
    if isinstance(error, WorkerLostError):
        return _Sign.LATE if was_killed else _Sign.GONE
    if isinstance(error, SamplingCancelled):
        return _Sign.ASKED
    if isinstance(error, SmallerPolicyError):
        return _Sign.SHORT
    return _Sign.PEER if isinstance(error, PeerLostError | WorkerTimeoutError | GatherBrokenError) else _Sign.WRONG


HUNG_GRACE_S = 5.0
"""How long those may still take to end, at most, of whom others have waited in vain."""
KILL_S = 30.0
"""How long the end of a killed process may take to be heard of."""


class TaskPhase(Enum):
    """Where a task is; the value completes the sentence "this task ..."."""

    NEW = "was not sent"
    RUNNING = "is computed"
    ENDING = "is being ended"
    OVER = "is over"


class TaskRun:
    """A task that is computed by a group. Used once; thread-safe.

    Args:
        workers: of the group, the leader first.
        tasks: for each of them.
        timeout_s: how long workers wait for each other.
        on_told: (place in the group, what was told); called on threads of the pool, one at a time.
        on_over: called once, on any thread, after the last `on_told`.
    """

    def __init__(
        self,
        workers: Sequence[WorkerHandle],
        tasks: Sequence[RunTask],
        *,
        timeout_s: float,
        on_told: Callable[[int, StepReport], None],
        on_over: Callable[[TaskEnd], None],
    ) -> None:
        self._workers, self._tasks, self._timeout_s = workers, tasks, timeout_s
        self._grace_s = min(HUNG_GRACE_S, timeout_s)
        self._on_told, self._on_over = on_told, on_over
        self._lock = threading.RLock()
        self._phase = TaskPhase.NEW
        self._outcomes: dict[int, TaskResult | BaseException] = {}
        self._killed: set[int] = set()
        self._stopped = self._left = False
        self._silence: WorkerTimeoutError | None = None
        self.together = False
        """Whether the workers can take another task without rendezvous anew; known when it is over."""
        self.leaving: list[Future[None]] = []
        """What must be done before the workers meet again."""
        self._pulse = Heartbeat(workers, timeout_s)
        self._slowest_s = 0.0
        self._deadline_s = 0.0

    def begin(self) -> None:
        """Send it to all."""
        with self._lock:
            assert self._phase is TaskPhase.NEW, f"this task {self._phase.value}"
            self._phase = TaskPhase.RUNNING
        # All have it before any can end.
        pairs = zip(self._workers, self._tasks, strict=True)
        futures = [worker.run(task, partial(self._told, place)) for place, (worker, task) in enumerate(pairs)]
        for place, future in enumerate(futures):
            future.add_done_callback(partial(self._take_end, place))

    def stop(self) -> None:
        """Let all end before their next block. Stopping twice is allowed."""
        with self._lock:
            self._stopped = True
            if self._phase is TaskPhase.RUNNING:
                self._end_within(self._timeout_s)

    def look(self) -> None:
        """End it where nobody goes on for too long, and kill those that do not end in their time."""
        with self._lock:
            now = time.monotonic()
            if self._phase is TaskPhase.RUNNING:
                self._pulse.look()
                limit = silence_limit(self._timeout_s, begun=self._pulse.begun, slowest_s=self._slowest_s)
                if self._pulse.silence_s > limit:
                    ranks = ", ".join(str(worker.rank) for worker in self._workers)
                    self._silence = WorkerTimeoutError(f"nothing was heard of worker {ranks} for {limit:g} s")
                    self._leave()
                    self._end_within(self._grace_s)
            elif self._phase is TaskPhase.ENDING and now > self._deadline_s:
                self._kill()

    def _told(self, place: int, told: StepReport) -> None:
        with self._lock:
            if self._phase is TaskPhase.OVER:
                return
            self._pulse.heard()
            self._slowest_s = max(self._slowest_s, told.record.wall_s)
            self._on_told(place, told)

    def _take_end(self, place: int, future: Future[TaskResult]) -> None:
        error = future.exception()
        with self._lock:
            if self._phase is TaskPhase.OVER:
                return
            self._pulse.heard()
            self._outcomes[place] = future.result() if error is None else error
            if len(self._outcomes) == len(self._workers):
                self._end()
                return
            if error is not None:
                if not isinstance(error, SamplingCancelled):
                    self._leave()
                self._end_within(self._grace_s if isinstance(error, WorkerTimeoutError) else self._timeout_s)

    @property
    def _pending(self) -> list[int]:
        return [place for place in range(len(self._workers)) if place not in self._outcomes]

    def _end_within(self, seconds: float) -> None:
        self._deadline_s = time.monotonic() + seconds
        if self._phase is TaskPhase.ENDING:
            return
        self._phase = TaskPhase.ENDING
        for place in self._pending:
            self._workers[place].ask("stop", self._tasks[place].run_id)

    def _leave(self) -> None:
        """Let nobody wait for the others any more."""
        if self._left:
            return
        self._left = True
        self.leaving = [worker.ask("leave") for worker in self._workers]

    def _kill(self) -> None:
        """End the processes of those that are late; of one that was killed long ago nothing more is expected."""
        for place in self._pending:
            worker = self._workers[place]
            if place in self._killed:
                self._outcomes[place] = WorkerLostError(
                    f"worker {worker.rank} was killed, and its end was not heard of for {KILL_S:g} s", worker.rank
                )
                continue
            self._killed.add(place)
            worker.kill()
        self._deadline_s = time.monotonic() + KILL_S
        if not self._pending and self._phase is TaskPhase.ENDING:
            self._end()

    def _end(self) -> None:
        self._phase = TaskPhase.OVER
        end = classify_failure(self._outcomes, killed=self._killed, stopped=self._stopped)
        if (
            self._silence is not None
            and not self._stopped
            and end.verdict not in (TaskVerdict.FAILED, TaskVerdict.SMALLER)
        ):
            # Those who heard the stop in the end have Cancelled, which nobody wished.
            end = replace(end, verdict=TaskVerdict.LOST, error=self._silence)
        # After any other end of one of several the others may be elsewhere, whatever it was in the end.
        alike = all(isinstance(each, TaskResult | SamplingCancelled) for each in self._outcomes.values())
        self.together = not self._left and alike
        # A group keeps its last task, which need not keep latents and states.
        self._tasks, self._outcomes = (), {}
        self._on_over(end)
