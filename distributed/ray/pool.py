"""Workers behind Ray: started on this machine or in a cluster, checked, replaced, and ended without a trace."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import wait
from contextlib import ExitStack
from typing import Any

from ...offload import sweep
from ...schema import LOCAL, WorkersRef, check_address, is_loopback
from ..transport.path_map import places
from ..transport.versions import check_versions
from ..worker.worker import Worker
from .actor import FOLDER, PACKAGE, actor_class
from .connection import CONNECTION, OBJECT_STORE_BYTES
from .errors import LostAtStartError, RaySetupError
from .handle import RayWorkerHandle, describe_exit
from .placement import Placement
from .worker import Started

START_TIMEOUT_S = 180.0
"""Importing torch takes its time, on all cores at once."""
END_TIMEOUT_S = 20.0


CLOSE_TIMEOUT_S = 5.0
TOKEN_HINT = (
    " See that every machine of the cluster has started Ray with RAY_AUTH_MODE=token and the same token: workers "
    "without it cannot reach this process"
)


class RayPool:
    """See `Pool`: `ref.count` workers. Blocks until all of them answer. Use with `with`, or `close` it.

    Args:
        device: of local workers: "cuda" gives each a GPU of its own, "cpu" none, "" whatever there is. Those of a
            cluster have GPUs if it has any.
        store_bytes: room that Ray has for what workers tell.

    Raises:
        RayMissingError: Ray is not installed.
        RaySetupError: fewer GPUs or CPU slots than workers; a cluster that does not answer, or that other machines
            reach without a token; another Ray in this process; workers that do not start within `start_timeout_s`.
        VersionsError: a worker has another WanStream, torch, diffusers or Python.
        WorkersError: an address that `beyond_loopback` or `token_file` does not go with.
    """

    def __init__(
        self,
        ref: WorkersRef,
        device: str = "",
        *,
        store_bytes: int = OBJECT_STORE_BYTES,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        assert ref.count >= 1, ref
        check_address(ref.address, beyond_loopback=ref.beyond_loopback, token_file=ref.token_file)
        self._ref, self._timeout_s = ref, start_timeout_s
        self._replacing, self._closed, self._failed = threading.Lock(), False, False
        self._starting: list[Any] = []
        with ExitStack() as undo:
            undo.callback(sweep)  # last: workers that are killed leave the RAM behind that they shared
            self._ray = CONNECTION.enter(ref, store_bytes=store_bytes)
            undo.callback(CONNECTION.leave)
            on_gpus = device == "cuda" if ref.address == LOCAL and device else None
            self._placement = Placement(self._ray, ref.count, start_timeout_s, on_gpus=on_gpus)
            undo.callback(self._placement.close)
            self._class = actor_class(self._ray)
            self._workers = self._start(range(ref.count), undo)
            self._undo = undo.pop_all()

    @property
    def workers(self) -> Sequence[RayWorkerHandle]:
        """See `Pool.workers`."""
        return tuple(self._workers)

    @property
    def usable(self) -> bool:
        """See `Pool.usable`."""
        return not self._closed and not self._failed and CONNECTION.is_there()

    def replace(self, rank: int) -> RayWorkerHandle:
        """See `Pool.replace`. Raises as `RayPool` if the new one does not start, and after `close`."""
        with self._replacing:
            self._workers[rank].kill()
            self._workers[rank].wait_for_end(END_TIMEOUT_S)
            self._failed = True  # until it has succeeded
            self._workers[rank] = self._started_again(rank)
            self._failed = False
            return self._workers[rank]

    def close(self) -> None:
        """See `Pool.close`. A worker that is about to be replaced on another thread is not."""
        self._closed = True
        self._kill(self._starting)
        with self._replacing:
            self._end_all()

    def _end_all(self) -> None:
        # Workers of other machines give back there what they share, which nobody sweeps from here.
        wait([worker.ask("close") for worker in self._workers], timeout=CLOSE_TIMEOUT_S)
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.wait_for_end(END_TIMEOUT_S)
        self._undo.close()

    def __enter__(self) -> RayPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, ranks: Sequence[int], undo: ExitStack) -> list[RayWorkerHandle]:
        """Workers in these places, all at once."""
        folders = [str(place) for place in places(FOLDER, self._ref.paths)]
        self._check_open()
        actors = [self._class.options(**self._placement.options(rank)).remote() for rank in ranks]
        answers = [
            actor.start.remote(PACKAGE, folders, self._ref.threads, self._placement.workers_beside(rank))
            for actor, rank in zip(actors, ranks, strict=True)
        ]
        undo.callback(self._kill, actors)
        self._starting = actors
        self._check_open()
        until = time.monotonic() + self._timeout_s  # one deadline for all of them
        every = [self._answer(rank, answer, until) for rank, answer in zip(ranks, answers, strict=True)]
        self._starting = []
        CONNECTION.look()
        check_versions(Worker("cpu").facts(), [started.facts for started in every])
        check_exposure(every, beyond_loopback=self._ref.beyond_loopback)
        own_node = self._ray.get_runtime_context().get_node_id()
        return [
            RayWorkerHandle(self._ray, actor, rank, started, is_here=started.node_id == own_node)
            for actor, rank, started in zip(actors, ranks, every, strict=True)
        ]

    def _started_again(self, rank: int) -> RayWorkerHandle:
        """Ray hears late of a machine that is gone: what it still puts there is lost; the next one goes elsewhere."""
        until = time.monotonic() + self._timeout_s
        while True:
            self._check_open()  # asked after its end, Ray would start once more
            node = self._placement.node_of(rank)
            try:
                with ExitStack() as undo:
                    (worker,) = self._start([rank], undo)
                    undo.pop_all()
            except LostAtStartError:
                stays = node is not None and self._placement.node_of(rank) == node
                if stays or time.monotonic() > until:
                    raise
            else:
                return worker

    def _check_open(self) -> None:
        if self._closed:
            raise RaySetupError("these workers were ended while one of them was replaced: start others")
        if not CONNECTION.is_there():
            raise RaySetupError(
                f"the Ray at {self._ref.address} has ended or cannot be reached, and its workers with it: see that it "
                "runs, and start this again"
            )

    def _kill(self, actors: Sequence[Any]) -> None:
        # Asked after its end, Ray would start once more, with none of our settings.
        if self._ray.is_initialized():
            for actor in actors:
                self._ray.kill(actor)

    def _answer(self, rank: int, answer: Any, until: float) -> Started:
        errors = self._ray.exceptions
        try:
            started: Started = self._ray.get(answer, timeout=max(0.0, until - time.monotonic()))
        except errors.GetTimeoutError as err:
            raise RaySetupError(
                f"worker {rank} did not start within {self._timeout_s:g} s: {self._placement.late_words()}"
            ) from err
        except errors.RayTaskError as err:
            raise RaySetupError(f"worker {rank} does not start: {err.cause or err}") from err
        except errors.RayActorError as err:
            raise LostAtStartError(
                f"worker {rank} does not start: {describe_exit(str(err))}{TOKEN_HINT if self._ref.token_file else ''}"
            ) from err
        except errors.RayError as err:
            raise RaySetupError(f"worker {rank} does not start: {err}") from err
        return started


def check_exposure(workers: Sequence[Started], *, beyond_loopback: bool) -> None:
    """Raise RaySetupError for workers on addresses that other machines reach, unless that is asked for and guarded."""
    outside = [started for started in workers if not is_loopback(started.facts.address)]
    if outside and not beyond_loopback:
        raise RaySetupError(
            f"workers of this cluster listen on {outside[0].facts.address}, which other machines reach: set "
            "remote_machines to true in its entry if that is meant, or start Ray with --node-ip-address 127.0.0.1"
        )
    if any(not started.token for started in outside):
        raise RaySetupError(
            f"the cluster listens on {outside[0].facts.address} and requires no token: anyone who reaches it can "
            "run programs there. Start it with RAY_AUTH_MODE=token (ray get-auth-token --generate), and name that file "
            "as token_file in its entry"
        )
