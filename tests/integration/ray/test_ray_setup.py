"""Errors in Ray's setup: Ray is missing, another Ray is connected, no Ray at the address."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest

from wanstream.distributed.messages import WorkerFacts
from wanstream.distributed.ray import connection as ray_connection
from wanstream.distributed.ray import environment
from wanstream.distributed.ray.actor import Started
from wanstream.distributed.ray.connection import RayConnection, RayReaper, check_cluster
from wanstream.distributed.ray.pool import check_exposure, describe_exit, tail
from wanstream.distributed.transport.threads import run_in_thread
from wanstream.schema.refs import WorkersRef

LIMIT_S = 120

WITHOUT_RAY = """
import sys
from wanstream.distributed.ray.environment import RayMissingError
from wanstream.distributed.ray.pool import RayPool
from wanstream.schema.refs import WorkersRef
print("ray" in sys.modules)
sys.modules["ray"] = None
try:
    RayPool(WorkersRef(count=2))
except RayMissingError as err:
    print(err)
"""


@pytest.mark.integration
def test_missing_ray_is_refused_with_how_to_install_it(tmp_path):
    given = {"capture_output": True, "text": True, "check": True, "cwd": tmp_path}
    done = subprocess.run([sys.executable, "-c", WITHOUT_RAY], timeout=LIMIT_S, **given)
    imported, message = done.stdout.splitlines()
    assert imported == "False"
    assert "which is not installed" in message
    assert "wanstream[distributed]" in message


def started(address: str, *, token: bool) -> Started:
    facts = WorkerFacts(pid=1, node="rack", address=address, device="cpu", versions={})
    return Started(facts=facts, logs=(), requires_token=token, process="")


def test_exposed_workers_are_refused_unless_allowed_and_guarded():
    for address in ("127.0.0.1", "::1"):
        check_exposure([started(address, token=False)], beyond_loopback=address == "::1")
    outside = [started("127.0.0.1", token=True), started("192.0.2.7", token=True)]
    message = r"listen on 192\.0\.2\.7, which other machines reach: set remote_machines"
    with pytest.raises(environment.RaySetupError, match=message):
        check_exposure(outside, beyond_loopback=False)
    check_exposure(outside, beyond_loopback=True)
    message = r"192\.0\.2\.7 and requires no token: .* RAY_AUTH_MODE=token"
    with pytest.raises(environment.RaySetupError, match=message):
        check_exposure([started("192.0.2.7", token=False)], beyond_loopback=True)


def test_an_address_where_nobody_listens_is_told_at_once():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    said = rf"no Ray cluster answers at 127\.0\.0\.1:{port} .*ray start --head"
    with pytest.raises(environment.RaySetupError, match=said):
        check_cluster(f"127.0.0.1:{port}", "127.0.0.1", port)


@pytest.mark.integration
@pytest.mark.parametrize("safe", ["", "1"])
def test_helper_processes_import_nothing_from_the_folder(tmp_path, monkeypatch, safe):
    """Files in the current folder are not imported, with and without PYTHONSAFEPATH."""
    monkeypatch.setenv("PYTHONSAFEPATH", safe)
    real, planted = tmp_path / "real", tmp_path / "planted"
    for folder in (real, planted):
        folder.mkdir()
    (real / "ray.py").write_text("def init(**_): pass\ndef shutdown(): pass")
    for module in ("ray", "shutil", "psutil"):
        (planted / f"{module}.py").write_text("raise RuntimeError('planted')")
    monkeypatch.setenv("PYTHONPATH", str(real))
    monkeypatch.chdir(planted)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        check_cluster(f"127.0.0.1:{port}", "127.0.0.1", port)
    watched = planted / "watched"
    watched.mkdir()
    RayReaper(watched).close()
    assert not watched.exists()


@pytest.mark.integration
def test_what_is_no_ray_is_told_in_bounded_time():
    pytest.importorskip("ray")
    said = "did not accept this process within 3 s"
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with environment.temporary_environment({environment.ONE_MACHINE: "0"}):
            with pytest.raises(environment.RaySetupError, match=said):
                check_cluster(f"127.0.0.1:{port}", "127.0.0.1", port, timeout_s=3)


def test_ray_settings_are_set_only_while_they_are_needed(monkeypatch):
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "1")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    before = dict(os.environ)
    with environment.local_ray_environment():
        assert os.environ[environment.ONE_MACHINE] == "0"
        assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
        assert os.environ["RAY_AUTH_TOKEN"] == environment.PROCESS_TOKEN
        assert len(environment.PROCESS_TOKEN) == 64
        os.environ["RAY_LEFT_BY_RAY"] = os.environ["PYTHONBREAKPOINT"] = "x"
    assert dict(os.environ) == before
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/mine")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of a cluster")
    with environment.local_ray_environment():
        assert os.environ["RAY_AUTH_MODE"] == "token"
        assert os.environ["RAY_AUTH_TOKEN"] == environment.PROCESS_TOKEN
        assert "RAY_AUTH_TOKEN_PATH" not in os.environ
    assert os.environ["RAY_AUTH_MODE"] == "disabled"
    assert os.environ["RAY_AUTH_TOKEN"] == "of a cluster"


def test_one_thread_at_a_time_changes_the_environment():
    before = dict(os.environ)
    entered = threading.Event()

    def enter() -> str | None:
        with environment.temporary_environment({"RAY_OF_THE_SECOND": "1"}):
            entered.set()
            return os.environ.get("RAY_OF_THE_FIRST")

    first = environment.temporary_environment({"RAY_OF_THE_FIRST": "1"})
    with first, environment.temporary_environment({environment.ONE_MACHINE: "0"}):
        second = run_in_thread("second", enter)
        assert not entered.wait(0.1)
    assert second.result(LIMIT_S) is None
    assert dict(os.environ) == before


def test_imported_ray_is_returned_without_new_settings(monkeypatch):
    imported = ModuleType("ray")
    monkeypatch.setitem(sys.modules, "ray", imported)

    changed = mock.Mock(side_effect=AssertionError("the environment is changed"))
    monkeypatch.setattr(environment, "temporary_environment", changed)
    assert environment.import_ray() is imported


@pytest.fixture
def token_file(tmp_path):
    """A file with a token, readable only by the user."""
    file = tmp_path / "token"
    file.touch(mode=0o600)
    file.write_text("cd" * 32)
    return file


def test_a_token_comes_from_the_file_of_the_entry_alone(token_file, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of another cluster")
    before = dict(os.environ)
    with environment.token_of_cluster(str(token_file)):
        assert "RAY_AUTH_TOKEN" not in os.environ
        assert os.environ["RAY_AUTH_MODE"] == "token"
        assert os.environ["RAY_AUTH_TOKEN_PATH"] == str(token_file)
    with environment.token_of_cluster(""):
        assert os.environ["RAY_AUTH_MODE"] == "disabled"
        assert not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()
    assert dict(os.environ) == before


@pytest.mark.skipif(os.name != "posix", reason="these are bits of POSIX")
def test_unreadable_empty_or_open_token_file_is_refused(token_file):
    environment.check_token_file(str(token_file))
    for mode in (0o640, 0o604):
        token_file.chmod(mode)
        with pytest.raises(environment.RaySetupError, match=rf"has the mode {mode:o} .*chmod 600"):
            environment.check_token_file(str(token_file))
    token_file.chmod(0o600)
    token_file.write_text(" \n")
    with pytest.raises(environment.RaySetupError, match="is empty: copy the token"):
        environment.check_token_file(str(token_file))
    token_file.unlink()
    with pytest.raises(
        environment.RaySetupError, match=r"cannot be read .*ray get-auth-token --generate"
    ):
        environment.check_token_file(str(token_file))


@pytest.mark.slow
def test_an_entry_without_a_token_gets_none_of_this_process(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "ef" * 32)
    monkeypatch.setenv("HOME", str(tmp_path))  # without ~/.ray/auth_token
    received: list[bytes] = []
    ended = threading.Event()

    def keep(listening: socket.socket) -> None:
        listening.settimeout(0.5)
        while True:
            try:
                connection, _ = listening.accept()
            except TimeoutError:
                if ended.is_set():
                    return
                continue
            connection.settimeout(5)
            # Empty HTTP/2 server settings: gRPC then sends the call with all headers.
            with connection, suppress(TimeoutError, ConnectionError):
                connection.sendall(bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
                while got := connection.recv(1 << 16):
                    received.append(got)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        heard = run_in_thread("listener", keep, listening)
        with environment.on_loopback(), environment.token_of_cluster(""):
            with pytest.raises(environment.RaySetupError):
                check_cluster(f"127.0.0.1:{port}", "127.0.0.1", port, timeout_s=10)
        ended.set()
        heard.result(60)
    assert b"".join(received), "nothing was sent at all"
    assert b"ef" * 32 not in b"".join(received)


def test_how_a_worker_ended_is_said_without_remarks():
    message = (
        "The actor died unexpectedly before finishing this task.\n\tclass_name: X\nThe actor is "
        "dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit "
        "detail: Worker exits with code 2.\nEnd of file. Some common causes include: (1) killed"
    )
    assert describe_exit(message) == "Worker exits with code 2. End of file."
    assert describe_exit("The actor is\n unavailable") == "The actor is unavailable"
    assert describe_exit("") == "for an unknown reason"


def test_the_end_of_a_log_has_what_the_worker_wrote(tmp_path):
    log = tmp_path / "worker.err"
    lines = [f"line {number}" for number in range(100)]
    text = "\n".join([":job_id:01", *lines, ":actor_name:X", "the end \N{BULLET}"])
    log.write_bytes(text.encode() + b"\xff")
    shown = tail(log).splitlines()
    assert (shown[0], len(shown)) == ("line 71", 30)
    assert shown[-1].startswith("the end")


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="Windows has no such signals")
def test_ctrl_c_while_ray_starts_ends_what_is_started_afterwards(monkeypatch):
    ended: list[str] = []

    def start(ray, ref, store_bytes, undo):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.3)
        undo.callback(ended.append, "agent")

    monkeypatch.setattr(ray_connection, "_start_local", start)
    ray = SimpleNamespace(is_initialized=lambda: False)
    monkeypatch.setattr(environment, "import_ray", lambda: ray)
    # A test run in a shell's background ignores the signal.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            RayConnection().acquire(WorkersRef(count=1))
    finally:
        signal.signal(signal.SIGINT, handler)
    assert ended == ["agent"]
