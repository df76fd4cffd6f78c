"""What comes of a run of workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..plan import Timeline
from ..sampling import DenoiseRequest
from .run_notes import RunNotes
from .tasks import StepTold


@dataclass(frozen=True, kw_only=True, eq=False)
class Ran:
    """A run of workers that is done."""

    latents: torch.Tensor
    """[B, 16, T, h, w] float32, normalised, on the CPU."""
    sigma: float
    """The noise level that the latents are at, as of `DenoiseResult`."""
    timeline: Timeline
    """One record per step, over all its videos; see `over_leaders`. Its changes tell losses and smaller policies."""
    timelines: Mapping[int, Timeline]
    """By rank: what that worker did for it, with times from the beginning of the run or of its queue."""
    restarts: int
    """How many losses were made good by then, those of other requests of its queue among them."""
    wall_s: float
    """Seconds from the beginning of the run, or of its queue, until it was done."""
    gathered_bytes: int
    """Bytes that workers gave each other for it."""
    expert_switches: Mapping[int, int]
    """By rank: how often the worker's expert has changed since it was started."""


def make_ran(
    parts: Sequence[DenoiseRequest], items: Sequence[int], ended: Sequence[StepTold], notes: RunNotes, *, restarts: int
) -> Ran:
    """Put together what came of the parts of a request.

    Args:
        items: the numbers under which they were computed.
        ended: the last step of each of them.
    """
    latents = [told.state.latents for told in ended if told.state is not None]
    assert len(latents) == len(parts) == len(items), "a part did not end"
    return Ran(
        latents=torch.cat(latents),
        sigma=parts[0].course().end_sigma,
        timeline=notes.leaders_timeline(items),
        timelines=notes.timelines(items),
        restarts=restarts,
        wall_s=notes.now_s,
        gathered_bytes=notes.gathered_bytes(items),
        expert_switches=notes.expert_switches(),
    )
