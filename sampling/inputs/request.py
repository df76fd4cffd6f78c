"""DenoiseRequest: all inputs of one run, checked on construction."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ...plan import split_at_boundary
from ...schema import ContextWindows
from ...wan import WAN22, Nag, space_of
from ..cache.settings import CacheSettings, MagCache
from ..context_windows import computed_shape
from ..errors import RequestError
from ..schedules import Schedule, explicit_schedule, make_schedule
from ..solvers import SOLVERS
from .checks import (
    IMAGE_CONDITION_CHANNELS,
    Texts,
    check_guidance,
    check_image_embedding,
    check_latent,
    check_noise,
    check_start,
    check_step_plan,
    check_texts,
    check_windows,
)
from .extra_tokens import CONTEXT_KEY, NO_TOKENS, ExtraTokens, check_tokens
from .sides import NEGATIVE, sides_at


@dataclass(frozen=True, kw_only=True)
class Guidance:
    """Guidance of a run that is more than one CFG scale for each expert."""

    steps: tuple[float, ...] | None = None
    """See `DenoiseRequest.guidance_steps`."""
    nag: Nag | None = None
    """See `DenoiseRequest.nag`."""
    context: float = 1.0
    """See `DenoiseRequest.context_guidance`."""


def parse_scales(text: str) -> tuple[float, ...] | None:
    """Parse numbers that are separated by commas or spaces, as in "4, 4, 3.5"; returns None if there are none.

    Raises:
        RequestError: a word is not a finite number.
    """
    words = [word for word in re.split(r"[\s,;]+", text) if word]
    scales = []
    for word in words:
        try:
            scale = float(word)
        except ValueError:
            scale = math.nan
        if not math.isfinite(scale):
            raise RequestError(f"guidance_steps has {word!r}: give numbers with commas between, as in 4, 4, 3.5, 1")
        scales.append(scale)
    return tuple(scales) or None


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """Steps of a run: the noise levels, and the expert and the guidance of each step."""

    schedule: Schedule
    experts: tuple[str, ...]
    """Expert of every step of the schedule: "high" or "low"."""
    guidance: tuple[float, ...]
    """CFG scale of every step of the schedule."""
    start_step: int
    whole_steps: int
    """Steps of the whole schedule, those after the end of this run included."""

    @property
    def start_sigma(self) -> float:
        """The noise level at which the first step starts."""
        return self.schedule.sigmas[self.start_step]

    @property
    def end_sigma(self) -> float:
        """The noise level after the last step; 0 for a finished video."""
        return self.schedule.sigmas[-1]

    @property
    def steps(self) -> range:
        """The steps that the run computes, a part of the schedule."""
        return range(self.start_step, self.schedule.steps)


@dataclass(frozen=True, eq=False)
class DenoiseRequest:
    """Inputs of one run.

    Defaults are those of the Wan2.2 T2V-A14B release, except for guidance, which needs a negative text. B samples are
    denoised together; texts, image condition, mask and image embedding may be shared by all of them.

    Raises:
        RequestError: a value is out of range, or values do not fit together.
    """

    noise: torch.Tensor
    """[B, 16, T, h, w] float32, standard normal. TI2V-5B has 48 channels, here and below. Odd sides are padded to whole
    patches in each forward pass, as in ComfyUI."""
    positive: Texts
    """[1 or B, L, 4096] UMT5 embedding, any L >= 1; or one [1, L, 4096] for each sample, of any lengths."""
    negative: Texts | None = None
    """Like `positive`, of any lengths. Required if a guidance is not 1, or for NAG."""
    image_condition: torch.Tensor | None = None
    """[1 or B, C, T, h, w], joined to the latents. C = 20 for I2V and Fun InP: 4 mask channels (1 = known), then the
    image latent. 36 for Fun Control 2.2: control video, mask, start image; 32 for 2.1: without the mask. Fun 5B: 52 and
    100."""
    latent: torch.Tensor | None = None
    """[B, 16, T, h, w] to start from, mixed with the noise at the first sigma; None: start from noise alone."""
    start_step: int = 0
    """First step to compute, 0-based; the schedule and the switch are still those of all steps."""
    steps: int | None = None
    """Steps of the whole schedule; None: 40, or the number that `sigmas` has."""
    solver: str = "unipc"
    """One of `SOLVERS`: "euler", "unipc", "dpm++" or "lcm"."""
    schedule: str = "wan"
    """One of `SCHEDULES`: "simple" (ComfyUI's) or "wan" (diffusers'); not used if `sigmas` are given."""
    sigmas: Sequence[float] | torch.Tensor | None = None
    """Steps + 1 descending values, used without a flow shift. A last value above 0 leaves noise over."""
    flow_shift: float = 12.0
    boundary_ratio: float = 0.875
    """The high-noise expert computes the steps whose timestep is at least 1000 times this."""
    switch_step: int | None = None
    """First step of the low-noise expert, in place of `boundary_ratio`. 0: low only; the number of steps: high only."""
    guidance: tuple[float, float] = (1.0, 1.0)
    """CFG scale of the (high, low) expert; 1 computes no negative lane."""
    mask: torch.Tensor | None = None
    """[1 or B, 1 or 16, T, h, w], 1 where to denoise, 0 where `latent` is kept (without a latent: zeros). Its mean over
    a frame is the frame's timestep scale for TI2V-5B."""
    end_step: int | None = None
    """Step before which the run ends; None, or a number above the last step: the run computes all steps."""
    leftover_noise: bool = False
    """True: a run that ends early leaves the noise of its end step in; False: its last step goes down to sigma 0."""
    add_noise: bool = True
    """False: `latent` already has noise, and `noise` gives the shape only. The run starts from (1 - sigma) * latent, as
    ComfyUI's samplers do with a latent in which another sampler left noise."""
    latent_sigma: float | None = None
    """Noise level at which another run left `latent`, if known; a run that starts at another level is refused."""
    image_embedding: torch.Tensor | None = None
    """[1 or B, N, 1280] CLIP embedding of the start image, for a model with an image branch (Wan2.1 I2V)."""
    guidance_steps: tuple[float, ...] | None = None
    """CFG scale of each step of the schedule, in place of `guidance`; the last one applies to all later steps."""
    cache: CacheSettings | None = None
    """Step cache; None: every step computes all blocks."""
    nag: Nag | None = None
    """NAG of `negative` against `positive` in the steps of guidance 1; None: off."""
    windows: ContextWindows | None = None
    """Context windows for a video that is longer than the experts were trained on; None: the whole video."""
    tokens: ExtraTokens = NO_TOKENS
    """Tokens next to those of the video: a reference image, context videos and images."""
    negative_tokens: ExtraTokens | None = None
    """Those of the negative lanes; None: `tokens`."""
    context_guidance: float = 1.0
    """Scale of the context tokens in guided steps: their effect on the velocity of the negative text is multiplied by
    it. That needs lanes with the negative text and without context; 1 computes none."""

    def __post_init__(self) -> None:
        self._check_tensors()
        self._check_steps()

    def _check_tensors(self) -> None:
        check_noise(self.noise)
        check_texts("positive", self.positive, self.batch)
        if self.negative is not None:
            check_texts("negative", self.negative, self.batch)
        if self.image_condition is not None:
            check_latent("image_condition", self.image_condition, self.noise, IMAGE_CONDITION_CHANNELS, (1, self.batch))
        if self.latent is not None:
            check_latent("latent", self.latent, self.noise, (self.channels,), (self.batch,))
        if self.mask is not None:
            check_latent("mask", self.mask, self.noise, (1, self.channels), (1, self.batch))
        if self.image_embedding is not None:
            check_image_embedding(self.image_embedding, self.batch)
        check_tokens("positive", self.tokens, batch=self.batch)
        check_tokens("negative", self.tokens_of_sides[1], batch=self.batch)

    def _check_steps(self) -> None:
        check_guidance(self.guidance, self.guidance_steps, steps=self._schedule().steps)
        if self.negative is None and self.guided:
            remedy = "set guidance to (1, 1)" if self.guidance_steps is None else "give guidance_steps of 1 only"
            scales = self.guidance_steps or self.guidance
            raise RequestError(f"guidance {scales} needs a negative text: give one, or {remedy}")
        step_plan = self.step_plan
        check_context_guidance(self)
        if self.nag is not None:
            check_nag([step_plan.guidance[step] for step in step_plan.steps], has_negative=self.negative is not None)
        if self.windows is not None:
            mag_steps = step_plan.steps if isinstance(self.cache, MagCache) else ()
            check_windows(self.windows, self.noise.shape[2], mag_steps=mag_steps)
        if self.solver not in SOLVERS:
            raise RequestError(f"unknown solver {self.solver!r}: choose one of {', '.join(SOLVERS)}")
        if isinstance(self.cache, MagCache):
            sides = [self.sides_at(step) for step in range(step_plan.schedule.steps)]
            self.cache.table.check_steps(self._schedule().sigmas, step_plan.experts, sides)
        check_start(
            step_plan.start_sigma,
            step=self.start_step,
            add_noise=self.add_noise,
            has_latent=self.latent is not None,
            latent_sigma=self.latent_sigma,
        )

    @property
    def batch(self) -> int:
        """Number of samples."""
        return self.noise.shape[0]

    @property
    def channels(self) -> int:
        """Number of latent channels: 16, or 48 for TI2V-5B."""
        return self.noise.shape[1]

    @property
    def timestep_scales(self) -> tuple[tuple[float, ...] | None, ...]:
        """Timestep scale of each latent frame, for each sample (TI2V-5B); None for a sample whose scales are all 1.

        It is the mean of the mask over the frame, in float32, as ComfyUI computes it.
        """
        if self.mask is None or self.channels != WAN22.channels:
            return (None,) * self.batch
        scales = self.mask.expand(self.batch, *self.mask.shape[1:]).float().mean(dim=(1, 3, 4)).tolist()
        return tuple(None if set(of_sample) == {1.0} else tuple(of_sample) for of_sample in scales)

    def guidance_of(self, expert: str) -> float:
        """Return the CFG scale of the expert "high" or "low", without `guidance_steps`."""
        high, low = self.guidance
        return high if expert == "high" else low

    @property
    def needs_negative(self) -> bool:
        """True if a step may need the negative text."""
        return self.guided or self.nag is not None

    @property
    def guided(self) -> bool:
        """True if a step may have negative lanes."""
        return any(scale != 1 for scale in self.guidance_steps or self.guidance)

    def sides_at(self, step: int) -> tuple[int, ...]:
        """Return the CFG sides of a step of the whole schedule, in the order of its lanes."""
        return sides_at(self.step_plan.guidance[step], self.context_guidance)

    def sides_of(self, expert: str | None = None) -> tuple[int, ...]:
        """Return the CFG sides of the step with most of them that `expert` may take; None: either of them."""
        scales: tuple[float, ...]
        if self.guidance_steps is None:
            scales = self.guidance if expert is None else (self.guidance_of(expert),)
        elif expert is None:
            scales = self.guidance_steps
        else:
            step_plan = self.step_plan
            scales = tuple(step_plan.guidance[step] for step in step_plan.steps if step_plan.experts[step] == expert)
        return max((sides_at(scale, self.context_guidance) for scale in scales), key=len, default=sides_at(1))

    @property
    def computed_shape(self) -> tuple[int, ...]:
        """Shape [lanes of one CFG side, 16, T, h, w] in the step with most lanes, context windows included."""
        return computed_shape(self.noise.shape, self.windows, self.step_plan.steps)

    @property
    def control_channels(self) -> int:
        """Number of channels of a control video, the first ones of the condition; 0 without one."""
        given = 0 if self.image_condition is None else self.image_condition.shape[1]
        return self.channels if given >= 2 * self.channels else 0

    @property
    def tokens_of_sides(self) -> tuple[ExtraTokens, ExtraTokens]:
        """Tokens next to those of the video, of the positive and the negative lanes."""
        return self.tokens, self.tokens if self.negative_tokens is None else self.negative_tokens

    @property
    def tokens_words(self) -> str:
        """Description of the tokens next to those of the video, equal in requests that can be merged."""
        return " and ".join(tokens.words for tokens in self.tokens_of_sides)

    def lanes_at(self, step: int) -> int:
        """Return the number of lanes that each sample has in a step of the whole schedule."""
        sides = len(self.sides_at(step))
        return sides if self.windows is None else sides * len(self.windows.at(step, self.noise.shape[2]))

    @cached_property
    def step_plan(self) -> StepPlan:
        """Noise levels and experts of the steps."""
        schedule = self._schedule()
        end = schedule.steps if self.end_step is None else self.end_step
        check_step_plan(schedule.steps, start_step=self.start_step, switch_step=self.switch_step, end_step=end)
        switch = self._switch(schedule)
        experts = ("high",) * switch + ("low",) * (schedule.steps - switch)
        return StepPlan(
            schedule=schedule.until(end, leftover_noise=self.leftover_noise),
            experts=experts[:end],
            guidance=tuple(self._scale(step, expert) for step, expert in enumerate(experts[:end])),
            start_step=self.start_step,
            whole_steps=schedule.steps,
        )

    def _scale(self, step: int, expert: str) -> float:
        if self.guidance_steps is None:
            return self.guidance_of(expert)
        return self.guidance_steps[min(step, len(self.guidance_steps) - 1)]

    def _schedule(self) -> Schedule:
        if self.sigmas is None:
            return make_schedule(self.schedule, 40 if self.steps is None else self.steps, self.flow_shift)
        schedule = explicit_schedule(self.sigmas)
        if self.steps not in (None, schedule.steps):
            raise RequestError(
                f"{schedule.steps + 1} sigmas make {schedule.steps} steps, not {self.steps}: do not give steps"
            )
        return schedule

    def _switch(self, schedule: Schedule) -> int:
        if not 0 <= self.boundary_ratio <= 1:
            raise RequestError(
                f"boundary ratio {self.boundary_ratio:g}: give 0 to 1 (Wan2.2: 0.875 for text, 0.9 for images)"
            )
        if self.switch_step is None:
            return split_at_boundary(schedule.timesteps, self.boundary_ratio)
        return self.switch_step


