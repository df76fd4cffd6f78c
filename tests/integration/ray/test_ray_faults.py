"""A pool whose Ray starts late or not at all, loses the raylet, or has slow workers.

Without a Ray.
"""

import dataclasses
import importlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext
from operator import is_
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest

from wanstream.cli.batch.ray_backend import MIN_CPU_ACTORS, check_local
from wanstream.cli.options import ActorOptions, BatchOptions, LocalOptions
from wanstream.distributed.ray import connection as ray_setup
from wanstream.distributed.ray import environment as ray_environment
from wanstream.distributed.ray import pool as ray_pool
from wanstream.distributed.ray.actor import Started
from wanstream.distributed.ray.connection import FOLDER_PREFIX, RayConnection
from wanstream.distributed.ray.environment import QUIET, LostAtStartError, RaySetupError, import_ray
from wanstream.distributed.ray.pool import RayPool
from wanstream.distributed.transport.pool import replace_lost
from wanstream.distributed.transport.threads import run_in_thread
from wanstream.distributed.worker.worker import Worker
from wanstream.schema.refs import WorkersRef

OWN = "own node"
OTHER = "other node"


class RayError(Exception):
    """As Ray's."""


GetTimeoutError = type("GetTimeoutError", (RayError,), {})
RayActorError = type("RayActorError", (RayError,), {})
GONE = RayActorError("Worker exit detail: gone.")
ERRORS = {each.__name__: each for each in (RayError, GetTimeoutError, RayActorError)}


class FakeRay:
    """The part of the module `ray` used by a pool.

    An answer is a delay in seconds, or an error.
    """

    __version__ = "0"
    exceptions = SimpleNamespace(**ERRORS, RayTaskError=RayError)

    def __init__(self) -> None:
        self.alive = {OWN: True}
        self.inits: list[Exception | None] = []
        self.folders: list[Path] = []
        self.ended = 0
        self.started = started()  # here, because the first report takes long on a busy machine
        self.server = "127.0.0.1:1"
        self.raylet_port = 2

    def init(self, *, _temp_dir, num_cpus, **_):
        self.folders.append(Path(_temp_dir))
        self.cpus = num_cpus
        if (error := self.inits.pop(0)) is not None:
            raise error

    def shutdown(self) -> None:
        self.ended += 1

    def is_initialized(self) -> bool:
        return True

    def get_runtime_context(self):
        return SimpleNamespace(get_node_id=lambda: OWN, gcs_address=self.server)

    def nodes(self):
        raylet = {"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": self.raylet_port}
        return [{"NodeID": name, "Alive": alive, **raylet} for name, alive in self.alive.items()]

    def kill(self, actor: object) -> None: ...

    def get(self, answer: float | Exception, timeout: float) -> Started:
        if isinstance(answer, Exception):
            raise answer
        time.sleep(max(0.0, min(answer - time.monotonic(), timeout)))
        if time.monotonic() < answer:
            raise GetTimeoutError
        return self.started


def started(**changes):
    facts = Worker("cpu", machine=OTHER).facts()
    given = {"facts": facts, "logs": (), "requires_token": True, "process": ""}
    return Started(**{**given, **changes})


PLACEMENT = SimpleNamespace(
    options=lambda rank: {},
    node_of=lambda rank: OWN,
    workers_on_machine_of=lambda rank: 1,
    describe_delay=lambda rank: "see whether its machine is busy",
    close=lambda: None,
)
"""Placement without failures."""


@pytest.fixture
def ray() -> FakeRay:
    return FakeRay()


