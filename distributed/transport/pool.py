"""Interfaces of worker pools and handles, for every transport: this process, or Ray."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

from ...sampling import DenoiseRequest
from ..messages import RunTask, StepReport, TaskResult
from .threads import run_in_thread

OnReport: TypeAlias = "Callable[[StepReport], None]"


class WorkerLostError(RuntimeError):
    """The process of a worker ended. The message has the worker, the cause if it is known, and the end of its log."""

    def __init__(self, message: str, rank: int) -> None:
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
        """Call a short method of the `Worker` while it computes. The future raises its error, or WorkerLostError."""

    def run(self, task: RunTask, on_report: OnReport) -> Future[TaskResult]:
        """Compute a task; one at a time. `on_report` is called after every step, on a thread of the pool.

        It should not block: the same thread receives the next report. The future raises the worker's error
        (SamplingCancelled, SmallerPolicyError, ...), or WorkerLostError.
        """

    def log_tail(self) -> str:
        """Return the last lines of the worker's output; empty if it was not saved."""

    def kill(self) -> None:
        """End the process now. Later calls do nothing."""


class Pool(Protocol):
    """Workers of one driver."""

    @property
    def workers(self) -> Sequence[WorkerHandle]:
        """Workers by rank."""

    @property
    def usable(self) -> bool:
        """True if lost workers can be replaced; if not, the caller needs another pool."""

    def share(self, requests: Sequence[DenoiseRequest]) -> AbstractContextManager[object]:
        """Send these requests to each machine at most once in the context, however many tasks have them."""

    def replace(self, rank: int) -> WorkerHandle:
        """Start a new worker in place of one that was lost or killed. Blocks until it answers.

        Threads may replace several ranks at the same time, each of which starts immediately.
        """

    def close(self) -> None:
        """End all workers and everything that was started for them. Later calls do nothing."""


def replace_lost(pool: Pool, ranks: Sequence[int]) -> None:
    """Replace the workers of these ranks side by side, in the time of one start.

    Raises the error of the first rank that could not be replaced, after all of them have ended.
    """
    replacing = [run_in_thread(f"wanstream-replace-{rank}", pool.replace, rank) for rank in ranks]
    wait(replacing)
    for each in replacing:
        each.result()
