"""Processes meet, vote and part; when one is lost or hangs, the others say so and can meet again."""

from __future__ import annotations

import gc
import os
import signal
import socket
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from wanstream.distributed.messages import RendezvousSpec
from wanstream.distributed.worker.errors import PeerLostError, WorkerTimeoutError
from wanstream.distributed.worker.groups import GroupsState, ProcessGroups, group_members, meet
from wanstream.schema import StateError
from wanstream.schema.mesh import Mesh

LOOPBACK = "127.0.0.1"
SHORT_S, LONG_S = 2.0, 50.0

Processes = Any


# What the processes do.


def job_meet(here: SimpleNamespace, every: list[RendezvousSpec]) -> dict[str, Any]:
    here.groups = meet(every[here.number], "cpu")
    listening = [each.laddr.ip for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN]
    return {"pid": os.getpid(), "state": here.groups.state, "listening": listening}


def job_meet_and_leave_at_once(here: SimpleNamespace, every: list[list[RendezvousSpec]]) -> list[GroupsState]:
    states = []
    for rendezvous in every:
        with meet(rendezvous[here.number], "cpu") as groups:
            states.append(groups.state)
    return states


def job_leave(here: SimpleNamespace) -> tuple[GroupsState, int]:
    here.groups.leave()
    here.groups.leave()
    gc.collect()  # groups of runs before, which errors and hooks hold in circles
    listening = [each for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN]
    return here.groups.state, len(listening)


def job_listening(here: SimpleNamespace) -> set[int]:
    """Return the ports that this process listens on."""
    gc.collect()
    return {each.laddr.port for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN}


def job_leave_if_met(here: SimpleNamespace) -> None:
    if hasattr(here, "groups"):
        here.groups.leave()


def job_vote(here: SimpleNamespace, wishes: list[list[bool]]) -> list[bool]:
    """Ask as often as there are wishes of this process."""
    own = iter(wishes[here.number])
    ask = here.groups.voting(lambda: next(own))
    return [ask() for _ in wishes[here.number]]


def job_reduce(here: SimpleNamespace, name: str) -> list[int]:
    """Who is in the group, by place in the group."""
    group = here.groups.group(name)
    seen = torch.zeros(here.groups.size, dtype=torch.int64)
    seen[here.groups.place] = 1
    torch.distributed.all_reduce(seen, group=group)
    return seen.nonzero().flatten().tolist()


def job_die(here: SimpleNamespace) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def met(processes: Processes, split_jobs: Any) -> Any:
    """`met(mesh)`: as many processes as it takes have met; they leave after the test."""
    count = 0

    def make(mesh: Mesh, **changes: Any) -> list[dict[str, Any]]:
        nonlocal count
        count = max(count, mesh.size)
        return processes.all(job_meet, split_jobs.rendezvous(mesh, **changes), count=mesh.size)

    yield make
    processes.all(job_leave_if_met, count=count)


def test_workers_meet_on_loopback_only_and_leave_nothing_behind(processes: Processes, met: Any) -> None:
    # Groups that earlier tests broke listen until nothing refers to their errors.
    before = processes.all(job_listening, count=2)
    told = met(Mesh(cfg=2))
    assert len({each["pid"] for each in told} | {os.getpid()}) == 3
    assert all(each["state"] is GroupsState.MET for each in told)
    assert {address for each in told for address in each["listening"]} == {LOOPBACK}
    assert all(state is GroupsState.LEFT for state, _ in processes.all(job_leave, count=2))
    assert not any(after - there for after, there in zip(processes.all(job_listening, count=2), before, strict=True))


def test_who_leaves_at_once_leaves_after_all_have_met(processes: Processes, split_jobs: Any) -> None:
    every = [split_jobs.rendezvous(Mesh(ulysses=3)) for _ in range(8)]
    processes.at_least(3)
    assert processes.all(job_meet_and_leave_at_once, every, count=3, timeout=LONG_S) == [[GroupsState.MET] * 8] * 3


def test_every_group_has_the_workers_of_its_axis(processes: Processes, met: Any) -> None:
    met(Mesh(cfg=2, ulysses=2))
    assert processes.all(job_reduce, "control", count=4) == [[0, 1, 2, 3]] * 4
    assert processes.all(job_reduce, "weights", count=4) == [[0, 1, 2, 3]] * 4
    assert processes.all(job_reduce, "cfg", count=4) == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert processes.all(job_reduce, "context", count=4) == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_cells_have_nothing_to_do_with_each_other(processes: Processes, met: Any) -> None:
    met(Mesh(data=2, cfg=2))
    assert processes.all(job_reduce, "control", count=4) == [[0, 1]] * 4
    assert processes.all(job_vote, [[True], [False], [False], [False]], count=4) == [[True], [True], [False], [False]]


@pytest.mark.parametrize("mesh", [Mesh(cfg=2), Mesh(ulysses=4)])
def test_a_wish_between_two_votes_is_answered_the_same_on_all_ranks(mesh: Mesh, processes: Processes, met: Any) -> None:
    met(mesh)
    wishes = [[rank == 1 and at == 2 for at in range(5)] for rank in range(mesh.size)]
    assert processes.all(job_vote, wishes, count=mesh.size) == [[at == 2 for at in range(5)]] * mesh.size


