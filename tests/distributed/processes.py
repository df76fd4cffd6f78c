"""Real processes for tests: each imports torch once, keeps what a job leaves behind, and does one job after the other.

    answers = processes.all(job, *args, count=4)
    answer = processes[1].start(job, *args)

A job is a plain function at the top of a test file, called as `job(here, *args)` in the process: `here` is a namespace
that outlives it, `here.number` says which process it is. Arguments, answers and errors travel by pipes. A process ends
when its parent does.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType, SimpleNamespace
from typing import Any

WAIT_S = 120.0
"""Neither a start nor a job takes longer, on any machine."""

Job = Callable[..., Any]


class JobFailedError(RuntimeError):
    """A job raised what cannot travel; says what."""


class ProcessGoneError(RuntimeError):
    """A process ended in the middle of a job."""


class Answer:
    """What a job will have returned."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def result(self, timeout: float = WAIT_S) -> Any:
        """What the job returned; raises what it raised, with the text of its traceback as the cause."""
        return self._process.receive(timeout)


class Process:
    """One process; `start` one job at a time."""

    def __init__(self, number: int) -> None:
        self.number = number
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours.detach())
        command = [sys.executable, __file__, str(theirs.fileno()), str(number)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        self._popen = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()

    @property
    def pid(self) -> int:
        return self._popen.pid

    def start(self, job: Job, *args: Any) -> Answer:
        """Let it do a job, and return at once."""
        file = inspect.getsourcefile(job)
        assert file is not None
        self._connection.send((file, job.__name__, args))
        return Answer(self)

    def receive(self, timeout: float) -> Any:
        if not self._connection.poll(timeout):
            raise TimeoutError(f"process {self.number} was not done after {timeout:g} s")
        try:
            value, error, trace = self._connection.recv()
        except (EOFError, ConnectionResetError) as err:
            raise ProcessGoneError(f"process {self.number} ended in the middle of a job") from err
        if trace:
            raise (error or JobFailedError(trace)) from JobFailedError(trace)
        return value

    def signal(self, number: int) -> None:
        """Send it a signal: SIGSTOP to let it hang, SIGCONT to let it go on."""
        self._popen.send_signal(number)

    def kill(self) -> None:
        """End it as `kill -9` does. Killing twice is allowed."""
        self._popen.kill()
        self._popen.wait(WAIT_S)
        self._connection.close()


class Processes(Sequence[Process]):
    """Processes that are started when they are asked for, and kept."""

    def __init__(self) -> None:
        self._every: list[Process] = []

    def at_least(self, count: int) -> Processes:
        """Have so many or more, which are ready."""
        started = [Process(number) for number in range(len(self._every), count)]
        self._every += started
        for process in started:
            process.receive(WAIT_S)
        return self

    def all(self, job: Job, *args: Any, count: int, timeout: float = WAIT_S) -> list[Any]:
        """Let the first `count` do the same job at once; their answers, in order."""
        answers = [process.start(job, *args) for process in self.at_least(count)._every[:count]]
        return [answer.result(timeout) for answer in answers]

    def replace(self, number: int) -> Process:
        """End a process, and start another one in its place."""
        self._every[number].kill()
        self._every[number] = Process(number)
        self._every[number].receive(WAIT_S)
        return self._every[number]

    def close(self) -> None:
        while self._every:
            self._every.pop().kill()

    def __getitem__(self, number: Any) -> Any:
        return self._every[number]

    def __len__(self) -> int:
        return len(self._every)

    def __iter__(self) -> Iterator[Process]:
        return iter(self._every)


def _serve(handle: int, number: int) -> None:
    """Say that all is imported that most jobs need, and do the jobs that come until nobody sends any more."""
    import torch

    import wanstream.sampling  # noqa: F401

    torch.set_num_threads(1)
    connection, jobs = Connection(handle), SimpleQueue[tuple[str, str, tuple[Any, ...]]]()
    threading.Thread(target=_listen, args=(connection, jobs), daemon=True).start()
    connection.send((None, None, ""))
    here, modules = SimpleNamespace(number=number), dict[str, ModuleType]()
    while True:
        file, name, args = jobs.get()
        try:
            if file not in modules:
                modules[file] = _load(file)
            connection.send((getattr(modules[file], name)(here, *args), None, ""))
        except Exception as error:  # noqa: BLE001 - every error of a job goes to the test
            text = traceback.format_exc()
            with contextlib.suppress(Exception):
                connection.send((None, error, text))
                continue
            connection.send((None, None, text))


def _listen(connection: Connection, jobs: SimpleQueue[tuple[str, str, tuple[Any, ...]]]) -> None:
    """Also while a job runs, so that a process does not outlive its parent."""
    while True:
        try:
            jobs.put(connection.recv())
        except (EOFError, OSError):
            os.kill(os.getpid(), signal.SIGKILL)


def _load(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[Path(file).stem] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]))
