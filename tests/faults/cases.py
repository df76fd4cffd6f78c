"""Kinds of faults, and the number of cases for each kind.

A case is a function to inject the fault on a stage, with a separate random number generator. The
campaign then repeats the command until it succeeds, and checks the folder.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from wanstream.tests.faults.comfy_like import Trouble, forked_server, running_server
from wanstream.tests.faults.foreign import FOREIGN, Outside, foreign_thing, mounted
from wanstream.tests.faults.points import Points, full_disk, interrupt_twice, kill, remove
from wanstream.tests.faults.stage import Stage
from wanstream.tools.comfyui import free_port

Harm = Callable[[Stage, random.Random, "Place"], None]


class Restartable(Protocol):
    """A real ComfyUI server, always at the same port."""

    def kill(self) -> None:
        """Kill the server."""

    def start(self) -> None:
        """Restart the server, and wait until it responds."""


@dataclass(frozen=True)
class Place:
    """Inputs for a case: a client's crash points, the case number, model folders."""

    points: int
    number: int
    models: Path
    other_models: Path | None = None
    """The same names, other weights."""
    comfyui: Restartable | None = None
    half_done: Path | None = None
    """An output folder without the last row done."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Kind of fault.

    `world` selects the batch's target: replaced, real, run, lanes or server.
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
        folder = stage.out if which == "out" else stage.out / which
        # A removal before the client has created and locked the folder is not a fault.
        stage.run(Points(chance.randrange(20, place.points), remove(folder)).install)

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
    journal, copy = stage.out / "journal.sqlite", stage.out / "journal.sqlite.before"
    if journal.exists():
        damages[place.number % len(damages)](journal)
    if copy.exists() and chance.random() < 0.5:
        chance.choice(damages)(copy)


def _zero_a_page(chance: random.Random) -> Callable[[Path], object]:
    def zero(path: Path) -> None:
        content = bytearray(path.read_bytes())
        page = chance.randrange(max(len(content) // 4096, 1))
        content[page * 4096 : page * 4096 + 4096] = bytes(
            len(content[page * 4096 : page * 4096 + 4096])
        )
        path.write_bytes(content)

    return zero


def _journal_crafted(stage: Stage, chance: random.Random, place: Place) -> None:
    stage.run(Points(chance.randrange(30, place.points), kill).install)
    victim = stage.folder / "victim.txt"
    victim.write_text("victim")
    there = '[{"name": "../../victim.txt", "size": 6, "sha256": "0"}]'
    crafts = [
        f"UPDATE rows SET state = 'placing', files = '{there}'",
        f"UPDATE rows SET state = 'posted', prompt_id = '../../../{stage.temporary.name}'",
        "UPDATE rows SET state = 'nonsense'",
        "CREATE TRIGGER t AFTER INSERT ON rows BEGIN DELETE FROM rows; END",
        "UPDATE rows SET files = 'no json'",
        "UPDATE rows SET stem = '../x' WHERE line = 1",
    ]
    with closing(sqlite3.connect(stage.out / "journal.sqlite")) as journal:
        journal.execute(crafts[place.number % len(crafts)])
        journal.commit()
    stage.run()
    assert victim.read_text() == "victim"
    assert stage.temporary.is_dir()


def _region_damaged(*, copy: bool) -> Harm:
    """Overwrite a few bytes: every fourth position in the first 200 bytes, then random regions."""

    def harm(stage: Stage, chance: random.Random, place: Place) -> None:
        assert place.half_done is not None
        shutil.copytree(place.half_done, stage.out)
        journal = stage.out / "journal.sqlite"
        content = bytearray(journal.read_bytes())
        if place.number < FIRST_BYTES // 4:
            start, length = place.number * 4, 4
        else:
            length = chance.choice([1, 4, 16, 100, 1000, 5000])
            start = chance.randrange(len(content))
        values = chance.choice(
            [bytes(length), b"\xff" * length, chance.randbytes(length), chance.randbytes(length)]
        )
        content[start : start + length] = values[: len(content) - start]
        journal.write_bytes(content)
        if not copy:
            (stage.out / "journal.sqlite.before").unlink()
        stage.run()

    return harm


FIRST_BYTES = 200


def _foreign(stage: Stage, chance: random.Random, place: Place) -> None:
    """Put a foreign thing in place for one command, which refuses it by name."""
    if os.geteuid() != 0:
        raise SkippedError("a file of another user needs root")
    assert place.half_done is not None
    shutil.copytree(place.half_done, stage.out)
    outside = Outside(stage.folder / "outside")
    with foreign_thing(stage.out, place.number, outside) as path:
        _refused(stage, path)
        stage.findings.lost += outside.touched


def _mounted(stage: Stage, chance: random.Random, place: Place) -> None:
    assert place.half_done is not None
    shutil.copytree(place.half_done, stage.out)
    outside = Outside(stage.folder / "outside")
    try:
        with mounted(stage.out, chance, outside) as path:
            _refused(stage, path)
            stage.findings.lost += outside.touched
    except OSError as err:
        raise SkippedError(f"a folder cannot be mounted: {err}") from err


def _refused(stage: Stage, path: Path) -> None:
    made = {each.name for each in stage.out.glob("*.mp4")}
    if (
        stage.run() != 2
        or path.name not in stage.stderr()
        or {each.name for each in stage.out.glob("*.mp4")} != made
    ):
        stage.findings.broken.append(
            f"{path} was not refused before a row was computed: {stage.stderr()[-500:]}"
        )


NAMES = (
    *(
        "journal",
        "JOURNAL.sqlite",
        "journal.sqlite-journal",
        "Journal.sqlite-wal",
        "journal.sqlite-shm",
    ),
    *(
        "journal.sqlite.lock",
        "journal.sqlite.before",
        "journal.sqlite.copy",
        "journal.sqlite.x",
        "con",
        "AUX",
        "nul.x",
    ),
    *(
        "com1",
        "COM\u00b9",
        "lpt\u00b3.mp4",
        "aux .x",
        "a:b",
        "x.",
        "x ",
        " x",
        ".",
        "..",
        ".wanstream",
        "a/b",
        "a\\b",
    ),
    *(
        "x~1",
        "e\u0301",
        "x\0y",
        "x\ny",
        "\u202ex",
        "~",
        "",
        "-x",
        "x" * 101,
        "../x",
        "/x",
        "lock:",
        "*",
        "?",
        "SHOT",
    ),
)
"""Names forbidden for rows on every system. The last one is another row's, in other letters."""


