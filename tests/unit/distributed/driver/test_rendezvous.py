"""Groups of workers that join, leave, get lost and are replaced."""

import errno
import logging
import queue
import threading
from unittest import mock

import pytest

from wanstream.distributed import Driver, RestartLimitError, WorkerLostError
from wanstream.distributed.driver.rendezvous import Rendezvous
from wanstream.distributed.driver.results import TaskLog
from wanstream.distributed.driver.stage_run import Inbox
from wanstream.distributed.driver.worker_group import WorkerGroup
from wanstream.distributed.path_map import MissingPathError
from wanstream.distributed.transport.threads import run_in_thread
from wanstream.sampling.steps import SamplingCancelled, SmallerPolicyError
from wanstream.schema import Mesh, OffloadPolicy
from wanstream.schema.refs import PathMap, WorkersRef
from wanstream.tests.support.distributed.fake_pool import FakePool, FakeWorker, Fault, driver_of

CFG = Mesh(cfg=2)
DATA_CFG = Mesh(data=2, cfg=2)
SHORT = SmallerPolicyError("out of memory in step 4", OffloadPolicy.layerwise(0))


@pytest.mark.parametrize("mesh", [Mesh(cfg=2, ulysses=2), DATA_CFG, Mesh(data=4)], ids=str)
def test_three_of_four_workers_are_replaced_side_by_side(mesh, run, monkeypatch):
    """No replacement ends before all three have begun, in one group or in several."""
    pool = FakePool(4)
    starting = threading.Barrier(3)
    for rank in (1, 2, 3):
        pool.workers[rank].kill()
    replace_worker = pool.replace

    def replace_with_others(rank: int) -> FakeWorker:
        starting.wait(20)
        return replace_worker(rank)

    monkeypatch.setattr(pool, "replace", replace_with_others)
    run(driver_of(pool, mesh), mesh.data)
    assert sorted(pool.replaced) == [1, 2, 3]


def test_group_on_several_machines_votes_once_per_step(run, caplog):
    pool = FakePool(4, machines={3: "other"})
    driver = driver_of(pool, DATA_CFG)
    with caplog.at_level(logging.WARNING, "wanstream.distributed"):
        run(driver, 2)
    apart = "2 on node-2 (127.0.0.1), 3 on node-3 (127.0.0.1)"
    assert caplog.messages == [f"workers that share a video are apart: {apart}"]
    spans = {rank: rendezvous.spans_machines for rank, rendezvous in pool.joined}
    assert spans == {0: False, 1: False, 2: True, 3: True}
    machines = [[each.machine for each in facts] for _, facts in driver.workers]
    assert machines == [["", ""], ["", "other"]]


def test_groups_join_separately_and_stay_joined(run):
    pool = FakePool(4)
    driver = driver_of(pool, Mesh(stage=2, cfg=2))
    for _ in range(2):
        run(driver)
    met = sorted((rank, rendezvous.rank, rendezvous.mesh) for rank, rendezvous in pool.joined)
    assert met == [(rank, rank % 2, CFG) for rank in range(4)]
    assert {rendezvous.weights for _, rendezvous in pool.joined} == {"auto"}
    assert len({rendezvous.generation for _, rendezvous in pool.joined}) == 2


@pytest.mark.parametrize("failing", [2, 9])
def test_workers_that_do_not_start_count_as_lost(failing, run):
    pool = FakePool(2, [Fault(1, 2, "dies")])
    tries = [WorkerLostError("it does not start", 1)] * failing + [mock.DEFAULT]
    pool.replace = mock.Mock(wraps=pool.replace, side_effect=tries)
    driver = driver_of(pool, CFG)
    if failing < 3:
        assert run(driver).restarts == 3
        return
    with pytest.raises(RestartLimitError, match="not start\ngiving up after 3 worker restarts"):
        run(driver)
    # Workers that never start end a run before it begins.
    pool.sent.clear()
    with pytest.raises(RestartLimitError, match="it does not start"):
        run(driver)
    assert pool.sent == []


def test_a_run_can_be_stopped_while_workers_join(run):
    pool = FakePool(2)
    pool.workers[1].kill()
    pool.replace = lambda rank: threading.Event().wait(1) or FakePool(2).workers[1]
    with pytest.raises(SamplingCancelled):
        run(driver_of(pool, CFG), should_stop=lambda: True)


