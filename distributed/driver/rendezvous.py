"""A group's rendezvous on the driver's side: replace lost workers, then join all."""

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

from ...schema import Mesh
from ...schema.refs import WorkersRef
from ..messages import RendezvousSpec, WorkerFacts
from ..transport.pool import Pool, WorkerHandle, WorkerLostError, replace_lost
from ..worker.rendezvous import PeerLostError, WorkerTimeoutError

ANSWER_S = 60.0
"""Time limit for short calls to a worker, in seconds. The driver kills a worker that exceeds it."""
PORT_TRIES = 4
"""Ports to try. Another program may have taken a port after it was found free."""
GENERATIONS = itertools.count(1)
"""Rendezvous numbers, unique in this process, because several drivers may use the same workers
in turn."""


logger = logging.getLogger("wanstream.distributed")


def format_machines(ranks: Sequence[int], workers: Sequence[WorkerFacts]) -> str:
    """Format workers by machine: "0 1 on node-a (10.0.0.1), 2 on node-b (10.0.0.2)"."""
    places: dict[tuple[str, str], list[str]] = {}
    for rank, facts in zip(ranks, workers, strict=True):
        places.setdefault((facts.node, facts.address), []).append(str(rank))
    return ", ".join(
        f"{' '.join(each)} on {node} ({address})" for (node, address), each in places.items()
    )


class Rendezvous:
    """Rendezvous for one worker group.

    `connect`, `repair` and `disable` may be called from any thread.

    Args:
        ranks: worker ranks in `pool`, leader first.
        layout: mesh of these workers alone, with data and stage degrees of 1.
    """

    def __init__(self, pool: Pool, ref: WorkersRef, ranks: Sequence[int], layout: Mesh) -> None:
        self.ranks = tuple(ranks)
        self.timeout_s = ref.timeout_s
        self.generation = 0
        """Number of the last rendezvous."""
        self.is_joined = False
        """True if the workers can compute another task without a new rendezvous."""
        self.facts: tuple[WorkerFacts, ...] = ()
        """Worker facts at the last rendezvous, leader first."""
        self._pool = pool
        self._ref = ref
        self._layout = layout
        self._leaving: Sequence[Future[None]] = ()
        self._lock = threading.Lock()
        self._is_disabled = False

    @property
    def workers(self) -> list[WorkerHandle]:
        return [self._pool.workers[rank] for rank in self.ranks]

    @property
    def spans_machines(self) -> bool:
        """True if the group has workers on several machines."""
        return len({each.machine for each in self.facts}) > 1

    def connect(self, paths: Sequence[str]) -> tuple[WorkerFacts, ...]:
        """Replace lost workers, then join all.

        Blocks. Returns worker facts, with the sizes of `paths`.

        Raises:
            WorkerLostError: a worker was lost during the rendezvous.
            OSError: no port was free.
        """
        with self._lock:
            self.is_joined = self.is_joined and self._are_joined()
        self.repair()
        # Read again, because `_join` has requested them without paths, or not at all.
        self.facts = self._all_facts(paths)
        return self.facts

    def repair(self) -> None:
        """Replace lost workers, then join all, unless they are joined.

        Raises as `connect`.
        """
        with self._lock:
            if self.is_joined or self._is_disabled:
                return
            # A late `leave` would end the new rendezvous.
            wait(self._leaving, timeout=ANSWER_S)
            self._leaving = ()
            self._join()
            self.is_joined = True

    def leave(self) -> None:
        """Make all workers leave, so that none waits for a peer.

        Does not block. A second call does nothing.
        """
        # Without the lock: a repair holds it, and this must not block.
        self.is_joined = False
        self._leaving = self._leaving or [worker.call("leave") for worker in self.workers]

    def disable(self) -> None:
        """Turn all later repairs into no-ops. Blocks until a repair in progress has ended."""
        with self._lock:
            self._is_disabled = True

    def _join(self) -> None:
        replace_lost(self._pool, self._lost_ranks())
        self.facts = self._all_facts()
        if self.spans_machines:
            logger.warning(
                "workers that share a video are apart: %s", format_machines(self.ranks, self.facts)
            )
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
            # Only a taken port is worth another try.
            if not (isinstance(error, OSError) and error.errno == errno.EADDRINUSE and tries_left):
                raise error

    def _are_joined(self) -> bool:
        """Return True if all workers are in this group's last rendezvous.

        Another driver may have joined them since.
        """
        try:
            return all(each.generation == self.generation for each in self._all_facts())
        except WorkerLostError:
            return False

    def _lost_ranks(self) -> list[int]:
        """Return the ranks of lost workers.

        Ends workers without an answer, and counts them as lost.
        """
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
        """Request facts from all workers, and wait until one time limit for all."""
        requests = [
            (worker, worker.call("facts", paths, self._ref.paths)) for worker in self.workers
        ]
        wait([answer for _, answer in requests], timeout=ANSWER_S)
        return requests

    def _result(self, worker: WorkerHandle, answer: Future[Any], timeout_s: float = 0.0) -> Any:
        """Return the result of a short call.

        Without an answer, kills the worker and raises WorkerLostError.
        """
        try:
            # `_request_facts` has waited for all answers together, so 0 s are enough after that.
            return answer.result(timeout_s)
        except FutureTimeoutError as err:
            if answer.done():  # the worker itself raised a TimeoutError
                raise
            worker.kill()
            raise WorkerLostError(
                f"worker {worker.rank} did not answer within {ANSWER_S:g} s and was "
                f"ended\n{worker.log_tail()}",
                worker.rank,
            ) from err

    def _try_join(self, workers: Sequence[WorkerHandle], spec: RendezvousSpec) -> Exception | None:
        """Join all workers.

        Returns None, or why the join failed, after the last worker has given up.
        """
        joining = [
            worker.call("join", replace(spec, rank=place)) for place, worker in enumerate(workers)
        ]
        # Longer than the workers' own timeout, so that they report it first.
        wait(joining, timeout=self.timeout_s + ANSWER_S, return_when=FIRST_EXCEPTION)
        if all(each.done() and each.exception() is None for each in joining):
            return None
        # Otherwise peers would wait for a failed worker until their timeout.
        leaving = [worker.call("leave") for worker in workers]
        wait([*joining, *leaving], timeout=ANSWER_S)
        for worker, each in zip(workers, joining, strict=True):
            if not each.done():
                worker.kill()
        return self._first_cause([each.exception() if each.done() else None for each in joining])

    def _first_cause(self, errors: Sequence[BaseException | None]) -> Exception:
        """Return the error that caused the others.

        A worker whose peer failed raises PeerLostError or a timeout.
        """
        for error in errors:
            if isinstance(error, Exception) and not isinstance(
                error, PeerLostError | WorkerTimeoutError
            ):
                return error
        place = next((place for place, error in enumerate(errors) if error is not None), 0)
        message = f"worker {self.ranks[place]} could not join its group: {errors[place]}"
        return WorkerLostError(message, self.ranks[place])
