"""Course of the forward passes of a model whose sampler and block order are not ours.

    CLOSED --begin--> BETWEEN --begin_pass--> IN_PASS --enter--> IN_BLOCK --exit--> IN_PASS --end_pass--> BETWEEN
    IN_PASS --begin_pass--> IN_PASS: the caller has caught an error in the pass, and computes it again
    every state --close--> CLOSED

The program covers the predicted passes. A block that is not the next one of the program ends the program; the rest is
predicted and compiled again, and blocks that are in buffers already are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from ...plan import PassOrders, Visit, predict_visits
from ...schema import StateError
from ...telemetry import Recorder
from .engine import OffloadEngine
from .run import EngineRun, VisitContext


class CourseState(Enum):
    """States of a course; see the diagram of this module."""

    CLOSED = "closed"
    BETWEEN = "between two passes"
    IN_PASS = "in a pass"
    IN_BLOCK = "in a block"


class ForwardCourse:
    """Runs of an engine that follow the forward passes of a model with one stack of blocks.

    Args:
        engine: its only stack is followed.
        orders: orders of earlier passes.
        poll: see `EngineRun.visit`.

    Attributes:
        orders: orders of the passes so far.
        course: orders of the passes of this course, each one as far as it went.
        passes: passes of this course that have started.
        recompiled: programs of this course after the first one.
        fetches, visits: those of this course so far, of programs that have ended.
    """

    def __init__(
        self,
        engine: OffloadEngine,
        orders: PassOrders | None = None,
        *,
        poll: Callable[[], object] | None = None,
    ) -> None:
        (self._stack, blocks), *others = engine.block_counts.items()
        assert not others, f"a course follows one stack, not {list(engine.block_counts)}"
        self.orders = orders or PassOrders(blocks=blocks)
        self.passes = self.recompiled = self.fetches = self.visits = 0
        self.course: list[tuple[int, ...]] = []
        self._engine = engine
        self._poll = poll
        self._state = CourseState.CLOSED
        self._expected = 0  # passes that were predicted
        self._visited: list[int] = []  # blocks of the current pass
        self._recorder: Recorder | None = None
        self._run: EngineRun | None = None
        self._next = 0  # visits of the run that have started
        self._open: VisitContext | None = None

    @property
    def is_open(self) -> bool:
        """True between `begin` and `close`."""
        return self._state is not CourseState.CLOSED

    @property
    def in_pass(self) -> bool:
        """True between `begin_pass` and `end_pass`."""
        return self._state in (CourseState.IN_PASS, CourseState.IN_BLOCK)

    @property
    def in_block(self) -> bool:
        """True between `enter` and `exit`."""
        return self._state is CourseState.IN_BLOCK

    @property
    def visited(self) -> int:
        """Visits so far."""
        return self.visits + self._next

    @property
    def due(self) -> int | None:
        """The block that the program visits next; None at its end."""
        due = self._due()
        return None if due is None else due.block

    def begin(self, passes: int, recorder: Recorder | None = None) -> None:
        """Start to fetch for a predicted number of passes, at least 1; more or fewer may follow.

        Raises:
            RuntimeError: the engine executes another run, or was detached.
        """
        self._expect("begin", CourseState.CLOSED)
        self.passes = self.recompiled = self.fetches = self.visits = 0
        self._expected, self._recorder, self._visited, self.course = max(1, passes), recorder, [], []
        self._start(predict_visits(self.orders, self._stack, (), passes_after=self._expected - 1, number=0))
        self._state = CourseState.BETWEEN

    def begin_pass(self) -> None:
        """Start a forward pass; one that has not ended is given up, and its order is not learnt."""
        self._expect("begin_pass", CourseState.BETWEEN, CourseState.IN_PASS)
        if self._state is CourseState.IN_PASS:
            self.course.append(tuple(self._visited))
        self.passes += 1
        self._visited = []
        self._state = CourseState.IN_PASS

    def enter(self, block: int) -> None:
        """Start the visit of a block: its weights are on the device until `exit`.

        Raises:
            OSError: the block could not be read.
        """
        self._expect("enter", CourseState.IN_PASS)
        due = self._due()
        if due is None or due.block != block:
            due = self._compile_again(block)
        assert self._run is not None
        context = self._run.visit(*due, poll=self._poll)
        context.__enter__()
        self._next += 1
        self._visited.append(block)
        self._open, self._state = context, CourseState.IN_BLOCK

    def exit(self) -> None:
        """End the visit."""
        self._expect("exit", CourseState.IN_BLOCK)
        assert self._open is not None
        self._open.__exit__(None, None, None)
        self._open, self._state = None, CourseState.IN_PASS

    def end_pass(self) -> None:
        """End a forward pass and learn its order. Visits that were predicted but did not happen stay fetched."""
        self._expect("end_pass", CourseState.IN_PASS)
        self.orders = self.orders.learn(self._visited)
        self.course.append(tuple(self._visited))
        self._state = CourseState.BETWEEN

    def close(self, error: BaseException | None = None) -> None:
        """End the course, because of `error` if there is one. Buffers keep their blocks; closing twice is allowed."""
        self._state, self._open = CourseState.CLOSED, None
        run, self._run = self._run, None
        self._recorder = None
        if run is not None:
            self._end(run, error)

    def _due(self) -> Visit | None:
        assert self._run is not None
        visits = self._run.program.visits
        return visits[self._next] if self._next < len(visits) else None

    def _compile_again(self, block: int) -> Visit:
        """Replace the program by one that starts with `block`, and return its first visit."""
        run, self._run = self._run, None
        assert run is not None
        self._end(run)
        self.recompiled += 1
        # A course that is longer than predicted is expected to double, so that few passes start with a cold block.
        if self.passes > self._expected:
            self._expected = 2 * self.passes
        number = self.passes - 1
        first = Visit(number, self._stack, block)
        visited = (*self._visited, block)
        after = self._expected - self.passes
        rest = predict_visits(self.orders, self._stack, visited, passes_after=after, number=number)
        self._start((first, *rest))
        return first

    def _start(self, visits: tuple[Visit, ...]) -> None:
        run = self._engine.run(visits, self._recorder)
        run.__enter__()
        self._run, self._next = run, 0

    def _end(self, run: EngineRun, error: BaseException | None = None) -> None:
        if error is None and self._next < len(run.program.visits):
            run.leave()  # blocks that were fetched ahead are kept for the next program
        self.visits, self._next = self.visits + self._next, 0
        try:
            run.__exit__(None if error is None else type(error), error, None)
        finally:
            self.fetches += len(run.fetched)

    def _expect(self, call: str, *states: CourseState) -> None:
        if self._state not in states:
            needed = " or ".join(state.value for state in states)
            raise StateError(f"the course is {self._state.value}: {call} needs it to be {needed}")
