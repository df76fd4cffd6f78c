"""A hundred rows on four servers, with fifty seeded kills: each row is there, once."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from wanstream.batch.running import runner
from wanstream.batch.servers import server_backend
from wanstream.cli.arguments import DONE
from wanstream.tests.faults import comfy_like
from wanstream.tests.faults.campaign import small_workflow
from wanstream.tests.faults.comfy_like import forked_server
from wanstream.tests.faults.replaced import computing_replaced, named_models
from wanstream.tests.faults.stage import Stage
from wanstream.tools.comfyui import free_port

SEED, ROWS, SERVERS, KILLS = 20, 100, 4, 50
PATIENCE_SECONDS = 60.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="clients are forked"),
    # Python warns about a fork with threads, but a client uses no threads from the test run.
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),
]


class Machine:
    """A server killed and restarted at the same port after some time."""

    def __init__(self, folder: Path, models: Path) -> None:
        self._output, self._models, self._port = folder, models, free_port()
        folder.mkdir()
        self.url = f"http://127.0.0.1:{self._port}"
        self._pid: int | None = None
        self._starts_at = 0.0
        self.start()

    @property
    def alive(self) -> bool:
        return self._pid is not None

    def start(self, *, now: bool = False) -> None:
        """Start the server, unless it runs or must still wait."""
        if self._pid is None and (now or time.monotonic() >= self._starts_at):
            self._pid = forked_server(self._port, self._output, self._models, seconds=0.05)

    def hang(self, *, on: bool) -> None:
        """Accept connections without a response, or go on."""
        assert self._pid is not None
        os.kill(self._pid, signal.SIGSTOP if on else signal.SIGCONT)

    def kill(self, absence_s: float = 0.0) -> None:
        """End the server as `kill -9` does, for at least some seconds."""
        if self._pid is None:
            return
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self._pid, self._starts_at = None, time.monotonic() + absence_s


def undisturbed(
    folder: Path, models: Path, workflow: Mapping[str, Any], rows: Sequence[object]
) -> dict[str, list[bytes]]:
    """Return files made by one process without servers."""
    stage = Stage(folder, workflow, rows, ["--models", str(models)])
    with computing_replaced():
        assert stage.run() == DONE, stage.stderr()
    return {path.name: [path.read_bytes()] for path in stage.out.glob("*.mp4")}


@pytest.mark.timeout(600)
def test_fifty_kills_cost_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(
        1
    )  # A child forked from a process with a thread pool would wait for threads it lacks.
    chance, workflow = random.Random(SEED), small_workflow()
    models = named_models(tmp_path / "models", workflow)
    rows = [{"sampler.seed": 1000 + number} for number in range(ROWS)]
    expected = undisturbed(tmp_path / "one", models, workflow, rows)
    assert len(expected) == ROWS
    info = comfy_like.object_info(models)
    monkeypatch.setattr(comfy_like, "object_info", lambda models: info)
    monkeypatch.setattr(runner, "GRACE_SECONDS", 0.5)
    machines = [Machine(tmp_path / f"served{number}", models) for number in range(SERVERS)]
    where = [word for machine in machines for word in ("--server", machine.url)]
    stage = Stage(tmp_path / "four", workflow, rows, [*where, "--timeout", "60"])
    killed = {"client": 0, "server": 0}
    try:
        client = stage.start()
        for number in range(1, KILLS + 1):
            deadline = time.monotonic() + PATIENCE_SECONDS
            while len([*stage.out.glob("*.mp4")]) < number * (ROWS - 10) // KILLS:
                assert time.monotonic() < deadline, stage.stderr()[-3000:]
                for machine in machines:
                    machine.start()
                time.sleep(0.005)
            time.sleep(chance.uniform(0.0, 0.1))
            alive = [machine for machine in machines if machine.alive]
            # Without a server at its start, a command runs nothing, so one always stays.
            if chance.random() < 0.6 and len(alive) > 1:
                chance.choice(alive).kill(chance.choice([0.0, 0.3, 2.0]))
                killed["server"] += 1
                continue
            stage.signal(client, signal.SIGKILL)
            assert stage.wait(client) == -signal.SIGKILL, stage.stderr()[-3000:]
            killed["client"] += 1
            client = stage.start()
        for machine in machines:
            machine.start(now=True)
        stage.wait(client)
        stage.finish()
        findings = stage.judge(expected)
        assert findings.clean, findings
        assert sum(killed.values()) == KILLS
        assert min(killed.values()) >= 10, killed
        assert "other backends take its" in stage.stderr(), "rows have changed servers"
    finally:
        for machine in machines:
            machine.kill()
        stage.clear()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("killed", [False, True])
def test_a_server_that_is_stopped_for_a_while_costs_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    """With `killed`, the client is killed meanwhile, and the next one finds a hung server."""
    torch.set_num_threads(1)
    workflow = small_workflow()
    models = named_models(tmp_path / "models", workflow)
    rows = [{"sampler.seed": 1000 + number} for number in range(40)]
    expected = undisturbed(tmp_path / "one", models, workflow, rows)
    info = comfy_like.object_info(models)
    monkeypatch.setattr(comfy_like, "object_info", lambda models: info)
    monkeypatch.setattr(runner, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(server_backend, "STATUS_SECONDS", 0.5)
    monkeypatch.setattr(server_backend, "_SLOW", ())  # it may be stopped while it takes a workflow
    machines = [Machine(tmp_path / f"served{number}", models) for number in range(2)]
    where = [word for machine in machines for word in ("--server", machine.url)]
    stage = Stage(tmp_path / "two", workflow, rows, [*where, "--timeout", "60"])

    def wait_for(count: int) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len([*stage.out.glob("*.mp4")]) < count:
            assert time.monotonic() < deadline, stage.stderr()[-3000:]
            time.sleep(0.005)

    try:
        client = stage.start()
        wait_for(6)
        machines[1].hang(on=True)
        wait_for(12)
        if killed:
            stage.signal(client, signal.SIGKILL)
            assert stage.wait(client) == -signal.SIGKILL
            client = stage.start()
        wait_for(20)
        machines[1].hang(on=False)
        assert stage.wait(client) == DONE, stage.stderr()[-3000:]
        findings = stage.judge(expected)
        assert findings.clean, findings
        assert killed or f"{machines[1].url} has not responded for" in stage.stderr()
    finally:
        for machine in machines:
            machine.kill()
        stage.clear()
