"""Pool of real workers in `processes.py` processes, without Ray, called over a socket."""

import itertools
import os
import pickle
import signal
import threading
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from functools import partial
from multiprocessing.connection import Client, Listener

from wanstream.distributed.transport.pool import WorkerLostError
from wanstream.distributed.transport.threads import WorkThread, run_in_thread
from wanstream.distributed.worker.worker import Worker
from wanstream.tests.support.sampling.short_memory import ShortPair, once
from wanstream.wan.experts.open import ExpertsRegistry, open_pair

WAIT_S = 60.0


def serve(here, address, key, rank, short_at, machine):
    """Serve a worker's calls until the driver hangs up.

    All runs share one thread. Every other call has a new one.
    """

    def opened(ref):
        pair = open_pair(ref)
        return pair if short_at is None else ShortPair(pair, once(short_at))

    worker = Worker("cpu", threads=1, experts=ExpertsRegistry(opened), machine=machine)
    lock = threading.Lock()
    runs = WorkThread("runs")
    with Client(address, authkey=key) as connection:

        def send(number, kind, value):
            with lock:
                connection.send_bytes(pickle.dumps((number, kind, value)))

        def answer(number, done):
            error = done.exception()
            if error is None:
                send(number, "value", done.result())
            else:
                send(number, "error", error)

        send(rank, "here", None)
        while True:
            number, method, args = pickle.loads(connection.recv_bytes())  # noqa: S301 - from our own test
            if number < 0:
                send(number, "bye", None)
                break
            if method == "run":
                done = runs.submit(worker.run, *args, partial(send, number, "step"))
            else:
                done = run_in_thread("call", getattr(worker, method), *args)
            done.add_done_callback(partial(answer, number))
    runs.close()
    worker.close()


class ProcessWorker:
    """See `WorkerHandle`."""

    def __init__(self, rank, process, connection):
        self.rank = rank
        self._process = process
        self._connection = connection
        self.pid: int = process.pid
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting = {}  # future and report function by number
        self._gone = False
        self._lost_one = True
        self._listening = threading.Thread(target=self._listen, name=f"process {rank}", daemon=True)
        self._listening.start()

    def call(self, method, *args):
        return self._send(method, args, None)

    def run(self, task, on_report):
        return self._send("run", (task,), on_report)

    def log_tail(self):
        return ""

    def kill(self):
        with self._lock, suppress(ProcessLookupError):
            if not self._gone:
                self._process.signal(signal.SIGKILL)

    def hang_up(self):
        """Let the process do something else. False if it is gone."""
        with self._lock:
            if not self._gone:
                self._connection.send_bytes(pickle.dumps((-1, "", ())))
        self._listening.join(WAIT_S)
        self._connection.close()
        return not self._lost_one

    def _send(self, method, args, on_report):
        future = Future()
        with self._lock:
            number = next(self._numbers)
            if not self._gone:
                self._waiting[number] = (future, on_report)
                try:
                    self._connection.send_bytes(pickle.dumps((number, method, tuple(args))))
                except OSError:
                    self._gone = True
                    del self._waiting[number]
        if self._gone and not future.done():
            future.set_exception(self._lost())
        return future

    def _listen(self):
        while True:
            try:
                number, kind, value = pickle.loads(self._connection.recv_bytes())  # noqa: S301 - from our own process
            except (EOFError, OSError):
                break
            if kind == "bye":
                self._lost_one = False
                break
            future, on_report = self._waiting[number]
            if kind == "step":
                assert on_report is not None
                on_report(value)
                continue
            with self._lock:
                del self._waiting[number]
            if kind == "error":
                future.set_exception(value)
            else:
                future.set_result(value)
        with self._lock:
            self._gone = True
            waiting = self._waiting
            self._waiting = {}
        for future, _ in waiting.values():
            future.set_exception(self._lost())

    def _lost(self):
        return WorkerLostError(f"worker {self.rank} (process {self.pid}) is gone", self.rank)


class ProcessPool:
    """A `Pool` to use in a `with`, which leaves the processes to others.

    Args:
        first: rank 0's process.
        short_at: by rank: at which use of a block memory is short, in the rank's first process.
        machines: machine identifier by rank, by default this machine's.
    """

    def __init__(self, processes, count, *, first=0, short_at=None, machines=None):
        self._machines = machines or {}
        self._processes = processes.at_least(first + count)
        self._first = first
        self._key = os.urandom(16)
        self._answers = {}
        self._replacing = threading.Lock()
        self._listener = Listener(family="AF_UNIX", authkey=self._key)
        for rank in range(count):
            self._serve(rank, (short_at or {}).get(rank))
        started = sorted((self._accept() for _ in range(count)), key=lambda worker: worker.rank)
        self.workers = list(started)
        self.replaced: list[int] = []

    def share(self, requests):
        return nullcontext()  # each is sent with its task

    def replace(self, rank):
        with self._replacing:
            self.replaced.append(rank)
            self._processes.replace(self._first + rank)
            self._serve(rank, None)
            self.workers[rank] = self._accept()
            return self.workers[rank]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for rank, worker in enumerate(self.workers):
            if worker.hang_up():
                self._answers[rank].result(WAIT_S)
            else:
                self._processes.replace(self._first + rank)
        self._listener.close()

    def _serve(self, rank, short_at):
        process = self._processes[self._first + rank]
        given = (rank, short_at, self._machines.get(rank))
        self._answers[rank] = process.start(serve, self._listener.address, self._key, *given)

    def _accept(self):
        connection = self._listener.accept()
        rank, _, _ = pickle.loads(connection.recv_bytes())  # noqa: S301 - from our own process
        return ProcessWorker(rank, self._processes[self._first + rank], connection)
