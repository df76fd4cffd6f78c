"""Process groups: join, decide and leave.

A lost or hung worker is reported, and the others can join again.
"""

import gc
import os
import signal
import socket

import psutil
import pytest
import torch

from wanstream.distributed.worker.groups import GroupsState, ProcessGroups
from wanstream.distributed.worker.parallel_forward import group_forward
from wanstream.distributed.worker.rendezvous import PeerLostError, WorkerTimeoutError
from wanstream.schema import Mesh, StateError
from wanstream.tests.support.distributed import split_jobs

LOOPBACK = "127.0.0.1"
SHORT_S = 2.0
LONG_S = 50.0

# Jobs for the processes.


def listening() -> set[tuple[str, int]]:
    """Return the addresses and ports this process listens on."""
    gc.collect()  # errors and hooks keep earlier runs' groups in reference cycles
    every = psutil.Process().net_connections()
    return {each.laddr for each in every if each.status == psutil.CONN_LISTEN}


def job_join(here, every):
    """Return the process id, the state, and the addresses this process listens on."""
    # Groups broken by earlier tests listen until nothing refers to their errors.
    here.before = listening()
    here.groups = split_jobs.join_groups(every[here.number])
    return os.getpid(), here.groups.state, {ip for ip, _ in listening()}


def job_join_and_leave(here, every):
    for specs in every:
        groups = split_jobs.join_groups(specs[here.number])
        assert groups.state is GroupsState.JOINED
        groups.leave()


def job_leave(here):
    """Leave twice.

    Returns the state, and the number of ports still open since this process joined.
    """
    here.groups.leave()
    here.groups.leave()
    return here.groups.state, len(listening() - here.before)


def job_decide(here, wishes):
    """Decide once per wish on this process."""
    return [here.groups.any_wants(wish) for wish in wishes[here.number]]


def job_reduce(here, name):
    """Return the group ranks of the process group's members."""
    group = here.groups.group(name)
    seen = torch.zeros(here.groups.size, dtype=torch.int64)
    seen[here.groups.rank] = 1
    torch.distributed.all_reduce(seen, group=group)
    return seen.nonzero().flatten().tolist()


def job_die(here):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def joined(processes):
    """`joined(mesh)`: join with as many processes as the mesh has, and leave after the test."""
    count = 0

    def make(mesh, **changes):
        nonlocal count
        count = max(count, mesh.size)
        return processes.all(job_join, split_jobs.rendezvous(mesh, **changes), count=mesh.size)

    yield make
    processes.all(split_jobs.job_leave, count=count)


def test_workers_listen_on_loopback_only_and_leave_no_sockets(processes, joined):
    pids, states, addresses = zip(*joined(Mesh(cfg=2)), strict=True)
    assert len({*pids, os.getpid()}) == 3
    assert states == (GroupsState.JOINED,) * 2
    assert set.union(*addresses) == {LOOPBACK}
    assert processes.all(job_leave, count=2) == [(GroupsState.LEFT, 0)] * 2


def test_a_worker_can_leave_immediately_after_it_has_joined(processes):
    every = [split_jobs.rendezvous(Mesh(ulysses=3)) for _ in range(8)]
    processes.at_least(3).all(job_join_and_leave, every, count=3, timeout=LONG_S)


def test_every_group_has_the_workers_of_its_axis(processes, joined):
    joined(Mesh(cfg=2, ulysses=2))
    whole = [[0, 1, 2, 3]] * 4
    for name, members in {
        "control": whole,
        "weights": whole,
        "cfg": [[0, 2], [1, 3], [0, 2], [1, 3]],
        "context": [[0, 1], [0, 1], [2, 3], [2, 3]],
    }.items():
        assert processes.all(job_reduce, name, count=4) == members, name


