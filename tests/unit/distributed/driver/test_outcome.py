"""Task outcome from worker errors: the root cause is returned."""

from __future__ import annotations

import pytest

from wanstream.distributed.driver.worker_group import TaskOutcome, classify_failure
from wanstream.distributed.messages import TaskResult
from wanstream.distributed.transport.pool import WorkerLostError
from wanstream.distributed.worker.rendezvous import PeerLostError, WorkerTimeoutError
from wanstream.sampling.steps import InsufficientMemoryError, SamplingCancelled, SmallerPolicyError
from wanstream.schema import OffloadPolicy
from wanstream.schema.records import Timeline

GONE, PEER, HUNG = WorkerLostError("gone", 1), PeerLostError("peer"), WorkerTimeoutError("hung")
SHORT = SmallerPolicyError("short", OffloadPolicy.layerwise(0))
WRONG, CANCELLED = InsufficientMemoryError("no room"), SamplingCancelled(3, 4)
RESULT = TaskResult(timeline=Timeline(kind="measured", steps=()))

ENDED, FAILED, SMALLER, LOST, KILLED, STOPPED, FINISHED = TaskOutcome


def errors_of(outcomes: list[TaskResult | BaseException]) -> dict[int, BaseException]:
    return {place: each for place, each in enumerate(outcomes) if isinstance(each, BaseException)}


@pytest.mark.parametrize(
    ("outcomes", "killed", "outcome", "place"),
    [
        ([RESULT, GONE], (), ENDED, 1),
        ([PEER, GONE], (), ENDED, 1),
        ([RuntimeError("reset by peer"), GONE], (), ENDED, 1),
        ([SHORT, GONE], (), ENDED, 1),
        ([WRONG, PEER], (), FAILED, 0),
        ([PEER, WRONG], (), FAILED, 1),
        ([WRONG, GONE], (1,), FAILED, 0),
        ([PEER, SHORT], (), SMALLER, 1),
        ([SHORT, SHORT], (), SMALLER, 0),
        ([SHORT, GONE], (1,), SMALLER, 0),
        ([PEER, PEER], (), LOST, 0),
        ([GONE, HUNG], (0,), LOST, 1),
        ([GONE], (0,), KILLED, 0),
        ([CANCELLED, CANCELLED], (), STOPPED, 0),
        ([PEER, CANCELLED], (), LOST, 0),
    ],
)
def test_the_error_that_caused_the_others_is_returned(
    outcomes: list[TaskResult | BaseException],
    killed: tuple[int, ...],
    outcome: TaskOutcome,
    place: int,
) -> None:
    end = classify_failure(errors_of(outcomes), killed=killed, stopped=False)
    assert (end.outcome, end.place) == (outcome, place)
    assert end.error is outcomes[place]
    assert end.outcome.is_loss == (outcome in (ENDED, LOST, KILLED))


@pytest.mark.parametrize(
    "outcomes", [[CANCELLED, PEER], [WRONG, CANCELLED], [GONE, CANCELLED], [SHORT, RESULT], [GONE]]
)
def test_any_error_of_a_stopped_task_counts_as_stopped(
    outcomes: list[TaskResult | BaseException],
) -> None:
    end = classify_failure(errors_of(outcomes), killed=(), stopped=True)
    assert end.outcome is STOPPED
    assert (end.error is CANCELLED) == (CANCELLED in outcomes)


def test_a_task_that_all_workers_finished_is_finished_even_after_a_stop() -> None:
    for stopped in (False, True):
        assert classify_failure({}, killed=(), stopped=stopped) == (FINISHED, None, 0)
