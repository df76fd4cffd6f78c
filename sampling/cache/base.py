"""Step caches: the names under which they keep values, and the base classes of a cache and of one pass with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch

from ...wan import BlockCache, Lane


class LaneName(NamedTuple):
    """Name of a lane: in every step, the same name means the same piece of the same video under the same text."""

    side: int
    """Number of the CFG side: `POSITIVE`, `NEGATIVE` or `NO_CONTEXT`."""
    sample: int
    frames: tuple[int, ...] | None = None
    """Latent frames of the context window; None: the whole video."""


def names_of(lanes: Sequence[Lane]) -> tuple[LaneName, ...]:
    """Return the names of lanes that `LaneInputs.lanes` made."""
    return tuple(lane.name for lane in lanes if isinstance(lane.name, LaneName))


def count_texts(names: Sequence[LaneName]) -> int:
    """Return the number of lanes without windows: one for each text of each sample."""
    return len({(name.side, name.sample) for name in names})


StepLanes: TypeAlias = "Mapping[int, tuple[str, Sequence[LaneName]]]"
"""Maps each step of a run to its expert and its lanes."""


class CachedPass(BlockCache):
    """A `BlockCache` that reports the skipped lanes and visits; it skips nothing unless a subclass does."""

    whole = False
    skips_rest = False
    """True if the planned visits after the first block were skipped."""
    skipped_lanes = 0
    """Number of this worker's lanes that skipped blocks."""

    def skip_all(self, lane: int, tokens: torch.Tensor) -> torch.Tensor:
        raise AssertionError(f"{type(self).__name__} skips no first block")

    def skip_rest(self, lane: int, hidden: torch.Tensor) -> torch.Tensor:
        raise AssertionError(f"{type(self).__name__} skips all blocks or none")


class StepCache:
    """Cache of one run; it keeps tensors of one expert at a time."""

    skipped: frozenset[int] = frozenset()
    """Steps that are known to need no block."""

    def predict(self, step: int, expert: str, lanes: Sequence[Lane]) -> Mapping[int, torch.Tensor]:
        """Return the velocities of lanes that need no forward pass, by their place; the others are computed."""
        return {}

    def begin(
        self, step: int, expert: str, lanes: Sequence[LaneName], own: Sequence[LaneName], model: torch.nn.Module
    ) -> CachedPass | None:
        """Begin a forward pass of a step with these `lanes`, of which this worker computes `own`; None: a whole one."""
        return None

    def record(self, lanes: Sequence[Lane], velocities: Sequence[torch.Tensor]) -> None:
        """Record the velocities of the lanes that were computed in a step."""
