"""DenoiseRequest: inputs, steps, guidance and options for one run, checked on construction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import signature
from itertools import pairwise
from operator import attrgetter
from typing import Any

import torch

from ...schema import OffloadPolicy
from ...shapes import ContextWindows
from ...wan import Nag
from ..cache.settings import CacheSettings, MagCache, policy_with_cache
from ..steps.context_windows import computed_shape
from ..steps.errors import RequestError
from ..steps.guidance import Guidance
from ..steps.settings import StepPlan, StepSettings
from ..steps.sides import Side
from .extra_tokens import CONTEXT_KEY, NO_TOKENS, ExtraTokens
from .run_inputs import RunInputs, Texts


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """Run options that save compute or divide it."""

    cache: CacheSettings | None = None
    """Step cache. None: every step computes all blocks."""
    windows: ContextWindows | None = None
    """Context windows for a video longer than the experts' training videos. None: the whole
    video."""

    def policy(self, policy: OffloadPolicy) -> OffloadPolicy:
        """Return the policy for a run with these options."""
        return policy_with_cache(policy, self.cache)

    def check(
        self,
        frames: int,
        sigmas: Sequence[float],
        experts: Sequence[str],
        sides: Sequence[Sequence[Side]],
        *,
        start_step: int = 0,
    ) -> None:
        """Raise RequestError unless windows fit the video, and MagCache the run's steps.

        Args:
            frames: latent frames in the video.
            sigmas: all noise levels in the schedule.
            experts: expert by step, from the schedule's first step to the run's last one.
            sides: CFG sides by step.
            start_step: first step of the run.
        """
        if self.windows is not None:
            self._check_windows(self.windows, frames, range(start_step, len(experts)))
        if isinstance(self.cache, MagCache):
            self.cache.table.check_steps(sigmas, experts, sides)

    def _check_windows(self, windows: ContextWindows, frames: int, steps: Sequence[int]) -> None:
        try:
            windows.check_video(frames)
        except ValueError as err:
            raise RequestError(str(err)) from err
        if not isinstance(self.cache, MagCache) or len(steps) < 2:
            return
        places = [windows.at(step, frames) for step in steps]
        if all(before != after for before, after in pairwise(places)):
            raise RequestError(
                "the context windows shift in every step, and MagCache skips a step only if all of "
                "its windows were computed in the step before: turn shift_windows off in Wan "
                "Context Windows, or use the first-block cache, which decides for each window"
            )


@dataclass(frozen=True, init=False, eq=False)
class DenoiseRequest:
    """One run: inputs, steps, guidance and options.

    The constructor takes the fields of all four. `guidance_steps` and `context_guidance` are
    `steps` and `context` in `Guidance`. Defaults follow the Wan2.2 T2V-A14B release, except for
    guidance, which needs a negative text.

    Raises:
        RequestError: a value is out of range, or values do not fit together.
    """

    inputs: RunInputs
    step_settings: StepSettings
    guidance_settings: Guidance
    options: RequestOptions

    def __init__(  # noqa: PLR0913, PLR0917 (public: every keyword of the four values)
        self,
        noise: torch.Tensor,
        positive: Texts,
        negative: Texts | None = None,
        image_condition: torch.Tensor | None = None,
        latent: torch.Tensor | None = None,
        start_step: int = 0,
        steps: int | None = None,
        solver: str = "unipc",
        schedule: str = "wan",
        sigmas: Sequence[float] | torch.Tensor | None = None,
        flow_shift: float = 12.0,
        boundary_ratio: float = 0.875,
        switch_step: int | None = None,
        guidance: tuple[float, float] = (1.0, 1.0),
        mask: torch.Tensor | None = None,
        end_step: int | None = None,
        leftover_noise: bool = False,
        add_noise: bool = True,
        latent_sigma: float | None = None,
        image_embedding: torch.Tensor | None = None,
        guidance_steps: tuple[float, ...] | None = None,
        cache: CacheSettings | None = None,
        nag: Nag | None = None,
        windows: ContextWindows | None = None,
        tokens: ExtraTokens = NO_TOKENS,
        negative_tokens: ExtraTokens | None = None,
        context_guidance: float = 1.0,
    ) -> None:
        inputs = RunInputs(
            noise=noise,
            positive=positive,
            negative=negative,
            image_condition=image_condition,
            image_embedding=image_embedding,
            latent=latent,
            mask=mask,
            add_noise=add_noise,
            latent_sigma=latent_sigma,
            tokens=tokens,
            negative_tokens=negative_tokens,
        )
        step_settings = StepSettings(
            steps=steps,
            solver=solver,
            schedule=schedule,
            sigmas=sigmas,
            flow_shift=flow_shift,
            boundary_ratio=boundary_ratio,
            switch_step=switch_step,
            start_step=start_step,
            end_step=end_step,
            leftover_noise=leftover_noise,
        )
        scales = Guidance(scales=guidance, steps=guidance_steps, nag=nag, context=context_guidance)
        self._set(inputs, step_settings, scales, RequestOptions(cache=cache, windows=windows))

    @classmethod
    def of(
        cls,
        inputs: RunInputs,
        step_settings: StepSettings,
        guidance_settings: Guidance,
        options: RequestOptions,
    ) -> DenoiseRequest:
        """Return a request with these values. Raises RequestError if they do not fit together."""
        # Not through the constructor, because this would build the four values from keywords.
        request = object.__new__(cls)
        request._set(inputs, step_settings, guidance_settings, options)
        return request

    def with_steps(self, steps: int | None) -> DenoiseRequest:
        """Return a request with another number of steps, or this one for None.

        Raises RequestError if the request has sigmas.
        """
        if steps is None:
            return self
        if self.step_settings.sigmas is not None:
            raise RequestError(
                f"{steps} steps were requested, but the run has its sigmas from another node: "
                "leave steps empty"
            )
        return self.replaced(step_settings=replace(self.step_settings, steps=steps))

    def replaced(
        self,
        *,
        inputs: RunInputs | None = None,
        step_settings: StepSettings | None = None,
        guidance_settings: Guidance | None = None,
        options: RequestOptions | None = None,
    ) -> DenoiseRequest:
        """Return a request with some of the four values replaced.

        Raises RequestError if they do not fit together.
        """
        return self.of(
            inputs or self.inputs,
            step_settings or self.step_settings,
            guidance_settings or self.guidance_settings,
            options or self.options,
        )

    def keywords(self) -> dict[str, Any]:
        """Return the values by constructor keyword, in order.

        Request digests depend on the order.
        """
        guidance = self.guidance_settings
        values = {
            **vars(self.inputs),
            **vars(self.step_settings),
            **vars(self.options),
            "guidance": guidance.scales,
            "guidance_steps": guidance.steps,
            "nag": guidance.nag,
            "context_guidance": guidance.context,
        }
        return {name: values[name] for name in signature(DenoiseRequest).parameters}

    def _set(
        self, inputs: RunInputs, steps: StepSettings, guidance: Guidance, options: RequestOptions
    ) -> None:
        # A frozen dataclass refuses assignment.
        vars(self).update(
            inputs=inputs, step_settings=steps, guidance_settings=guidance, options=options
        )
        self._check()

    def _check(self) -> None:
        guidance = self.guidance_settings
        step_plan = self.step_plan
        has_negative = self.inputs.negative is not None
        guidance.check_length(step_plan.whole_steps)
        if guidance.guided and not has_negative:
            remedy = "set guidance to (1, 1)"
            if guidance.steps is not None:
                remedy = "give guidance_steps of 1 only"
            raise RequestError(
                f"guidance {guidance.steps or guidance.scales} needs a negative text: give one, or "
                f"{remedy}"
            )
        scales = step_plan.scales()
        self._check_context_guidance(scales)
        guidance.check_nag(scales, has_negative=has_negative)
        self.options.check(
            self.noise.shape[2],
            self.step_settings.whole.sigmas,
            step_plan.experts,
            [guidance.sides(scale) for scale in step_plan.guidance],
            start_step=step_plan.start_step,
        )
        self.inputs.check_start(step_plan.start_sigma, step=step_plan.start_step)

    def _check_context_guidance(self, scales: Sequence[float]) -> None:
        """Raise RequestError for a context scale that no lane at these CFG scales needs."""
        context = self.guidance_settings.context
        if context == 1:
            return
        # First, because nodes do not pass on a negative that no step reads, so it has no context
        # here.
        if all(scale == 1 for scale in scales):
            raise RequestError(
                f"context_guidance is {context:g}, and it acts in steps whose guidance is not 1, "
                "of which this run has none: set it to 1, or give an expert or a step another "
                "guidance; if another sampler runs the guided steps, give this one a Wan Guidance "
                "of its own"
            )
        if not self.inputs.tokens_of_sides[Side.NEGATIVE].context:
            raise RequestError(
                f"context_guidance is {context:g}, and the negative has no context ({CONTEXT_KEY}) "
                "that could be left out: connect positive and negative through WanStream Bernini, "
                "with a source or a reference, or set it to 1"
            )

    # Constructor keywords that scripts read.
    positive = property(attrgetter("inputs.positive"))
    negative = property(attrgetter("inputs.negative"))
    latent = property(attrgetter("inputs.latent"))
    steps = property(attrgetter("step_settings.steps"))
    solver = property(attrgetter("step_settings.solver"))
    schedule = property(attrgetter("step_settings.schedule"))
    flow_shift = property(attrgetter("step_settings.flow_shift"))
    boundary_ratio = property(attrgetter("step_settings.boundary_ratio"))
    switch_step = property(attrgetter("step_settings.switch_step"))
    start_step = property(attrgetter("step_settings.start_step"))
    guidance = property(attrgetter("guidance_settings.scales"))

    @property
    def noise(self) -> torch.Tensor:
        """[B, 16 or 48, T, h, w] float32, in the shape of the latents."""
        return self.inputs.noise

    @property
    def batch(self) -> int:
        """Number of samples."""
        return self.inputs.batch

    @cached_property
    def step_plan(self) -> StepPlan:
        """Noise level, expert and guidance by step."""
        return self.step_settings.plan(self.guidance_settings)

    @property
    def computed_shape(self) -> tuple[int, ...]:
        """Shape [lanes on a CFG side, 16, T, h, w] in the step with most lanes, with windows."""
        return computed_shape(self.noise.shape, self.options.windows, self.step_plan.steps)

    def sides_at(self, step: int) -> tuple[Side, ...]:
        """Return the CFG sides in a step of the whole schedule, in lane order."""
        return self.guidance_settings.sides(self.step_plan.guidance[step])

    def sides_of(self, expert: str | None = None) -> tuple[Side, ...]:
        """Return the CFG sides in the step with most sides that `expert` may take.

        None: either expert.
        """
        guidance = self.guidance_settings
        if expert is None:
            return guidance.most_sides(guidance.steps or guidance.scales)
        if guidance.steps is None:
            return guidance.sides(guidance.scale(0, expert))
        return guidance.most_sides(self.step_plan.scales(expert))

    def lanes_at(self, step: int) -> int:
        """Return the number of lanes per sample in a step of the whole schedule."""
        sides = len(self.sides_at(step))
        if self.options.windows is None:
            return sides
        return sides * len(self.options.windows.at(step, self.noise.shape[2]))