@pytest.fixture
def answers(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> list[float | Exception]:
    """Answers from starting workers, in order: a delay in seconds, or an error."""
    every: list[float | Exception] = []

    def call(method, *_):
        if method != "started":
            return SimpleNamespace(future=lambda: closed)
        answer = every.pop(0)
        return answer if isinstance(answer, Exception) else time.monotonic() + answer

    closed: Future[None] = Future()
    closed.set_result(None)
    actor = type("Actor", (), {"call": SimpleNamespace(remote=call)})  # hashable
    made = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: actor()))
    monkeypatch.setattr(ray_pool, "actor_class", lambda _: made)
    monkeypatch.setattr(ray_pool, "Placement", lambda *_, **__: PLACEMENT)
    monkeypatch.setattr(ray_pool.CONNECTION, "acquire", lambda ref, **_: ray)
    monkeypatch.setattr(ray_pool.CONNECTION, "is_alive", lambda: True)
    monkeypatch.setattr(ray_pool.CONNECTION, "release", lambda: None)
    monkeypatch.setattr(ray_pool, "CLOSE_TIMEOUT_S", 0.0)
    return every


def test_all_workers_start_before_one_deadline(answers):
    answers += [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    began = time.monotonic()
    with pytest.raises(RaySetupError, match=r"worker \d did not start within 0.25 s"):
        RayPool(WorkersRef(count=6), start_timeout_s=0.25)
    assert time.monotonic() - began < 2.0
    answers[:] = [0.1] * 6
    with RayPool(WorkersRef(count=6), start_timeout_s=2.0) as pool:
        assert pool.usable


def test_worker_that_does_not_start_may_lack_the_token(answers):
    answers += [RayActorError("It never ran.")] * 2
    ref = WorkersRef(count=1, address="127.0.0.1:1", token_file="/token")
    message = r"It never ran\. Check that .* RAY_AUTH_MODE=token and the same token"
    with pytest.raises(LostAtStartError, match=message):
        RayPool(ref, start_timeout_s=0.1)


@pytest.mark.parametrize(
    ("address", "token", "beyond_loopback", "message"),
    [
        ("192.0.2.7", True, False, "192.0.2.7, which other machines reach: set remote_machines"),
        ("192.0.2.7", False, True, "192.0.2.7 and requires no token: .* RAY_AUTH_MODE=token"),
        ("192.0.2.7", True, True, ""),
        ("::1", False, True, ""),
        ("127.0.0.1", False, False, ""),
    ],
)
def test_exposed_workers_are_refused_unless_allowed_and_guarded(
    address, token, beyond_loopback, message, ray, answers, monkeypatch
):
    """The first of two workers listens on loopback, with a token."""
    facts = dataclasses.replace(started().facts, address=address)
    found = [started(), started(facts=facts, requires_token=token)]
    monkeypatch.setattr(ray, "get", mock.Mock(side_effect=found))
    answers += [0.0, 0.0]
    cluster = {"address": "127.0.0.1:1", "token_file": "/token", "count": 2}
    with pytest.raises(RaySetupError, match=message) if message else nullcontext():
        RayPool(WorkersRef(**cluster, beyond_loopback=beyond_loopback)).close()


def test_lost_workers_are_started_once_more(answers):
    answers += [0.0, GONE, 0.0, 0.0]
    with RayPool(WorkersRef(count=2), start_timeout_s=10.0) as pool:
        assert pool.usable
        answers += [GONE, 0.0]
        pool.replace(0)
        assert (pool.usable, answers) == (True, [])
        answers += [GONE, GONE, 0.0]
        with pytest.raises(LostAtStartError, match="worker 0 does not start: gone"):
            pool.replace(0)
        assert not pool.usable
        pool.replace(0)
        assert pool.usable
    answers[:] = [GONE, GONE]
    with pytest.raises(LostAtStartError, match="worker 0 does not start: gone"):
        RayPool(WorkersRef(count=1), start_timeout_s=10.0)
    assert answers == []


def test_three_of_four_workers_start_side_by_side(ray, answers, monkeypatch):
    answers += [0.0] * 4
    with RayPool(WorkersRef(count=4), start_timeout_s=60.0) as pool:
        before = pool.workers
        starting = threading.Barrier(3)
        answers += [0.0] * 3
        get = ray.get
        timeouts = []

        def meet(answer: float | Exception, timeout: float) -> Started:
            timeouts.append(timeout)
            starting.wait(timeout)  # a replacement that waits for another one never comes here
            return get(answer, timeout)

        monkeypatch.setattr(ray, "get", meet)
        replace_lost(pool, [1, 2, 3])
        assert len(timeouts) == 3
        assert [*map(is_, before, pool.workers)] == [True, False, False, False]
        assert pool.usable


def test_failed_replacement_does_not_end_the_others(ray, answers, monkeypatch):
    get = ray.get

    def lose_the_first(answer: float | Exception, timeout: float) -> Started:
        if threading.current_thread().name == "wanstream-replace-0":
            raise GONE
        return get(answer, timeout)

    answers += [0.0] * 3
    with RayPool(WorkersRef(count=3), start_timeout_s=10.0) as pool:
        before = pool.workers
        answers += [0.0] * 4
        monkeypatch.setattr(ray, "get", lose_the_first)
        with pytest.raises(LostAtStartError, match="worker 0 does not start: gone"):
            replace_lost(pool, [0, 1, 2])
        assert [*map(is_, before, pool.workers)] == [True, False, False]
        assert not pool.usable
        answers += [0.0]
        pool.replace(0)
        assert pool.usable


def test_closing_ends_all_replacements_in_flight(ray, answers, monkeypatch):
    answers += [0.0] * 3
    pool = RayPool(WorkersRef(count=3), start_timeout_s=60.0)
    killed = list[object]()
    starting = threading.Barrier(3)
    ended = threading.Event()

    def get(answer: float | Exception, timeout: float) -> Started:
        starting.wait(timeout)
        assert ended.wait(10), "only some of the replacements were ended"
        raise RayActorError("Worker exit detail: killed.")

    def kill(actor: object) -> None:
        killed.append(actor)
        if len(killed) == 2:
            ended.set()

    answers += [0.0] * 2
    monkeypatch.setattr(ray, "get", get)
    replacing = [run_in_thread("replace", pool.replace, rank) for rank in (0, 1)]
    starting.wait(10)
    killed.clear()
    monkeypatch.setattr(ray, "kill", kill)
    pool.close()
    for each in replacing:
        with pytest.raises(RaySetupError, match=r"the pool was closed|does not start: killed"):
            each.result(10)


def test_lost_machine_or_raylet_makes_the_connection_unusable(ray, monkeypatch):
    monkeypatch.setattr(ray_environment, "import_ray", lambda: ray)
    connection = RayConnection()
    server, raylet = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
    with server, raylet:
        connection._server = ray.server = f"127.0.0.1:{server.getsockname()[1]}"
        ray.raylet_port = raylet.getsockname()[1]
        assert connection.is_alive()
        ray.alive[OTHER] = False
        assert connection.is_alive(), "that of a worker can be replaced"
        ray.alive[OWN] = False
        assert not connection.is_alive()
        ray.alive[OWN] = True
        assert connection.is_alive()
        raylet.close()  # Ray's server still counts on it for some seconds
        assert not connection.is_alive()


def start_local(ray: FakeRay, undo: ExitStack) -> None:
    ray_setup._start_local(ray, WorkersRef(count=1), 1 << 20, undo)


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """A separate folder for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_users_pattern_for_skipped_log_messages_is_kept(monkeypatch):
    name = "RAY_DEDUP_LOGS_SKIP_REGEX"
    read = dict[str, str]()
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "1")
    monkeypatch.setattr(importlib, "import_module", lambda _: read.update(os.environ))
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.delenv(name, raising=False)
    for pattern in (None, "my messages"):
        if pattern is not None:
            monkeypatch.setenv(name, pattern)
        import_ray()
        assert read[name] == (pattern or QUIET[name])
        assert read["RAY_USAGE_STATS_ENABLED"] == "0", "it is never left to a default"
        assert (os.environ.get(name), os.environ["RAY_USAGE_STATS_ENABLED"]) == (pattern, "1")


LATE = "The current node timed out during startup."


@pytest.mark.integration
def test_a_ray_that_starts_late_is_tried_once_more(ray, temporary):
    """The folder of Ray lies in one that is closed to others."""
    ray.inits = [Exception(LATE), None]
    with ExitStack() as undo:
        start_local(ray, undo)
        first, second = (folder.parent for folder in ray.folders)
        assert (first.exists(), second.exists(), ray.ended) == (False, True, 1)
        assert second.name.startswith(FOLDER_PREFIX)
        assert sys.platform == "win32" or second.stat().st_mode & 0o777 == 0o700
        assert ray.folders[1] == second / "r"
    assert (list(temporary.iterdir()), ray.ended) == ([], 2)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("error", "tries"), [(Exception(LATE), 2), (ValueError("the minimum allowed is 1"), 1)]
)
def test_ray_that_does_not_start_leaves_nothing(ray, temporary, error, tries):
    ray.inits = [error] * 3
    with ExitStack() as undo, pytest.raises(RaySetupError, match=f"this machine: {error}"):
        start_local(ray, undo)
    assert (list(temporary.iterdir()), len(ray.inits), ray.ended) == ([], 3 - tries, tries)


@pytest.mark.integration
@pytest.mark.parametrize("cores", [1, 33])
def test_local_ray_has_a_slot_for_each_core(cores, ray, temporary, monkeypatch):
    monkeypatch.setattr(ray_setup, "core_count", lambda: cores)
    ray.inits = [None]
    most = max(cores, MIN_CPU_ACTORS)
    paths = dict.fromkeys(("jobs", "workflow", "output"), temporary)
    given = {"local": LocalOptions(device="cpu"), "actors": ActorOptions(workers=most)}
    check_local(BatchOptions(**paths, **given), gpus=0, cores=cores)
    with ExitStack() as undo:
        start_local(ray, undo)
        assert ray.cpus / ray_setup.CPU_SLOT >= most, "as many actors as the command allows"


def test_paths_of_sockets_are_short_enough():
    """In the usual folder for temporary files. The system takes 107 bytes."""
    session = "session_2026-11-22_15-08-00_123456_4194304/sockets/plasma_store"
    assert len(f"/tmp/{FOLDER_PREFIX}12345678/r/{session}.12") <= 107


def test_closing_looks_for_ray_once_for_all_workers(answers, monkeypatch):
    look = mock.Mock(return_value=True)
    answers += [0.0] * 8
    pool = RayPool(WorkersRef(count=8), start_timeout_s=10.0)
    monkeypatch.setattr(ray_pool.CONNECTION, "is_alive", look)
    pool.close()
    look.assert_called_once()  # a look takes seconds if the server cannot be reached


@pytest.mark.integration
def test_a_worker_of_this_machine_whose_ray_is_gone_is_killed(ray, answers, monkeypatch):
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        facts = dataclasses.replace(Worker("cpu", machine=OWN).facts(), pid=process.pid)
        monkeypatch.setattr(ray, "get", lambda *_, **__: started(facts=facts))
        answers += [0.0]
        pool = RayPool(WorkersRef(count=1), start_timeout_s=10.0)
        pool.workers[0].wait_for_end(0.1)
        assert psutil.pid_exists(process.pid), "Ray ends it"
        monkeypatch.setattr(ray_pool.CONNECTION, "is_alive", lambda: False)
        pool.close()
        assert not psutil.pid_exists(process.pid)


def test_replacement_is_tried_again_while_ray_moves_it(answers, monkeypatch):
    nodes = iter(["first", "first", "first", "first", "gone", "gone", None, "last", "last"])
    answers += [0.0, GONE, GONE]
    with RayPool(WorkersRef(count=1), start_timeout_s=10.0) as pool:
        monkeypatch.setattr(PLACEMENT, "node_of", lambda rank: next(nodes))
        with pytest.raises(LostAtStartError):
            pool.replace(0)
        assert answers == [], "two losses on the same machine"
        answers += [GONE, GONE, 0.0]
        pool.replace(0)
        assert answers == []
