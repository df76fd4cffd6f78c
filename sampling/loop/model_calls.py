"""Model calls in one run, under one transfer program for all predicted calls.

The calls of our own sampler are certain. The calls of an external sampler are predicted. In both
cases blocks are fetched ahead from call to call and across the expert switch.

    with ModelCalls(policy, ["high", "high", "low"], recorder=recorder) as calls:
        velocities = calls.forward("high", lanes, sigma=1.0)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial

import torch

from ...offload import SessionState, StepCalls, StreamSession
from ...plan.programs import TRAIN_TIMESTEPS, Visit
from ...schema import OffloadPolicy
from ...schema.records import StepRecord
from ...telemetry import Recorder
from ...wan import ExpertEngine, Lane, Nag, changed, forward_lanes
from ..cache.base import CachedPass, PassStart, Stage, StepCache, names_of
from ..steps.errors import SamplingCancelled
from .interruptible import interruptible_visit
from .oom_fallback import RunPolicy


class ModelCalls:
    """Calls to the experts of one engine. Leaving the `with` block ends all fetches.

    A call that runs out of device memory is computed again under the next smaller policy.

    Args:
        policy: creates the engine when the first run begins, and again after a policy change.
        predicted: expert of each call to come, in order.
        recorder: records one step per call, and samples memory while this object is entered.
        first_step: number of the first step where each call is a step. None: calls are numbered
            from 0.
        should_stop: polled before every block.
        nag: NAG settings, attached to the models.
        cache: step cache. Each call is one step to it.
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
        self._policy = policy
        self._recorder = recorder
        self._unit = "call" if first_step is None else "step"
        self._should_stop = should_stop
        self._nag = nag
        step_cache = cache or StepCache()
        self._cache = step_cache
        self._engine: ExpertEngine | None = None
        self._attached = ExitStack()
        self._attached_policy: OffloadPolicy | None = None
        self._entered = ExitStack()
        self._compiled = False
        self._steps = StepCalls(
            predicted,
            policy.pair.block_counts,
            first_step=first_step or 0,
            patch_at=policy.pair.patch_at,
            # Not through `self`: a reference cycle would keep the run's tensors.
            skipped=lambda: step_cache.skipped,
        )
        poll = None if should_stop is None else self._poll
        self._session = StreamSession(
            self._steps,
            self._attach,
            policy=self,
            recorder=recorder,
            poll=poll,
            # Workers in a group vote, and must do so equally often.
            poll_waiting=poll if policy.split.alone else None,
        )

    @property
    def engine(self) -> ExpertEngine:
        """Engine under the present policy, once a run has begun."""
        assert self._engine is not None, "no run has begun"
        return self._engine

    @property
    def state(self) -> SessionState:
        """Session state. Errors quote the value."""
        return self._session.state

    @property
    def calls(self) -> int:
        """Number of calls so far."""
        return self._session.calls_done

    @property
    def recompiled(self) -> int:
        """Number of unpredicted calls. Each needed a new program."""
        return self._session.recompiled

    def forward(self, expert: str, lanes: Sequence[Lane], sigma: float) -> list[torch.Tensor]:
        """Return each lane's velocity [1, 16, T, h, w] in the compute dtype.

        The weights are streamed once for all.

        Args:
            expert: "high" or "low".
            sigma: noise level of the lanes, at most 1. The model's timestep is 1000 times it.

        Raises:
            SamplingCancelled: `should_stop` returned True. Another call may follow, as after any
                error.
            StateError: outside `with`, or inside another call.
        """
        for attempt in self.attempts(expert, sigma):
            with attempt, torch.inference_mode():
                velocities = self.velocities(lanes, sigma * TRAIN_TIMESTEPS)
        return velocities

    def attempts(self, expert: str, sigma: float) -> Iterator[AbstractContextManager[None]]:
        """Yield attempts for one call, each recorded as its step, until one has enough memory.

        Each attempt calls `velocities` once.

        Raises:
            SamplingCancelled: `should_stop` returned True. Another call may follow, as after any
                error.
            StateError: outside `with`, or inside another call.
        """
        try:
            yield from self._session.attempts(expert, self._steps.step, sigma)
        finally:
            if self.state is SessionState.IDLE:
                self._detach()

    def velocities(self, lanes: Sequence[Lane], timestep: float) -> list[torch.Tensor]:
        """Return each lane's velocity in an attempt: computed, or from the step cache."""
        expert = self._steps.expected[0]
        graphs = self.engine.models.settings.graphs
        self._select_patches()
        self._session.begin_pass()
        stage = Stage(*self._steps.patches[0])
        # Before the lanes are divided: workers predict alike, and share the rest.
        predicted = self._cache.predict(self._steps.step, stage, lanes)
        # This worker's share of the predicted lanes, rounded up.
        saved = -(-len(predicted) // self._policy.split.share.cfg)
        computed = [lane for at, lane in enumerate(lanes) if at not in predicted]
        velocities: list[torch.Tensor] = []
        if computed:
            split = self._policy.split
            model = self.engine.models[expert]
            with split.computing(computed) as own:
                names = names_of(computed), names_of(own)
                shortcut = self._cache.begin(PassStart(self._steps.step, stage, *names, model))
                velocities = forward_lanes(
                    model,
                    own,
                    torch.tensor([timestep]),  # on the CPU, because the value is read
                    self._visit(),
                    shortcut,
                    split.local_tokens,
                )
                velocities = split.gather(velocities, len(computed))
            # After the gather, so that every worker keeps the velocities of all lanes.
            self._cache.record(computed, velocities)
            self._record_cached(expert, saved, shortcut)
        else:
            self._session.skip_rest()
            self._recorder.cached(lanes=saved, visits=self.engine.block_counts[expert])
        self._session.end_pass()
        self._compiled = self.engine.models.settings.graphs > graphs
        # Computed velocities are in lane order, without the predicted ones.
        rest = iter(velocities)
        return [predicted[at] if at in predicted else next(rest) for at in range(len(lanes))]

    def _visit(self) -> Callable[[int], AbstractContextManager[object]]:
        """Return the function that visits a block."""
        if self._should_stop is not None and self._policy.stops_inside:
            return partial(interruptible_visit, self._session, self._poll_inside)
        return self._session.visit

    def _record_cached(self, expert: str, saved: int, shortcut: CachedPass | None) -> None:
        """Record `saved` predicted lanes, and skip the pass's skipped visits."""
        visits = 0
        if shortcut is not None:
            saved += shortcut.skipped_lanes
            visits = shortcut.skipped_visits(self.engine.block_counts[expert])
            if shortcut.skips_rest:
                self._session.skip_rest()
        self._recorder.cached(lanes=saved, visits=visits)

    def revised(self, record: StepRecord) -> OffloadPolicy | None:
        """Return a better policy after the first call, if the record suggests one."""
        # A first call that compiled blocks is slower than the others, so the record is not used.
        if self.calls != 1 or self._compiled:
            return None
        return self._policy.revised(record)

    def use(self, policy: OffloadPolicy) -> None:
        """Continue under a revised policy."""
        self._policy.use(policy)

    def make_smaller(self, message: str) -> None:
        """Continue under a smaller policy. `RunPolicy.make_smaller` documents the errors."""
        self._policy.make_smaller(
            f"{self._unit} {self._steps.step} ({self._steps.expected[0]}-noise expert)", message
        )

    def _poll(self, visit: Visit) -> None:
        assert self._should_stop is not None
        if self._policy.split.any_stops(self._should_stop(), visit.block):
            raise SamplingCancelled(visit.step, visit.block)

    def _poll_inside(self) -> None:
        visit = self._session.due
        assert visit is not None, "polled inside a block only"
        self._poll(visit)

    def _select_patches(self) -> None:
        """Apply the LoRA strengths in each expert's next call to unstreamed parameters."""
        if self._policy.pair.strengths_vary:
            # In reverse, so that an expert's earliest call counts.
            for expert, patch in dict(reversed(self._steps.patches)).items():
                self.engine.models.select_patch(expert, patch)

    def _attach(self) -> ExpertEngine:
        """Return the present policy's engine, with context parallelism and NAG on the models."""
        policy = self._policy.policy
        if self._engine is not None and self._attached_policy == policy:
            return self._engine
        # Another engine has other models.
        self._detach()
        is_first = self._engine is None
        engine = self._engine = self._policy.engine()
        if is_first:
            self._entered.callback(
                self._count_non_block_bytes, engine, before=engine.models.non_block_bytes
            )
        with ExitStack() as attaching:
            attaching.enter_context(self._policy.split.attached(engine.models.bare.values()))
            if self._nag is not None:
                attaching.enter_context(changed(engine.models.settings, nag=self._nag))
            # `pop_all` keeps the contexts open after this `with`, unless an error comes first.
            self._attached = attaching.pop_all()
        self._attached_policy = policy
        return engine

    def _detach(self) -> None:
        # First, so that models count as detached even if a context fails to end.
        self._attached_policy = None
        self._attached.close()

    def __enter__(self) -> ModelCalls:
        with ExitStack() as entering:
            if self.state is SessionState.NEW:
                entering.enter_context(self._recorder.watching())
                entering.callback(self._detach)
                self._entered = entering
            # An error here ends the contexts entered above.
            self._session.begin()
            self._entered = entering.pop_all()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # The contexts end after the session, even if closing it raises an error.
        with self._entered:
            self._session.close(error)

    def _count_non_block_bytes(self, engine: ExpertEngine, *, before: int) -> None:
        self._recorder.non_block_bytes += engine.models.non_block_bytes - before
