"""Keeps fetches out of a part of each visit: the computing thread closes a gate in front of it and opens it behind.

    OPEN --close--> CLOSED --open--> OPEN
                       |
                       +--end_run--> OPEN

Every other order is a bug of ours and raises. The computing thread never waits here. What the fetch thread does depends
on the device:

* A CPU computes while it is called, so the gate is closed exactly while the part lasts. The fetch thread copies a block
  in pieces, and waits at the gate before each of them.
* A GPU is told ahead of time. Each opening leaves a mark, and a copy is issued behind the mark of the visit that begins
  when its buffer is free; on the host the fetch thread waits until that visit was given to the device. A copy that has
  begun goes on to its end, also through the next such part, unless computing waits for its block.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from ..metrics import Clock, Mark
from ..plan import Fetch, TransferProgram
from .progress import RunProgress

PIECE_BYTES = 16 * 1024**2
"""What is copied between two looks at the gate: two reader threads share it, and RAM gives it in some milliseconds."""


class GateState(Enum):
    OPEN = "open"
    CLOSED = "closed"


class GateOrderError(RuntimeError):
    """A gate was used out of order; names its state and the call that was made."""


class FetchGate:
    """The gate of one engine. `mark` is the latest opening of the run that goes on; None: there was none yet."""

    def __init__(self, clock: Clock, *, piece_bytes: int = PIECE_BYTES) -> None:
        self.mark: Mark | None = None
        self._clock, self._piece_bytes = clock, piece_bytes
        self._changed = threading.Condition()
        self._state = GateState.OPEN

    @property
    def state(self) -> GateState:
        return self._state

    def close(self) -> None:
        """No fetch starts from now on (computing thread)."""
        with self._changed:
            self._expect("close", GateState.OPEN)
            self._state = GateState.CLOSED

    def open(self) -> None:
        """Fetches may start behind what the device was given so far (computing thread)."""
        with self._changed:
            self._expect("open", GateState.CLOSED)
            self.mark = self._clock.mark()
            self._state = GateState.OPEN
            self._changed.notify_all()

    def wait(self) -> None:
        """Return when the gate is open (fetch thread)."""
        with self._changed:
            self._changed.wait_for(lambda: self._state is GateState.OPEN)

    def pieces(self, nbytes: int) -> Iterator[range]:
        """The bytes of a block piece by piece, each of them when the gate is open (fetch thread)."""
        for start in range(0, nbytes, self._piece_bytes):
            self.wait()
            yield range(start, min(nbytes, start + self._piece_bytes))

    def end_run(self) -> None:
        """The run is over, at whatever point: nobody waits any more."""
        with self._changed:
            self.mark = None
            self._state = GateState.OPEN
            self._changed.notify_all()

    def _expect(self, call: str, state: GateState) -> None:
        if self._state is not state:
            raise GateOrderError(f"the gate is {self._state.value}: {call} needs it to be {state.value}")


@dataclass(frozen=True, kw_only=True, eq=False)
class Held:
    """How one fetch is held back."""

    gate: FetchGate
    """To be waited at before each piece, where the fetch thread itself copies."""
    behind: Mark | None = None
    """Nothing is copied before the device has passed it; None: at once."""


def behind_visit(fetch: Fetch) -> int | None:
    """The visit that a fetch comes behind: the one that begins when its buffer is free. None where it is for that one.

    It is over before the block is needed, so that nobody waits for what waits for him.
    """
    visit = fetch.start_after + 1
    return visit if visit < fetch.needed_by else None


class Holding:
    """Holds back the fetches of one run.

    Args:
        ahead: whether the device is told ahead of time.
    """

    def __init__(self, gate: FetchGate, program: TransferProgram, progress: RunProgress, *, ahead: bool) -> None:
        self._gate, self._progress, self._ahead = gate, progress, ahead
        visits = (behind_visit(fetch) for fetch in program.fetches) if ahead else ()
        self._awaited = frozenset(visit for visit in visits if visit is not None)
        self._marks: dict[int, Mark | None] = {}

    def visit_over(self, visit: int) -> None:
        """Visit number `visit` was given to the device (computing thread, before it is released)."""
        if visit in self._awaited:
            self._marks[visit] = self._gate.mark

    def held(self, fetch: Fetch) -> Held:
        """How the next fetch is held back (fetch thread). Raises RunStopped when the run is over."""
        visit = behind_visit(fetch) if self._ahead else None
        if visit is None:
            return Held(gate=self._gate)
        self._progress.await_released(visit)
        # Fetches that may begin at once share the first visit; of all others each has one of its own.
        mark = self._marks[visit] if visit == 0 else self._marks.pop(visit)
        return Held(gate=self._gate, behind=mark)

    def end_run(self) -> None:
        """The run is over: nobody waits at the gate any more."""
        self._gate.end_run()