def test_processes_join_five_times(processes, joined):
    pids = []
    for turn in range(5):
        pids.append({pid for pid, _, _ in joined(Mesh(ulysses=3))})
        assert processes.all(job_decide, [[True], [False], [False]], count=3) == [[True]] * 3
        if turn == 2:
            doomed = processes[1].start(job_die)
            for answer in [processes[rank].start(job_decide, [[False]] * 3) for rank in (0, 2)]:
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


def test_a_worker_that_hangs_is_named(processes, joined):
    joined(Mesh(ulysses=3), timeout_s=SHORT_S)
    processes[2].signal(signal.SIGSTOP)
    errors = []
    try:
        for answer in [processes[rank].start(job_decide, [[False]] * 3) for rank in range(2)]:
            lost = (WorkerTimeoutError, PeerLostError)
            with pytest.raises(lost, match="no sign of rank 2") as caught:
                answer.result()
            errors.append(caught.value)
    finally:
        processes[2].signal(signal.SIGCONT)
    late = [str(error) for error in errors if isinstance(error, WorkerTimeoutError)]
    assert f"waited {SHORT_S:g} s" in "".join(late)


@pytest.mark.parametrize("name", ["control", "weights", "ulysses"])
def test_worker_leaves_from_another_thread(name, processes, joined):
    joined(Mesh(ulysses=3))
    processes[2].signal(signal.SIGSTOP)
    try:
        job = split_jobs.job_leave_while_it_waits, name
        said = r"this worker has left the rendezvous|another worker broke"
        for answer in [processes[rank].start(*job) for rank in (0, 1)]:
            with pytest.raises(PeerLostError, match=said):
                answer.result(LONG_S)
        assert processes[0].start(job_leave).result() == (GroupsState.LEFT, 0)
    finally:
        processes[2].signal(signal.SIGCONT)
    processes.all(job_leave, count=3)
    joined(Mesh(ulysses=3))
    assert processes.all(job_decide, [[False], [True], [False]], count=3) == [[True]] * 3


def test_the_loss_of_rank_0_is_reported(processes, joined):
    joined(Mesh(ulysses=3))
    processes[0].start(job_die)
    for answer in [processes[rank].start(job_decide, [[False]] * 3) for rank in (1, 2)]:
        with pytest.raises(PeerLostError, match="rank 0, which runs the store, is gone"):
            answer.result()
    processes.replace(0)
    processes.all(split_jobs.job_leave, count=3)


def test_missing_workers_are_named(processes):
    every = split_jobs.rendezvous(Mesh(ulysses=4), timeout_s=SHORT_S)
    for answer in [processes.at_least(4)[rank].start(job_join, every) for rank in (0, 2)]:
        with pytest.raises(WorkerTimeoutError, match=r"ranks 1 and 3 did not join .* within 2 s"):
            answer.result()
    every = split_jobs.rendezvous(Mesh(ulysses=2), timeout_s=SHORT_S)
    message = f"no store responds at {LOOPBACK}:{every[0].port} after 2 s"
    with pytest.raises(WorkerTimeoutError, match=message):
        processes[1].start(job_join, every).result()


def test_a_port_that_is_taken_is_named(processes):
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        every = split_jobs.rendezvous(Mesh(cfg=2), port=port)
        with pytest.raises(OSError, match=f"port {port} at {LOOPBACK} is taken"):
            processes.at_least(1)[0].start(job_join, every).result()


def test_a_group_of_one_worker_opens_no_connection():
    groups = split_jobs.join_groups(split_jobs.rendezvous(Mesh())[0])
    assert group_forward(groups).alone
    assert group_forward(groups).any_stops(True, 3)
    assert not group_forward(groups).any_stops(False, 0)
    assert not torch.distributed.is_initialized()
    groups.leave()
    assert groups.state is GroupsState.LEFT


def test_groups_out_of_order_are_refused():
    groups = ProcessGroups(split_jobs.rendezvous(Mesh(cfg=2))[0], torch.device("cpu"))
    with pytest.raises(StateError, match="these are new"):
        groups.group("control")
    groups.leave()
    with pytest.raises(StateError, match="these are left"):
        groups.join()
