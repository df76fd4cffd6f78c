"""A small process that ends what is left of a Ray of ours when this process is gone, however it went.

The kernel ends the processes that Ray started from here, and those end their workers; but two helpers of Ray report the
loss to a server that is gone too, for a minute.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

END_TIMEOUT_S = 20.0
RAYLET = "raylet"

WATCH = """
import sys

# Without the folder that it is started in, where everybody may put files; PYTHONSAFEPATH leaves it out already.
sys.path = [place for place in sys.path if place]
import shutil

import psutil

watched = []
for line in sys.stdin:
    try:
        watched.append(psutil.Process(int(line)))
    except psutil.NoSuchProcess:
        pass
for process in watched:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        pass
psutil.wait_procs(watched, timeout=10)
shutil.rmtree(sys.argv[1], ignore_errors=True)
"""


class RayWatch:
    """Watches over a Ray that this process has started with its files in `folder`, and removes that at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._told: set[int] = set()
        self._raylet: psutil.Process | None = None
        self._process = subprocess.Popen(
            [sys.executable, "-c", WATCH, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder.parent,
            start_new_session=True,  # what ends this process from a terminal must not end the watch
            text=True,
        )

    def look(self) -> None:
        """Note the processes that this Ray has now."""
        pipe = self._process.stdin
        assert pipe is not None
        for pid in self._processes() - self._told - {self._process.pid}:
            pipe.write(f"{pid}\n")
            self._told.add(pid)
        pipe.flush()

    def raylet_lives(self) -> bool:
        """False once the raylet that was there at the last `look` has ended, reaped or not."""
        raylet = self._raylet
        try:
            return raylet is None or (raylet.is_running() and raylet.status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False

    def close(self) -> None:
        """Let it end what is left, now."""
        self._process.communicate(timeout=END_TIMEOUT_S)

    def _processes(self) -> set[int]:
        found = set()
        for child in psutil.Process().children():
            try:
                if any(str(self._folder) in word for word in child.cmdline()):
                    if self._raylet is None and child.name().startswith(RAYLET):
                        self._raylet = child
                    found |= {child.pid, *(each.pid for each in child.children(recursive=True))}
            except psutil.NoSuchProcess:
                continue
        return found
