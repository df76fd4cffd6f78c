"""The runs of an engine for the steps of one run of the sampler: one, and another after every step that ends early."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType

from ..offload import EngineRun

Begin = Callable[[], AbstractContextManager[EngineRun]]
"""A run for the steps that are left now."""


class StepRuns:
    """Gives the visits of the steps in order; use with `with`, which begins the first run and ends the last one.

    Args:
        begin: makes each run from what the buffers hold then.
    """

    def __init__(self, begin: Begin) -> None:
        self._begin = begin
        self._entered: tuple[AbstractContextManager[EngineRun], EngineRun] | None = None

    def visit(self, step: int, expert: str, block: int) -> AbstractContextManager[object]:
        """The next visit; see `EngineRun.visit`."""
        return self._run().visit(step, expert, block)

    def leave_step(self) -> None:
        """The other visits of this step will not come: what was fetched for them stays, and nothing more is."""
        self._run().leave()
        self._end(None, None, None)

    def _run(self) -> EngineRun:
        if self._entered is None:
            manager = self._begin()
            self._entered = manager, manager.__enter__()
        return self._entered[1]

    def _end(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        entered, self._entered = self._entered, None
        if entered is not None:
            entered[0].__exit__(kind, error, trace)

    def __enter__(self) -> StepRuns:
        self._run()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(kind, error, trace)
