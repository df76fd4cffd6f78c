"""How the workers of a group come together: whoever is gone is replaced, then all meet, as the next generation."""

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
from ..worker.errors import PeerLostError, WorkerTimeoutError

ANSWER_S = 60.0
"""How long a worker may take to answer a short question; one that takes longer is replaced."""
PORT_TRIES = 4
"""How many ports are tried: one that was free a moment ago may be taken."""
GENERATIONS = itertools.count(1)
"""Of all rendezvous that this process calls, whoever drives the workers."""


class Rendezvous:
    """Brings workers of one pool together. Thread-safe: groups may meet side by side."""

    def __init__(self, pool: Pool, ref: WorkersRef) -> None:
        self._pool, self._ref = pool, ref
        self._lock = threading.Lock()

    def meet(self, ranks: Sequence[int], layout: Mesh) -> int:
        """Let the workers with these ranks meet as a group of `layout`; the first one leads it. Blocks until they have.

        Returns the generation of the rendezvous. Raises:
            WorkerLostError: one was lost on the way.
            OSError: no port was free.
        """
        facts = [self._answering(rank) for rank in ranks]
        workers = [self._pool.workers[rank] for rank in ranks]
        for left in reversed(range(PORT_TRIES)):
            rendezvous = RendezvousSpec(
                rank=0,
                mesh=layout,
                host=facts[0].address,
                port=self._answer(workers[0], "free_port"),
                generation=next(GENERATIONS),
                timeout_s=self._ref.timeout_s,
                weights=self._ref.weights,
            )
            error = self._join(workers, rendezvous)
            if error is None:
                break
            if not (isinstance(error, OSError) and error.errno == errno.EADDRINUSE and left):
                raise error
        return rendezvous.generation

    def facts(self, ranks: Sequence[int], paths: Sequence[str]) -> list[WorkerFacts]:
        """What each of these workers is, and which of `paths` it misses. Raises WorkerLostError."""
        return [self._facts(self._pool.workers[rank], paths) for rank in ranks]

    def _answering(self, rank: int) -> WorkerFacts:
        """The facts of that worker, or of the one that takes its place."""
        try:
            return self._facts(self._pool.workers[rank])
        except WorkerLostError:
            with self._lock:  # pools replace one after the other
                worker = self._pool.replace(rank)
            return self._facts(worker)

    def _facts(self, worker: WorkerHandle, paths: Sequence[str] = ()) -> WorkerFacts:
        facts = self._answer(worker, "facts", paths, self._ref.paths)
        assert isinstance(facts, WorkerFacts)
        return facts

    def _answer(self, worker: WorkerHandle, method: str, *args: Any) -> Any:
        asked = worker.ask(method, *args)
        try:
            return asked.result(ANSWER_S)
        except FutureTimeoutError as err:
            if asked.done():
                raise
            worker.kill()
            raise WorkerLostError(
                f"worker {worker.rank} did not answer within {ANSWER_S:g} s and was ended\n{worker.log_tail()}",
                worker.rank,
            ) from err

    def _join(self, workers: Sequence[WorkerHandle], rendezvous: RendezvousSpec) -> Exception | None:
        """Let all join, and return when none of them is about to any more; what went wrong, as one error."""
        joining = [worker.ask("join", replace(rendezvous, rank=place)) for place, worker in enumerate(workers)]
        wait(joining, timeout=self._ref.timeout_s + ANSWER_S, return_when=FIRST_EXCEPTION)
        if all(each.done() and each.exception() is None for each in joining):
            return None
        # Those who still wait for the others need not.
        leaving = [worker.ask("leave") for worker in workers]
        wait([*joining, *leaving], timeout=ANSWER_S)
        for worker, each in zip(workers, joining, strict=True):
            if not each.done():
                worker.kill()
        return self._worst(workers, joining)

    def _worst(self, workers: Sequence[WorkerHandle], joining: Sequence[Future[None]]) -> Exception:
        """Of the errors the one that made the others: whoever waits for a worker that is gone is let down."""
        errors: list[tuple[WorkerHandle, BaseException]] = [
            (worker, error)
            for worker, each in zip(workers, joining, strict=True)
            if each.done() and (error := each.exception()) is not None
        ]
        for _, error in errors:
            if isinstance(error, Exception) and not isinstance(error, PeerLostError | WorkerTimeoutError):
                return error
        worker, error = errors[0] if errors else (workers[0], None)
        return WorkerLostError(f"worker {worker.rank} could not meet the others of its group: {error}", worker.rank)
