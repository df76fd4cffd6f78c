"""Step caches: lane names, and base classes for a cache and a cached pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch

from ...wan import BlockCache, Lane
from ..steps.sides import Side


class LaneName(NamedTuple):
    """Lane name.

    In every step, the same name means the same piece of the same video under the same text.
    """

    side: Side
    """CFG side."""
    sample: int
    frames: tuple[int, ...] | None = None
    """Latent frames in the context window. None: the whole video."""


def names_of(lanes: Sequence[Lane]) -> tuple[LaneName, ...]:
    """Return the names of lanes from `LaneInputs.lanes`."""
    return tuple(lane.name for lane in lanes if isinstance(lane.name, LaneName))


def count_texts(names: Sequence[LaneName]) -> int:
    """Return the number of lanes without windows: one per text and sample."""
    return len({(name.side, name.sample) for name in names})


class Stage(NamedTuple):
    """Steps with the same expert and LoRA strengths. Nothing is reused in another stage."""

    expert: str
    patch: int = 0
    """See `BlockKey.patch`."""


StepLanes: TypeAlias = "Mapping[int, tuple[Stage, Sequence[LaneName]]]"
"""Stage and lanes by step."""


class CachedPass(BlockCache):
    """`BlockCache` that reports skipped lanes and visits.

    It skips nothing unless a subclass does.
    """

    whole = False
    skips_rest = False
    """True if the planned visits after the first block were skipped."""
    skipped_lanes = 0
    """Number of lanes on this worker that skipped blocks."""

    def skipped_visits(self, blocks: int) -> int:
        """Return the number of visits skipped by this pass, out of `blocks` blocks."""
        if self.whole:
            return blocks
        return blocks - 1 if self.skips_rest else 0

    def skip_all(self, lane: int, tokens: torch.Tensor) -> torch.Tensor:
        raise AssertionError(f"{type(self).__name__} skips no first block")

    def skip_rest(self, lane: int, hidden: torch.Tensor) -> torch.Tensor:
        raise AssertionError(f"{type(self).__name__} skips all blocks or none")


class PassStart(NamedTuple):
    """Start of a forward pass in a step, with the lanes to compute."""

    step: int
    stage: Stage
    lanes: Sequence[LaneName]
    own: Sequence[LaneName]
    """This worker's part of `lanes`."""
    model: torch.nn.Module


class StepCache:
    """Cache for one run. It keeps tensors for one stage at a time."""

    skipped: frozenset[int] = frozenset()
    """Steps known to need no block."""

    def predict(self, step: int, stage: Stage, lanes: Sequence[Lane]) -> Mapping[int, torch.Tensor]:
        """Return velocities for lanes that need no forward pass, by lane index.

        The other lanes are computed.
        """
        return {}

    def begin(self, start: PassStart) -> CachedPass | None:
        """Begin a forward pass in a step. None: compute all blocks."""
        return None

    def record(self, lanes: Sequence[Lane], velocities: Sequence[torch.Tensor]) -> None:
        """Record the velocities of lanes computed in a step."""
