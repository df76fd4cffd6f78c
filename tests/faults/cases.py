"""Kinds of faults, and the number of cases for each kind.

A case is a function to inject the fault on a stage, with a separate random number generator. The
campaign then repeats the command until it succeeds, and checks the folder.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wanstream.tests.faults.comfy_like import forked_server, running_server
from wanstream.tests.faults.points import Points, full_disk, interrupt_twice, kill, remove
from wanstream.tests.faults.stage import Stage
from wanstream.tools.comfyui import free_port

Harm = Callable[[Stage, random.Random, "Place"], None]


@dataclass(frozen=True)
class Place:
    """Inputs for a case: a client's crash points, the case number, and the campaign's folders."""

    points: int
    number: int
    campaign: Any


@dataclass(frozen=True)
class Kind:
    """Kind of fault.

    `world` selects the batch's target, by a name in the campaign.
    """

    name: str
    harm: Harm
    cases: int | None
    """None: one for each crash point."""
    world: str = "replaced"
    done_code: int = 0
    rows: tuple[str, ...] = ()
    """Rows that always fail."""


class SkippedError(Exception):
    """The machine cannot inject the fault. The message names the missing feature."""


def _at_a_point(action: Callable[[str], None], *, every: int = 1, after: bool = False) -> Harm:
    def harm(stage: Stage, chance: random.Random, place: Place) -> None:
        at = place.number * every % place.points
        stage.run(Points(at, action, after=after).install)

    return harm


def _killed_twice(stage: Stage, chance: random.Random, place: Place) -> None:
    for _ in range(2):
        stage.run(Points(chance.randrange(place.points), kill, after=chance.random() < 0.5).install)


def _folder_removed(which: str) -> Harm:
    def harm(stage: Stage, chance: random.Random, place: Place) -> None:
        # A removal before the client has created and locked the folder is not a fault.
        stage.run(Points(chance.randrange(20, place.points), remove(stage.out / which)).install)

    return harm


def _journal_damaged(stage: Stage, chance: random.Random, place: Place) -> None:
    if place.number % 2:
        stage.run()
    stage.run(Points(chance.randrange(20, place.points), kill).install)
    damages: list[Callable[[Path], object]] = [
        lambda path: os.truncate(path, chance.randrange(path.stat().st_size)),
        lambda path: path.write_bytes(chance.randbytes(path.stat().st_size)),
        lambda path: path.write_text("not a journal"),
        lambda path: path.write_bytes(bytes(path.stat().st_size)),
        lambda path: path.write_bytes(b""),
        lambda path: path.unlink(),
        _zero_a_page(chance),
    ]
    journal = stage.out / "journal.sqlite"
    copy = stage.out / "journal.sqlite.before"
    if journal.exists():
        damages[place.number % len(damages)](journal)
    if copy.exists() and chance.random() < 0.5:
        chance.choice(damages)(copy)


def _zero_a_page(chance: random.Random) -> Callable[[Path], object]:
    def zero(path: Path) -> None:
        content = bytearray(path.read_bytes())
        page = 4096 * chance.randrange(max(len(content) // 4096, 1))
        content[page : page + 4096] = bytes(len(content[page : page + 4096]))
        path.write_bytes(content)

    return zero


def _journal_locked(stage: Stage, chance: random.Random, place: Place) -> None:
    journal = stage.out / "journal.sqlite"
    pid = stage.start(lambda: _slowly(0.2))
    while not journal.exists():
        time.sleep(0.002)
    with closing(sqlite3.connect(journal, isolation_level=None, timeout=10)) as other:
        other.execute("BEGIN EXCLUSIVE")
        time.sleep((1.0, 7.0)[place.number % 2])
    stage.wait(pid)


def _slowly(seconds: float) -> None:
    """Make each row take at least this long."""
    from wanstream.host.embedded.run import Workflow

    inner = Workflow.run

    def slow(workflow: Workflow, **options: object) -> object:
        time.sleep(seconds)
        return inner(workflow, **options)

    Workflow.run = slow


def _two_clients(stage: Stage, chance: random.Random, place: Place) -> None:
    pids = [stage.start(lambda: _slowly(0.1)) for _ in range(2)]
    time.sleep(chance.uniform(0, 0.5))
    pids.append(stage.start())
    for pid in pids:
        stage.wait(pid)


def _limited(kind: int, values: Callable[[random.Random, int], int]) -> Harm:
    def harm(stage: Stage, chance: random.Random, place: Place) -> None:
        value = values(chance, place.number)
        stage.run(lambda: _limit(kind, value))

    return harm


def _limit(kind: int, value: int) -> None:
    with open(os.devnull, "w") as nowhere:  # The log is a file too, and the limit would end it.
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    resource.setrlimit(kind, (value, value))


def _address_space(chance: random.Random, number: int) -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize() + chance.choice([1, 4, 20, 100]) * (1 << 20)


def _file_size(chance: random.Random, number: int) -> int:
    return 1 if number == 0 else chance.randrange(1, 40_000)


def _small_disk(stage: Stage, chance: random.Random, place: Place) -> None:
    if os.geteuid() != 0:
        raise SkippedError("a small tmpfs needs root")
    stage.out.mkdir()
    size = f"size={chance.choice([24, 32, 44, 60]) * 1024}"
    mount = ["mount", "-t", "tmpfs", "-o", size, "none", str(stage.out)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SkippedError(f"a small tmpfs cannot be mounted: {done.stderr.strip()}")
    try:
        stage.run()
        subprocess.run(["mount", "-o", "remount,size=64m", stage.out], check=True)
        stage.finish()
        kept = stage.folder / "kept"
        shutil.copytree(stage.out, kept)
    finally:
        subprocess.run(["umount", stage.out], check=True)
    stage.out.rmdir()
    kept.rename(stage.out)


# Cases that compute for real.


def _some_time(stage: Stage, chance: random.Random) -> None:
    """Wait until the client is at work, and a little longer."""
    deadline = time.monotonic() + 60
    while "experts" not in stage.stderr() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(chance.uniform(0.0, 3.0))


def _signalled(*numbers: int) -> Harm:
    def harm(stage: Stage, chance: random.Random, place: Place) -> None:
        pid = stage.start()
        _some_time(stage, chance)
        stage.signal_each(pid, numbers, chance, pause=0.3)

    return harm


def _checkpoint(stage: Stage, chance: random.Random, place: Place) -> None:
    """Cut, zero, remove or swap one expert file while in use, and restore it later."""
    file = sorted((place.campaign.models / "diffusion_models").glob("*t2v*fp8*"))[
        chance.randrange(2)
    ]
    kept, changed = (file.with_name(f"{file.name}.{end}") for end in ("kept", "changed"))
    pid = stage.start()
    _some_time(stage, chance)
    os.link(file, kept)
    try:
        match ("cut", "zeroed", "removed", "swapped")[place.number % 4]:
            case "cut":
                changed.write_bytes(file.read_bytes()[: chance.randrange(file.stat().st_size)])
            case "zeroed":
                changed.write_bytes(bytes(file.stat().st_size))
            case "removed":
                file.unlink()
            case "swapped":
                other = place.campaign.other_models / "diffusion_models" / file.name
                shutil.copyfile(other, changed)
        if changed.exists():
            changed.replace(file)
        stage.wait(pid)
    finally:
        kept.replace(file)


# A server with ComfyUI's protocol.


@dataclass(frozen=True)
class Served:
    """A server's port and folders."""

    port: int
    output: Path
    models: Path

    def run(self, **settings: Any) -> AbstractContextManager[int]:
        return running_server(self.port, self.output, self.models, **settings)

    def fork(self) -> int:
        return forked_server(self.port, self.output, self.models, seconds=0.1)


