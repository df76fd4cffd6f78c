"""How the driver reaches its workers, whatever carries the messages: this process, or Ray."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeAlias

from ..messages import RunTask, StepReport, TaskResult

OnReport: TypeAlias = "Callable[[StepReport], None]"


class WorkerLostError(RuntimeError):
    """The process of a worker is gone. Says which, how it ended as far as that is known, and the end of its log."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message, rank)
        self.rank = rank

    def __str__(self) -> str:
        return str(self.args[0])


class WorkerHandle(Protocol):
    """One worker, as its driver sees it. Methods may be called from any thread and return at once."""

    @property
    def rank(self) -> int:
        """Its place in the pool."""

    def ask(self, method: str, *args: Any) -> Future[Any]:
        """Call a short method of the `Worker` beside whatever it computes. Its errors, or WorkerLostError, come out."""

    def run(self, task: RunTask, on_report: OnReport) -> Future[TaskResult]:
        """Let it compute a task; `on_report` is called for every step, on a thread of the pool. One task at a time.

        The future raises what the worker raised (Cancelled, SmallerPolicyError, ...), or WorkerLostError.
        """

    def log_tail(self) -> str:
        """The last lines that the worker has written; empty where nobody kept them."""

    def kill(self) -> None:
        """End its process now. Killing twice is allowed."""


class Pool(Protocol):
    """The workers of one driver."""

    @property
    def workers(self) -> Sequence[WorkerHandle]:
        """By rank."""

    @property
    def usable(self) -> bool:
        """Whether those that are lost can be replaced; otherwise only another pool helps."""

    def replace(self, rank: int) -> WorkerHandle:
        """Start another worker in the place of one that is lost or was killed; blocks until it answers."""

    def close(self) -> None:
        """End all workers and what was started for them. Closing twice is allowed."""
