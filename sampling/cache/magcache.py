"""MagCache: residual reuse by measured magnitude ratios, and the measurement of ratios.

As in diffusers' MagCache, a ratio is the mean over tokens of the ratio of residual norms. Lanes on
one CFG side are averaged. A context window counts in a step if the previous step had it too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, pairwise
from statistics import fmean

import torch

from ...plan.programs import SkipRule, skipped_steps
from ...shapes import OUTPUT_TOKENS
from ...wan import SkipDecision
from ..steps.parallel import LOCAL_FORWARD, ParallelForward
from ..steps.sides import Side
from .base import CachedPass, LaneName, PassStart, StepCache, StepLanes, count_texts
from .mag_table import MagTable, model_mark


def known_skips(table: MagTable, rule: SkipRule, steps: StepLanes) -> frozenset[int]:
    """Return the steps skipped by MagCache."""
    found = set[int]()
    texts = {step: (stage, count_texts(lanes)) for step, (stage, lanes) in steps.items()}
    for (stage, _), stretch in groupby(sorted(steps), key=texts.__getitem__):
        measured = [step for step, expert in enumerate(table.experts) if expert == stage.expert]
        taken = list(stretch)
        computed = None
        # All steps with this expert count, because the retention is a share of them.
        allowed = skipped_steps(measured, taken, table.ratios, rule)
        # A skipped step adds residuals by lane name, so the last computed step must have had all
        # these lanes.
        for step in taken:
            lanes = steps[step][1]
            if step in allowed and lanes == computed:
                found.add(step)
            else:
                computed = lanes
    return frozenset(found)


class MagSteps(StepCache):
    """MagCache for a run. It keeps the residuals from the last computed step."""

    def __init__(self, table: MagTable, skipped: frozenset[int], split: ParallelForward) -> None:
        self._table = table
        self._split = split
        self.skipped = skipped
        self._added: dict[LaneName, torch.Tensor] = {}
        self._checked: set[str] = set()

    def begin(self, start: PassStart) -> MagPass:
        """See `StepCache.begin`.

        Raises:
            RequestError: the table was not measured on this expert.
        """
        expert = start.stage.expert
        if expert not in self._checked:
            self._table.check_model(expert, model_mark(start.model))
            self._checked.add(expert)
        whole = start.step in self.skipped
        if not whole:
            # Freed before the pass, because it measures all lanes again.
            self._added.clear()
        return MagPass(start.own, self._added, _residual, self._split, whole=whole)


class Calibration(StepCache):
    """Residual measurement in a run that skips nothing.

    An instance is both the cache settings and the cache.
    """

    cached_states = 1
    """See `FirstBlockCache.cached_states`. Here the input to the blocks."""
    words = "calibration"

    def __init__(self) -> None:
        self._lengths: dict[int, dict[LaneName, torch.Tensor]] = {}
        self.marks: dict[str, tuple[float, ...]] = {}
        """Marks by expert that ran. See `MagTable.marks`."""

    def start(self, steps: StepLanes, split: ParallelForward = LOCAL_FORWARD) -> Calibration:
        """See `FirstBlockCache.start`."""
        return self

    def begin(self, start: PassStart) -> MagPass:
        """See `StepCache.begin`."""
        self.marks.setdefault(start.stage.expert, model_mark(start.model))
        # A new dict, so a repeated attempt does not keep lengths of the failed one.
        lengths = self._lengths[start.step] = {}
        return MagPass(start.own, lengths, _residual_lengths, LOCAL_FORWARD)

    def ratios(self, experts: Mapping[int, str]) -> tuple[tuple[float, ...], ...]:
        """Return the ratios by CFG side and step.

        `experts` has the expert by step for all steps that ran, in order.
        """
        sides = {name.side for lengths in self._lengths.values() for name in lengths}
        found = [[1.0] for _ in sides]
        for before, step in pairwise(experts):
            for side, ratios in zip(sorted(sides), found, strict=True):
                ratio = 1.0
                if experts[before] == experts[step]:
                    ratio = self._ratio(before, step, side)
                ratios.append(ratio)
        return tuple(tuple(ratios) for ratios in found)

    def _ratio(self, before: int, step: int, side: Side) -> float:
        """Return the mean ratio over a side's lanes in both steps, or 1 without lanes."""
        before_lengths = self._lengths[before]
        lengths = self._lengths[step]
        shared = [name for name in lengths if name.side == side and name in before_lengths]
        # diffusers adds the same 1e-8 against a division by zero.
        ratios = [float((lengths[name] / (before_lengths[name] + 1e-8)).mean()) for name in shared]
        return fmean(ratios or [1.0])


class MagPass(CachedPass):
    """Forward pass in one step that keeps a measure of each lane, or adds the kept residual.

    The measure is `measure(hidden, tokens, video)`.
    """

    def __init__(
        self,
        names: Sequence[LaneName],
        kept: dict[LaneName, torch.Tensor],
        measure: Callable[[torch.Tensor, torch.Tensor, slice], torch.Tensor],
        split: ParallelForward,
        *,
        whole: bool = False,
    ) -> None:
        self.whole = whole
        if whole:
            self.skipped_lanes = len(names)
        self._names = names
        self._kept = kept
        self._measure = measure
        self._split = split
        self._entered: dict[int, tuple[torch.Tensor, slice]] = {}
        """A lane's tokens on this worker before the first block, and the video's place among
        them."""

    def skip_all(self, lane: int, tokens: torch.Tensor) -> torch.Tensor:
        """See `BlockCache.skip_all`."""
        return self._split.local_tokens(tokens) + self._kept[self._names[lane]]

    def entered(self, lane: int, tokens: torch.Tensor, hidden: torch.Tensor, video: slice) -> None:
        """See `BlockCache.entered`."""
        own = self._split.local_tokens(tokens)
        if own is not tokens:
            own = own.clone()  # a view would keep all workers' tokens
        self._entered[lane] = (own, video)

    def choose(self) -> SkipDecision:
        """See `BlockCache.choose`."""
        return SkipDecision(range(len(self._entered)), True)

    def ended(self, lane: int, hidden: torch.Tensor) -> None:
        """See `BlockCache.ended`."""
        tokens, video = self._entered.pop(lane)
        self._kept[self._names[lane]] = self._measure(hidden, tokens, video)


def _residual(hidden: torch.Tensor, tokens: torch.Tensor, video: slice) -> torch.Tensor:
    """Return every token's residual: tokens next to the video are skipped with it."""
    return hidden - tokens


def _residual_lengths(hidden: torch.Tensor, tokens: torch.Tensor, video: slice) -> torch.Tensor:
    """Return the residual norm of each video token."""
    # In pieces of tokens: a whole residual would take as much memory as another hidden state.
    parts = zip(
        hidden[:, video].split(OUTPUT_TOKENS, dim=1),
        tokens[:, video].split(OUTPUT_TOKENS, dim=1),
        strict=True,
    )
    return torch.cat([(after - before).float().norm(dim=-1) for after, before in parts], dim=1)
