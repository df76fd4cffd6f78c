"""A hundred rows on four servers, with fifty seeded kills: each row is there, once."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from contextlib import ExitStack
from functools import cache

import pytest

from wanstream.batch.running import runner
from wanstream.cli.arguments import DONE
from wanstream.tests.faults import comfy_like
from wanstream.tests.faults.campaign import small_workflow
from wanstream.tests.faults.comfy_like import forked_server
from wanstream.tests.faults.replaced import computing_replaced, named_models
from wanstream.tests.faults.stage import Stage
from wanstream.tests.support.batch.command import videos
from wanstream.tests.support.marks import FORKED
from wanstream.tests.support.polling import eventually
from wanstream.tools.comfyui import free_port

SEED = 20
ROWS = 100
SERVERS = 4
KILLS = 50

pytestmark = FORKED


class Machine:
    """A server killed and restarted at the same port after some time."""

    def __init__(self, folder, models):
        self._output = folder
        self._models = models
        self._port = free_port()
        folder.mkdir()
        self.url = f"http://127.0.0.1:{self._port}"
        self._starts_at = 0.0
        self.pid = 0
        self.start()

    def start(self, *, now: bool = False) -> None:
        """Start the server, unless it runs or must still wait."""
        if not self.pid and (now or time.monotonic() >= self._starts_at):
            self.pid = forked_server(self._port, self._output, self._models, seconds=0.05)

    def kill(self, absence_s: float = 0.0) -> None:
        """End the server as `kill -9` does, for at least some seconds."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0
            self._starts_at = time.monotonic() + absence_s


@pytest.fixture
def models(tmp_path, monkeypatch):
    """A models folder. Servers keep descriptions of the nodes for it."""
    monkeypatch.setattr(comfy_like, "object_info", cache(comfy_like.object_info))
    folder = named_models(tmp_path / "models", small_workflow())
    comfy_like.object_info(folder)
    return folder


@pytest.fixture
def machines(tmp_path, models):
    with ExitStack() as opened:
        made = [Machine(tmp_path / f"served{number}", models) for number in range(SERVERS)]
        for machine in made:
            opened.callback(machine.kill)
        yield made


@pytest.mark.timeout(600)
def test_fifty_kills_cost_no_row(tmp_path, models, machines, monkeypatch):
    monkeypatch.setattr(runner, "GRACE_SECONDS", 0.5)
    seeds = [{"sampler.seed": 1000 + number} for number in range(ROWS)]
    alone = Stage(tmp_path / "one", small_workflow(), seeds, ["--models", str(models)])
    with computing_replaced():
        assert alone.run() == DONE, alone.stderr()
    expected = {name: [content] for name, content in videos(alone.out).items()}
    where = [word for machine in machines for word in ("--server", machine.url)]
    stage = Stage(tmp_path / "fleet", small_workflow(), seeds, [*where, "--timeout", "60"])

    def has_rows(count: int) -> bool:
        for machine in machines:
            machine.start()
        return len([*stage.out.glob("*.mp4")]) >= count

    chance = random.Random(SEED)
    killed = Counter[str]()
    client = stage.start()
    for number in range(1, KILLS + 1):
        wanted = number * (ROWS - 10) // KILLS
        assert eventually(lambda wanted=wanted: has_rows(wanted), limit_s=60), stage.stderr()
        time.sleep(chance.uniform(0.0, 0.1))
        alive = [machine for machine in machines if machine.pid]
        # Without a server at its start, a command runs nothing, so one always stays.
        if chance.random() < 0.6 and len(alive) > 1:
            chance.choice(alive).kill(chance.choice([0.0, 0.3, 2.0]))
            killed["server"] += 1
            continue
        stage.signal(client, signal.SIGKILL)
        assert stage.wait(client) == -signal.SIGKILL, stage.stderr()[-3000:]
        client = stage.start()
        killed["client"] += 1
    for machine in machines:
        machine.start(now=True)
    stage.wait(client)
    stage.finish()
    assert len(expected) == ROWS
    assert stage.judge(expected).clean, stage.findings
    assert min(killed["server"], killed["client"]) >= 10, killed
    assert "other backends take its" in stage.stderr(), "rows have changed servers"