ServerHarm = Callable[[Stage, random.Random, Served], None]


def _on_server(harm: ServerHarm) -> Harm:
    def on_server(stage: Stage, chance: random.Random, place: Place) -> None:
        served = Served(free_port(), stage.folder / "served", place.campaign.named_models)
        served.output.mkdir()
        stage.command = [*stage.command, "--server", f"http://127.0.0.1:{served.port}"]
        harm(stage, chance, served)
        with served.run():
            stage.finish()

    return on_server


def _client_killed(stage: Stage, chance: random.Random, served: Served) -> None:
    with served.run(seconds=chance.choice([0.0, 0.05])):
        stage.run(Points(chance.randrange(150), kill, after=chance.random() < 0.5).install)
        # The server is still there, with everything it has made.
        stage.finish()


def _server_killed(times: int, client_too: bool) -> ServerHarm:
    def harm(stage: Stage, chance: random.Random, served: Served) -> None:
        server = served.fork()
        pid = stage.start()
        for _ in range(times):
            time.sleep(chance.uniform(0.0, 0.7))
            _kill(server)
            if client_too:
                stage.signal(pid, signal.SIGKILL)
            time.sleep(chance.uniform(0.0, 0.3))
            server = served.fork()
        stage.wait(pid)
        _kill(server)

    return harm


def _client_signalled(*numbers: int) -> ServerHarm:
    def harm(stage: Stage, chance: random.Random, served: Served) -> None:
        with served.run(seconds=0.1):
            pid = stage.start()
            time.sleep(chance.uniform(0.0, 1.0))
            stage.signal_each(pid, numbers, chance, pause=0.2)

    return harm


