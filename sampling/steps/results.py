"""Result of a run, and of each step on the way to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ...schema.records import StepRecord, Timeline
from .parallel import RunState


@dataclass(frozen=True, kw_only=True, eq=False)
class StepProgress:
    """Argument of `on_step`, called after each step."""

    record: StepRecord
    done: int
    """Steps finished so far."""
    total: int
    """Steps in this run, which may start after step 0 of the schedule."""
    denoised: torch.Tensor | None
    """Current estimate of the final latents: [B, 16, T, h, w] float32, normalised, on the run's
    device. In a run on workers, the estimate for one part, on the CPU. None for a step without a
    preview."""
    state: Callable[[], RunState]
    """Return a CPU copy of the run's state after this step. Nothing is copied without a call."""
    part: int = 0
    """Part of the batch that took the step, if several workers compute one part each. The first has
    the first video."""
    changes: tuple[str, ...] = ()
    """Policy changes so far, as in `Timeline.changes`. Workers report theirs at the end of the
    run."""

    @property
    def index(self) -> int:
        """Step number, 0-based in the whole schedule."""
        return self.record.index


@dataclass(frozen=True, kw_only=True, eq=False)
class DenoiseResult:
    """Result of a run."""

    latents: torch.Tensor
    """[B, 16, T, h, w] float32, normalised, on the device of the request's noise."""
    sigma: float
    """Noise level of the latents: 0, or the end step's level if noise was left over."""
    timeline: Timeline
    predicted: Timeline | None = None
    """Prediction made before the run, if any."""

    def with_notes(self, *notes: str) -> DenoiseResult:
        """Return a copy with nonempty `notes` before the timeline's changes."""
        changes = (*filter(None, notes), *self.timeline.changes)
        return replace(self, timeline=replace(self.timeline, changes=changes))
