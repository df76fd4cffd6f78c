"""Forward passes whose number and order are predicted, not known.

A sampler that is not ours calls the model when it likes. Its calls can be predicted, so one transfer program is made
for all of them, and blocks are fetched ahead from call to call and across the switch, as in a run that is known. A call
that was not predicted ends that program and gets another one, made from what the buffers hold by then.

    with Passes(engine, ["high", "high", "low"], recorder=recorder) as passes:
        velocities = passes.forward("high", lanes, sigma=1.0)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from enum import Enum
from functools import partial
from types import TracebackType

import torch

from ..metrics import Recorder
from ..offload import EngineRun
from ..offload.shortage import forget, is_out_of_memory
from ..plan import step_visits
from ..plan.experts import TRAIN_TIMESTEPS
from ..wan import ExpertEngine, Lane, Nag, forward_lanes, held_against
from .lanes import cancellable
from .run_policy import Revise, RunPolicy
from .step_cache import CachedCalls, CachedPass, ComputeWith

AHEAD = 8
"""Calls of one expert that are expected where nothing is predicted; what they fetch in vain is the prefetch depth."""

log = logging.getLogger("wanstream.sampling")


class PassOrderError(RuntimeError):
    """A pass was asked for outside `with`, or inside another pass."""


class PassState(Enum):
    """Where `Passes` is; the value completes the sentence "these passes ..."."""

    NEW = "are not entered yet: use `with`"
    IDLE = "wait for a call, and nothing is fetched"
    STREAMING = "wait for a call, and blocks are fetched for it"
    COMPUTING = "compute: one pass must end before the next"
    CLOSED = "are over"


def expect_again(rest: Sequence[str], expert: str) -> tuple[str, ...]:
    """What to expect from a call of `expert` on, when `rest` was expected and does not begin with it.

    A prediction that had more calls of the other expert goes on at the next call of this one; otherwise some calls of
    this one are put before it.
    """
    if expert in rest:
        return tuple(rest[rest.index(expert) :])
    return (expert,) * AHEAD + tuple(rest)


class Passes:
    """Passes through the experts of one engine; use with `with`, which ends what is being fetched.

    A call that runs out of device memory is computed again with the next smaller policy, if there is a `policy` to
    make smaller; the caller sees nothing of it.

    Args:
        engine: under that policy.
        predicted: the expert of each call to come, in order.
        recorder: gets one step per call, numbered from 0, and watches from entering to leaving.
        should_stop: asked before every block.
        policy: gives the engine anew after a change; None: nothing is changed on the way.
        revise: told once how the first call went, where it went undisturbed (see `denoise`).
        nag: holds texts of lanes against each other.
        cached: takes calls over, each of which is a step of its own.
    """

    def __init__(
        self,
        engine: ExpertEngine,
        predicted: Sequence[str],
        *,
        recorder: Recorder,
        should_stop: Callable[[], bool] | None = None,
        policy: RunPolicy | None = None,
        revise: Revise | None = None,
        nag: Nag | None = None,
        cached: CachedCalls | None = None,
    ) -> None:
        self._engine, self._recorder, self._should_stop = engine, recorder, should_stop
        self._policy, self._revise = policy, revise
        self._nag, self._cached = nag, cached
        self._expected = tuple(predicted)
        self._state = PassState.NEW
        self._run: AbstractContextManager[object] | None = None
        self._visits: EngineRun | None = None
        self._watching = ExitStack()
        self._compiled = False
        self.calls = 0
        """Passes that were asked for so far."""
        self.recompiled = 0
        """Calls that were not the predicted ones."""

    @property
    def state(self) -> PassState:
        return self._state

    def forward(self, expert: str, lanes: Sequence[Lane], sigma: float) -> list[torch.Tensor]:
        """Each lane's velocity [1, 16, T, h, w] in the model's compute dtype; the weights pass once for all lanes.

        Args:
            expert: "high" or "low".
            sigma: noise level of the lanes, at most 1; the model is told 1000 times it.

        Raises:
            Cancelled: `should_stop` returned True. Another call may follow, as after any error.
            PassOrderError: outside `with`, or inside another pass.
        """
        if self._state not in (PassState.IDLE, PassState.STREAMING):
            raise PassOrderError(f"these passes {self._state.value}")
        if self._state is PassState.IDLE or self._expected[0] != expert:
            self._expect(expert)
        call, self.calls = self.calls, self.calls + 1
        while isinstance(velocities := self._try(call, lanes, sigma), str):
            self._make_smaller(call, velocities)
            self._begin_run(call)
        self._expected = self._expected[1:]
        self._go_on()
        return velocities

    def _try(self, call: int, lanes: Sequence[Lane], sigma: float) -> list[torch.Tensor] | str:
        """What `call` gives; or what was said where memory was short. Then, as after any error, the run is over."""
        assert self._visits is not None
        expert, self._state = self._expected[0], PassState.COMPUTING
        graphs = self._engine.graphs
        inside = self._policy is not None and self._policy.stops_inside
        visit = cancellable(partial(self._visits.visit, call, expert), call, self._should_stop, inside=inside)
        with ExitStack() as ending:
            ending.push(self._end_run)
            try:
                with self._recorder.step(call, expert, sigma), torch.inference_mode():
                    timestep = torch.tensor([sigma * TRAIN_TIMESTEPS])
                    compute = partial(forward_lanes, self._engine.models[expert], timestep=timestep, visit=visit)
                    velocities = compute(lanes) if self._cached is None else self._taken_over(call, lanes, compute)
            except RuntimeError as err:
                if self._policy is None or not is_out_of_memory(err):
                    raise
                return forget(err)
            ending.pop_all()
        self._compiled = self._engine.graphs > graphs
        return velocities

    def _taken_over(self, call: int, lanes: Sequence[Lane], compute: ComputeWith) -> list[torch.Tensor]:
        """As `compute` gives it; what a call before has computed is taken over."""
        assert self._cached is not None
        assert self._visits is not None
        expert = self._expected[0]
        cached = CachedPass(self._cached.cache, call, expert, lanes, self._engine.models[expert])
        velocities = cached.forward(compute, lanes)
        if cached.leaves_rest:
            # Its other visits will not come: what was fetched for them stays for the next call.
            self._visits.leave()
            self._end_run(None, None, None)
        cached.tell(self._recorder, blocks=self._engine.block_counts[expert])
        return velocities

    def _go_on(self) -> None:
        """A call is over: fetch for the next, under a policy that the first call may have revised."""
        if self._run is None and self._expected:
            self._begin_run(self.calls)
        self._state = PassState.STREAMING
        if not self._expected:
            self._end_run(None, None, None)
        elif self._revise is not None and self._policy is not None and self.calls == 1 and not self._compiled:
            before = self._policy.policy
            self._policy.revise(self._revise, self._recorder.last)
            if self._policy.policy != before:
                self._end_run(None, None, None)
                self._begin_run(self.calls)

    def _expect(self, expert: str) -> None:
        """A call of `expert` that is not the predicted one: predict anew, and fetch for that."""
        self._end_run(None, None, None)
        self.recompiled += 1
        log.debug("call %d is of the %s-noise expert, which was not predicted: a new program", self.calls, expert)
        self._expected = expect_again(self._expected, expert)
        self._begin_run(self.calls)

    def _begin_run(self, call: int) -> None:
        """Fetch for what is expected from `call` on; where there is no room for the buffers, into fewer of them."""
        assert self._run is None
        while (short := self._try_to_begin(call)) is not None:
            self._make_smaller(call, short)

    def _try_to_begin(self, call: int) -> str | None:
        """None, or what was said where memory was short."""
        try:
            if self._policy is not None:
                self._engine = self._policy.engine()
            skipped = frozenset[int]() if self._cached is None else self._cached.skipped
            visits = step_visits(self._expected, self._engine.block_counts, first_step=call, skipped=skipped)
            with ExitStack() as entering:
                self._visits = entering.enter_context(self._engine.run(visits, recorder=self._recorder))
                if self._nag is not None:
                    entering.enter_context(held_against(self._engine.models.bare.values(), self._nag))
                self._run = entering.pop_all()
        except RuntimeError as err:
            if self._policy is None or not is_out_of_memory(err):
                raise
            return forget(err)
        self._state = PassState.STREAMING
        return None

    def _make_smaller(self, call: int, said: str) -> None:
        """Memory was short in `call`, or for its buffers: the next run has a smaller policy."""
        assert self._policy is not None
        self._policy.make_smaller(f"call {call} ({self._expected[0]}-noise expert)", said)

    def _end_run(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        run, self._run, self._visits = self._run, None, None
        self._state = PassState.IDLE
        if run is not None:
            run.__exit__(kind, error, trace)

    def __enter__(self) -> Passes:
        if self._state is not PassState.NEW:
            raise PassOrderError(f"cannot be entered: these passes {self._state.value}")
        self._state = PassState.IDLE
        with ExitStack() as entering:
            entering.enter_context(self._recorder.watching())
            if self._expected:
                self._begin_run(0)
            self._watching = entering.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._watching:
            try:
                self._end_run(kind, error, trace)
            finally:
                self._state = PassState.CLOSED
