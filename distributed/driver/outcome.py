"""Outcome of a task that all workers of a group computed, and the error that explains it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum

from ...offload import GatherBrokenError
from ...sampling import SamplingCancelled, SmallerPolicyError
from ...schema import OffloadPolicy
from ..messages import PeerLostError, TaskResult, WorkerTimeoutError
from ..transport.pool import WorkerLostError


class TaskOutcome(Enum):
    """Outcome of a task."""

    FINISHED = "finished"
    STOPPED = "stopped"
    """The driver stopped the workers on request."""
    LOST = "lost"
    """A worker, or the connection between workers, was lost."""
    SMALLER_POLICY = "smaller policy"
    """The group can continue with a policy that needs less memory."""
    FAILED = "failed"
    """The task raises the same error on any worker."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskEnd:
    """End of a task: its outcome, and the results or the error of its workers."""

    outcome: TaskOutcome
    results: Mapping[int, TaskResult]
    """Results of the workers that finished, by their place in the group."""
    error: BaseException | None = None
    """Error that explains the outcome; None after FINISHED."""
    place: int = 0
    """Place of the worker that raised `error`."""

    @property
    def policy(self) -> OffloadPolicy | None:
        """Policy to continue with after SMALLER_POLICY; None after any other outcome."""
        return self.error.policy if isinstance(self.error, SmallerPolicyError) else None


class _Cause(IntEnum):
    """Cause of one worker's error. A lower number explains errors with higher ones in the same group."""

    PROCESS_ENDED = 0
    TASK_FAILED = 1
    OUT_OF_MEMORY = 2
    PEER_LOST = 3
    KILLED = 4
    """The driver ended the process because it did not stop in time."""
    STOPPED = 5


_OUTCOMES = {
    _Cause.PROCESS_ENDED: TaskOutcome.LOST,
    _Cause.TASK_FAILED: TaskOutcome.FAILED,
    _Cause.OUT_OF_MEMORY: TaskOutcome.SMALLER_POLICY,
    _Cause.PEER_LOST: TaskOutcome.LOST,
    _Cause.KILLED: TaskOutcome.LOST,
    _Cause.STOPPED: TaskOutcome.STOPPED,
}


def classify_failure(
    outcomes: Mapping[int, TaskResult | BaseException], *, killed: Collection[int], stopped: bool
) -> TaskEnd:
    """Return the end of a task from the result or error of each place of its group.

    Args:
        killed: places whose processes the driver ended.
        stopped: the driver stopped the workers on request. Any error then counts as STOPPED.
    """
    results = {place: each for place, each in outcomes.items() if isinstance(each, TaskResult)}
    errors = {place: each for place, each in outcomes.items() if isinstance(each, BaseException)}
    if not errors:
        return TaskEnd(outcome=TaskOutcome.FINISHED, results=results)
    causes = {place: _cause(error, was_killed=place in killed) for place, error in errors.items()}

    def rank(place: int) -> tuple[bool, int, int]:
        # After a stop, a SamplingCancelled goes first: it has the step and block.
        return not (stopped and causes[place] is _Cause.STOPPED), causes[place], place

    place = min(causes, key=rank)
    outcome = TaskOutcome.STOPPED if stopped else _OUTCOMES[causes[place]]
    return TaskEnd(outcome=outcome, results=results, error=errors[place], place=place)


def _cause(error: BaseException, *, was_killed: bool) -> _Cause:
    if isinstance(error, WorkerLostError):
        return _Cause.KILLED if was_killed else _Cause.PROCESS_ENDED
    if isinstance(error, SamplingCancelled):
        return _Cause.STOPPED
    if isinstance(error, SmallerPolicyError):
        return _Cause.OUT_OF_MEMORY
    is_peer = isinstance(error, PeerLostError | WorkerTimeoutError | GatherBrokenError)
    return _Cause.PEER_LOST if is_peer else _Cause.TASK_FAILED
