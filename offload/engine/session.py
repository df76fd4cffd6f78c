"""Session: an engine's run along a sampler's model calls, from first to last predicted visit.

    NEW --begin--> PREDICTED --begin_pass--> FOLLOWING --visit--> VISITING --exit--> FOLLOWING
    FOLLOWING --end_pass--> PREDICTED
    FOLLOWING --visit--> SURPRISED: the block is not the next one of the program
    PREDICTED, FOLLOWING, VISITING --error--> OUT_OF_MEMORY, or IDLE after another error
    PREDICTED --begin_pass, end of a call--> SURPRISED: another stack is next than was predicted
    PREDICTED --end of a call--> REVISED: the record of the call suggests a better policy
    PREDICTED --end of a call--> IDLE: no call is predicted
    SURPRISED, OUT_OF_MEMORY, REVISED, IDLE --the next program--> the state before it
    every state --close--> ENDED

A source of calls (`calls.py`) predicts the visits. The session compiles them into one program and
follows it. A block other than the next one ends the program, and the rest is predicted and compiled
again. Blocks in buffers are kept. A call that runs out of memory is computed again under a smaller
policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from typing import Protocol

from ...devices import forget, is_out_of_memory
from ...plan.programs import Visit
from ...schema import OffloadPolicy, StateError
from ...schema.records import StepRecord
from ...telemetry import Recorder
from .calls import CallSource
from .run import EngineRun


class SessionState(Enum):
    """Session state, as in the diagram of this module. Errors quote the value."""

    NEW = "not entered yet: use `with`"
    PREDICTED = "waiting for a call, and blocks are fetched for it"
    FOLLOWING = "computing: one call must end before the next"
    VISITING = "in a block: it must end before the next one"
    SURPRISED = "at a block that was not predicted"
    OUT_OF_MEMORY = "out of memory"
    REVISED = "under a policy that was revised"
    IDLE = "waiting for a call, and nothing is fetched"
    ENDED = "closed"


CANNOT_CALL = (SessionState.NEW, SessionState.VISITING, SessionState.ENDED)


class Engine(Protocol):
    """Part of an engine used by a session."""

    def run(self, visits: tuple[Visit, ...], recorder: Recorder | None) -> EngineRun:
        """Compile `visits` into a run."""


class SessionPolicy(Protocol):
    """A session's offload policy, and changes to it between two calls.

    No program is running in any method.
    """

    def revised(self, record: StepRecord) -> OffloadPolicy | None:
        """Return a better policy for the calls after the one in `record`. None: the present one."""

    def use(self, policy: OffloadPolicy) -> None:
        """Continue under a policy from `revised`."""

    def make_smaller(self, message: str) -> None:
        """Continue under a smaller policy after an out-of-memory error.

        Raises an error if there is none.
        """


class StreamSession:
    """Engine run along a sampler's calls.

    Args:
        calls: predicts the visits.
        engine: returns the engine under the present policy. Called before each program.
        policy: policy changes, for `attempts`.
        recorder: records calls and visits.
        poll: called before each visit. It ends the run by raising.
        poll_waiting: called now and then while a visit waits for the block.

    Attributes:
        state: the state.
        due: the program's next visit, or the one that has begun. None at the end.
        in_call: True inside an attempt from `attempts`.
        calls_done: ended calls.
        recompiled: programs compiled because of a surprise.
        visits, fetches: how many so far, without the present program.
    """

    def __init__(
        self,
        calls: CallSource,
        engine: Callable[[], Engine],
        *,
        policy: SessionPolicy | None = None,
        recorder: Recorder | None = None,
        poll: Callable[[Visit], object] | None = None,
        poll_waiting: Callable[[Visit], object] | None = None,
    ) -> None:
        self.state = SessionState.NEW
        self.in_call = False
        self.due: Visit | None = None
        self.calls_done = 0
        self.recompiled = 0
        self.visits = 0
        self.fetches = 0
        self._calls = calls
        self._engine = engine
        self._policy = policy
        self._recorder = recorder
        self._poll = poll
        self._poll_waiting = poll_waiting
        self._run: EngineRun | None = None
        self._program: tuple[Visit | None, ...] = ()
        """Visits in the present program, with None at the end."""
        self._next = 0
        self._shortage: str | None = None
        """Out-of-memory message from the last attempt."""
        self._visited: list[int] = []
        """Blocks visited in the present pass."""

    def begin(self) -> None:
        """Start to fetch for the predicted calls, if there are any.

        Raises:
            RuntimeError: the engine executes another run, or was detached.
        """
        if self.state is not SessionState.NEW:
            raise StateError(f"cannot be entered twice; state: {self.state.value}")
        self.state = SessionState.IDLE
        try:
            if not self._calls.is_over:
                self._start_retried()
        except BaseException:
            self.close()
            raise

    def attempts(
        self, stack: str, step: int, sigma: float
    ) -> Iterator[AbstractContextManager[None]]:
        """Yield attempts at one call until one does not run out of memory.

        Each is one recorded step.

            for attempt in session.attempts("high", 0, 1.0):
                with attempt:
                    ...

        Raises:
            StateError: inside another call, or the session has not begun or has ended.
        """
        assert self._recorder is not None, "attempts are recorded"
        if self.in_call or self.state in CANNOT_CALL:
            raise StateError(f"the model cannot be called; state: {self.state.value}")
        if not self._calls.expect(stack):
            self._surprise()
        while True:
            self._start_retried()
            yield self._attempt(self._recorder.step(step, stack, sigma))
            if self._shortage is None:
                break
            self._make_smaller(self._shortage)
        self.calls_done += 1
        if not self._calls.end_call():
            self._surprise()
        self._continue()

    def begin_pass(self, stack: str = "") -> None:
        """Start a pass through the blocks in `stack`. Empty: the call's stack.

        An unfinished pass is given up, and the order is not learnt.
        """
        self._expect("begin_pass", SessionState.PREDICTED, SessionState.FOLLOWING)
        if self.state is SessionState.FOLLOWING:
            self._calls.end_pass(self._visited, is_whole=False)
        self._visited.clear()
        if not self._calls.begin_pass(stack):
            self._surprise()
            self._start(self._calls.predicted(self._visited))
        self.state = SessionState.FOLLOWING

    def visit(self, block: int) -> AbstractContextManager[object]:
        """Start the visit to a block. The weights are on the device until the context ends.

        Raises:
            OSError: the block could not be read.
        """
        # The work is done here rather than in `__enter__`, as `open` does. It saves one call per
        # block.
        if self.state is not SessionState.FOLLOWING:
            self._expect("a visit", SessionState.FOLLOWING)
        visit = self.due
        is_due = visit is not None and visit.block == block
        if visit is None or not is_due:
            visit = self._calls.visit(block)
        if self._poll is not None:
            self._poll(visit)
        # The block is appended first, so a new prediction begins behind this block.
        self._visited.append(block)
        if not is_due:
            self._surprise()
            self._start((visit, *self._calls.predicted(self._visited)))
        assert self._run is not None
        self._run.begin(visit, self._poll_waiting)
        self.state = SessionState.VISITING
        return self

    def __enter__(self) -> None:
        """Enter the visit begun by `visit`. The session is the context for the open visit."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.end_visit()
        elif self._run is not None:
            self._run.end(error)  # names the visit in the error, which is about to end the program

    def end_visit(self) -> None:
        """End the visit."""
        if self.state is not SessionState.VISITING:
            self._expect("the end of a visit", SessionState.VISITING)
        assert self._run is not None
        self._run.end()
        self._next += 1
        self.due = self._program[self._next]
        self.state = SessionState.FOLLOWING

    def end_pass(self) -> None:
        """End the pass. Blocks predicted but not visited stay fetched."""
        self._expect("end_pass", SessionState.FOLLOWING)
        self._calls.end_pass(self._visited)
        self._visited.clear()
        self.state = SessionState.PREDICTED

    def skip_rest(self) -> None:
        """Skip the remaining visits in a call. The next program has the calls after it."""
        self._expect("skip_rest", SessionState.FOLLOWING)
        self._end_program()

    def close(self, error: BaseException | None = None) -> None:
        """End the session, because of `error` if there is one.

        Buffers keep their blocks. Closing twice is allowed.
        """
        try:
            self._end_program(error)
        finally:
            self.state = SessionState.ENDED
            # They refer to the caller, which refers to this session. Such a cycle would keep its
            # tensors alive.
            self._policy = None
            self._poll = None
            self._poll_waiting = None
            self._engine = _ended

    def _surprise(self) -> None:
        self._end_program()
        self.recompiled += 1
        self._calls.surprise()
        self.state = SessionState.SURPRISED

    def _continue(self) -> None:
        """Prepare for the next call after one has ended."""
        assert self._policy is not None
        assert self._recorder is not None
        if self._calls.is_over:
            self._end_program()
            self.state = SessionState.IDLE
            return
        revised = self._policy.revised(self._recorder.last)
        if revised is not None:
            self._end_program()
            self.state = SessionState.REVISED
            self._policy.use(revised)
        self._start_retried()

    def _start_retried(self) -> None:
        """Start a program if there is none, under smaller policies while it runs out of memory."""
        while self._run is None:
            try:
                self._start(self._calls.predicted(self._visited))
                break
            except RuntimeError as err:
                if self._policy is None or not is_out_of_memory(err):
                    raise
                message = forget(err)
            self._make_smaller(message)

    def _make_smaller(self, message: str) -> None:
        assert self._policy is not None
        self.state = SessionState.OUT_OF_MEMORY
        try:
            self._policy.make_smaller(message)
        except BaseException:
            self.state = SessionState.IDLE
            raise

    def _start(self, visits: tuple[Visit, ...]) -> None:
        run = self._engine().run(visits, self._recorder)
        # Not `with`: a program spans several calls, and `_end_program` leaves it.
        self._run = run.__enter__()
        self._program = (*run.program.visits, None)
        self._next = 0
        self.due = self._program[0]
        self.state = SessionState.PREDICTED

    def _end_program(self, error: BaseException | None = None) -> None:
        run = self._run
        # The field is cleared first: if the exit raises, the next call still starts a program.
        self._run = None
        if run is None:
            return
        is_open = self.state is SessionState.VISITING
        if error is None and not is_open and self.due is not None:
            run.leave()  # blocks that were fetched ahead are kept for the next program
        self.visits += self._next
        self._next = 0
        self._program = ()
        self.due = None
        try:
            run.__exit__(type(error), error, None)
        finally:
            self.fetches += len(run.fetched)

    @contextmanager
    def _attempt(self, recorded: AbstractContextManager[None]) -> Iterator[None]:
        """Record an attempt at a call. Instead of raising out of memory, keep the message."""
        self._shortage = None
        self.in_call = True
        try:
            with recorded:
                yield
        except BaseException as error:
            self.state = SessionState.IDLE
            self._end_program(error)
            self._visited.clear()
            self._calls.end_pass((), is_whole=False)
            is_shortage = isinstance(error, RuntimeError) and is_out_of_memory(error)
            if self._policy is None or not is_shortage:
                raise
            # The traceback keeps the call's activations alive, and the next attempt needs their
            # memory.
            self._shortage = forget(error)
        finally:
            self.in_call = False

    def _expect(self, call: str, *states: SessionState) -> None:
        if self.state not in states:
            needed = " or ".join(state.value for state in states)
            raise StateError(f"the session is {self.state.value}: {call} needs it to be {needed}")


def _ended() -> Engine:
    raise StateError(f"the session is {SessionState.ENDED.value}")
