"""Stage for one fault: a folder, clients in separate processes, and a verdict on the files left."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import av
import numpy as np
import torch

from wanstream.cli import main
from wanstream.cli.arguments import DONE, INTERRUPTED
from wanstream.tests.faults.points import Points
from wanstream.tests.support.batch.command import command_line, videos
from wanstream.wan.latents.file import read_latent

TRACEBACK = 99
"""Exit code after an uncaught exception."""

WAIT_SECONDS = 240.0
MOST_RUNS = 8

_ALLOWED = ("journal.sqlite", "journal.sqlite.before", "journal.sqlite.lock", ".wanstream/lock")


def forked(work: Callable[[], int | None], log: Path, *, temporary: Path) -> int:
    """Run `work` in a forked child with a new session, and return the child's id."""
    # An early signal, before the child can take it, would reach the campaign's own code.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        return pid
    code: int | None = TRACEBACK
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        tempfile.tempdir = str(temporary)
        with log.open("ab") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False, errors="backslashreplace")
        code = work()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else TRACEBACK
    except BaseException:  # noqa: BLE001 (any exception is logged and reported by the exit code)
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(TRACEBACK if code is None else code)
    return 0


@dataclass
class Findings:
    """Damage in words. All lists but `codes` are empty if nothing has happened."""

    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    """Exit codes in order, negative for a signal."""

    @property
    def clean(self) -> bool:
        return not (self.lost or self.doubled or self.broken or self.leaked)


class Stage:
    """A folder with rows and a workflow, and the clients that ran in it."""

    def __init__(self, folder, workflow, rows, more):
        self.folder = folder
        self.out = folder / "out"
        self.log = folder / "log"
        self.temporary = folder / "temporary"
        self.temporary.mkdir(parents=True)
        self.command = command_line(folder, workflow, *rows, options=more)
        self.done_code = DONE
        self.findings = Findings()
        self._clients: list[int] = []

    def start(self, prepare=None, after=None):
        """Start a client, with `prepare` before the command and `after` when it has ended."""

        def work() -> int:
            # It lacks any torch threads in this process.
            torch.set_num_threads(1)
            if prepare is not None:
                prepare()
            try:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            except KeyboardInterrupt:
                return INTERRUPTED
            code = main(self.command)
            if after is not None:
                after()
            return code

        pid = forked(work, self.log, temporary=self.temporary)
        self._clients.append(pid)
        return pid

    def wait(self, pid: int) -> int:
        """Return a client's exit code, negative for a signal."""
        deadline = time.monotonic() + WAIT_SECONDS
        step = 0.002
        while True:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                break
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                self.findings.lost.append(f"no end after {WAIT_SECONDS:.0f} s")
                deadline += 60
            time.sleep(step)
            step = min(step * 1.5, 0.05)
        code = os.waitstatus_to_exitcode(status)
        self.findings.codes.append(code)
        return code

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to a client that may have ended already."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def signal_each(self, pid, numbers, chance, *, pause):
        """Send signals with pauses, and wait for the end."""
        for number in numbers:
            self.signal(pid, number)
            time.sleep(chance.uniform(0, pause))
        self.wait(pid)

    def run(self, prepare: Callable[[], object] | None = None) -> int:
        return self.wait(self.start(prepare))

    def count_points(self) -> int:
        """Run an undisturbed client, and return the number of its crash points."""
        points = Points()
        counted = self.folder / "points"
        self.wait(self.start(points.install, lambda: counted.write_text(str(points.count))))
        return int(counted.read_text())

    def finish(self) -> None:
        """Run the same command again until it is done."""
        for _ in range(MOST_RUNS):
            if self.run() == self.done_code:
                return
        self.findings.lost.append(f"not done after {MOST_RUNS} runs: {self.stderr()[-300:]}")

    def stderr(self) -> str:
        """Return the output of all clients."""
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    def made(self) -> dict[str, bytes]:
        """Return the bytes of videos, and the values of latents: their metadata order varies."""
        latents = self.out.glob("*.latent")
        values = {path.name: read_latent(path).samples.numpy().tobytes() for path in latents}
        return videos(self.out) | values

    def judge(self, expected, *, frames_alone=False):
        """Compare the folder with undisturbed files, where each file may have several contents."""
        findings = self.findings
        made = self.made()
        findings.lost += sorted(expected.keys() - made.keys())
        findings.doubled += sorted(made.keys() - expected.keys())
        same = _frames if frames_alone else bytes
        for name in made.keys() & expected.keys():
            if same(made[name]) not in [same(content) for content in expected[name]]:
                findings.broken.append(name)
        self._judge_traceback()
        findings.leaked += self._leaked()
        return findings

    def judge_run(self, expected: bytes) -> Findings:
        """Judge the folder after `wanstream run`: one or more files, all whole and equal."""
        made = sorted(self.out.rglob("*.mp4"))
        self.findings.lost += [] if made else ["no video"]
        self.findings.broken += [path.name for path in made if path.read_bytes() != expected]
        self._judge_traceback()
        self.findings.leaked += self._processes()
        return self.findings

    def _judge_traceback(self) -> None:
        if self.findings.codes.count(TRACEBACK) or "Traceback" in self.stderr():
            words = self.stderr().partition("Traceback")[2][:3000]
            self.findings.broken.append(f"a traceback: {words}")

    def _processes(self) -> list[str]:
        left = []
        for leader in self._clients:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(leader, 0)
                left.append(f"a process of the session {leader}")
                os.killpg(leader, signal.SIGKILL)
        return left

    def _leaked(self) -> list[str]:
        leaked = self._processes()
        announced = self.stderr()
        for path in sorted((*self.out.rglob("*"), *self.temporary.rglob("*"))):
            name = str(path.relative_to(self.out)) if path.is_relative_to(self.out) else str(path)
            kept = name in _ALLOWED or name.startswith("journal.sqlite.damaged")
            kept |= path.parent == self.out and path.suffix in {".mp4", ".latent"}
            if path.is_file() and not kept and str(path) not in announced:
                leaked.append(name)
        return leaked

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _frames(content: bytes) -> bytes:
    with tempfile.NamedTemporaryFile(suffix=".mp4") as file:
        file.write(content)
        file.flush()
        with av.open(file.name) as container:
            return np.stack([frame.to_ndarray() for frame in container.decode(video=0)]).tobytes()