def _named(stage: Stage, chance: random.Random, place: Place) -> None:
    """A row with a forbidden name fails alone."""
    name = NAMES[place.number % len(NAMES)]
    with (stage.folder / "jobs.jsonl").open("a", encoding="utf-8") as jobs:
        jobs.write("\n" + json.dumps({"name": name, "sampler.seed": 90}))
    if stage.run() != 1 or "line 5: name '" not in stage.stderr():
        stage.findings.broken.append(f"{name!r} was not refused: {stage.stderr()[-300:]}")


def _journal_locked(stage: Stage, chance: random.Random, place: Place) -> None:
    pid = stage.start(lambda: _slowly(0.2))
    while not (stage.out / "journal.sqlite").exists():
        time.sleep(0.002)
    with closing(
        sqlite3.connect(stage.out / "journal.sqlite", isolation_level=None, timeout=10)
    ) as other:
        other.execute("BEGIN EXCLUSIVE")
        time.sleep((1.0, 7.0)[place.number % 2])
    stage.wait(pid)


def _slowly(seconds: float) -> None:
    """Make each row take at least this long."""
    from wanstream.host.embedded.run import Workflow

    inner = Workflow.run

    def slow(workflow: Workflow, **options: object) -> object:
        time.sleep(seconds)
        return inner(workflow, **options)  # type: ignore[arg-type]

    Workflow.run = slow  # type: ignore[assignment]


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


def _small_disk(stage: Stage, chance: random.Random, place: Place) -> None:
    if os.geteuid() != 0:
        raise SkippedError("a small tmpfs needs root")
    stage.out.mkdir()
    size = chance.choice([24, 32, 44, 60]) * 1024
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", stage.out],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        raise SkippedError(f"a small tmpfs cannot be mounted: {mounted.stderr.strip()}")
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


def _nothing(stage: Stage, chance: random.Random, place: Place) -> None:
    """The rows are the fault."""
    stage.run(Points(chance.randrange(place.points), kill).install)


# Cases that compute for real.


def _some_time(stage: Stage, chance: random.Random) -> None:
    """Wait until the client is at work, and a little longer."""
    deadline = time.monotonic() + 60
    while "experts" not in stage.stderr() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(chance.uniform(0.0, 3.0))


def _signalled(*numbers: int, pause: float = 0.3) -> Harm:
    def harm(stage: Stage, chance: random.Random, place: Place) -> None:
        pid = stage.start()
        _some_time(stage, chance)
        for number in numbers:
            stage.signal(pid, number)
            time.sleep(chance.uniform(0, pause))
        stage.wait(pid)

    return harm


