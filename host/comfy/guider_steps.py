"""Settings of a guider, and the step that each call of the model belongs to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...plan import TRAIN_TIMESTEPS, expert_at
from ...sampling import (
    NEAR_SIGMA,
    CacheSettings,
    Guidance,
    LaneName,
    MagCache,
    RequestError,
    StepWindows,
    check_guidance,
    check_nag,
    check_windows,
    check_windows_stay,
    computed_shape,
    lane_names,
)
from ...schema import ContextWindows


@dataclass(frozen=True, kw_only=True)
class GuiderSettings:
    """When each expert runs, and how strongly it follows the prompt. Raises `RequestError` for another ratio."""

    boundary_ratio: float
    guidance: tuple[float, float]
    """CFG scale of the (high, low) expert; 1 computes no negative lane."""
    more_guidance: Guidance = field(default_factory=Guidance)
    """A scale for each step, which wins over `guidance`, and NAG."""
    cache: CacheSettings | None = None
    """What calls of the model may take over from the ones before."""
    windows: ContextWindows | None = None
    """How a video that is too long for the experts is looked at in pieces."""

    def __post_init__(self) -> None:
        if not 0 <= self.boundary_ratio <= 1:
            raise RequestError(
                f"boundary ratio {self.boundary_ratio:g}: give 0 to 1 (Wan2.2: 0.875 for text, 0.9 for images)"
            )

    def expert(self, sigma: float) -> str:
        """The expert of a call at noise level `sigma`."""
        return expert_at(sigma * TRAIN_TIMESTEPS, self.boundary_ratio)

    def scale(self, expert: str) -> float:
        """The CFG scale of an expert, where no step has one of its own."""
        return self.guidance[0 if expert == "high" else 1]


SAME_LEVEL = 1e-5
"""Noise levels nearer than this are the same, come to by two ways of reckoning."""


@dataclass(frozen=True, kw_only=True)
class GuiderSteps:
    """The steps of one run under `settings`. Raises RequestError for settings that do not fit these steps."""

    settings: GuiderSettings
    sigmas: tuple[float, ...]
    """Steps + 1 noise levels."""
    frames: int
    """Of the latent."""

    def __post_init__(self) -> None:
        said, steps = self.settings.more_guidance, self.steps
        if steps < 1:
            return
        check_guidance(self.settings.guidance, said.steps, steps=steps)
        levels = self.sigmas[:-1]
        scales = [self.scale(level) for level in levels]
        if said.nag is not None:
            check_nag(scales, has_negative=True)
        windows, cache = self.settings.windows, self.settings.cache
        if windows is not None:
            check_windows(windows, self.frames)
        if isinstance(cache, MagCache):
            cache.table.check_steps(self.sigmas, [self.settings.expert(level) for level in levels], scales)
            if windows is not None:
                check_windows_stay(windows, range(steps), self.frames)

    @property
    def steps(self) -> int:
        return len(self.sigmas) - 1

    def step(self, sigma: float) -> int:
        """The step of a call at noise level `sigma`, 0-based; sigmas may fall, as always, or rise."""
        falls = self.sigmas[0] >= self.sigmas[-1]
        begun = [
            step
            for step, level in enumerate(self.sigmas[:-1])
            if (level >= sigma - SAME_LEVEL if falls else level <= sigma + SAME_LEVEL)
        ]
        return begun[-1] if begun else 0

    def scale(self, sigma: float) -> float:
        """The CFG scale of a call."""
        scales = self.settings.more_guidance.steps
        if scales is None:
            return self.settings.scale(self.settings.expert(sigma))
        return scales[min(self.step(sigma), len(scales) - 1)]

    def guided(self, levels: Sequence[float]) -> dict[str, bool]:
        """Whether calls of each expert at these levels have negative lanes."""
        found = {"high": False, "low": False}
        for level in levels:
            found[self.settings.expert(level)] |= self.scale(level) != 1
        return found

    def reads_negative(self, levels: Sequence[float]) -> dict[str, bool]:
        """Whether calls of each expert at these levels read the negative text."""
        nag = self.settings.more_guidance.nag is not None
        return {expert: guided or nag for expert, guided in self.guided(levels).items()}

    def windows(self, sigma: float) -> StepWindows | None:
        """The context windows of a call."""
        settings = self.settings.windows
        return None if settings is None else StepWindows(settings, self.step(sigma), self.frames)

    def lanes(self, level: float, samples: int) -> tuple[LaneName, ...]:
        """Of a call at that level, unless its sampler reads the negative where guidance is 1."""
        return lane_names(samples, with_negative=self.scale(level) != 1, windows=self.windows(level))

    def calls(self, levels: Sequence[float], samples: int) -> Mapping[int, tuple[str, Sequence[LaneName]]]:
        """Of each call to come, by number: its expert and its lanes."""
        return {call: (self.settings.expert(level), self.lanes(level, samples)) for call, level in enumerate(levels)}

    def computed_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """See `sampling.windows.computed_shape`."""
        return computed_shape(shape, self.settings.windows, range(max(1, self.steps)))

    def check_calls(self, asked: Sequence[float] | None, sampler: str) -> None:
        """Refuse a cache by magnitudes for a sampler whose calls are not known, or are not one for each step."""
        if not isinstance(self.settings.cache, MagCache):
            return
        if asked is not None and len(asked) == self.steps and all(map(_near, asked, self.sigmas)):
            return
        calls = "when it calls the model is not known" if asked is None else f"it calls the model {len(asked)} times"
        raise RequestError(
            f"a cache by magnitudes was measured with one call of the model in each of {self.steps} steps, and of the "
            f"sampler {sampler} {calls}, or at other noise levels: choose euler or another sampler that calls once in "
            "a step, or the first-block cache"
        )

    def check_call(self, call: int, sigma: float) -> None:
        """Refuse a call that is not the one that a cache by magnitudes reckons with."""
        if isinstance(self.settings.cache, MagCache) and not (call < self.steps and _near(sigma, self.sigmas[call])):
            raise RequestError(
                f"call {call} of the model is at noise level {sigma:.4f}, and a cache by magnitudes reckons with one "
                f"call for each of {self.steps} steps: use the first-block cache"
            )


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= NEAR_SIGMA
