"""MagCache: steps that reuse residuals by measured magnitude ratios, and the measurement of these ratios.

As in diffusers' MagCache, a ratio is the mean over tokens of the ratio of the residuals' norms. Lanes of one CFG side
are averaged; context windows count in steps where the step before had them too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, pairwise
from statistics import fmean
from typing import NamedTuple

import torch

from ...plan import SkipRule, skipped_steps
from ...schema import OUTPUT_TOKENS
from ...wan import SkipDecision
from ..loop.parallel import LOCAL_FORWARD, ParallelForward
from .base import CachedPass, LaneName, StepCache, StepLanes, count_texts
from .mag_table import MagTable, model_mark


def known_skips(table: MagTable, rule: SkipRule, steps: StepLanes) -> frozenset[int]:
    """Return the steps that MagCache skips."""
    found = set[int]()
    texts = {step: (expert, count_texts(lanes)) for step, (expert, lanes) in steps.items()}
    for (expert, _), stretch in groupby(sorted(steps), key=texts.__getitem__):
        stage = [step for step, measured in enumerate(table.experts) if measured == expert]
        taken, computed = list(stretch), None
        allowed = skipped_steps(stage, taken, table.ratios, rule)
        # A skipped step adds the residuals of its lanes' names, so the computed step before must have had them all.
        for step in taken:
            lanes = steps[step][1]
            if step in allowed and lanes == computed:
                found.add(step)
            else:
                computed = lanes
    return frozenset(found)


class MagSteps(StepCache):
    """MagCache of a run. It keeps the residuals of the last computed step."""

    def __init__(self, table: MagTable, skipped: frozenset[int], split: ParallelForward) -> None:
        self._table, self._split, self.skipped = table, split, skipped
        self._added: dict[LaneName, torch.Tensor] = {}
        self._checked: set[str] = set()

    def begin(
        self, step: int, expert: str, lanes: Sequence[LaneName], own: Sequence[LaneName], model: torch.nn.Module
    ) -> MagPass:
        """See `StepCache.begin`.

        Raises:
            RequestError: the table was not measured on this expert.
        """
        if expert not in self._checked:
            self._table.check_model(expert, model_mark(model.get_parameter("scale_shift_table")))
            self._checked.add(expert)
        whole = step in self.skipped
        if not whole:
            self._added.clear()
        return MagPass(own, self._added, _residual, self._split, whole=whole)


class Calibration(StepCache):
    """Measurement of the residuals in a run that skips nothing; the cache settings of that run, and its cache."""

    cached_states = 1
    """See `FirstBlockCache.cached_states`; here the input of the blocks."""
    words = "calibration"

    def __init__(self) -> None:
        self._lengths: dict[int, dict[LaneName, torch.Tensor]] = {}
        self.marks: dict[str, tuple[float, ...]] = {}
        """Marks of each expert that ran; see `MagTable.marks`."""

    def start(self, steps: StepLanes, split: ParallelForward = LOCAL_FORWARD) -> Calibration:
        """See `FirstBlockCache.start`."""
        return self

    def begin(
        self, step: int, expert: str, lanes: Sequence[LaneName], own: Sequence[LaneName], model: torch.nn.Module
    ) -> MagPass:
        """See `StepCache.begin`."""
        self.marks.setdefault(expert, model_mark(model.get_parameter("scale_shift_table")))
        lengths = self._lengths[step] = {}
        return MagPass(own, lengths, _residual_lengths, LOCAL_FORWARD)

    def ratios(self, experts: Mapping[int, str]) -> tuple[tuple[float, ...], ...]:
        """Return the ratios by CFG side and step; `experts` has the expert of each step that ran, in order."""
        sides = {name.side for lengths in self._lengths.values() for name in lengths}
        found = [[1.0] for _ in sides]
        for before, step in pairwise(experts):
            for side, ratios in zip(sorted(sides), found, strict=True):
                same = experts[before] == experts[step]
                ratios.append(self._ratio(before, step, side) if same else 1.0)
        return tuple(tuple(ratios) for ratios in found)

    def _ratio(self, before: int, step: int, side: int) -> float:
        """Return the mean ratio of a side's lanes that are in both steps, or 1 if there are none."""
        before_lengths, lengths = self._lengths[before], self._lengths[step]
        shared = [name for name in lengths if name.side == side and name in before_lengths]
        ratios = [float((lengths[name] / (before_lengths[name] + 1e-8)).mean()) for name in shared]
        return fmean(ratios) if ratios else 1.0


class _Entered(NamedTuple):
    """This worker's tokens of a lane before the first block, and the place of the video among them."""

    tokens: torch.Tensor
    video: slice


class MagPass(CachedPass):
    """Forward pass of one step that keeps `measure(hidden, tokens, video)` of each lane, or adds the kept residual."""

    def __init__(
        self,
        names: Sequence[LaneName],
        kept: dict[LaneName, torch.Tensor],
        measure: Callable[[torch.Tensor, torch.Tensor, slice], torch.Tensor],
        split: ParallelForward,
        *,
        whole: bool = False,
    ) -> None:
        self.whole, self.skipped_lanes = whole, len(names) if whole else 0
        self._names, self._kept, self._measure, self._split = names, kept, measure, split
        self._entered: dict[int, _Entered] = {}

    def skip_all(self, lane: int, tokens: torch.Tensor) -> torch.Tensor:
        """See `BlockCache.skip_all`."""
        return self._split.local_tokens(tokens) + self._kept[self._names[lane]]

    def entered(self, lane: int, tokens: torch.Tensor, hidden: torch.Tensor, video: slice) -> None:
        """See `BlockCache.entered`."""
        own = self._split.local_tokens(tokens)
        # A view would keep the tokens of all workers.
        self._entered[lane] = _Entered(own if own is tokens else own.clone(), video)

    def choose(self) -> SkipDecision:
        """See `BlockCache.choose`."""
        return SkipDecision(range(len(self._entered)), True)

    def ended(self, lane: int, hidden: torch.Tensor) -> None:
        """See `BlockCache.ended`."""
        tokens, video = self._entered.pop(lane)
        self._kept[self._names[lane]] = self._measure(hidden, tokens, video)


def _residual(hidden: torch.Tensor, tokens: torch.Tensor, video: slice) -> torch.Tensor:
    """Return the residual of every token: the tokens next to the video are skipped with it."""
    return hidden - tokens


def _residual_lengths(hidden: torch.Tensor, tokens: torch.Tensor, video: slice) -> torch.Tensor:
    """Return the norm of the residual of each token of the video."""
    hidden, tokens = hidden[:, video], tokens[:, video]
    # In pieces of tokens: a whole residual would take as much memory as another hidden state.
    parts = zip(hidden.split(OUTPUT_TOKENS, dim=1), tokens.split(OUTPUT_TOKENS, dim=1), strict=True)
    return torch.cat([(after - before).float().norm(dim=-1) for after, before in parts], dim=1)
