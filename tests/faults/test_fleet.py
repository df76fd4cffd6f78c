"""A hundred rows on four servers, with fifty seeded kills: each row is there, once."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from contextlib import ExitStack, closing
from functools import cache

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
from wanstream.tests.support.batch.command import videos
from wanstream.tests.support.marks import FORKED
from wanstream.tools.comfyui import free_port

SEED, ROWS, SERVERS, KILLS = 20, 100, 4, 50
PATIENCE_SECONDS = 60.0

pytestmark = FORKED


class Machine:
    """A server killed and restarted at the same port after some time."""

    def __init__(self, folder, models):
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


class Fleet:
    """Servers, a batch on them, and the files of one process without servers."""

    def __init__(self, folder, *, rows, servers):
        # A child forked from a process with a thread pool would wait for threads it lacks.
        torch.set_num_threads(1)
        workflow = small_workflow()
        models = named_models(folder / "models", workflow)
        seeds = [{"sampler.seed": 1000 + number} for number in range(rows)]
        alone = Stage(folder / "one", workflow, seeds, ["--models", str(models)])
        with computing_replaced():
            assert alone.run() == DONE, alone.stderr()
        self.expected = {name: [content] for name, content in videos(alone.out).items()}
        assert len(self.expected) == rows
        comfy_like.object_info(models)  # kept for the servers, which would need seconds for it
        self.machines = [Machine(folder / f"served{number}", models) for number in range(servers)]
        where = [word for machine in self.machines for word in ("--server", machine.url)]
        self.stage = Stage(folder / "fleet", workflow, seeds, [*where, "--timeout", "60"])

    def wait_for(self, count, poll=lambda: None):
        """Wait until so many rows are there."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len([*self.stage.out.glob("*.mp4")]) < count:
            assert time.monotonic() < deadline, self.stage.stderr()[-3000:]
            poll()
            time.sleep(0.005)

    def start_machines(self, *, now: bool = False) -> None:
        for machine in self.machines:
            machine.start(now=now)

    def restart_client(self, client: int) -> int:
        self.stage.signal(client, signal.SIGKILL)
        assert self.stage.wait(client) == -signal.SIGKILL, self.stage.stderr()[-3000:]
        return self.stage.start()

    def close(self) -> None:
        for machine in self.machines:
            machine.kill()
        self.stage.clear()


@pytest.fixture
def make_fleet(tmp_path, monkeypatch):
    """`make_fleet(rows=..., servers=...)`."""
    monkeypatch.setattr(comfy_like, "object_info", cache(comfy_like.object_info))
    monkeypatch.setattr(runner, "GRACE_SECONDS", 0.5)
    with ExitStack() as opened:
        yield lambda **given: opened.enter_context(closing(Fleet(tmp_path, **given)))


@pytest.mark.timeout(600)
def test_fifty_kills_cost_no_row(make_fleet):
    fleet = make_fleet(rows=ROWS, servers=SERVERS)
    chance = random.Random(SEED)
    killed = Counter[str]()
    client = fleet.stage.start()
    for number in range(1, KILLS + 1):
        fleet.wait_for(number * (ROWS - 10) // KILLS, fleet.start_machines)
        time.sleep(chance.uniform(0.0, 0.1))
        alive = [machine for machine in fleet.machines if machine.alive]
        # Without a server at its start, a command runs nothing, so one always stays.
        if chance.random() < 0.6 and len(alive) > 1:
            chance.choice(alive).kill(chance.choice([0.0, 0.3, 2.0]))
            killed["server"] += 1
            continue
        client = fleet.restart_client(client)
        killed["client"] += 1
    fleet.start_machines(now=True)
    fleet.stage.wait(client)
    fleet.stage.finish()
    assert fleet.stage.judge(fleet.expected).clean, fleet.stage.findings
    assert killed.total() == KILLS
    assert min(killed.values()) >= 10, killed
    assert "other backends take its" in fleet.stage.stderr(), "rows have changed servers"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("killed", [False, True])
def test_a_server_that_is_stopped_for_a_while_costs_no_row(make_fleet, monkeypatch, killed):
    """With `killed`, the client is killed meanwhile, and the next one finds a hung server."""
    monkeypatch.setattr(server_backend, "STATUS_SECONDS", 0.5)
    monkeypatch.setattr(server_backend, "_SLOW", ())  # it may be stopped while it takes a workflow
    fleet = make_fleet(rows=40, servers=2)
    hung = fleet.machines[1]
    client = fleet.stage.start()
    fleet.wait_for(6)
    hung.hang(on=True)
    fleet.wait_for(12)
    if killed:
        client = fleet.restart_client(client)
    fleet.wait_for(20)
    hung.hang(on=False)
    assert fleet.stage.wait(client) == DONE, fleet.stage.stderr()[-3000:]
    assert fleet.stage.judge(fleet.expected).clean, fleet.stage.findings
    assert killed or f"{hung.url} has not responded for" in fleet.stage.stderr()