def _checkpoint(stage: Stage, chance: random.Random, place: Place) -> None:
    """Cut, zero, remove or swap one expert file while in use, and restore it later."""
    file = sorted((place.models / "diffusion_models").glob("*t2v*fp8*"))[chance.randrange(2)]
    kept = file.with_name(f"{file.name}.kept")
    pid = stage.start()
    _some_time(stage, chance)
    os.link(file, kept)
    try:
        changed = file.with_name(f"{file.name}.changed")
        match ("cut", "zeroed", "removed", "swapped")[place.number % 4]:
            case "cut":
                changed.write_bytes(file.read_bytes()[: chance.randrange(file.stat().st_size)])
                changed.replace(file)
            case "zeroed":
                changed.write_bytes(bytes(file.stat().st_size))
                changed.replace(file)
            case "removed":
                file.unlink()
            case "swapped":
                assert place.other_models is not None
                shutil.copyfile(place.other_models / "diffusion_models" / file.name, changed)
                changed.replace(file)
        stage.wait(pid)
    finally:
        kept.replace(file)


# `wanstream run` instead of `batch`.


def _run_limited(stage: Stage, chance: random.Random, place: Place) -> None:
    value = chance.choice([1, 1000, 4000, 10_000])
    stage.run(lambda: _limit(resource.RLIMIT_FSIZE, value))


# A server with ComfyUI's protocol.


def _on_server(harm: Callable[[Stage, random.Random, int, Path, Path], None]) -> Harm:
    def on_server(stage: Stage, chance: random.Random, place: Place) -> None:
        port, output = free_port(), stage.folder / "served"
        output.mkdir()
        stage.command = [*stage.command, "--server", f"http://127.0.0.1:{port}"]
        harm(stage, chance, port, output, place.models)
        with running_server(port, output, place.models):
            stage.finish()

    return on_server


def _client_killed(
    stage: Stage, chance: random.Random, port: int, output: Path, models: Path
) -> None:
    with running_server(port, output, models, seconds=chance.choice([0.0, 0.05])):
        stage.run(Points(chance.randrange(150), kill, after=chance.random() < 0.5).install)
        # The server is still there, with everything it has made.
        stage.finish()


def _server_killed(
    times: int, client_too: bool
) -> Callable[[Stage, random.Random, int, Path, Path], None]:
    def harm(stage: Stage, chance: random.Random, port: int, output: Path, models: Path) -> None:
        server = forked_server(port, output, models, seconds=0.1)
        pid = stage.start()
        for _ in range(times):
            time.sleep(chance.uniform(0.0, 0.7))
            _kill(server)
            if client_too:
                stage.signal(pid, signal.SIGKILL)
            time.sleep(chance.uniform(0.0, 0.3))
            server = forked_server(port, output, models, seconds=0.1)
        stage.wait(pid)
        _kill(server)

    return harm


def _client_signalled(*numbers: int) -> Callable[[Stage, random.Random, int, Path, Path], None]:
    def harm(stage: Stage, chance: random.Random, port: int, output: Path, models: Path) -> None:
        with running_server(port, output, models, seconds=0.1):
            pid = stage.start()
            time.sleep(chance.uniform(0.0, 1.0))
            for number in numbers:
                stage.signal(pid, number)
                time.sleep(chance.uniform(0.0, 0.2))
            stage.wait(pid)

    return harm


def _in_trouble(stage: Stage, chance: random.Random, port: int, output: Path, models: Path) -> None:
    trouble = Trouble(share=0.15, seed=chance.randrange(1 << 30))
    with ExitStack() as opened:
        opened.enter_context(running_server(port, output, models, trouble=trouble, seconds=0.02))
        pid = stage.start()
        if chance.random() < 0.4:
            time.sleep(chance.uniform(0.0, 1.5))
            stage.signal(pid, signal.SIGKILL)
        stage.wait(pid)


def _comfyui_killed(stage: Stage, chance: random.Random, place: Place) -> None:
    """Kill a real ComfyUI at work, and in some cases the client too."""
    assert place.comfyui is not None
    pid = stage.start()
    time.sleep(chance.uniform(0.5, 8.0))
    place.comfyui.kill()
    if place.number % 4 == 3:
        stage.signal(pid, signal.SIGKILL)
    place.comfyui.start()
    stage.wait(pid)


def _kill(server: int) -> None:
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)


_BAD = (
    '{"latent.width": 70, "sampler.seed": 90}',
    "no json",
    '{"sampler.sed": 1}',
    '{"name": "../x"}',
    "[" * 9000,
)

