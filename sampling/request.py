"""DenoiseRequest: everything one run needs to know, checked when it is made.

Latents, noise and image condition are in the model's normalised space (see `wan.normalise`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..plan import split_at_boundary
from ..wan.vae import LATENT_CHANNELS
from .errors import RequestError
from .schedules import Schedule, explicit_schedule, make_schedule
from .solvers import SOLVERS

IMAGE_CONDITION_CHANNELS = 20
TEXT_WIDTH = 4096
PATCH = 2
"""Latent pixels per token, in height and in width."""


@dataclass(frozen=True, kw_only=True)
class Course:
    """The steps of a run: noise levels, and the expert that takes each step."""

    schedule: Schedule
    experts: tuple[str, ...]
    """Of every step of the schedule: "high" or "low"."""
    start_step: int

    @property
    def steps(self) -> range:
        """The steps that are really taken."""
        return range(self.start_step, self.schedule.steps)


@dataclass(frozen=True, eq=False)
class DenoiseRequest:
    """One run. Defaults are those of the model's makers for Wan2.2 T2V-A14B, but for guidance, which needs a negative.

    B samples are denoised together; text, negative and image condition may be given once for all of them. Raises
    `RequestError` for anything that does not fit together.
    """

    noise: torch.Tensor
    """[B, 16, T, h, w] float32, standard normal; h and w even."""
    positive: torch.Tensor
    """[1 or B, L, 4096] UMT5 embedding, any L >= 1."""
    negative: torch.Tensor | None = None
    """As `positive`, of any length of its own. Needed where a guidance is not 1."""
    image_condition: torch.Tensor | None = None
    """[1 or B, 20, T, h, w] for I2V experts: 4 mask channels (1 = known), then 16 channels of image latent."""
    latent: torch.Tensor | None = None
    """[B, 16, T, h, w] to start from, mixed with the noise at the first sigma; None: from noise alone."""
    start_step: int = 0
    """First step to take, 0-based; the schedule stays that of all steps."""
    steps: int | None = None
    """Steps of the whole schedule; None: 40, or what `sigmas` make."""
    solver: str = "unipc"
    """One of `SOLVERS`: "euler" or "unipc"."""
    schedule: str = "wan"
    """One of `SCHEDULES`: "simple" (ComfyUI's) or "wan" (diffusers'); not used where `sigmas` are given."""
    sigmas: Sequence[float] | torch.Tensor | None = None
    """Steps + 1 descending values, the last one 0, used as they are: no flow shift is applied."""
    flow_shift: float = 12.0
    boundary_ratio: float = 0.875
    """The high-noise expert takes the steps whose timestep is at least 1000 times this."""
    switch_step: int | None = None
    """First step of the low-noise expert; wins over `boundary_ratio`. 0: low only; the number of steps: high only."""
    guidance: tuple[float, float] = (1.0, 1.0)
    """CFG scale of the (high, low) expert; 1 computes no negative lane."""

    def __post_init__(self) -> None:
        _check_noise(self.noise)
        _check_text("positive", self.positive, self.batch)
        if self.negative is not None:
            _check_text("negative", self.negative, self.batch)
        if self.image_condition is not None:
            _check_latent(
                "image_condition", self.image_condition, self.noise, IMAGE_CONDITION_CHANNELS, (1, self.batch)
            )
        if self.latent is not None:
            _check_latent("latent", self.latent, self.noise, LATENT_CHANNELS, (self.batch,))
        self._check_guidance()
        if self.solver not in SOLVERS:
            raise RequestError(f"unknown solver {self.solver!r}: choose one of {', '.join(SOLVERS)}")
        self.course()

    @property
    def batch(self) -> int:
        """Number of samples."""
        return self.noise.shape[0]

    def guidance_of(self, expert: str) -> float:
        """The CFG scale of the expert "high" or "low"."""
        high, low = self.guidance
        return high if expert == "high" else low

    def course(self) -> Course:
        """Noise levels and experts of the steps."""
        schedule = self._schedule()
        check_course(schedule.steps, start_step=self.start_step, switch_step=self.switch_step)
        switch = self._switch(schedule)
        experts = ("high",) * switch + ("low",) * (schedule.steps - switch)
        return Course(schedule=schedule, experts=experts, start_step=self.start_step)

    def _schedule(self) -> Schedule:
        if self.sigmas is None:
            return make_schedule(self.schedule, 40 if self.steps is None else self.steps, self.flow_shift)
        schedule = explicit_schedule(self.sigmas)
        if self.steps not in (None, schedule.steps):
            raise RequestError(
                f"{schedule.steps + 1} sigmas make {schedule.steps} steps, not {self.steps}: leave steps out"
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

    def _check_guidance(self) -> None:
        is_pair = not isinstance(self.guidance, int | float) and len(self.guidance) == 2
        if not is_pair or not all(math.isfinite(scale) for scale in self.guidance):
            raise RequestError(f"guidance {self.guidance}: give two numbers, for the high and the low expert")
        if self.negative is None and any(scale != 1 for scale in self.guidance):
            raise RequestError(f"guidance {self.guidance} needs a negative text: give one, or set guidance to (1, 1)")


def check_course(steps: int, *, start_step: int, switch_step: int | None) -> None:
    """Refuse a first step or an explicit switch that lies outside a run of `steps` steps."""
    if not 0 <= start_step < steps:
        raise RequestError(f"start step {start_step} of {steps} steps: give 0 to {steps - 1}")
    if switch_step is not None and not 0 <= switch_step <= steps:
        raise RequestError(f"switch step {switch_step} of {steps} steps: give 0 to {steps}")


def check_channels(request: DenoiseRequest, in_channels: int) -> None:
    """Refuse a request that does not fit experts with `in_channels` input channels: 16 for T2V, 36 for I2V."""
    given = LATENT_CHANNELS + (0 if request.image_condition is None else IMAGE_CONDITION_CHANNELS)
    if given == in_channels:
        return
    remedy = "leave image_condition out" if request.image_condition is not None else "give an image_condition"
    raise RequestError(
        f"the experts take {in_channels} channels, the request has {given}: {remedy}, or open other experts"
    )


def _check_noise(noise: torch.Tensor) -> None:
    if noise.ndim != 5 or noise.shape[1] != LATENT_CHANNELS or 0 in noise.shape:
        raise RequestError(f"noise is {list(noise.shape)}: give [B, {LATENT_CHANNELS}, T, h, w]")
    if noise.dtype != torch.float32:
        raise RequestError(f"noise is {noise.dtype}: give float32")
    height, width = noise.shape[-2:]
    if height % PATCH or width % PATCH:
        raise RequestError(
            f"a latent of {height} x {width} does not divide into {PATCH} x {PATCH} patches: "
            f"use a video height and width that are multiples of {8 * PATCH}"
        )


def _check_text(name: str, text: torch.Tensor, batch: int) -> None:
    shape = list(text.shape)
    if text.ndim != 3 or shape[2] != TEXT_WIDTH:
        raise RequestError(f"{name} is {shape}: give a UMT5 embedding [1 or {batch}, tokens, {TEXT_WIDTH}]")
    if shape[1] == 0:
        raise RequestError(f"{name} is {shape}: it has no tokens; encode an empty prompt instead")
    if shape[0] not in (1, batch):
        raise RequestError(f"{name} has {shape[0]} texts for {batch} samples: give 1 or {batch}")
    if not text.is_floating_point():
        raise RequestError(f"{name} is {text.dtype}: give floating point embeddings, not token numbers")


def _check_latent(name: str, value: torch.Tensor, noise: torch.Tensor, channels: int, batches: tuple[int, ...]) -> None:
    fits = value.ndim == 5 and value.shape[0] in batches and value.shape[1] == channels
    if not fits or value.shape[2:] != noise.shape[2:]:
        wanted = [" or ".join(str(b) for b in sorted(set(batches))), channels, *noise.shape[2:]]
        raise RequestError(f"{name} is {list(value.shape)}: give [{', '.join(map(str, wanted))}], to match the noise")
    if not value.is_floating_point():
        raise RequestError(f"{name} is {value.dtype}: give floating point values")
