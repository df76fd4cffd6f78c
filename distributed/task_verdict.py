"""What became of a task, judged from what each worker of its cell ended with.

One error makes others: whoever waits for a worker that has ended says that its peer is lost. So a process that is gone
by itself explains everything; then what was wrong with the task itself; then a want of memory; then errors about peers,
and processes that were killed because they did not end.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum

from ..offload.gather import GatherBrokenError
from ..plan import OffloadPolicy
from ..sampling import Cancelled, SmallerPolicyError
from .peer_errors import HungError, PeerLostError
from .pool import WorkerLostError
from .tasks import RunEnded


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
    ended: Mapping[int, RunEnded]
    """By place in the cell, of those that computed all of it."""
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


def judge(outcomes: Mapping[int, RunEnded | BaseException], *, killed: Collection[int], stopped: bool) -> TaskEnd:
    """Judge a task by what came out of each place of its cell.

    Args:
        killed: places whose processes the driver has ended.
        stopped: whether the driver has asked the workers to stop; what else happened then does not matter.
    """
    ended = {place: each for place, each in outcomes.items() if isinstance(each, RunEnded)}
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
    if isinstance(error, Cancelled):
        return _Sign.ASKED
    if isinstance(error, SmallerPolicyError):
        return _Sign.SHORT
    return _Sign.PEER if isinstance(error, PeerLostError | HungError | GatherBrokenError) else _Sign.WRONG
