"""Run guidance: CFG scales, NAG, and the scale for context tokens."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ...wan import Nag
from .errors import RequestError
from .sides import Side, sides_at


@dataclass(frozen=True, kw_only=True)
class Guidance:
    """Guidance for a run. Raises RequestError for infinite numbers and NaN."""

    scales: tuple[float, float] = (1.0, 1.0)
    """CFG scale for the (high, low) expert. 1 computes no negative lane."""
    steps: tuple[float, ...] | None = None
    """CFG scale by step of the schedule, in place of `scales`. The last one applies to all later
    steps."""
    nag: Nag | None = None
    """NAG between negative and positive text in steps with guidance 1. None: off."""
    context: float = 1.0
    """Scale for the context tokens in guided steps. It multiplies their effect on the negative
    text's velocity. This needs lanes with the negative text and without context. 1 computes
    none."""

    def __post_init__(self) -> None:
        is_pair = not isinstance(self.scales, int | float) and len(self.scales) == 2
        if not is_pair or not all(map(math.isfinite, self.scales)):
            raise RequestError(
                f"guidance {self.scales}: give two numbers, for the high and the low expert"
            )
        if self.steps is not None and not (self.steps and all(map(math.isfinite, self.steps))):
            raise RequestError(
                f"guidance_steps {tuple(self.steps)}: give a number for each step, the last one "
                "for the rest"
            )
        if not math.isfinite(self.context):
            raise RequestError(
                f"context_guidance is {self.context}: give a finite number; 1 computes no lanes "
                "without context"
            )

    @staticmethod
    def parse_steps(text: str) -> tuple[float, ...] | None:
        """Parse numbers separated by commas or spaces, as in "4, 4, 3.5".

        Returns None if there are none.

        Raises:
            RequestError: a word is not a finite number.
        """
        words = [word for word in re.split(r"[\s,;]+", text) if word]
        scales = []
        for word in words:
            try:
                scale = float(word)
            except ValueError:
                # NaN is refused below, with the word in the message.
                scale = math.nan
            if not math.isfinite(scale):
                raise RequestError(
                    f"guidance_steps has {word!r}: give numbers with commas between, as in 4, 4, "
                    "3.5, 1"
                )
            scales.append(scale)
        return tuple(scales) or None

    @property
    def guided(self) -> bool:
        """True if a step may have negative lanes."""
        return any(scale != 1 for scale in self.steps or self.scales)

    @property
    def needs_negative(self) -> bool:
        """True if a step may need the negative text."""
        return self.guided or self.nag is not None

    def scale(self, step: int, expert: str) -> float:
        """Return the CFG scale in a step with the expert "high" or "low"."""
        if self.steps is not None:
            return self.steps[min(step, len(self.steps) - 1)]
        # False is index 0 (high), True is 1 (low).
        return self.scales[expert == "low"]

    def sides(self, scale: float) -> tuple[Side, ...]:
        """Return the CFG sides in a step with this scale, in lane order."""
        return sides_at(scale, self.context)

    def most_sides(self, scales: Sequence[float]) -> tuple[Side, ...]:
        """Return the CFG sides in the step with most sides, among steps with these scales."""
        # A run may have no step of this expert.
        return max(map(self.sides, scales), key=len, default=sides_at(1))

    def check_length(self, steps: int) -> None:
        """Raise RequestError if there are scales for more than `steps` steps."""
        if self.steps is not None and len(self.steps) > steps:
            raise RequestError(
                f"guidance_steps has {len(self.steps)} numbers for {steps} steps: "
                f"remove the last {len(self.steps) - steps}"
            )

    def check_nag(self, scales: Sequence[float], *, has_negative: bool) -> None:
        """Raise RequestError if NAG lacks a negative text, or `scales` has no guidance of 1."""
        if self.nag is None:
            return
        if not has_negative:
            raise RequestError("NAG needs a negative text: give one, or remove NAG")
        if all(scale != 1 for scale in scales):
            raise RequestError(
                "NAG acts in steps of guidance 1, and this run has none: set the guidance of an "
                "expert or a step to 1, or remove NAG"
            )
