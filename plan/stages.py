"""Which steps each stage of a pipeline computes: an expert each first, then equal seconds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise
from math import inf

from .mesh import MeshError


def stage_boundaries(experts_of_steps: Sequence[str], step_costs_s: Sequence[float], stages: int) -> tuple[range, ...]:
    """The steps of each of `stages` stages: together all steps, in order, and no stage without one.

    From two stages on no stage has steps of two experts, so that each worker keeps the one that it has. Among these the
    slowest stage is as short as can be: a queue of videos comes out at its pace.

    Args:
        experts_of_steps: the expert of each step.
        step_costs_s: predicted seconds of each step, 0 or more.
        stages: how many.

    Raises MeshError for more stages than steps, and for fewer (but more than one) than stretches of one expert.
    """
    steps = len(experts_of_steps)
    if len(step_costs_s) != steps:
        raise ValueError(f"{len(step_costs_s)} costs for {steps} steps: give one for each")
    if not 1 <= stages <= steps:
        raise MeshError(f"stage {stages} for {steps} step{'s' * (steps != 1)}: every stage needs one; use 1 to {steps}")
    if stages == 1:
        return (range(steps),)
    stretches = _stretches(experts_of_steps)
    if len(stretches) > stages:
        raise MeshError(
            f"the expert changes {len(stretches) - 1} times, so stages of one expert each are {len(stretches)}, not "
            f"{stages}: use 1, or {len(stretches)} to {steps}"
        )
    cuts = [_Cuts(stretch, step_costs_s) for stretch in stretches]
    for _ in range(stages - len(stretches)):
        max((each for each in cuts if each.divisible), key=lambda each: each.slowest_s).divide()
    return tuple(part for each in cuts for part in each.parts())


def _stretches(experts_of_steps: Sequence[str]) -> list[range]:
    """Steps that follow each other under one expert."""
    ends = list(accumulate(sum(1 for _ in members) for _, members in groupby(experts_of_steps)))
    return [range(first, past) for first, past in zip([0, *ends], ends, strict=False)]


class _Cuts:
    """Steps in a row, cut into ever more parts of which the slowest is as short as can be."""

    def __init__(self, steps: range, costs: Sequence[float]) -> None:
        self._steps = steps
        self._before = [0.0, *accumulate(costs[step] for step in steps)]
        # Per number of parts and of steps from the first: the slowest part at best, and where the last one begins.
        self._best = [[(cost, 0) for cost in self._before]]

    @property
    def divisible(self) -> bool:
        return len(self._best) < len(self._steps)

    @property
    def slowest_s(self) -> float:
        return self._best[-1][-1][0]

    def divide(self) -> None:
        """One part more."""
        fewer, before, parts = self._best[-1], self._before, len(self._best)
        too_few = [(inf, 0)] * (parts + 1)
        self._best.append(
            too_few
            + [
                min((max(fewer[cut][0], before[past] - before[cut]), cut) for cut in range(parts, past))
                for past in range(parts + 1, len(before))
            ]
        )

    def parts(self) -> tuple[range, ...]:
        """The parts, in order."""
        ends = [len(self._steps)]
        for row in reversed(self._best):
            ends.append(row[ends[-1]][1])
        first = self._steps.start
        return tuple(range(first + begin, first + end) for begin, end in pairwise(reversed(ends)))
