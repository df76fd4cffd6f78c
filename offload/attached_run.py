"""A run over attached blocks: one execution of their programs, with the weights put into the blocks."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from ..plan import Fetch, RunPrograms, TransferProgram, Visit
from .engine_run import EngineRun
from .visit_context import VisitContext

if TYPE_CHECKING:
    from .handle import OffloadHandle


class OffloadRun:
    """A run over attached blocks."""

    def __init__(self, handle: OffloadHandle, run: EngineRun) -> None:
        self._handle, self._run = handle, run

    @property
    def program(self) -> TransferProgram:
        return self._run.program

    @property
    def programs(self) -> RunPrograms:
        return self._run.programs

    @property
    def reads(self) -> list[Fetch]:
        """Reads into slots of RAM so far: fetches of the RAM program."""
        return self._run.reads

    @property
    def fetched(self) -> list[Fetch]:
        """What was really fetched so far, in the order in which it was issued."""
        return self._run.fetched

    def visit(self, step: int, expert: str, block: int) -> VisitContext:
        """The next visit of the program; inside this context the block's weights are on the device.

        Raises:
            VisitOrderError: on entering, if another visit is due.
        """
        return VisitContext(self._run, Visit(step, expert, block), self._handle.bind, self._handle.unbind)

    def leave(self) -> None:
        """Keep what was issued for visits that will not come: the run ends next, before its last visit."""
        self._run.leave()

    def __enter__(self) -> OffloadRun:
        self._run.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._run.__exit__(kind, error, trace)
        finally:
            self._handle.unbind_all()
