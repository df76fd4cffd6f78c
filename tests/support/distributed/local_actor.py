"""Actor whose service is in this process, on threads.

It can be killed, and is restarted as Ray would.
"""

import threading
from concurrent.futures import Future
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from wanstream.cli.batch.ray_backend import RayBackend, stop_all
from wanstream.cli.batch.row_service import RowService
from wanstream.distributed import WorkerLostError

PLAIN = (str, int, float, bool, bytes, type(None))
MARK = "mark"
ROWS = "wanstream rows"
STOPPING = "stopping service"
END_SECONDS = 30.0


def is_plain(value):
    """Return True for values a process can unpickle before it has imported the pack."""
    if isinstance(value, dict):
        return all(is_plain(each) for pair in value.items() for each in pair)
    if isinstance(value, list | tuple):
        return all(is_plain(each) for each in value)
    return isinstance(value, PLAIN)


@contextmanager
def rows_ended():
    """After the `with`, no stopped service runs a row, and no service is still stopping.

    A running row writes into a temporary folder, so a test's folder could not be removed.
    """
    yield
    for thread in threading.enumerate():
        if thread.name.startswith((ROWS, STOPPING)):
            thread.join(END_SECONDS)
            assert not thread.is_alive(), f"{thread.name} goes on: its service was not stopped"


class LocalActor:
    """An `Actor` in this process.

    A killed one does not answer `down` calls, then has a new service without workflows.

    Like a `RayWorkerHandle` it does not call the new service before `restarted`.
    """

    def __init__(self, make, rank=0, *, down=2):
        self._make = make
        self.rank = rank
        self._down = down
        self.service = make()
        self.calls: list[str] = []
        self.without_ray = False
        self.restarts = 0
        self._left = 0
        self._killed = False
        self._lock = threading.Lock()

    def kill(self):
        """End the process. The thread goes on for a moment, as on a machine that was cut off."""
        with self._lock:
            if not self._killed:
                service = self.service
                self._left = self._down
                self._killed = True
                threading.Thread(target=service.stop, name=STOPPING, daemon=True).start()

    def call(self, method, *args):
        """Return the result from the process's worker."""
        with self._lock:
            return self._lost() or _answer(lambda: method)

    def serve(self, method, *args):
        """See `Actor.serve`."""
        assert is_plain(args), (method, args)
        self.calls.append(method)
        if method == "end":  # this would end the test process
            self.kill()
            return Future()
        with self._lock:
            lost = self._lost(started=False)
            service = self.service
        return lost or _answer(lambda: getattr(service, method)(*args))

    def restarted(self, started):
        """See `Actor.restarted`."""
        assert started == "started"
        self.restarts += 1
        self.service = self._make()
        self._killed = False

    def has_ray(self):
        """See `Actor.has_ray`."""
        return not self.without_ray

    def _lost(self, *, started=True):
        """Return a dead process's answer, or None.

        With `started`, a restarted process answers, too.
        """
        if not self._killed or (started and not self._left):
            return None
        self._left = max(0, self._left - 1)
        future: Future[Any] = Future()
        future.set_exception(WorkerLostError(f"worker {self.rank} is gone", self.rank))
        return future


def _answer(call):
    future: Future[Any] = Future()
    try:
        future.set_result(deepcopy(call()))
    except Exception as err:  # noqa: BLE001 - the future raises it
        future.set_exception(deepcopy(err))  # without the cause, as from another process
    return future


def row_service(options, output):
    """Return a service constructor.

    The hosts save in `output` if the machine has that folder.
    """
    folders = {"models": str(options.local.models), "input": str(options.local.input)}
    return lambda: RowService("cpu", 1, strict=False, **folders, marked=str(output / MARK))


def local_backend(actor, options):
    """Return an actor's backend."""
    return RayBackend(
        actor, options, {}, MARK, check_machine=lambda _: None, stop=lambda: stop_all([actor])
    )
