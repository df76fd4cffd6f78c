"""The work of one visit, between the arrival of its block and the end of what was computed with it."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from ..plan import BlockKey, Visit
from .buffers import BlockBuffer

if TYPE_CHECKING:
    from .engine_run import EngineRun

BindBlock = Callable[[BlockKey, BlockBuffer], None]
UnbindBlock = Callable[[BlockKey], None]


class VisitContext:
    """`with` around the work of one visit. A class, not a generator: it is entered once per block and step.

    `bind(key, buffer)` is called when the block is there, `unbind(key)` when its tenancy is over.
    """

    __slots__ = ("_begun", "_bind", "_run", "_unbind", "_visit")

    def __init__(self, run: EngineRun, visit: Visit, bind: BindBlock, unbind: UnbindBlock) -> None:
        self._run, self._visit, self._bind, self._unbind = run, visit, bind, unbind

    def __enter__(self) -> None:
        self._begun = self._run.begin(self._visit)
        buffer = self._begun[0]
        assert buffer.key is not None, "a visit begins with its block"
        self._bind(buffer.key, buffer)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self._run.end(*self._begun):
            self._unbind(self._visit.key)
