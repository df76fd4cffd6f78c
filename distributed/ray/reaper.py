"""Process that ends the remaining processes of a Ray after this process is gone, even if it was killed.

The kernel ends the processes that Ray started from here, and these end their workers. But two helpers of Ray would run
for another minute, trying to report the loss to a server that is gone too.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

END_TIMEOUT_S = 20.0
RAYLET = "raylet"

REAPER = """
import sys

# Without the current folder, in which other users may write; PYTHONSAFEPATH has the same effect.
sys.path = [folder for folder in sys.path if folder]
import shutil

import psutil

tracked = []
for line in sys.stdin:
    try:
        tracked.append(psutil.Process(int(line)))
    except psutil.NoSuchProcess:
        pass
for process in tracked:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        pass
psutil.wait_procs(tracked, timeout=10)
shutil.rmtree(sys.argv[1], ignore_errors=True)
"""


class RayReaper:
    """Reaper of a Ray that this process has started with its files in `folder`; it removes the folder at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tracked: set[int] = set()
        self._raylet: psutil.Process | None = None
        self._process = subprocess.Popen(
            [sys.executable, "-c", REAPER, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder.parent,
            start_new_session=True,  # Ctrl-C in a terminal must not end the reaper
            text=True,
        )

    def track(self) -> None:
        """Send the ids of the processes that this Ray has now to the reaper."""
        pipe = self._process.stdin
        assert pipe is not None
        for pid in self._processes() - self._tracked - {self._process.pid}:
            pipe.write(f"{pid}\n")
            self._tracked.add(pid)
        pipe.flush()

    def raylet_is_alive(self) -> bool:
        """Return False after the raylet found by `track` has ended, even as a zombie."""
        raylet = self._raylet
        try:
            return raylet is None or (raylet.is_running() and raylet.status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False

    def close(self) -> None:
        """End the tracked processes now."""
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