def _in_trouble(stage: Stage, chance: random.Random, served: Served) -> None:
    with served.run(share=0.15, seed=chance.randrange(1 << 30), seconds=0.02):
        pid = stage.start()
        if chance.random() < 0.4:
            time.sleep(chance.uniform(0.0, 1.5))
            stage.signal(pid, signal.SIGKILL)
        stage.wait(pid)


def _comfyui_killed(stage: Stage, chance: random.Random, place: Place) -> None:
    """Kill a real ComfyUI at work, and in some cases the client too."""
    comfyui = place.campaign.comfyui
    pid = stage.start()
    time.sleep(chance.uniform(0.5, 8.0))
    comfyui.kill()
    if place.number % 4 == 3:
        stage.signal(pid, signal.SIGKILL)
    comfyui.start()
    stage.wait(pid)


def _kill(server: int) -> None:
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)


_BAD = (
    *('{"latent.width": 70, "sampler.seed": 90}', "no json", '{"sampler.sed": 1}'),
    *('{"name": "../x"}', "[" * 9000),
)

_INT = signal.SIGINT
_REPLACED = (
    Kind("SIGKILL before each disk or journal call", _at_a_point(kill), None),
    Kind("SIGKILL after every second call", _at_a_point(kill, every=2, after=True), 60),
    Kind("full disk at every second call", _at_a_point(full_disk, every=2), 60),
    Kind("Ctrl-C twice at every third call", _at_a_point(interrupt_twice, every=3), 40),
    Kind("SIGKILL twice, the second time in the recovery", _killed_twice, 20),
    Kind("output folder removed", _folder_removed(""), 8),
    Kind(".wanstream removed", _folder_removed(".wanstream"), 8),
    Kind("journal damaged, its copy too at times", _journal_damaged, 28),
    Kind("journal locked by another program", _journal_locked, 2),
    Kind("two or three clients on one folder", _two_clients, 4),
    Kind("file size limit (RLIMIT_FSIZE)", _limited(resource.RLIMIT_FSIZE, _file_size), 12),
    Kind("memory limit (RLIMIT_AS)", _limited(resource.RLIMIT_AS, _address_space), 6),
    Kind("small disk, then a larger one", _small_disk, 4),
    Kind("rows that are invalid, and SIGKILL twice", _killed_twice, 6, done_code=1, rows=_BAD),
)
_REAL = (
    Kind("all real: SIGKILL", _signalled(signal.SIGKILL), 8, "real"),
    Kind("all real: SIGTERM", _signalled(signal.SIGTERM), 2, "real"),
    Kind("all real: Ctrl-C once", _signalled(_INT), 2, "real"),
    Kind("all real: Ctrl-C twice", _signalled(_INT, _INT), 3, "real"),
    Kind("all real: Ctrl-C three times", _signalled(_INT, _INT, _INT), 2, "real"),
    Kind("all real: checkpoint cut, zeroed, removed, swapped", _checkpoint, 8, "real"),
    Kind("run: SIGKILL", _signalled(signal.SIGKILL), 4, "run"),
    Kind("run: SIGTERM", _signalled(signal.SIGTERM), 1, "run"),
    Kind("run: Ctrl-C once, twice", _signalled(_INT, _INT), 3, "run"),
    Kind("run: file size limit", _limited(resource.RLIMIT_FSIZE, _file_size), 3, "run"),
)
_SERVERS = (
    Kind("server: client SIGKILL at a call", _on_server(_client_killed), 16, "server"),
    Kind("server: SIGKILL and restart", _on_server(_server_killed(1, False)), 12, "server"),
    Kind("server: both SIGKILL", _on_server(_server_killed(1, True)), 8, "server"),
    Kind("server: restarted three times", _on_server(_server_killed(3, False)), 6, "server"),
    Kind("server: Ctrl-C once", _on_server(_client_signalled(_INT)), 8, "server"),
    Kind("server: Ctrl-C twice", _on_server(_client_signalled(_INT, _INT)), 8, "server"),
    Kind("server: SIGTERM", _on_server(_client_signalled(signal.SIGTERM)), 4, "server"),
    Kind("real ComfyUI: SIGKILL and restart", _comfyui_killed, 20, "comfyui"),
    Kind("server: drops, 500, 502, half answers", _on_server(_in_trouble), 24, "server"),
)
CONTINUED = Kind("chain of rows, SIGKILL twice", _killed_twice, 20, "continued")
KINDS: tuple[Kind, ...] = (
    *_REPLACED,
    Kind("lanes, SIGKILL at a random call", _killed_twice, 20, "lanes"),
    CONTINUED,
    Kind("lanes, journal damaged, its copy too at times", _journal_damaged, 14, "lanes"),
    *_REAL,
    *_SERVERS,
)
