"""Errors in Ray's setup: Ray is missing, another Ray is connected, no Ray at the address."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest

from wanstream.distributed.ray import connection as ray_connection
from wanstream.distributed.ray import environment
from wanstream.distributed.ray.connection import RayConnection, RayReaper, check_cluster
from wanstream.distributed.ray.pool import RayPool, describe_exit
from wanstream.distributed.transport.threads import run_in_thread
from wanstream.schema.refs import WorkersRef

LIMIT_S = 120


def test_missing_ray_is_refused_with_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(environment.RayMissingError, match=r"not installed.*wanstream\[dis"):
        RayPool(WorkersRef(count=2))


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
    real = tmp_path / "real"
    planted = tmp_path / "planted"
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


def test_how_a_worker_ended_is_said_without_remarks():
    message = (
        "The actor died unexpectedly before finishing this task.\n\tclass_name: X\nThe actor is "
        "dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit "
        "detail: Worker exits with code 2.\nEnd of file. Some common causes include: (1) killed"
    )
    assert describe_exit(message) == "Worker exits with code 2. End of file."
    assert describe_exit("The actor is\n unavailable") == "The actor is unavailable"
    assert describe_exit("") == "for an unknown reason"


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


ENDS = """
from types import SimpleNamespace
from wanstream.distributed.ray import connection, environment
from wanstream.schema.refs import WorkersRef
environment.import_ray = lambda: SimpleNamespace(is_initialized=lambda: False)
connection._start_local = lambda ray, ref, size, undo: undo.callback(print, "Ray is ended")
connection.CONNECTION.acquire(WorkersRef(count=1))
print("the main module returns")
"""


@pytest.mark.integration
def test_a_process_that_returns_ends_its_ray(tmp_path):
    output = subprocess.check_output([sys.executable, "-c", ENDS], text=True, cwd=tmp_path)
    assert output == "the main module returns\nRay is ended\n"
