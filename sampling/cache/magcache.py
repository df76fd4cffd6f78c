"""MagCache: steps that reuse residuals by measured magnitude ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import torch

from ...plan import skipped_steps
from ...wan import SkipDecision
from ..loop.lanes import LaneName, count_texts
from ..loop.parallel import ParallelForward
from .mag_table import model_mark
from .settings import MagCache


class MagSteps:
    """MagCache of a run; see `StepCache`. It keeps the residuals of the last computed step."""

    def __init__(self, settings: MagCache, split: ParallelForward) -> None:
        self._settings, self._split = settings, split
        self._skipped: frozenset[int] = frozenset()
        self._added: dict[int, torch.Tensor] = {}
        self._checked: set[str] = set()

    def known_skips(self, steps: Mapping[int, tuple[str, Sequence[LaneName]]]) -> frozenset[int]:
        """See `StepCache.known_skips`."""
        table, found = self._settings.table, set[int]()
        texts = {step: (expert, count_texts(lanes)) for step, (expert, lanes) in steps.items()}
        for (expert, _), stretch in groupby(sorted(steps), key=texts.__getitem__):
            stage = [step for step, measured in enumerate(table.experts) if measured == expert]
            taken, computed = list(stretch), None
            allowed = skipped_steps(stage, taken, table.ratios, self._settings.rule)
            # A skipped step adds the residuals of its lanes' names, so the computed step before must have had them all.
            for step in taken:
                lanes = steps[step][1]
                if step in allowed and lanes == computed:
                    found.add(step)
                else:
                    computed = lanes
        self._skipped = frozenset(found)
        return self._skipped

    def begin(
        self, step: int, expert: str, lanes: Sequence[LaneName], own: Sequence[LaneName], model: torch.nn.Module
    ) -> MagPass:
        """See `StepCache.begin`.

        Raises:
            RequestError: the table was not measured on this expert.
        """
        if expert not in self._checked:
            self._settings.table.check_model(expert, model_mark(model.get_parameter("scale_shift_table")))
            self._checked.add(expert)
        whole = step in self._skipped
        if not whole:
            self._added.clear()
        return MagPass(self._added, self._split, whole=whole)


class MagPass:
    """Forward pass of one step; see `BlockCache`."""

    skips_rest = False

    def __init__(self, added: dict[int, torch.Tensor], split: ParallelForward, *, whole: bool) -> None:
        self.whole = whole
        self._added, self._split = added, split
        self._entered: dict[int, torch.Tensor] = {}
        self.skipped_lanes = len(added) if whole else 0

    def skip_all(self, lane: int, tokens: torch.Tensor) -> torch.Tensor:
        """See `BlockCache.without_blocks`."""
        return self._split.local_tokens(tokens) + self._added[lane]

    def entered(self, lane: int, tokens: torch.Tensor, hidden: torch.Tensor) -> None:
        """See `BlockCache.entered`."""
        own = self._split.local_tokens(tokens)
        self._entered[lane] = own if own is tokens else own.clone()  # a view would keep the tokens of all workers

    def choose(self) -> SkipDecision:
        """See `BlockCache.choose`."""
        return SkipDecision(range(len(self._entered)), True)

    def skip_rest(self, lane: int, hidden: torch.Tensor) -> torch.Tensor:
        """See `BlockCache.from_first`."""
        raise AssertionError("MagCache skips all blocks or none")

    def ended(self, lane: int, hidden: torch.Tensor) -> None:
        """See `BlockCache.ended`."""
        self._added[lane] = hidden - self._entered.pop(lane)
