"""Real processes for tests, forked from one with everything imported that workers import.

Each keeps a job's state for the next job.

    answers = processes.all(job, *args, count=4)
    answer = processes[1].start(job, *args)

A job is a plain function at the top of a test file, called as `job(here, *args)` in the process:
`here` is a namespace that outlives it, `here.number` is the process index, and `here.load` imports
a file. Arguments, answers and errors are sent through pipes. A process ends when its parent does.
"""

import contextlib
import functools
import importlib.util
import inspect
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

WAIT_S = 120.0
"""Neither a start nor a job takes longer, on any machine."""


class JobFailedError(RuntimeError):
    """A job raised an exception that cannot be pickled. The message is the traceback."""


class ProcessGoneError(RuntimeError):
    """A process ended in the middle of a job."""


class Source:
    """The process to fork all others from.

    It computes nothing, and so has no threads.
    """

    def __init__(self):
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, __file__, str(theirs.fileno())]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._popen = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()

    def fork(self, number):
        """Return a new process's id, and the pipe to it."""
        ours, theirs = socket.socketpair()
        socket.send_fds(self._socket, [number.to_bytes(8, "little")], [theirs.fileno()])
        theirs.close()
        connection = Connection(ours.detach())
        if not connection.poll(WAIT_S):
            connection.close()
            raise TimeoutError(f"process {number} did not start within {WAIT_S:g} s")
        try:
            return _receive(connection), connection
        except EOFError as err:
            connection.close()
            raise ProcessGoneError("the process to fork from has ended: see what it wrote") from err

    def close(self):
        self._popen.kill()
        self._popen.wait(WAIT_S)
        self._socket.close()


class Process:
    """One process. `start` one job at a time."""

    def __init__(self, source, number):
        self.number = number
        self.pid, self._connection = source.fork(number)
        # Ids are given again when a process is gone, and the system reaps these.
        self._handle = os.pidfd_open(self.pid)
        self.hangs = False

    def start(self, job, *args):
        """Let it do a job, and return at once."""
        _send(self._connection, (inspect.getsourcefile(job), job.__name__, args))
        return self

    def result(self, timeout=WAIT_S):
        """Return the job's result, or raise the exception, caused by the traceback's text."""
        if not self._connection.poll(timeout):
            self.hangs = True
            raise TimeoutError(f"process {self.number} was not done after {timeout:g} s")
        try:
            value, error, trace = _receive(self._connection)
        except (EOFError, ConnectionResetError) as err:
            raise ProcessGoneError(f"process {self.number} ended in the middle of a job") from err
        if trace:
            raise (error or JobFailedError(trace)) from JobFailedError(trace)
        return value

    def signal(self, number):
        """Send it a signal: SIGSTOP to let it hang, SIGCONT to let it go on, SIGKILL to lose it."""
        signal.pidfd_send_signal(self._handle, number)

    def end(self):
        """End it as `kill -9` does, unless it is gone already."""
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        os.close(self._handle)
        self._connection.close()


class Processes(Sequence[Process]):
    """Processes that are started on demand and reused."""

    def __init__(self):
        self._source: Source | None = None
        self._every: list[Process] = []

    def at_least(self, count):
        """Have so many or more, none hanging in another test's job."""
        self._source = self._source or Source()
        while len(self._every) < count:
            self._every.append(Process(self._source, len(self._every)))
        for process in self._every:
            if process.hangs:
                self.replace(process.number)
        return self

    def all(self, job, *args, count, timeout=WAIT_S):
        """Let the first `count` do the same job at once, and return their answers, in order."""
        answers = [process.start(job, *args) for process in self.at_least(count)._every[:count]]
        return [answer.result(timeout) for answer in answers]

    def replace(self, number):
        """End a process, and start another one in its place."""
        self._every[number].end()
        self._every[number] = Process(self._source, number)
        return self._every[number]

    def close(self):
        while self._every:
            self._every.pop().end()
        if self._source is not None:
            self._source.close()

    def __getitem__(self, number):
        return self._every[number]

    def __len__(self):
        return len(self._every)


def _fork_when_asked(handle):
    """Fork one child per request until the socket closes. The system reaps the children."""
    import gc

    import torch

    from wanstream.distributed.worker.worker import import_models

    import_models()
    gc.freeze()  # as in a worker of Ray: no collection in a child visits what is imported here
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    connection = socket.socket(fileno=handle)
    while True:
        number, handles, _, _ = socket.recv_fds(connection, 8, 1)
        if not number:
            return
        if os.fork() == 0:
            connection.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _serve(Connection(handles[0]), int.from_bytes(number, "little"))
        os.close(handles[0])


def _serve(connection, number):
    """Run jobs from the connection until it closes."""
    _send(connection, os.getpid())
    jobs = SimpleQueue()
    threading.Thread(target=_listen, args=(connection, jobs), daemon=True).start()
    here = SimpleNamespace(number=number, load=functools.cache(load))
    while True:
        file, name, args = jobs.get()
        try:
            _send(connection, (getattr(here.load(file), name)(here, *args), None, ""))
        except Exception as error:  # noqa: BLE001 - every error of a job goes to the test
            text = traceback.format_exc()
            try:
                _send(connection, (None, error, text))
            except Exception:  # noqa: BLE001 - any error of pickling
                _send(connection, (None, None, text))


def _listen(connection, jobs):
    """Receive jobs also while one runs, because a process must not outlive its parent."""
    while True:
        try:
            jobs.put(_receive(connection))
        except (EOFError, OSError):
            os.kill(os.getpid(), signal.SIGKILL)


def _send(connection, value):
    """Send by value: `Connection.send` would share tensor memory through open files."""
    connection.send_bytes(pickle.dumps(value))


def _receive(connection):
    return pickle.loads(connection.recv_bytes())  # noqa: S301 - of our own parent or child


def load(file):
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[Path(file).stem] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    _fork_when_asked(int(sys.argv[1]))
