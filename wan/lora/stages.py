"""Distinct LoRA stacks of an expert over the steps of a run."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from ...schema import StepStrengths
from .apply import LoraStack, stack_identity
from .file import LoraFile


@dataclass(frozen=True, kw_only=True, eq=False)
class LoraStages:
    """Distinct LoRA stacks of an expert, and the stack of each step. LoRAs of strength 0 are left out."""

    stacks: tuple[LoraStack, ...]
    starts: tuple[int, ...]
    """First step of each stretch of steps with the same stack, ascending from 0."""
    numbers: tuple[int, ...]
    """For each of `starts`: index in `stacks`."""

    def number_at(self, step: int) -> int:
        """Return the index in `stacks` of the stack of a step of the whole schedule."""
        return self.numbers[bisect_right(self.starts, step) - 1]


def lora_stages(loras: Sequence[tuple[LoraFile, StepStrengths]]) -> LoraStages:
    """Return the stacks of these LoRAs; one, which may be empty, if no strength differs between steps."""
    starts = sorted({0}.union(*(strengths.starts for _, strengths in loras)))
    stacks: list[LoraStack] = []
    number_of: dict[Hashable, int] = {}
    numbers: list[int] = []
    for step in starts:
        stack = [(lora, strengths.at(step)) for lora, strengths in loras if strengths.at(step) != 0]
        identity = stack_identity(stack)
        if identity not in number_of:
            number_of[identity] = len(stacks)
            stacks.append(stack)
        numbers.append(number_of[identity])
    return LoraStages(stacks=tuple(stacks), starts=tuple(starts), numbers=tuple(numbers))
