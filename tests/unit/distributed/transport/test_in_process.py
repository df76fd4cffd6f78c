"""One-worker pool in this process: same guarantees as every pool."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from wanstream.distributed.messages import RunTask, StepReport
from wanstream.distributed.transport.in_process import InProcessPool
from wanstream.distributed.transport.pool import Pool, WorkerLostError
from wanstream.sampling.steps import SamplingCancelled
from wanstream.tests.support.reports import Reports, latents_of

LIMIT_S = 60

MakeTask = Callable[..., RunTask]


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = InProcessPool("cpu")
    yield pool
    pool.close()


def ignore(report: StepReport) -> None:
    return


def test_a_run_on_another_thread_is_reported_and_ends(
    pool: Pool, make_task: MakeTask, alone: Callable
) -> None:
    told = Reports()
    threads: set[int] = set()

    def on_report(step: StepReport) -> None:
        told.append(step)
        threads.add(threading.get_ident())

    task = make_task()
    pool.workers[0].run(task, on_report).result(LIMIT_S)
    assert torch.equal(told.latents, alone(task))
    assert [step.record.index for step in told] == [0, 1, 2, 3]
    assert threading.get_ident() not in threads
    assert pool.workers[0].call("facts").result(LIMIT_S).pid == os.getpid()


def test_calls_are_answered_during_a_run(pool: Pool, make_task: MakeTask) -> None:
    answers = []
    worker = pool.workers[0]
    run = worker.run(make_task(), lambda _: answers.append(worker.call("facts").result(LIMIT_S)))
    run.result(LIMIT_S)
    assert len(answers) == 4


def test_futures_raise_errors(pool: Pool, make_task: MakeTask) -> None:
    task = make_task()
    pool.workers[0].call("stop", task.run_id).result(LIMIT_S)
    with pytest.raises(SamplingCancelled):
        pool.workers[0].run(task, ignore).result(LIMIT_S)
    with pytest.raises(AttributeError):
        pool.workers[0].call("nonsense").result(LIMIT_S)


def test_a_killed_worker_is_lost_and_can_be_replaced(
    pool: Pool, make_task: MakeTask, alone: Callable
) -> None:
    killed, task = pool.workers[0], make_task()
    run = killed.run(task, lambda _: killed.kill())
    after = killed.run(make_task(), ignore)
    with pytest.raises(WorkerLostError) as lost:
        run.result(LIMIT_S)
    assert lost.value.rank == 0
    for future in (after, killed.run(make_task(), ignore), killed.call("facts")):
        with pytest.raises(WorkerLostError):
            future.result(LIMIT_S)
    killed.kill()
    assert killed.log_tail() == ""
    again = pool.replace(0)
    assert again is pool.workers[0]
    assert torch.equal(latents_of(again, task), alone(task))


def test_closing_ends_the_run_and_its_thread(make_task: MakeTask) -> None:
    before = set(threading.enumerate())
    pool = InProcessPool("cpu")
    begun, go_on = threading.Event(), threading.Event()

    def on_report(step: StepReport) -> None:
        begun.set()
        assert go_on.wait(LIMIT_S)

    run = pool.workers[0].run(make_task(), on_report)
    assert begun.wait(LIMIT_S)
    closing = threading.Thread(target=pool.close)
    closing.start()
    go_on.set()
    closing.join(LIMIT_S)
    with pytest.raises(WorkerLostError):
        run.result(LIMIT_S)
    for thread in set(threading.enumerate()) - before:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    pool.close()
