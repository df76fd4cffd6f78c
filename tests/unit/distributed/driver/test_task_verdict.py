"""What became of a task, from the errors of its workers: the one that made the others is told."""

from __future__ import annotations

import pytest

from wanstream.distributed.driver.task_run import TaskVerdict, classify_failure
from wanstream.distributed.messages import TaskResult
from wanstream.distributed.transport.pool import WorkerLostError
from wanstream.distributed.worker.errors import PeerLostError, WorkerTimeoutError
from wanstream.sampling import NoRoomError, SamplingCancelled, SmallerPolicyError
from wanstream.schema import OffloadPolicy, Timeline

GONE, PEER, HUNG = WorkerLostError("gone", 1), PeerLostError("peer"), WorkerTimeoutError("hung")
SHORT = SmallerPolicyError("short", OffloadPolicy.layerwise(0))
WRONG, ASKED = NoRoomError("no room"), SamplingCancelled(3, 4)
ENDED = TaskResult(run_id="", rank=0, timeline=Timeline(kind="measured", steps=()), latents=None, sigma=0.0)

LOST, FAILED, SMALLER, STOPPED = (
    TaskVerdict.LOST,
    TaskVerdict.FAILED,
    TaskVerdict.SMALLER,
    TaskVerdict.STOPPED,
)


@pytest.mark.parametrize(
    ("outcomes", "killed", "verdict", "place"),
    [
        ([ENDED, GONE], (), LOST, 1),
        ([PEER, GONE], (), LOST, 1),
        ([RuntimeError("reset by peer"), GONE], (), LOST, 1),
        ([SHORT, GONE], (), LOST, 1),
        ([WRONG, PEER], (), FAILED, 0),
        ([PEER, WRONG], (), FAILED, 1),
        ([WRONG, GONE], (1,), FAILED, 0),
        ([PEER, SHORT], (), SMALLER, 1),
        ([SHORT, SHORT], (), SMALLER, 0),
        ([SHORT, GONE], (1,), SMALLER, 0),
        ([PEER, PEER], (), LOST, 0),
        ([GONE, HUNG], (0,), LOST, 1),
        ([GONE], (0,), LOST, 0),
        ([ASKED, ASKED], (), STOPPED, 0),
        ([PEER, ASKED], (), LOST, 0),
    ],
)
def test_the_telling_error_is_told(
    outcomes: list[TaskResult | BaseException], killed: tuple[int, ...], verdict: TaskVerdict, place: int
) -> None:
    end = classify_failure(dict(enumerate(outcomes)), killed=killed, stopped=False)
    assert (end.verdict, end.place) == (verdict, place)
    assert end.error is outcomes[place]
    assert end.policy == (SHORT.policy if verdict is SMALLER else None)
    assert set(end.ended) == {at for at, each in enumerate(outcomes) if each is ENDED}


@pytest.mark.parametrize("outcomes", [[ASKED, PEER], [WRONG, ASKED], [GONE, ASKED], [SHORT, ENDED], [GONE]])
def test_of_a_task_that_was_stopped_nothing_else_matters(outcomes: list[TaskResult | BaseException]) -> None:
    end = classify_failure(dict(enumerate(outcomes)), killed=(), stopped=True)
    assert end.verdict is STOPPED
    assert (end.error is ASKED) == (ASKED in outcomes)


def test_a_task_that_all_have_computed_is_ended_even_if_they_were_to_stop() -> None:
    for stopped in (False, True):
        end = classify_failure({0: ENDED, 1: ENDED}, killed=(), stopped=stopped)
        assert (end.verdict, end.error, set(end.ended)) == (TaskVerdict.ENDED, None, {0, 1})
