"""Runners of all backends of a batch: one alone in this thread, several in a thread each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from .job_queue import JobQueue
from .runner import Runner

_END_SECONDS = 5.0
"""Time for the threads to end after the last row, or to cancel theirs: one may wait for a server that hangs."""


def run_all(runners: Sequence[Runner], queue: JobQueue, wait: Callable[[], None]) -> None:
    """Run all rows of the queue. Raises the first error of a runner; it ends the others, too.

    `wait` sleeps for a moment in this thread, and shows the progress. A single runner stays in this thread, because an
    embedded backend computes in it and is stopped by its signals.
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

    # Daemons, because a request to a server that does not respond may take a minute, and cannot be interrupted.
    threads = [threading.Thread(target=run, args=[runner], daemon=True) for runner in runners]
    try:
        for thread in threads:
            thread.start()
        while not (queue.over or queue.stop.immediate) and any(thread.is_alive() for thread in threads):
            wait()
            for runner in runners:
                runner.watch()
        end = time.monotonic() + _END_SECONDS
        for thread in threads:
            thread.join(max(end - time.monotonic(), 0.0))
    finally:
        queue.abort()  # also for an error here, such as a third Ctrl-C: threads that are left post nothing more
    # Not by the threads: that of a server that still hangs has not ended.
    for runner in runners:
        runner.note_given()
    if errors:
        raise errors[0]
