"""Model calls of one run, under one transfer program for all predicted calls.

The calls of our own sampler are certain; those of an external sampler are predicted. In both cases blocks are fetched
ahead from call to call and across the expert switch. An unpredicted call ends the program; the next program is compiled
from the present contents of the buffers.

    with ModelCalls(engine, ["high", "high", "low"], recorder=recorder) as calls:
        velocities = calls.forward("high", lanes, sigma=1.0)
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
from ..cache.base import CachedPass, StepCache, names_of
from .interruptible import BlockVisits
from .oom_fallback import RunPolicy
from .parallel import LOCAL_FORWARD, Compute

CALLS_AHEAD = 8
"""Calls of one expert that are assumed where nothing is predicted. A wrong guess wastes at most the prefetch depth."""

Result = TypeVar("Result")

logger = logging.getLogger("wanstream.sampling")


class CallState(Enum):
    """State of `ModelCalls`; errors quote the value."""

    NEW = "not entered yet: use `with`"
    IDLE = "waiting for a call, and nothing is fetched"
    STREAMING = "waiting for a call, and blocks are fetched for it"
    COMPUTING = "computing: one call must end before the next"
    CLOSED = "closed"


def predict_again(rest: Sequence[str], expert: str) -> tuple[str, ...]:
    """Predict the calls from an unpredicted one of `expert` on, where `rest` was predicted.

    If `rest` contains a call of `expert`, the prediction continues there. Otherwise `CALLS_AHEAD` calls of `expert` are
    put before it.
    """
    if expert in rest:
        return tuple(rest[rest.index(expert) :])
    return (expert,) * CALLS_AHEAD + tuple(rest)


class ModelCalls:
    """Calls of the experts of one engine; leaving the `with` block ends all fetches.

    A call that runs out of device memory is computed again under the next smaller policy, if `policy` is given. The
    caller does not notice.

    Args:
        engine: engine under the present policy; None: made by `policy` when the first run begins.
        predicted: expert of each call to come, in order.
        recorder: records one step per call, and samples memory while this object is entered.
        first_step: number of the first step where each call is a step; None: calls are numbered from 0.
        should_stop: polled before every block.
        policy: makes the engine again after a change of policy, and has the parallel forward; None: neither.
        nag: NAG settings, attached to the models.
        cache: step cache, for which each call is one step.
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
        cache: StepCache | None = None,
    ) -> None:
        self._engine, self._recorder, self._should_stop = engine, recorder, should_stop
        self._first_step = first_step or 0
        self._unit = "call" if first_step is None else "step"
        self._policy, self._nag, self._cache = policy, nag, cache
        self._split = LOCAL_FORWARD if policy is None else policy.split
        self._non_block_bytes_before = None if engine is None else engine.non_block_bytes
        self._expected = tuple(predicted)
        self._state = CallState.NEW
        self._run: EngineRun | None = None
        self._attached: ExitStack | None = None
        self._attached_policy: OffloadPolicy | None = None
        self._recording = ExitStack()
        self._compiled = False
        self.calls = 0
        """Number of calls so far."""
        self.recompiled = 0
        """Number of unpredicted calls, each of which needed a new program."""

    @property
    def state(self) -> CallState:
        return self._state

    @property
    def engine(self) -> ExpertEngine:
        """The engine under the present policy, once a run has begun."""
        assert self._engine is not None, "no run has begun"
        return self._engine

    def forward(self, expert: str, lanes: Sequence[Lane], sigma: float) -> list[torch.Tensor]:
        """Return each lane's velocity [1, 16, T, h, w] in the compute dtype; the weights are streamed once for all.

        Args:
            expert: "high" or "low".
            sigma: noise level of the lanes, at most 1; the model's timestep is 1000 times it.

        Raises:
            SamplingCancelled: `should_stop` returned True. Another call may follow, as after any error.
            StateError: outside `with`, or inside another call.
        """
        return self.step(expert, sigma, sigma * TRAIN_TIMESTEPS, lambda compute: compute(lanes))

    def step(self, expert: str, sigma: float, timestep: float, body: Callable[[Compute], Result]) -> Result:
        """Return `body(compute)`, recorded as one step; `compute` returns the velocities of lanes.

        `body` calls `compute` once. If the device runs out of memory, `body` is called again under a smaller policy.

        Raises:
            SamplingCancelled: `should_stop` returned True. Another call may follow, as after any error.
            StateError: outside `with`, or inside another call.
        """
        if self._state not in (CallState.IDLE, CallState.STREAMING):
            raise StateError(f"the model cannot be called; state: {self._state.value}")
        if self._state is CallState.IDLE or self._expected[0] != expert:
            self._repredict(expert)
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
        """Return the result in a tuple, or the message of an out-of-memory error. After any error the run has ended."""
        expert, self._state = self._expected[0], CallState.COMPUTING
        graphs = self.engine.graphs
        with ExitStack() as ending:
            ending.push(self._end_run)
            try:
                with self._recorder.step(self._first_step + call, expert, sigma), torch.inference_mode():
                    result = body(partial(self._velocities, self._first_step + call, expert, torch.tensor([timestep])))
            except RuntimeError as err:
                if self._policy is None or not is_out_of_memory(err):
                    raise
                # The traceback keeps the step's activations alive, and the retry needs their memory.
                return forget(err)
            ending.pop_all()
        self._compiled = self.engine.graphs > graphs
        return (result,)

    def _velocities(self, step: int, expert: str, timestep: torch.Tensor, lanes: Sequence[Lane]) -> list[torch.Tensor]:
        """Return the velocity of each lane, computed by the expert or taken from the step cache."""
        assert self._run is not None
        engine, run = self.engine, self._run
        inside = self._policy is not None and self._policy.stops_inside
        visit = BlockVisits(run, step, expert, self._should_stop, inside=inside)
        own = self._split.local_tokens
        compute = partial(forward_lanes, engine.models[expert], timestep=timestep, visit=visit, local_tokens=own)
        cache = self._cache
        if cache is None:
            return self._split.forward(lanes, compute)
        passes: list[CachedPass] = []

        def compute_cached(own: Sequence[Lane]) -> list[torch.Tensor]:
            passes.append(cache.begin(step, expert, names_of(lanes), names_of(own), engine.models[expert]))
            return compute(own, shortcut=passes[0])

        velocities = self._split.forward(lanes, compute_cached)
        if passes[0].skips_rest:
            # The remaining visits are skipped. `leave` keeps the blocks fetched for them in their buffers, where the
            # next call finds them; ending the run without it would discard them.
            run.leave()
            self._end_run(None, None, None)
        blocks = engine.block_counts[expert]
        skipped = blocks if passes[0].whole else blocks - 1 if passes[0].skips_rest else 0
        self._recorder.cached(lanes=passes[0].skipped_lanes, visits=skipped)
        return velocities

    def _revise_once(self) -> None:
        """Before the second call, replace the policy if the record of the first call suggests a better one."""
        # A first call that compiled blocks is slower than the others, so its record is not used.
        if self._policy is None or self.calls != 1 or self._compiled:
            return
        if self._policy.revise(self._recorder.last):
            self._end_run(None, None, None)
            self._begin_run(self.calls)

    def _repredict(self, expert: str) -> None:
        """Predict again from an unpredicted call of `expert`, and begin a run for that prediction."""
        self._end_run(None, None, None)
        self.recompiled += 1
        logger.debug("call %d is of the %s-noise expert, which was not predicted: a new program", self.calls, expert)
        self._expected = predict_again(self._expected, expert)
        self._begin_run(self.calls)

    def _begin_run(self, call: int) -> None:
        """Begin a run for the predicted calls from `call` on, under a smaller policy if the buffers do not fit."""
        assert self._run is None
        while (short := self._try_begin(call)) is not None:
            self._make_smaller(call, short)

    def _try_begin(self, call: int) -> str | None:
        """Begin a run; returns None, or the message of an out-of-memory error."""
        try:
            self._attach()
            engine = self.engine
            skipped = frozenset[int]() if self._cache is None else self._cache.skipped
            visits = step_visits(
                self._expected, engine.block_counts, first_step=self._first_step + call, skipped=skipped
            )
            run = engine.run(visits, recorder=self._recorder)
            self._run = run.__enter__()
        except RuntimeError as err:
            if self._policy is None or not is_out_of_memory(err):
                raise
            return forget(err)
        self._state = CallState.STREAMING
        return None

    def _attach(self) -> None:
        """Make the engine for the present policy, and attach context parallelism and NAG to its models."""
        policy = None if self._policy is None else self._policy.policy
        if self._attached is not None and self._attached_policy == policy:
            return
        # The engine installs a policy's chunked forward as `block.forward`, and hooks of context parallelism wrap the
        # forward that they find. So the hooks come off before the engine changes, and on again after it.
        self._detach()
        if self._policy is not None:
            self._engine = self._policy.engine()
        if self._non_block_bytes_before is None:
            self._non_block_bytes_before = self.engine.non_block_bytes
        with ExitStack() as attaching:
            attaching.enter_context(self._split.attached(self.engine))
            if self._nag is not None:
                attaching.enter_context(attach_nag(self.engine.models.bare.values(), self._nag))
            self._attached, self._attached_policy = attaching.pop_all(), policy

    def _detach(self) -> None:
        attached, self._attached = self._attached, None
        if attached is not None:
            attached.close()

    def _make_smaller(self, call: int, message: str) -> None:
        """Choose a smaller policy after `call`, or the allocation of its buffers, ran out of memory."""
        assert self._policy is not None
        self._policy.make_smaller(f"{self._unit} {self._first_step + call} ({self._expected[0]}-noise expert)", message)

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
            raise StateError(f"cannot be entered twice; state: {self._state.value}")
        self._state = CallState.IDLE
        with ExitStack() as entering:
            entering.enter_context(self._recorder.watching())
            entering.callback(self._count_non_block_bytes)
            entering.callback(self._detach)
            if self._expected:
                self._begin_run(0)
            self._recording = entering.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._recording:
            try:
                self._end_run(kind, error, trace)
            finally:
                self._state = CallState.CLOSED

    def _count_non_block_bytes(self) -> None:
        if self._engine is not None and self._non_block_bytes_before is not None:
            self._recorder.non_block_bytes += self._engine.non_block_bytes - self._non_block_bytes_before
