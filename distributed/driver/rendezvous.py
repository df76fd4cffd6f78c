"""Rendezvous of the workers of a group, on the driver's side: replace lost workers, then join all of them."""

from __future__ import annotations

import errno
import itertools
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from typing import Any

from ...schema import Mesh, WorkersRef
from ..messages import RendezvousSpec, WorkerFacts
from ..transport.pool import Pool, WorkerHandle, WorkerLostError, replace_lost
from ..worker.rendezvous import PeerLostError, WorkerTimeoutError

ANSWER_S = 60.0
"""Time limit for short calls to a worker, in seconds; a worker that exceeds it is killed."""
PORT_TRIES = 4
"""Number of ports to try: a port that was free a moment ago may be in use now."""
GENERATIONS = itertools.count(1)
"""Numbers of rendezvous, unique in this process, because several drivers may use the same workers in turn."""


logger = logging.getLogger("wanstream.distributed")


def format_machines(ranks: Sequence[int], workers: Sequence[WorkerFacts]) -> str:
    """Format the machines of workers: "0 1 on node-a (10.0.0.1), 2 on node-b (10.0.0.2)"."""
    places: dict[tuple[str, str], list[str]] = {}
    for rank, facts in zip(ranks, workers, strict=True):
        places.setdefault((facts.node, facts.address), []).append(str(rank))
    return ", ".join(f"{' '.join(each)} on {node} ({address})" for (node, address), each in places.items())


class Rendezvous:
    """Rendezvous of the workers of one group. `connect`, `repair` and `disable` may be called from any thread.

    Args:
        ranks: ranks of the workers in `pool`, the leader's first.
        layout: mesh of these workers alone; its data and stage degrees are 1.
    """

    def __init__(self, pool: Pool, ref: WorkersRef, ranks: Sequence[int], layout: Mesh) -> None:
        self.ranks, self.timeout_s = tuple(ranks), ref.timeout_s
        self.generation = 0
        """Number of the last rendezvous."""
        self.is_joined = False
        """True if the workers can compute another task without a new rendezvous."""
        self.facts: tuple[WorkerFacts, ...] = ()
        """Facts of the workers at the last rendezvous, the leader's first."""
        self._pool, self._ref, self._layout = pool, ref, layout
        self._leaving: Sequence[Future[None]] = ()
        self._lock = threading.Lock()
        self._is_disabled = False

    @property
    def workers(self) -> list[WorkerHandle]:
        return [self._pool.workers[rank] for rank in self.ranks]

    @property
    def spans_machines(self) -> bool:
        """True if the workers lie on several machines."""
        return len({each.machine for each in self.facts}) > 1

    def connect(self, paths: Sequence[str]) -> tuple[WorkerFacts, ...]:
        """Replace lost workers and join all of them. Blocks. Returns their facts, with the sizes of `paths`.

        Raises:
            WorkerLostError: a worker was lost during the rendezvous.
            OSError: no port was free.
        """
        with self._lock:
            self.is_joined = self.is_joined and self._are_joined()
        self.repair()
        self.facts = self._all_facts(paths)
        return self.facts

    def repair(self) -> None:
        """Replace lost workers and join all of them, unless they are joined. Raises as `connect`."""
        with self._lock:
            if self.is_joined or self._is_disabled:
                return
            # A worker that leaves late would leave the new rendezvous.
            wait(self._leaving, timeout=ANSWER_S)
            self._leaving = ()
            self._join()
            self.is_joined = True

    def leave(self) -> None:
        """Make all workers leave, so that none of them waits for a peer. Does not block; leaving twice is allowed."""
        self.is_joined = False
        self._leaving = self._leaving or [worker.call("leave") for worker in self.workers]

    def disable(self) -> None:
        """Make all later repairs do nothing. Blocks until a repair in progress has ended."""
        with self._lock:
            self._is_disabled = True

    def _join(self) -> None:
        replace_lost(self._pool, self._lost_ranks())
        self.facts = self._all_facts()
        if self.spans_machines:
            logger.warning("workers that share a video are apart: %s", format_machines(self.ranks, self.facts))
        workers = self.workers
        for tries_left in reversed(range(PORT_TRIES)):
            spec = RendezvousSpec(
                rank=0,
                mesh=self._layout,
                host=self.facts[0].address,
                port=self._result(workers[0], workers[0].call("free_port"), ANSWER_S),
                generation=next(GENERATIONS),
                timeout_s=self.timeout_s,
                spans_machines=self.spans_machines,
                weights=self._ref.weights,
            )
            error = self._try_join(workers, spec)
            if error is None:
                self.generation = spec.generation
                return
            if not (isinstance(error, OSError) and error.errno == errno.EADDRINUSE and tries_left):
                raise error

    def _are_joined(self) -> bool:
        """Return True if all workers are in this group's last rendezvous; another driver may have joined them since."""
        try:
            return all(each.generation == self.generation for each in self._all_facts())
        except WorkerLostError:
            return False

    def _lost_ranks(self) -> list[int]:
        """Return the ranks of the workers that are lost; those that do not answer are ended, and lost too."""
        lost = []
        for worker, answer in self._request_facts():
            try:
                self._result(worker, answer)
            except WorkerLostError:
                lost.append(worker.rank)
        return lost

    def _all_facts(self, paths: Sequence[str] = ()) -> tuple[WorkerFacts, ...]:
        return tuple(self._result(*request) for request in self._request_facts(paths))

    def _request_facts(self, paths: Sequence[str] = ()) -> list[tuple[WorkerHandle, Future[Any]]]:
        """Request the facts of all workers, and wait for them until one time limit."""
        requests = [(worker, worker.call("facts", paths, self._ref.paths)) for worker in self.workers]
        wait([answer for _, answer in requests], timeout=ANSWER_S)
        return requests

    def _result(self, worker: WorkerHandle, answer: Future[Any], timeout_s: float = 0.0) -> Any:
        """Return the result of a short call. A worker that does not answer is killed: raises WorkerLostError."""
        try:
            return answer.result(timeout_s)
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
        wait(joining, timeout=self.timeout_s + ANSWER_S, return_when=FIRST_EXCEPTION)
        if all(each.done() and each.exception() is None for each in joining):
            return None
        # Peers of a failed worker would wait for it until their timeout.
        leaving = [worker.call("leave") for worker in workers]
        wait([*joining, *leaving], timeout=ANSWER_S)
        for worker, each in zip(workers, joining, strict=True):
            if not each.done():
                worker.kill()
        return self._first_cause([each.exception() if each.done() else None for each in joining])

    def _first_cause(self, errors: Sequence[BaseException | None]) -> Exception:
        """Return the error that caused the others: a worker whose peer failed raises PeerLostError or a timeout."""
        for error in errors:
            if isinstance(error, Exception) and not isinstance(error, PeerLostError | WorkerTimeoutError):
                return error
        place = next((place for place, error in enumerate(errors) if error is not None), 0)
        message = f"worker {self.ranks[place]} could not join its group: {errors[place]}"
        return WorkerLostError(message, self.ranks[place])
