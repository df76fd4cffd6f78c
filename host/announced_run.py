"""What is told of a run to whoever watches it: that it begins, each of its steps, and how it ended. Plain JSON."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from enum import Enum
from types import TracebackType
from typing import Any, TypeAlias

from ..plan import StepRecord, Timeline
from .run_settings import RunSettings

BEGIN = "wanstream.begin"
STEP = "wanstream.step"
END = "wanstream.end"

Announce: TypeAlias = "Callable[[str, Mapping[str, Any]], None]"


class AnnounceOrderError(RuntimeError):
    """A step was told before the beginning or after the end."""


class _State(Enum):
    """Where an announced run is; the value completes the sentence "this run ..."."""

    NEW = "has not begun: use `with`"
    RUNNING = "goes on"
    OVER = "is over"


class AnnouncedRun:
    """Tells one run from its first step to its end, however it ends; use with `with`, around all of it.

    Args:
        announce: is given the name of each event and its payload.
        prompt_id: the queue item.
        node_id: the node that executes.
        shown_at: the node that the run belongs to where that is another one; None: the same.
        experts: the expert of each step of this run, in order.
        predicted: what was simulated for it.
        settings: what a list of runs shows of its settings.
    """

    def __init__(
        self,
        announce: Announce,
        *,
        prompt_id: str | None,
        node_id: str | None,
        experts: Sequence[str],
        shown_at: str | None = None,
        predicted: Timeline | None = None,
        settings: RunSettings | None = None,
    ) -> None:
        self._announce, self._experts, self._predicted = announce, list(experts), predicted
        self._settings = None if settings is None else settings.plain()
        self._ids = {"run": uuid.uuid4().hex, "prompt_id": prompt_id, "node": node_id, "shown_at": shown_at or node_id}
        self._timeline: Timeline | None = None
        self._ranks: dict[int, Timeline] = {}
        self._state = _State.NEW
        self._done = 0

    def __enter__(self) -> AnnouncedRun:
        self._in(_State.NEW)
        self._state = _State.RUNNING
        pairs = zip(self._experts, self._experts[1:], strict=False)
        switch = next((step for step, (before, now) in enumerate(pairs, start=1) if before != now), None)
        self._tell(
            BEGIN,
            steps=len(self._experts),
            experts=self._experts,
            switch_step=switch,
            predicted=_plain(self._predicted),
            settings=self._settings,
            at=time.time(),
        )
        return self

    def step(self, record: StepRecord) -> None:
        """A step is whole. Raises AnnounceOrderError outside `with`."""
        self._in(_State.RUNNING)
        self._done += 1
        self._tell(STEP, done=self._done, total=max(self._done, len(self._experts)), record=asdict(record))

    def ended(
        self, timeline: Timeline, predicted: Timeline | None = None, *, ranks: Mapping[int, Timeline] | None = None
    ) -> None:
        """The run has come to its end with this; `predicted` None leaves what was told at the beginning.

        `ranks` is what each worker did, where there were some; samples of their memory are not told.

        Raises AnnounceOrderError outside `with`.
        """
        self._in(_State.RUNNING)
        self._ranks = dict(ranks or {})
        self._timeline, self._predicted = timeline, predicted or self._predicted

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._state = _State.OVER
        said = None if error is None else str(error) or type(error).__name__
        ranks = {str(rank): _plain(replace(told, memory=())) for rank, told in sorted(self._ranks.items())}
        timelines = {"timeline": _plain(self._timeline), "predicted": _plain(self._predicted), "ranks": ranks}
        self._tell(END, **timelines, error=said)

    def _in(self, state: _State) -> None:
        if self._state is not state:
            raise AnnounceOrderError(f"this run {self._state.value}")

    def _tell(self, event: str, **what: Any) -> None:
        self._announce(event, {**self._ids, **what})


def _plain(timeline: Timeline | None) -> dict[str, Any] | None:
    return None if timeline is None else timeline.to_dict()
