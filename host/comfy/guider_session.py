"""Session of a guider: its settings, the step of each model call, its policy and predicted timeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ...plan import TRAIN_TIMESTEPS, OffloadJob, expert_at
from ...sampling import (
    NEAR_SIGMA,
    CacheSettings,
    Guidance,
    LaneInputs,
    LaneName,
    MagCache,
    ModelCalls,
    RequestError,
    RunPolicy,
    StepLanes,
    StepWindows,
    check_guidance,
    check_nag,
    check_windows,
    computed_shape,
    lane_names,
    offload_job,
)
from ...schema import ContextWindows
from ...telemetry import Recorder
from ...wan import ExpertPair
from ..run_events import RunEvents


@dataclass(frozen=True, kw_only=True)
class GuiderSettings:
    """Boundary, guidance, step cache and context windows. Raises RequestError for a ratio outside 0 to 1."""

    boundary_ratio: float
    guidance: tuple[float, float]
    """CFG scale of the (high, low) expert; 1 computes no negative lane."""
    more_guidance: Guidance = field(default_factory=Guidance)
    """NAG, and a scale for each step, which takes precedence over `guidance`."""
    cache: CacheSettings | None = None
    """Reuse of results of earlier model calls."""
    windows: ContextWindows | None = None
    """Context windows for a video that is too long for the experts."""

    def __post_init__(self) -> None:
        if not 0 <= self.boundary_ratio <= 1:
            raise RequestError(
                f"boundary ratio {self.boundary_ratio:g}: give 0 to 1 (Wan2.2: 0.875 for text, 0.9 for images)"
            )

    def expert(self, sigma: float) -> str:
        """Return the expert of a call at noise level `sigma`."""
        return expert_at(sigma * TRAIN_TIMESTEPS, self.boundary_ratio)

    def scale(self, expert: str) -> float:
        """Return the CFG scale of an expert; per-step scales take precedence."""
        return self.guidance[0 if expert == "high" else 1]


SIGMA_TOLERANCE = 1e-5
"""Noise levels closer than this differ only by rounding."""


@dataclass(frozen=True, kw_only=True)
class GuiderSteps:
    """The steps of one run under `settings`. Raises RequestError for settings that do not fit these steps."""

    settings: GuiderSettings
    sigmas: tuple[float, ...]
    """Steps + 1 noise levels."""
    frames: int
    """Latent frames."""

    def __post_init__(self) -> None:
        guidance, steps = self.settings.more_guidance, self.steps
        if steps < 1:
            return
        check_guidance(self.settings.guidance, guidance.steps, steps=steps)
        levels = self.sigmas[:-1]
        scales = [self.scale(level) for level in levels]
        if guidance.nag is not None:
            check_nag(scales, has_negative=True)
        windows, cache = self.settings.windows, self.settings.cache
        if windows is not None:
            mag_steps = range(steps) if isinstance(cache, MagCache) else ()
            check_windows(windows, self.frames, mag_steps=mag_steps)
        if isinstance(cache, MagCache):
            cache.table.check_steps(self.sigmas, [self.settings.expert(level) for level in levels], scales)

    @property
    def steps(self) -> int:
        return len(self.sigmas) - 1

    def step(self, sigma: float) -> int:
        """Return the 0-based step of a call at noise level `sigma`; sigmas may also rise, for unsampling."""
        descending = self.sigmas[0] >= self.sigmas[-1]
        started = [
            step
            for step, level in enumerate(self.sigmas[:-1])
            if (level >= sigma - SIGMA_TOLERANCE if descending else level <= sigma + SIGMA_TOLERANCE)
        ]
        return started[-1] if started else 0

    def scale(self, sigma: float) -> float:
        """Return the CFG scale of a call at `sigma`."""
        scales = self.settings.more_guidance.steps
        if scales is None:
            return self.settings.scale(self.settings.expert(sigma))
        return scales[min(self.step(sigma), len(scales) - 1)]

    def guided(self, levels: Sequence[float]) -> dict[str, bool]:
        """Return, for each expert, True if some of its calls at these levels have negative lanes."""
        guided = {"high": False, "low": False}
        for level in levels:
            guided[self.settings.expert(level)] |= self.scale(level) != 1
        return guided

    def needs_negative(self, levels: Sequence[float]) -> dict[str, bool]:
        """Return, for each expert, True if some of its calls at these levels read the negative text."""
        nag = self.settings.more_guidance.nag is not None
        return {expert: guided or nag for expert, guided in self.guided(levels).items()}

    def windows(self, sigma: float) -> StepWindows | None:
        """Return the context windows of a call."""
        settings = self.settings.windows
        return None if settings is None else StepWindows(settings, self.step(sigma), self.frames)

    def lanes(self, level: float, samples: int) -> tuple[LaneName, ...]:
        """Return the lanes of a call at `level`; a sampler may still read the negative at guidance 1."""
        return lane_names(samples, with_negative=self.scale(level) != 1, windows=self.windows(level))

    def calls(self, levels: Sequence[float], samples: int) -> StepLanes:
        """Return the expert and the lanes of each future call, by its number."""
        return {call: (self.settings.expert(level), self.lanes(level, samples)) for call, level in enumerate(levels)}

    def computed_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the largest shape that a call computes; see `sampling.computed_shape`."""
        return computed_shape(shape, self.settings.windows, range(max(1, self.steps)))

    def check_calls(self, levels: Sequence[float] | None, sampler: str) -> None:
        """Refuse MagCache unless the sampler calls the model once per step at the step's sigma; None: unknown calls."""
        if not isinstance(self.settings.cache, MagCache):
            return
        if levels is not None and len(levels) == self.steps and all(map(_near, levels, self.sigmas)):
            return
        calls = "has unknown model calls" if levels is None else f"makes {len(levels)} model calls"
        raise RequestError(
            f"magcache was calibrated with one model call in each of {self.steps} steps, but the sampler {sampler} "
            f"{calls}, or calls at other noise levels: choose euler or another sampler with one call per step, or the "
            "first-block cache"
        )

    def check_call(self, call: int, sigma: float) -> None:
        """Refuse a call that MagCache was not calibrated for."""
        if isinstance(self.settings.cache, MagCache) and not (call < self.steps and _near(sigma, self.sigmas[call])):
            raise RequestError(
                f"model call {call} is at noise level {sigma:.4f}, but magcache was calibrated with one call for each "
                f"of {self.steps} steps: use the first-block cache"
            )


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= NEAR_SIGMA


@dataclass(frozen=True, kw_only=True, eq=False)
class GuiderRunState:
    """State of one run, shared by its model calls."""

    inputs: LaneInputs
    model_calls: ModelCalls
    policy: RunPolicy
    recorder: Recorder
    events: RunEvents
    shape: torch.Size
    """Shape of the latents, [B, C, T, h, w]."""
    guider_steps: GuiderSteps
    sampler: str
    """Name of the sampler."""


def guider_job(
    pair: ExpertPair, guider_steps: GuiderSteps, levels: Sequence[float], shape: Sequence[int], device: torch.device
) -> OffloadJob:
    """Return the job of calls at `levels`, at least one, on latents of `shape` [B, C, T, h, w]."""
    calls = guider_steps.calls(levels, shape[0]).values()
    return offload_job(
        pair,
        guider_steps.computed_shape(shape),
        device,
        experts_of_steps=[expert for expert, _ in calls],
        lanes_of_steps=[len(names) for _, names in calls],
        guided=guider_steps.guided(levels),
        cache=guider_steps.settings.cache,
    )
