"""First-block cache: lanes skip all further blocks if the first residual hardly changed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...shapes import OUTPUT_TOKENS
from ...wan import SkipDecision
from ..steps.parallel import ParallelForward
from .base import CachedPass, LaneName, PassStart, Stage, StepCache, count_texts


class _LaneState(NamedTuple):
    """A lane's residuals in its last fully computed step: [1, S, dim] for this worker's tokens."""

    step: int
    first: torch.Tensor
    """First block's residual."""
    rest: torch.Tensor
    """Residual over all other blocks."""


class FirstBlockSteps(StepCache):
    """First-block cache for a run.

    Lanes are looked up by name. A context window without residuals from an earlier step is
    computed.
    """

    def __init__(self, threshold: float, split: ParallelForward) -> None:
        self.threshold = threshold
        self.split = split
        self.kept: dict[LaneName, _LaneState] = {}
        self._texts: tuple[Stage, int] | None = None

    def begin(self, start: PassStart) -> FirstBlockPass:
        """See `StepCache.begin`."""
        texts = start.stage, count_texts(start.lanes)
        if self._texts != texts:
            self.kept.clear()
            self._texts = texts
        # Residuals from this step or a later one belong to a failed attempt. Without them, a
        # repeated step decides as the first attempt did.
        # A tuple, because the loop removes entries.
        for name, kept in tuple(self.kept.items()):
            if kept.step >= start.step or name not in start.own:
                del self.kept[name]
        return FirstBlockPass(self, start.step, start.own)


class FirstBlockPass(CachedPass):
    """Forward pass in one step. See `BlockCache`."""

    def __init__(self, cache: FirstBlockSteps, step: int, names: Sequence[LaneName]) -> None:
        self._step = step
        self._names = names
        self._kept = cache.kept
        self._threshold = cache.threshold
        self._split = cache.split
        self._added: dict[int, torch.Tensor] = {}
        self._after_first: dict[int, torch.Tensor] = {}
        self._sums: list[torch.Tensor] = []

    def entered(self, lane: int, tokens: torch.Tensor, hidden: torch.Tensor, video: slice) -> None:
        """See `BlockCache.entered`."""
        added = hidden - self._split.local_tokens(tokens)
        self._added[lane] = added
        self._after_first[lane] = hidden
        kept = self._kept.get(self._names[lane])
        # The sums stay on the device: reading them here would stall between lanes. `choose` reads
        # them all.
        if kept is None:
            # An infinite distance, so that the lane is computed.
            self._sums.append(torch.tensor([math.inf, 1.0], dtype=torch.float64))
        else:
            now = added[:, video]
            before = kept.first[:, video]
            self._sums.append(torch.stack([_abs_distance(now, before), _abs_sum(before)]))

    def choose(self) -> SkipDecision:
        """See `BlockCache.choose`."""
        # One copy per lane: the first copy waits for the device, and later ones wait no more.
        sums = torch.stack([each.to("cpu", torch.float64) for each in self._sums])
        # Every worker decides by the same sums, so all of them skip or visit the same blocks.
        own, every = self._split.all_reduce_sums(sums)
        going = [lane for lane, each in enumerate(own.tolist()) if not self._is_similar(each)]
        visits = not all(self._is_similar(each) for each in every.tolist())
        self.skipped_lanes = len(self._sums) - len(going)
        self.skips_rest = not visits
        for lane in range(len(self._sums)):
            if lane in going:
                # Freed before the other blocks compute: `ended` stores new residuals.
                self._kept.pop(self._names[lane], None)
            else:
                del self._added[lane], self._after_first[lane]
        return SkipDecision(going, visits)

    def skip_rest(self, lane: int, hidden: torch.Tensor) -> torch.Tensor:
        """See `BlockCache.skip_rest`."""
        return hidden + self._kept[self._names[lane]].rest

    def ended(self, lane: int, hidden: torch.Tensor) -> None:
        """See `BlockCache.ended`."""
        # `pop` frees the first block's output with this statement.
        rest = hidden - self._after_first.pop(lane)
        self._kept[self._names[lane]] = _LaneState(self._step, self._added.pop(lane), rest)

    def _is_similar(self, sums: Sequence[float]) -> bool:
        """Return True if the other blocks may be skipped. False if a sum is NaN."""
        distance, size = sums
        return distance < self._threshold * size


def _abs_distance(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the L1 distance in pieces, because a difference is as large as a hidden state."""
    pairs = zip(first.split(OUTPUT_TOKENS, dim=1), second.split(OUTPUT_TOKENS, dim=1), strict=True)
    return torch.stack([_abs_sum(a - b) for a, b in pairs]).sum()


def _abs_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the L1 norm in fp32, because not every device has float64."""
    parts = tensor.split(OUTPUT_TOKENS, dim=1)
    return torch.stack([part.abs().sum(dtype=torch.float32) for part in parts]).sum()
