"""Interfaces for worker pools and handles, for every transport: this process, or Ray."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

from ...sampling.inputs import DenoiseRequest
from ..messages import RunTask, StepReport, TaskResult
from .threads import run_in_thread

OnReport: TypeAlias = "Callable[[StepReport], None]"


class WorkerLostError(RuntimeError):
    """A worker's process ended.

    The message has the worker, the cause if known, and the end of the log.
    """

    def __init__(self, message: str, rank: int) -> None:
        # Unpickling an exception calls the class with `args`, so both must be in there.
        super().__init__(message, rank)
        self.rank = rank

    def __str__(self) -> str:
        return str(self.args[0])


class WorkerHandle(Protocol):
    """Driver's side of one worker. Methods may be called from any thread and do not block."""

    @property
    def rank(self) -> int:
        """Rank in the pool."""

    def call(self, method: str, *args: Any) -> Future[Any]:
        """Call a short method of the `Worker` while it computes.

        The future raises the method's error, or WorkerLostError.
        """

    def run(self, task: RunTask, on_report: OnReport) -> Future[TaskResult]:
        """Compute a task; one at a time.

        `on_report` is called after every step, on a thread in the pool. It should not block,
        because the same thread receives the next report. The future raises the worker's error
        (SamplingCancelled, SmallerPolicyError, ...), or WorkerLostError.
        """

    def log_tail(self) -> str:
        """Return the last lines from the worker's output; empty if it was not saved."""

    def kill(self) -> None:
        """End the process now. Later calls do nothing."""


class Pool(Protocol):
    """Workers for one driver."""

    @property
    def workers(self) -> Sequence[WorkerHandle]:
        """Workers by rank."""

    @property
    def usable(self) -> bool:
        """True if lost workers can be replaced. Otherwise the caller needs another pool."""

    def share(self, requests: Sequence[DenoiseRequest]) -> AbstractContextManager[object]:
        """Send requests to each machine at most once in the context, for any number of tasks."""

    def replace(self, rank: int) -> WorkerHandle:
        """Replace a lost or killed worker by a new one. Blocks until the new one answers.

        Threads may replace several ranks at the same time. Each starts immediately.
        """

    def close(self) -> None:
        """End all workers and everything started for them. Later calls do nothing."""


def replace_lost(pool: Pool, ranks: Sequence[int]) -> None:
    """Replace the workers with these ranks side by side, in the time for one start.

    After all replacements have ended, raises the error for the first rank that failed.
    """
    replacing = [run_in_thread(f"wanstream-replace-{rank}", pool.replace, rank) for rank in ranks]
    wait(replacing)
    for each in replacing:
        each.result()
