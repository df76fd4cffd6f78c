"""One-worker pool in this process: same guarantees as every pool."""

import os
import threading

import pytest
import torch

from wanstream.distributed import InProcessPool, WorkerLostError
from wanstream.sampling.steps import SamplingCancelled
from wanstream.tests.support.distributed.reports import Reports, latents_of

LIMIT_S = 60


@pytest.fixture
def pool():
    pool = InProcessPool("cpu")
    yield pool
    pool.close()


def ignore(report): ...


def test_a_run_on_another_thread_is_reported_and_ends(pool, make_task, alone):
    told = Reports()
    threads = set[int]()
    pids = set[int]()
    worker = pool.workers[0]
    task = make_task()

    def on_report(step):
        told.append(step)
        threads.add(threading.get_ident())
        pids.add(worker.call("facts").result(LIMIT_S).pid)  # answered during the run

    worker.run(task, on_report).result(LIMIT_S)
    assert torch.equal(told.latents, alone(task))
    assert [step.record.index for step in told] == [0, 1, 2, 3]
    assert threading.get_ident() not in threads
    assert pids == {os.getpid()}
    # Futures raise errors.
    worker.call("stop", task.run_id).result(LIMIT_S)
    with pytest.raises(SamplingCancelled):
        worker.run(task, ignore).result(LIMIT_S)
    with pytest.raises(AttributeError):
        worker.call("nonsense").result(LIMIT_S)


def test_a_killed_worker_is_lost_and_can_be_replaced(pool, make_task, alone):
    killed = pool.workers[0]
    task = make_task()
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


def test_closing_ends_the_run_and_its_thread(make_task):
    before = set(threading.enumerate())
    pool = InProcessPool("cpu")
    begun = threading.Event()
    go_on = threading.Event()

    def on_report(step):
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