def check_nag(guidance: Sequence[float], *, has_negative: bool) -> None:
    """Raise RequestError if NAG lacks a negative text, or no step has guidance 1; `guidance` has the scale of each."""
    if not has_negative:
        raise RequestError("NAG needs a negative text: give one, or remove NAG")
    if all(scale != 1 for scale in guidance):
        raise RequestError(
            "NAG acts in steps of guidance 1, and this run has none: set the guidance of an expert or a step to 1, or "
            "remove NAG"
        )


def check_context_guidance(request: DenoiseRequest) -> None:
    """Raise RequestError for a scale that is not finite, or that no lane of the request needs."""
    scale = request.context_guidance
    if not math.isfinite(scale):
        raise RequestError(f"context_guidance is {scale}: give a finite number; 1 computes no lanes without context")
    if scale == 1:
        return
    # First, because a negative that no step reads is not passed on by the nodes, and so has no context here.
    step_plan = request.step_plan
    if all(step_plan.guidance[step] == 1 for step in step_plan.steps):
        raise RequestError(
            f"context_guidance is {scale:g}, and it acts in steps whose guidance is not 1, of which this run has none: "
            "set it to 1, or give an expert or a step another guidance; if another sampler runs the guided steps, give "
            "this one a Wan Guidance of its own"
        )
    if not request.tokens_of_sides[NEGATIVE].context:
        raise RequestError(
            f"context_guidance is {scale:g}, and the negative has no context ({CONTEXT_KEY}) that could be left out: "
            "connect positive and negative through WanStream Bernini, with a source or a reference, or set it to 1"
        )


