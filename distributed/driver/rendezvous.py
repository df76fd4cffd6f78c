"""Rendezvous of the workers of a group, on the driver's side: replace lost workers, then join all of them."""

from __future__ import annotations

import errno
import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from typing import Any

from ...schema import Mesh, WorkersRef
from ..messages import RendezvousSpec, WorkerFacts
from ..transport.pool import Pool, WorkerHandle, WorkerLostError
from ..worker.rendezvous import PeerLostError, WorkerTimeoutError

ANSWER_S = 60.0
"""Time limit for short calls to a worker, in seconds; a worker that exceeds it is killed."""
PORT_TRIES = 4
"""Number of ports to try: a port that was free a moment ago may be in use now."""
GENERATIONS = itertools.count(1)
"""Numbers of rendezvous, unique in this process, because several drivers may use the same workers in turn."""


class Rendezvous:
    """Rendezvous of workers of one pool. Thread-safe: several groups may join at once."""

    def __init__(self, pool: Pool, ref: WorkersRef) -> None:
        self._pool, self._ref = pool, ref
        self._replace_lock = threading.Lock()

    def join(self, ranks: Sequence[int], layout: Mesh) -> int:
        """Join the workers with these ranks as a group of `layout`, the leader first. Blocks until all have joined.

        Returns the generation of the rendezvous.

        Raises:
            WorkerLostError: a worker was lost during the rendezvous.
            OSError: no port was free.
        """
        facts = [self._facts_or_replace(rank) for rank in ranks]
        workers = [self._pool.workers[rank] for rank in ranks]
        for tries_left in reversed(range(PORT_TRIES)):
            spec = RendezvousSpec(
                rank=0,
                mesh=layout,
                host=facts[0].address,
                port=self._call(workers[0], "free_port"),
                generation=next(GENERATIONS),
                timeout_s=self._ref.timeout_s,
                weights=self._ref.weights,
            )
            error = self._try_join(workers, spec)
            if error is None:
                break
            if not (isinstance(error, OSError) and error.errno == errno.EADDRINUSE and tries_left):
                raise error
        return spec.generation

    def facts(self, ranks: Sequence[int], paths: Sequence[str]) -> list[WorkerFacts]:
        """Return the facts of each worker, with those of `paths` that its machine lacks. Raises WorkerLostError."""
        return [self._facts(self._pool.workers[rank], paths) for rank in ranks]

    def _facts_or_replace(self, rank: int) -> WorkerFacts:
        """Return the facts of a worker, or of its replacement if it is lost."""
        try:
            return self._facts(self._pool.workers[rank])
        except WorkerLostError:
            with self._replace_lock:  # pools replace one worker at a time
                worker = self._pool.replace(rank)
            return self._facts(worker)

    def _facts(self, worker: WorkerHandle, paths: Sequence[str] = ()) -> WorkerFacts:
        facts = self._call(worker, "facts", paths, self._ref.paths)
        assert isinstance(facts, WorkerFacts)
        return facts

    def _call(self, worker: WorkerHandle, method: str, *args: Any) -> Any:
        answer = worker.call(method, *args)
        try:
            return answer.result(ANSWER_S)
        except FutureTimeoutError as err:
            if answer.done():  # the worker itself raised a TimeoutError
                raise
            worker.kill()
            raise WorkerLostError(
                f"worker {worker.rank} did not answer within {ANSWER_S:g} s and was ended\n{worker.log_tail()}",
                worker.rank,
            ) from err

    def _try_join(self, workers: Sequence[WorkerHandle], spec: RendezvousSpec) -> Exception | None:
        """Join all workers. Returns None, or the error that explains the failure, after the last worker gave up."""
        joining = [worker.call("join", replace(spec, rank=place)) for place, worker in enumerate(workers)]
        wait(joining, timeout=self._ref.timeout_s + ANSWER_S, return_when=FIRST_EXCEPTION)
        if all(each.done() and each.exception() is None for each in joining):
            return None
        # Peers of a failed worker would wait for it until their timeout.
        leaving = [worker.call("leave") for worker in workers]
        wait([*joining, *leaving], timeout=ANSWER_S)
        for worker, each in zip(workers, joining, strict=True):
            if not each.done():
                worker.kill()
        return self._first_cause(workers, joining)

    def _first_cause(self, workers: Sequence[WorkerHandle], joining: Sequence[Future[None]]) -> Exception:
        """Return the error that caused the others: a worker whose peer failed raises PeerLostError or a timeout."""
        errors: list[tuple[WorkerHandle, BaseException]] = [
            (worker, error)
            for worker, each in zip(workers, joining, strict=True)
            if each.done() and (error := each.exception()) is not None
        ]
        for _, error in errors:
            if isinstance(error, Exception) and not isinstance(error, PeerLostError | WorkerTimeoutError):
                return error
        worker, error = errors[0] if errors else (workers[0], None)
        return WorkerLostError(f"worker {worker.rank} could not join its group: {error}", worker.rank)