def test_the_same_processes_meet_five_times_and_one_of_them_is_replaced(processes: Processes, met: Any) -> None:
    pids = []
    for turn in range(5):
        pids.append({each["pid"] for each in met(Mesh(ulysses=3))})
        assert processes.all(job_vote, [[True], [False], [False]], count=3) == [[True]] * 3
        if turn == 2:
            doomed = processes[1].start(job_die)
            answers = [processes[rank].start(job_vote, [[False]] * 3) for rank in (0, 2)]
            for answer in answers:
                with pytest.raises(PeerLostError, match="no sign of rank 1"):
                    answer.result()
            with pytest.raises(RuntimeError, match="process 1 ended"):
                doomed.result()
            processes.replace(1)
        else:
            processes[1].start(job_leave).result()
        for rank in (0, 2):
            assert processes[rank].start(job_leave).result() == (GroupsState.LEFT, 0)
    assert pids[0] == pids[1] == pids[2]
    assert pids[3] == pids[4]
    assert len(pids[2] & pids[3]) == 2


def test_a_worker_that_hangs_is_named(processes: Processes, met: Any) -> None:
    met(Mesh(ulysses=3), timeout_s=SHORT_S)
    processes[2].signal(signal.SIGSTOP)
    try:
        answers = [processes[rank].start(job_vote, [[False]] * 3) for rank in range(2)]
        errors = []
        for answer in answers:
            with pytest.raises((WorkerTimeoutError, PeerLostError)) as caught:
                answer.result()
            errors.append(caught.value)
    finally:
        processes[2].signal(signal.SIGCONT)
    assert all("no sign of rank 2" in str(error) for error in errors)
    assert any(isinstance(error, WorkerTimeoutError) and f"waited {SHORT_S:g} s" in str(error) for error in errors)


@pytest.mark.parametrize("name", ["control", "weights", "ulysses"])
def test_a_worker_leaves_from_another_thread_while_it_waits_and_meets_again(
    name: str, processes: Processes, split_jobs: Any, met: Any
) -> None:
    met(Mesh(ulysses=3))
    processes[2].signal(signal.SIGSTOP)
    try:
        waiting = [processes[rank].start(split_jobs.job_leave_while_it_waits, name) for rank in (0, 1)]
        for answer in waiting:
            with pytest.raises(PeerLostError, match=r"this worker has left the rendezvous|another worker broke"):
                answer.result(LONG_S)
        assert processes[0].start(job_leave).result() == (GroupsState.LEFT, 0)
    finally:
        processes[2].signal(signal.SIGCONT)
    processes.all(job_leave, count=3)
    met(Mesh(ulysses=3))
    assert processes.all(job_vote, [[False], [True], [False]], count=3) == [[True]] * 3


def test_the_loss_of_who_keeps_the_store_is_told(processes: Processes, met: Any) -> None:
    met(Mesh(ulysses=3))
    processes[0].start(job_die)
    answers = [processes[rank].start(job_vote, [[False]] * 3) for rank in (1, 2)]
    for answer in answers:
        with pytest.raises(PeerLostError, match="rank 0, which keeps the store, is gone"):
            answer.result()
    processes.replace(0)
    processes.all(job_leave_if_met, count=3)


def test_those_who_do_not_come_are_named(processes: Processes, split_jobs: Any) -> None:
    every = split_jobs.rendezvous(Mesh(ulysses=4), timeout_s=SHORT_S)
    answers = [processes.at_least(4)[rank].start(job_meet, every) for rank in (0, 2)]
    for answer in answers:
        with pytest.raises(WorkerTimeoutError, match=r"ranks 1 and 3 did not come .* within 2 s"):
            answer.result()
    every = split_jobs.rendezvous(Mesh(ulysses=2), timeout_s=SHORT_S)
    with pytest.raises(WorkerTimeoutError, match=f"no store answers at {LOOPBACK}:{every[0].port} after 2 s"):
        processes[1].start(job_meet, every).result()


def test_a_port_that_is_taken_is_named(processes: Processes, split_jobs: Any) -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"port {port} at {LOOPBACK} is taken"):
            processes.at_least(1)[0].start(job_meet, split_jobs.rendezvous(Mesh(cfg=2), port=port)).result()


def test_a_cell_of_one_worker_needs_nobody(split_jobs: Any) -> None:
    with meet(split_jobs.rendezvous(Mesh(data=4, stage=2))[5], "cpu") as groups:
        assert groups.split().alone
        assert groups.voting(wish := lambda: True) is wish
        assert not torch.distributed.is_initialized()
    assert groups.state is GroupsState.LEFT


def test_groups_out_of_order_are_refused(split_jobs: Any) -> None:
    groups = ProcessGroups(split_jobs.rendezvous(Mesh(cfg=2))[0], torch.device("cpu"))
    with pytest.raises(StateError, match="have not met yet"):
        groups.control  # noqa: B018 - the look-up is what is tested
    groups.leave()
    with pytest.raises(StateError, match="were left"):
        groups.meet()


def test_the_groups_of_a_cell_are_listed_in_one_order() -> None:
    assert group_members(Mesh(cfg=2)) == {"weights": [(0, 1)], "cfg": [(0, 1)]}
    assert group_members(Mesh(cfg=2, ring=2, ulysses=2)) == {
        "weights": [(0, 1, 2, 3, 4, 5, 6, 7)],
        "cfg": [(0, 4), (1, 5), (2, 6), (3, 7)],
        "ring": [(0, 2), (1, 3), (4, 6), (5, 7)],
        "ulysses": [(0, 1), (2, 3), (4, 5), (6, 7)],
        "context": [(0, 1, 2, 3), (4, 5, 6, 7)],
    }
