"""Batch run: a runner for each backend, one alone in this thread, several in a thread each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial

from ..opening import OpenBatch
from ..progress import BatchBar
from .job_queue import JobQueue
from .runner import Runner
from .stop_request import StopRequest

_TICK_SECONDS = 0.1
_REFRESH_SECONDS = 0.5

_END_SECONDS = 5.0
"""Time for threads to end after the last row, or to cancel their own. One may wait for a hung
server."""


def run_batch(
    batch: OpenBatch,
    stop: StopRequest,
    *,
    noun: str,
    timeout_s: float,
    stoppable: AbstractContextManager[None],
) -> None:
    """Run the rows until all are finished or the user stops the batch.

    Raises ValueError or OSError.

    Args:
        batch: rows, backends and journal. The tally counts ended rows.
        stop: the user's stop requests.
        noun: name for several backends.
        timeout_s: see `Runner`.
        stoppable: context in which `stop` is set.
    """
    spec = batch.spec
    several = len(spec.backends) > 1
    with ExitStack() as opened:
        bar = opened.enter_context(
            BatchBar(rows=len(spec.rows), ended=batch.ended, backends=len(spec.backends), noun=noun)
        )
        faults = [f"{lines}: {reason}" for reason, _, lines in batch.failures(whole=True)]
        for note in (*faults, *spec.notes, *batch.notes):
            bar.note(note)
        for backend in spec.backends:
            opened.enter_context(
                backend.opened(batch.store.backend_folder, partial(bar.show, backend=backend.name))
            )
        queue = JobQueue(
            journal=batch.journal,
            planner=spec.planner(bar.note),
            reporter=bar,
            stop=stop,
            backends=spec.backends,
            tally=batch.tally,
            silent=spec.silent,
        )
        queue.enter(spec.rows)
        # With several threads, only this one refreshes the bar.
        pause = partial(_sleep, queue=queue, shown=None if several else bar)
        make = partial(Runner, queue=queue, store=batch.store, sleep=pause, timeout_s=timeout_s)
        runners = [make(backend=backend) for backend in spec.backends]
        with stoppable:
            run_all(runners, queue, partial(_sleep, _REFRESH_SECONDS, queue=queue, shown=bar))


def _sleep(seconds: float, *, queue: JobQueue, shown: BatchBar | None) -> None:
    """Sleep until the time or the batch is over, or the user makes a stop request.

    Then refresh the bar.
    """
    end = time.monotonic() + seconds
    stop = queue.stop
    requested = stop.requested
    left = seconds
    while left > 0 and stop.requested == requested and not (stop.immediate or queue.over):
        # In short sleeps, because the signal handler only sets a flag.
        time.sleep(min(left, _TICK_SECONDS))
        left = end - time.monotonic()
    if shown is not None:
        shown.refresh()


def run_all(runners: Sequence[Runner], queue: JobQueue, wait: Callable[[], None]) -> None:
    """Run all rows in the queue. A runner's first error ends the others, and is raised.

    `wait` sleeps for a moment in this thread, and shows the progress. A single runner stays in this
    thread: an embedded backend computes in it, and this thread's signals stop it.
    """
    if len(runners) == 1:
        runners[0].run()
        return
    errors: list[BaseException] = []

    def run(runner: Runner) -> None:
        try:
            runner.run()
        except BaseException as err:  # noqa: BLE001 - raised again in the main thread
            errors.append(err)
            queue.abort()

    # Daemons, because a request to a silent server may take a minute, and cannot be interrupted.
    threads = [threading.Thread(target=run, args=[runner], daemon=True) for runner in runners]
    try:
        for thread in threads:
            thread.start()
        while not (queue.over or queue.stop.immediate) and any(
            thread.is_alive() for thread in threads
        ):
            wait()
            for runner in runners:
                runner.watch()
        end = time.monotonic() + _END_SECONDS
        for thread in threads:
            # One deadline is shared: each thread gets only the rest of the time.
            thread.join(max(end - time.monotonic(), 0.0))
    finally:
        # Also after an error here, such as a third Ctrl-C: remaining threads post nothing more.
        queue.abort()
    # Not in the threads: one may still wait for a hung server.
    for runner in runners:
        runner.note_given()
    if errors:
        raise errors[0]