CONDITIONS = {
    0: "text-to-video",
    20: "image-to-video",
    32: "Wan2.1 Fun Control",
    36: "Wan2.2 Fun Control",
    52: "Fun InP 5B",
    100: "Fun Control 5B",
}
"""Models by the channels of their condition."""


def check_channels(request: DenoiseRequest, in_channels: int, latent: int) -> None:
    """Raise RequestError unless the request has the model's input channels.

    Args:
        request: the request.
        in_channels: input channels of the model: of the latent and of the condition.
        latent: channels of its latent, 16 or 48.
    """
    condition = 0 if request.image_condition is None else request.image_condition.shape[1]
    given = request.channels + condition
    if (given, request.channels) == (in_channels, latent):
        return
    if request.channels != latent:
        raise RequestError(
            f"the latent has {request.channels} channels, as {space_of(request.channels).models} have, and the model "
            f"takes those of {space_of(latent).models}, with {latent}: connect a latent that was made for this model, "
            "or open another one"
        )
    problem = _condition_problem(condition, in_channels - latent, latent)
    raise RequestError(f"{problem} ({in_channels} channels expected, {given} given)")


def _condition_problem(given: int, expected: int, latent: int) -> str:
    """Describe a condition of `given` channels for a model that takes one of `expected`, with a remedy."""
    if expected == 0 and latent == WAN22.channels and given in (20, 52):
        return (
            "Wan2.2 5B takes a start image as the first frame of the latent, and this request has one as a condition "
            "(image_condition), as A14B takes it: choose the VAE of Wan2.2 5B in WanStream Image to Video"
        )
    model = CONDITIONS[expected]
    if given in (32, 36, 100):
        return (
            f"these are {model} experts, and the conditioning of {CONDITIONS[given]} is connected "
            f"(concat_latent_image of two latents{', with concat_mask_index' * (given != 32)}): remove its node, or "
            "choose the experts that it was made for"
        )
    if expected in (32, 36, 100):
        found = "no control video" if given == 0 else "only a start image"
        return (
            f"these are {model} experts, and {found} is connected: connect positive and negative through WanStream Fun "
            "Control"
        )
    if expected == 52:
        return (
            f"these are {model} experts, and no start image of theirs is connected (concat_latent_image): connect "
            "positive and negative through ComfyUI's WanFunInpaintToVideo"
        )
    if given == 0:
        return (
            f"these are {model} experts, and no start image is connected (image_condition): connect "
            "positive and negative through WanStream Image to Video, or choose text-to-video experts, whose files have "
            "t2v in their names"
        )
    return (
        f"these are {model} experts, and a start image is connected (image_condition): connect "
        "positive and negative straight from the text encoder, or choose image-to-video experts, whose files have i2v "
        "in their names"
    )
