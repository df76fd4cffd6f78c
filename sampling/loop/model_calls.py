"""Forward passes of one run: one transfer program for all calls of the model that are expected.

Our own sampler knows its calls. A sampler that is not ours calls the model when it likes; its calls are predicted. In
both cases blocks are fetched ahead from call to call and across the switch. A call that was not predicted ends the
program and gets another one, made from the present contents of the buffers.

    with Passes(engine, ["high", "high", "low"], recorder=recorder) as passes:
        velocities = passes.forward("high", lanes, sigma=1.0)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from enum import Enum
from functools import partial
from types import TracebackType
from typing import TypeVar

import torch

from ...devices import forget, is_out_of_memory
from ...offload import EngineRun
from ...plan import TRAIN_TIMESTEPS, step_visits
from ...schema import OffloadPolicy, StateError
from ...telemetry import Recorder
from ...wan import ExpertEngine, Lane, Nag, attach_nag, forward_lanes
from ..cache.base import CachedCalls, CachedPass
from .interruptible import BlockVisits
from .oom_fallback import RunPolicy
from .parallel import LOCAL_FORWARD, Compute

AHEAD = 8
"""Calls of one expert that are expected where nothing is predicted; what they fetch in vain is the prefetch depth."""

Result = TypeVar("Result")

logger = logging.getLogger("wanstream.sampling")


class CallState(Enum):
    """Where `ModelCalls` is; the value completes the sentence "these passes ..."."""

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


class ModelCalls:
    """Passes through the experts of one engine; use with `with`, which ends what is being fetched.

    A call that runs out of device memory is computed again with the next smaller policy, if there is a `policy` to
    make smaller; the caller sees nothing of it.

    Args:
        engine: under that policy; None: `policy` gives it when the first run begins.
        predicted: the expert of each call to come, in order.
        recorder: gets one step per call, and watches from entering to leaving.
        first_step: number of the first step, where each call is one; None: calls are numbered from 0.
        should_stop: called before every block.
        policy: gives the engine again after a change, and shares calls with other workers; None: nothing is changed.
        nag: holds texts of lanes against each other.
        cached: takes calls over, each of which is a step of its own.
    """

    def __init__(
        self,
        engine: ExpertEngine | None,
        predicted: Sequence[str],
        *,
        recorder: Recorder,
        first_step: int | None = None,
        should_stop: Callable[[], bool] | None = None,
        policy: RunPolicy | None = None,
        nag: Nag | None = None,
        cached: CachedCalls | None = None,
    ) -> None:
        self._given, self._recorder, self._should_stop = engine, recorder, should_stop
        self._first = first_step or 0
        self._word = "call" if first_step is None else "step"
        self._policy, self._nag, self._cached = policy, nag, cached
        self._split = LOCAL_FORWARD if policy is None else policy.split
        self._outer_before = None if engine is None else engine.non_block_bytes
        self._expected = tuple(predicted)
        self._state = CallState.NEW
        self._run: EngineRun | None = None
        self._attached: ExitStack | None = None
        self._attached_under: OffloadPolicy | None = None
        self._watching = ExitStack()
        self._compiled = False
        self.calls = 0
        """Passes that were asked for so far."""
        self.recompiled = 0
        """Calls that were not the predicted ones."""

    @property
    def state(self) -> CallState:
        return self._state

    @property
    def engine(self) -> ExpertEngine:
        """The engine under the present policy, once a run has begun."""
        assert self._given is not None, "no run has begun"
        return self._given

    def forward(self, expert: str, lanes: Sequence[Lane], sigma: float) -> list[torch.Tensor]:
        """Each lane's velocity [1, 16, T, h, w] in the model's compute dtype; the weights pass once for all lanes.

        Args:
            expert: "high" or "low".
            sigma: noise level of the lanes, at most 1; the timestep of the model is 1000 times it.

        Raises:
            Cancelled: `should_stop` returned True. Another call may follow, as after any error.
            PassOrderError: outside `with`, or inside another pass.
        """
        return self.step(expert, sigma, sigma * TRAIN_TIMESTEPS, lambda compute: compute(lanes))

    def step(self, expert: str, sigma: float, timestep: float, body: Callable[[Compute], Result]) -> Result:
        """The result of `body(compute)`, where `compute` gives the velocities of lanes; all of it is one step.

        `body` calls `compute` once. Where memory is short, `body` is called again under a smaller policy.

        Raises:
            Cancelled: `should_stop` returned True. Another call may follow, as after any error.
            PassOrderError: outside `with`, or inside another pass.
        """
        if self._state not in (CallState.IDLE, CallState.STREAMING):
            raise StateError(f"these passes {self._state.value}")
        if self._state is CallState.IDLE or self._expected[0] != expert:
            self._expect(expert)
        else:
            self._revise_once()
        call, self.calls = self.calls, self.calls + 1
        while isinstance(computed := self._try(call, sigma, timestep, body), str):
            self._make_smaller(call, computed)
            self._begin_run(call)
        self._expected = self._expected[1:]
        if self._expected:
            if self._run is None:
                self._begin_run(self.calls)
            self._state = CallState.STREAMING
        else:
            self._end_run(None, None, None)
        return computed[0]

    def _try(self, call: int, sigma: float, timestep: float, body: Callable[[Compute], Result]) -> tuple[Result] | str:
        """The result, or the message of the error where memory was short. Then, as after any error, the run is over."""
        expert, self._state = self._expected[0], CallState.COMPUTING
        graphs = self.engine.graphs
        with ExitStack() as ending:
            ending.push(self._end_run)
            try:
                with self._recorder.step(self._first + call, expert, sigma), torch.inference_mode():
                    result = body(partial(self._velocities, self._first + call, expert, torch.tensor([timestep])))
            except RuntimeError as err:
                if self._policy is None or not is_out_of_memory(err):
                    raise
                return forget(err)
            ending.pop_all()
        self._compiled = self.engine.graphs > graphs
        return (result,)

    def _velocities(self, step: int, expert: str, timestep: torch.Tensor, lanes: Sequence[Lane]) -> list[torch.Tensor]:
        """The velocity of each lane, from the expert or, of some, from a call before."""
        assert self._run is not None
        engine, run = self.engine, self._run
        inside = self._policy is not None and self._policy.stops_inside
        visit = BlockVisits(run, step, expert, self._should_stop, inside=inside)
        own = self._split.own_tokens
        compute = partial(forward_lanes, engine.models[expert], timestep=timestep, visit=visit, own_tokens=own)
        if self._cached is None:
            return self._split.forward(lanes, compute)
        cached = CachedPass(self._cached.cache, step, expert, lanes, engine.models[expert])
        velocities = self._split.forward(lanes, partial(cached.forward, compute))
        if cached.leaves_rest:
            # Its other visits will not come: what was fetched for them stays for the next call.
            run.leave()
            self._end_run(None, None, None)
        cached.tell(self._recorder, blocks=engine.block_counts[expert])
        return velocities

    def _revise_once(self) -> None:
        """Before the second call: take another policy if the record of the first one, undisturbed, asks for it."""
        if self._policy is None or self.calls != 1 or self._compiled:
            return
        if self._policy.revise(self._recorder.last):
            self._end_run(None, None, None)
            self._begin_run(self.calls)

    def _expect(self, expert: str) -> None:
        """Predict again from a call of `expert` that was not the predicted one, and fetch for that."""
        self._end_run(None, None, None)
        self.recompiled += 1
        logger.debug("call %d is of the %s-noise expert, which was not predicted: a new program", self.calls, expert)
        self._expected = expect_again(self._expected, expert)
        self._begin_run(self.calls)

    def _begin_run(self, call: int) -> None:
        """Fetch for what is expected from `call` on; where there is no room for the buffers, into fewer of them."""
        assert self._run is None
        while (short := self._try_to_begin(call)) is not None:
            self._make_smaller(call, short)

    def _try_to_begin(self, call: int) -> str | None:
        """None, or the message of the error where memory was short."""
        try:
            self._attach()
            engine = self.engine
            skipped = frozenset[int]() if self._cached is None else self._cached.skipped
            visits = step_visits(self._expected, engine.block_counts, first_step=self._first + call, skipped=skipped)
            run = engine.run(visits, recorder=self._recorder)
            self._run = run.__enter__()
        except RuntimeError as err:
            if self._policy is None or not is_out_of_memory(err):
                raise
            return forget(err)
        self._state = CallState.STREAMING
        return None

    def _attach(self) -> None:
        """Have the engine under the present policy, with the share of this worker and NAG attached to its models.

        A policy installs forwards of blocks, which hooks of context parallelism must find: these come off before.
        """
        policy = None if self._policy is None else self._policy.policy
        if self._attached is not None and self._attached_under == policy:
            return
        self._detach()
        if self._policy is not None:
            self._given = self._policy.engine()
        if self._outer_before is None:
            self._outer_before = self.engine.non_block_bytes
        with ExitStack() as attaching:
            attaching.enter_context(self._split.attached(self.engine))
            if self._nag is not None:
                attaching.enter_context(attach_nag(self.engine.models.bare.values(), self._nag))
            self._attached, self._attached_under = attaching.pop_all(), policy

    def _detach(self) -> None:
        attached, self._attached = self._attached, None
        if attached is not None:
            attached.close()

    def _make_smaller(self, call: int, said: str) -> None:
        """Memory was short in `call`, or for its buffers: the next run has a smaller policy."""
        assert self._policy is not None
        self._policy.make_smaller(f"{self._word} {self._first + call} ({self._expected[0]}-noise expert)", said)

    def _end_run(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        run, self._run = self._run, None
        self._state = CallState.IDLE
        try:
            if run is not None:
                run.__exit__(kind, error, trace)
        finally:
            if error is not None or not self._expected:
                self._detach()

    def __enter__(self) -> ModelCalls:
        if self._state is not CallState.NEW:
            raise StateError(f"cannot be entered: these passes {self._state.value}")
        self._state = CallState.IDLE
        with ExitStack() as entering:
            entering.enter_context(self._recorder.watching())
            entering.callback(self._count_outer_bytes)
            entering.callback(self._detach)
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
                self._state = CallState.CLOSED

    def _count_outer_bytes(self) -> None:
        if self._given is not None and self._outer_before is not None:
            self._recorder.non_block_bytes += self._given.non_block_bytes - self._outer_before
