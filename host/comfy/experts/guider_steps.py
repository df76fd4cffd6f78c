"""Step, expert and lanes for each model call in a guider run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ....plan.programs import TRAIN_TIMESTEPS
from ....sampling import lane_names, run_shape
from ....sampling.cache import NEAR_SIGMA, MagCache, Stage, StepLanes
from ....sampling.inputs import ExtraTokens
from ....sampling.steps import RequestError, Side, StepWindows, computed_shape
from ....shapes import RunShape
from ....wan import ExpertPair
from ...models import GuiderSettings

SIGMA_TOLERANCE = 1e-5
"""Noise levels closer than this differ only by rounding."""


@dataclass(frozen=True, kw_only=True)
class GuiderSteps:
    """Steps in one run under `settings`.

    Raises RequestError for settings that do not fit these steps.
    """

    settings: GuiderSettings
    sigmas: tuple[float, ...]
    """Steps + 1 noise levels."""
    shape: tuple[int, ...]
    """Latent shape, [B, C, T, h, w]."""
    levels: Sequence[float]
    """Predicted noise level for each model call."""
    tokens: tuple[ExtraTokens, ...] = ()
    """Tokens besides the video tokens, for each CFG side."""

    def __post_init__(self) -> None:
        guidance = self.settings.guidance
        if self.steps < 1:
            return
        guidance.check_length(self.steps)
        levels = self.sigmas[:-1]
        scales = [self.scale(level) for level in levels]
        guidance.check_nag(scales, has_negative=True)
        experts = [self.settings.expert(level) for level in levels]
        self.settings.options.check(
            self.shape[2], self.sigmas, experts, [guidance.sides(scale) for scale in scales]
        )

    @property
    def steps(self) -> int:
        return len(self.sigmas) - 1

    def step(self, sigma: float) -> int:
        """Return the 0-based step for a call at noise level `sigma`.

        Sigmas may also rise, for unsampling.
        """
        descending = self.sigmas[0] >= self.sigmas[-1]
        direction = 1 if descending else -1
        started = (
            step
            for step, level in enumerate(self.sigmas[:-1])
            if direction * (level - sigma) >= -SIGMA_TOLERANCE
        )
        # A level between two steps, as in midpoint samplers, belongs to the earlier step.
        return max(started, default=0)

    def scale(self, sigma: float) -> float:
        """Return the CFG scale for a call at `sigma`."""
        guidance = self.settings.guidance
        expert = self.settings.expert(sigma)
        return guidance.scale(0 if guidance.steps is None else self.step(sigma), expert)

    @property
    def sides(self) -> dict[str, tuple[Side, ...]]:
        """CFG sides by expert, taken from the call with the most sides."""
        sides = dict.fromkeys(("high", "low"), self.settings.guidance.sides(1))
        for level in self.levels:
            expert = self.settings.expert(level)
            sides[expert] = max(
                sides[expert], self.settings.guidance.sides(self.scale(level)), key=len
            )
        return sides

    @property
    def ahead(self) -> list[tuple[str, float, bool]]:
        """Expert and timestep for each call, and True if the expert reads the negative text."""
        nag = self.settings.guidance.nag is not None
        reads_negative = {expert: nag or len(sides) > 1 for expert, sides in self.sides.items()}
        experts = map(self.settings.expert, self.levels)
        return [
            (expert, sigma * TRAIN_TIMESTEPS, reads_negative[expert])
            for expert, sigma in zip(experts, self.levels, strict=True)
        ]

    def windows(self, sigma: float) -> StepWindows | None:
        """Return the context windows for a call."""
        settings = self.settings.options.windows
        if settings is None:
            return None
        return StepWindows(settings, self.step(sigma), self.shape[2])

    @property
    def calls(self) -> StepLanes:
        """Stage and lanes for each call, by call number.

        A sampler may still read the negative at guidance 1.
        """
        return {
            call: (
                Stage(self.settings.expert(level)),
                lane_names(
                    self.shape[0],
                    self.settings.guidance.sides(self.scale(level)),
                    self.windows(level),
                ),
            )
            for call, level in enumerate(self.levels)
        }

    @property
    def computed_shape(self) -> tuple[int, ...]:
        """Largest shape computed in one call; see `sampling.computed_shape`."""
        return computed_shape(self.shape, self.settings.options.windows, range(max(1, self.steps)))

    def run_shape(self, pair: ExpertPair, device: torch.device) -> RunShape:
        """Return the shape of the calls for the planner. There must be at least one call."""
        return run_shape(
            pair,
            self.computed_shape,
            device,
            lanes=self.calls,
            sides={expert: self.extra_tokens(pair, sides) for expert, sides in self.sides.items()},
            cache=self.settings.options.cache,
        )

    def extra_tokens(self, pair: ExpertPair, sides: Sequence[Side]) -> tuple[int, ...]:
        """Return the tokens in a lane besides the video tokens, for each of the CFG `sides`."""
        if not self.tokens:
            return (0,) * len(sides)
        windows = self.settings.options.windows
        reads = pair.reads_reference
        return tuple(
            self.tokens[side].count(self.shape[2], windows, reads_reference=reads) for side in sides
        )

    def check_calls(self, levels: Sequence[float] | None, sampler: str) -> None:
        """Refuse MagCache unless the sampler calls the model once per step at the step's sigma.

        None means unknown calls.
        """
        if not isinstance(self.settings.options.cache, MagCache):
            return
        calls = "has unknown model calls"
        if levels is not None:
            if len(levels) == self.steps and all(map(_near, levels, self.sigmas)):
                return
            calls = f"makes {len(levels)} model calls"
        raise RequestError(
            f"magcache was calibrated with one model call in each of {self.steps} steps, but the "
            f"sampler {sampler} {calls}, or calls at other noise levels: choose euler or another "
            "sampler with one call per step, or the first-block cache"
        )

    def check_call(self, call: int, sigma: float) -> None:
        """Refuse a call without MagCache calibration."""
        if not isinstance(self.settings.options.cache, MagCache):
            return
        if call >= self.steps or not _near(sigma, self.sigmas[call]):
            raise RequestError(
                f"model call {call} is at noise level {sigma:.4f}, but magcache was calibrated "
                f"with one call for each of {self.steps} steps: use the first-block cache"
            )


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= NEAR_SIGMA