def test_worker_lost_between_runs_is_replaced(run):
    pool = FakePool(2)
    driver = driver_of(pool, Mesh(data=2), max_restarts=0)
    run(driver, 2)
    pool.workers[1].kill()
    assert (run(driver, 2).restarts, pool.replaced) == (0, [1]), "no loss of this run"


def layouts(pool: FakePool, rank: int) -> list[str]:
    return [str(rendezvous.mesh) for each, rendezvous in pool.joined if each == rank]


def test_workers_that_left_for_another_driver_join_again(run):
    """The host closed them, or another driver joined them in between."""
    pool = FakePool(2)
    first = driver_of(pool, CFG)
    second = driver_of(pool, Mesh(ulysses=2))
    for driver in (first, second, first):
        run(driver)
    for closed in [worker.call("close") for worker in pool.workers]:
        closed.result(10)
    run(first)
    assert layouts(pool, 1) == ["cfg 2", "ulysses 2", "cfg 2", "cfg 2"]
    assert pool.replaced == []


def test_a_repair_of_a_former_driver_is_awaited(run):
    """Otherwise both drivers would replace the same worker and join it to different groups."""
    pool = FakePool(2, [Fault(1, 2, "dies")])
    replace_worker = pool.replace
    repairing = threading.Event()
    go_on = threading.Event()

    def slowly(rank: int) -> FakeWorker:
        repairing.set()
        assert go_on.wait(60)
        return replace_worker(rank)

    pool.replace = slowly
    first = driver_of(pool, CFG)
    with pytest.raises(SamplingCancelled) as stopped:
        run(first, should_stop=repairing.is_set)
    assert stopped.value.step == 2, "no job was stopped: it is the next step"
    ref = WorkersRef(count=2, timeout_s=20.0, max_restarts=0)
    running = run_in_thread("second", run, Driver(pool, ref, Mesh(ulysses=2), follows=first))
    threading.Timer(0.3, go_on.set).start()
    assert (running.result(60).restarts, pool.replaced) == (0, [1])
    assert layouts(pool, 0) == ["cfg 2", "cfg 2", "ulysses 2"]


def test_a_disabled_group_repairs_nothing():
    pool = FakePool(2)
    ref = WorkersRef(count=2, timeout_s=20.0)
    late, now = (WorkerGroup(Rendezvous(pool, ref, (0, 1), CFG), [], [], TaskLog()) for _ in "12")
    late.rendezvous.disable()
    for group, joined in ((late, 0), (now, 2)):
        inbox: Inbox = queue.SimpleQueue()
        ended = group.repair(inbox).receive(inbox.get(timeout=10)).end
        assert (ended.error, len(pool.joined)) == (None, joined)
    assert sorted(rank for rank, _ in pool.joined) == [0, 1]


@pytest.mark.parametrize("left", [0, 3, 4])
def test_ports_that_are_taken_are_passed_over(left, run):
    driver = driver_of(FakePool(2, taken=set(range(5000, 5000 + left))), CFG)
    if left < 4:
        run(driver)
        return
    with pytest.raises(OSError, match="port 5003") as raised:
        run(driver)
    assert raised.value.errno == errno.EADDRINUSE


def test_files_missing_on_a_machine_are_named(run, experts):
    high = experts.high_noise
    there = str(high.parent).replace("/", "/x", 1)
    pool = FakePool(2, missing={1: (str(high),)})
    maps = (PathMap(here=str(high.parent), there=there),)
    driver = driver_of(pool, Mesh(data=2), paths=maps)
    with pytest.raises(MissingPathError, match=rf"^{there}/.* or {high} does not exist on node-1"):
        run(driver, 2)
    assert pool.sent == []
    pool.missing = {}
    run(driver, 2)
    # Each worker finds its own.
    assert {(task.experts, task.paths) for _, task in pool.sent} == {(experts, maps)}


@pytest.mark.parametrize(
    ("faults", "taken"), [([Fault(0, 4, SHORT)], set()), ([], {5000})], ids=["last", "failed"]
)
def test_workers_leave_a_rendezvous_before_the_next_one(faults, taken, run):
    pool = FakePool(2, [*faults], step_s=0.1, leave_s={0: 0.1}, taken=taken)
    assert run(driver_of(pool, CFG, max_restarts=0)).restarts == 0
