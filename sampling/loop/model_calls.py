"""Model calls of one run, under one transfer program for all predicted calls.

The calls of our own sampler are certain; those of an external sampler are predicted. In both cases blocks are fetched
ahead from call to call and across the expert switch. An unpredicted call ends the program; the next program is compiled
from the present contents of the buffers.

    with ModelCalls(policy, ["high", "high", "low"], recorder=recorder) as calls:
        velocities = calls.forward("high", lanes, sigma=1.0)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from enum import Enum
from functools import partial
from typing import TypeVar

import torch

from ...devices import forget, is_out_of_memory
from ...offload import EngineRun
from ...plan import TRAIN_TIMESTEPS, step_visits
from ...schema import OffloadPolicy, StateError
from ...telemetry import Recorder
from ...wan import ExpertEngine, Lane, Nag, changed, forward_lanes
from ..cache.base import CachedPass, StepCache, names_of
from .interruptible import block_visit
from .oom_fallback import RunPolicy
from .parallel import Compute, ParallelForward

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


def _any_stops(split: ParallelForward, should_stop: Callable[[], bool], block: int) -> bool:
    return split.any_stops(should_stop(), block)


class ModelCalls:
    """Calls of the experts of one engine; leaving the `with` block ends all fetches.

    A call that runs out of device memory is computed again under the next smaller policy. The caller does not notice.

    Args:
        policy: makes the engine when the first run begins, and again after a change of policy.
        predicted: expert of each call to come, in order.
        recorder: records one step per call, and samples memory while this object is entered.
        first_step: number of the first step where each call is a step; None: calls are numbered from 0.
        should_stop: polled before every block.
        nag: NAG settings, attached to the models.
        cache: step cache, for which each call is one step.
    """

    def __init__(
        self,
        policy: RunPolicy,
        predicted: Sequence[str],
        *,
        recorder: Recorder,
        first_step: int | None = None,
        should_stop: Callable[[], bool] | None = None,
        nag: Nag | None = None,
        cache: StepCache | None = None,
    ) -> None:
        self._policy, self._recorder, self._should_stop = policy, recorder, should_stop
        self._first_step = first_step or 0
        self._unit = "call" if first_step is None else "step"
        self._nag, self._cache = nag, cache
        self._engine: ExpertEngine | None = None
        self._expected = tuple(predicted)
        self.state = CallState.NEW
        self._run: EngineRun | None = None
        self._attached = ExitStack()
        self._attached_policy: OffloadPolicy | None = None
        self._entered = ExitStack()
        self._compiled = False
        self.calls = 0
        """Number of calls so far."""
        self.recompiled = 0
        """Number of unpredicted calls, each of which needed a new program."""

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
        if self.state not in (CallState.IDLE, CallState.STREAMING):
            raise StateError(f"the model cannot be called; state: {self.state.value}")
        if self.state is CallState.IDLE or self._expected[0] != expert:
            self._repredict(expert)
        else:
            self._revise_once()
        call, self.calls = self.calls, self.calls + 1
        result = self._retried(call, partial(self._compute, call, sigma, timestep, body))
        self._expected = self._expected[1:]
        if not self._expected:
            self._end_run()
        elif self._run is None:
            self._retried(self.calls, partial(self._begin_run, self.calls))
        else:
            self.state = CallState.STREAMING
        return result

    def _retried(self, call: int, attempt: Callable[[], Result]) -> Result:
        """Return the result of `attempt`, which is repeated under smaller policies while it runs out of memory."""
        where = f"{self._unit} {self._first_step + call} ({self._expected[0]}-noise expert)"
        while True:
            try:
                return attempt()
            except RuntimeError as err:
                if not is_out_of_memory(err):
                    raise
                # The traceback keeps the step's activations alive, and the retry needs their memory.
                message = forget(err)
            self._policy.make_smaller(where, message)

    def _compute(self, call: int, sigma: float, timestep: float, body: Callable[[Compute], Result]) -> Result:
        """Compute a call, in a new run if the last one has ended. After any error the run has ended."""
        if self._run is None:
            self._begin_run(call)
        expert, step, self.state = self._expected[0], self._first_step + call, CallState.COMPUTING
        graphs = self.engine.graphs
        self._select_patches(call)
        with ExitStack() as ending:
            ending.push(self._end_run)
            with self._recorder.step(step, expert, sigma), torch.inference_mode():
                result = body(partial(self._velocities, step, expert, torch.tensor([timestep])))
            ending.pop_all()
        self._compiled = self.engine.graphs > graphs
        return result

    def _velocities(self, step: int, expert: str, timestep: torch.Tensor, lanes: Sequence[Lane]) -> list[torch.Tensor]:
        """Return the velocity of each lane, computed by the expert or taken from the step cache."""
        assert self._run is not None
        engine, run = self.engine, self._run
        split, cache, patch = self._policy.split, self._cache, self._policy.pair.patch_at(expert, step)
        inside = self._policy.stops_inside
        stops_before = None if self._should_stop is None else partial(_any_stops, split, self._should_stop)
        # Workers of a group vote, and must do so equally often.
        waiting = split.alone
        visit = partial(block_visit, run, step, expert, stops_before, patch=patch, waiting=waiting, inside=inside)
        own = split.local_tokens
        compute = partial(forward_lanes, engine.models[expert], timestep=timestep, visit=visit, local_tokens=own)
        if cache is None:
            return split.forward(lanes, compute)
        blocks = engine.block_counts[expert]
        predicted = cache.predict(step, expert, lanes)
        computed = [lane for at, lane in enumerate(lanes) if at not in predicted]
        saved = -(-len(predicted) // split.share.cfg)
        if not computed:
            self._leave_visits(run)
            self._recorder.cached(lanes=saved, visits=blocks)
            return [predicted[at] for at in range(len(lanes))]
        passes: list[CachedPass | None] = []

        def compute_cached(own: Sequence[Lane]) -> list[torch.Tensor]:
            passes.append(cache.begin(step, expert, names_of(computed), names_of(own), engine.models[expert]))
            return compute(own, shortcut=passes[0])

        velocities = split.forward(computed, compute_cached)
        cache.record(computed, velocities)
        skipped = 0
        if passes[0] is not None:
            if passes[0].skips_rest:
                self._leave_visits(run)
            saved += passes[0].skipped_lanes
            skipped = blocks if passes[0].whole else blocks - 1 if passes[0].skips_rest else 0
        self._recorder.cached(lanes=saved, visits=skipped)
        rest = iter(velocities)
        return [predicted[at] if at in predicted else next(rest) for at in range(len(lanes))]

    def _leave_visits(self, run: EngineRun) -> None:
        """Skip the visits that are left of a step."""
        # `leave` keeps the blocks fetched for them in their buffers, where the next call finds them; ending the run
        # without it would discard them.
        run.leave()
        self._end_run()

    def _revise_once(self) -> None:
        """Before the second call, replace the policy if the record of the first call suggests a better one."""
        # A first call that compiled blocks is slower than the others, so its record is not used.
        if self.calls == 1 and not self._compiled and self._policy.revise(self._recorder.last):
            self._end_run()

    def _repredict(self, expert: str) -> None:
        """End the run, and predict again from an unpredicted call of `expert`."""
        self._end_run()
        self.recompiled += 1
        logger.debug("call %d is of the %s-noise expert, which was not predicted: a new program", self.calls, expert)
        self._expected = predict_again(self._expected, expert)

    def _begin_run(self, call: int) -> None:
        """Begin a run for the predicted calls from `call` on."""
        assert self._run is None
        self._attach()
        skipped = frozenset[int]() if self._cache is None else self._cache.skipped
        visits = step_visits(
            self._expected,
            self.engine.block_counts,
            first_step=self._first_step + call,
            skipped=skipped,
            patches_of_steps=[patch for _, patch in self._patches_from(call)],
        )
        run = self.engine.run(visits, recorder=self._recorder)
        self._run = run.__enter__()
        self.state = CallState.STREAMING

    def _patches_from(self, call: int) -> list[tuple[str, int]]:
        """Return the expert and its `BlockKey.patch` of each predicted call from `call` on."""
        pair = self._policy.pair
        return [(each, pair.patch_at(each, step)) for step, each in enumerate(self._expected, self._first_step + call)]

    def _select_patches(self, call: int) -> None:
        """Apply the LoRA strengths of each expert's next call to its parameters that do not stream."""
        if self._policy.pair.strengths_vary:
            # In reverse, so that the earliest call of an expert counts.
            for expert, patch in dict(reversed(self._patches_from(call))).items():
                self.engine.select_patch(expert, patch)

    def _attach(self) -> None:
        """Make the engine for the present policy, and attach context parallelism and NAG to its models."""
        policy = self._policy.policy
        if self._attached_policy == policy:
            return
        # Another engine has other models.
        self._detach()
        first, self._engine = self._engine is None, self._policy.engine()
        if first:
            self._entered.callback(self._count_non_block_bytes, self._engine, before=self._engine.non_block_bytes)
        with ExitStack() as attaching:
            attaching.enter_context(self._policy.split.attached(self.engine))
            if self._nag is not None:
                attaching.enter_context(changed(self.engine.models.settings, nag=self._nag))
            self._attached, self._attached_policy = attaching.pop_all(), policy

    def _detach(self) -> None:
        self._attached_policy = None
        self._attached.close()

    def _end_run(self, kind: object = None, error: BaseException | None = None, trace: object = None) -> None:
        run, self._run = self._run, None
        self.state = CallState.IDLE
        try:
            if run is not None:
                run.__exit__(kind, error, trace)
        finally:
            if error is not None or not self._expected:
                self._detach()

    def __enter__(self) -> ModelCalls:
        if self.state is not CallState.NEW:
            raise StateError(f"cannot be entered twice; state: {self.state.value}")
        self.state = CallState.IDLE
        with self._entered:
            self._entered.enter_context(self._recorder.watching())
            self._entered.callback(self._detach)
            if self._expected:
                self._retried(0, partial(self._begin_run, 0))
            self._entered = self._entered.pop_all()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with self._entered:
            try:
                self._end_run(kind, error, trace)
            finally:
                self.state = CallState.CLOSED

    def _count_non_block_bytes(self, engine: ExpertEngine, *, before: int) -> None:
        self._recorder.non_block_bytes += engine.non_block_bytes - before