KINDS: tuple[Kind, ...] = (
    Kind(name="SIGKILL before each disk or journal call", harm=_at_a_point(kill), cases=None),
    Kind(
        name="SIGKILL after every second call",
        harm=_at_a_point(kill, every=2, after=True),
        cases=60,
    ),
    Kind(name="full disk at every second call", harm=_at_a_point(full_disk, every=2), cases=60),
    Kind(
        name="Ctrl-C twice at every third call",
        harm=_at_a_point(interrupt_twice, every=3),
        cases=40,
    ),
    Kind(name="SIGKILL twice, the second time in the recovery", harm=_killed_twice, cases=20),
    Kind(name="output folder removed", harm=_folder_removed("out"), cases=8),
    Kind(name=".wanstream removed", harm=_folder_removed(".wanstream"), cases=8),
    Kind(name="journal damaged, its copy too at times", harm=_journal_damaged, cases=28),
    Kind(name="journal crafted", harm=_journal_crafted, cases=12),
    Kind(
        name="journal region overwritten, with its copy", harm=_region_damaged(copy=True), cases=120
    ),
    Kind(
        name="journal region overwritten, without a copy",
        harm=_region_damaged(copy=False),
        cases=120,
    ),
    Kind(
        name="foreign thing in the working folder or next to the journal",
        harm=_foreign,
        cases=len(FOREIGN),
    ),
    Kind(name="folder of somebody else mounted in the working folder", harm=_mounted, cases=3),
    Kind(name="name that no row may have", harm=_named, cases=len(NAMES), done_code=1),
    Kind(name="journal locked by another program", harm=_journal_locked, cases=2),
    Kind(name="two or three clients on one folder", harm=_two_clients, cases=4),
    Kind(
        name="file size limit (RLIMIT_FSIZE)",
        harm=_limited(
            resource.RLIMIT_FSIZE,
            lambda chance, number: 1 if number == 0 else chance.randrange(1, 40_000),
        ),
        cases=12,
    ),
    Kind(
        name="memory limit (RLIMIT_AS)", harm=_limited(resource.RLIMIT_AS, _address_space), cases=6
    ),
    Kind(name="small disk, then a larger one", harm=_small_disk, cases=4),
    Kind(name="rows that are invalid, and SIGKILL", harm=_nothing, cases=6, done_code=1, rows=_BAD),
    Kind(name="lanes, SIGKILL at a random call", harm=_killed_twice, cases=20, world="lanes"),
    Kind(
        name="lanes, journal damaged, its copy too at times",
        harm=_journal_damaged,
        cases=14,
        world="lanes",
    ),
    Kind(name="all real: SIGKILL", harm=_signalled(signal.SIGKILL), cases=8, world="real"),
    Kind(name="all real: SIGTERM", harm=_signalled(signal.SIGTERM), cases=2, world="real"),
    Kind(name="all real: Ctrl-C once", harm=_signalled(signal.SIGINT), cases=2, world="real"),
    Kind(
        name="all real: Ctrl-C twice",
        harm=_signalled(signal.SIGINT, signal.SIGINT),
        cases=3,
        world="real",
    ),
    Kind(
        name="all real: Ctrl-C three times",
        harm=_signalled(signal.SIGINT, signal.SIGINT, signal.SIGINT),
        cases=2,
        world="real",
    ),
    Kind(
        name="all real: checkpoint cut, zeroed, removed, swapped",
        harm=_checkpoint,
        cases=8,
        world="real",
    ),
    Kind(name="run: SIGKILL", harm=_signalled(signal.SIGKILL), cases=4, world="run"),
    Kind(name="run: SIGTERM", harm=_signalled(signal.SIGTERM), cases=1, world="run"),
    Kind(
        name="run: Ctrl-C once, twice",
        harm=_signalled(signal.SIGINT, signal.SIGINT),
        cases=3,
        world="run",
    ),
    Kind(name="run: file size limit", harm=_run_limited, cases=3, world="run"),
    Kind(
        name="server: client SIGKILL at a call",
        harm=_on_server(_client_killed),
        cases=16,
        world="server",
    ),
    Kind(
        name="server: SIGKILL and restart",
        harm=_on_server(_server_killed(1, False)),
        cases=12,
        world="server",
    ),
    Kind(
        name="server: both SIGKILL",
        harm=_on_server(_server_killed(1, True)),
        cases=8,
        world="server",
    ),
    Kind(
        name="server: restarted three times",
        harm=_on_server(_server_killed(3, False)),
        cases=6,
        world="server",
    ),
    Kind(
        name="server: Ctrl-C once",
        harm=_on_server(_client_signalled(signal.SIGINT)),
        cases=8,
        world="server",
    ),
    Kind(
        name="server: Ctrl-C twice",
        harm=_on_server(_client_signalled(signal.SIGINT, signal.SIGINT)),
        cases=8,
        world="server",
    ),
    Kind(
        name="server: SIGTERM",
        harm=_on_server(_client_signalled(signal.SIGTERM)),
        cases=4,
        world="server",
    ),
    Kind(name="real ComfyUI: SIGKILL and restart", harm=_comfyui_killed, cases=20, world="comfyui"),
    Kind(
        name="server: drops, 500, 502, half answers",
        harm=_on_server(_in_trouble),
        cases=24,
        world="server",
    ),
)
