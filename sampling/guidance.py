"""What may be said of guidance beside the scales of a pair: a scale for each step, and a negative text held inside."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from ..wan import Nag
from .errors import RequestError


@dataclass(frozen=True, kw_only=True)
class Guidance:
    """The guidance of a run, where it is more than one scale for each expert."""

    steps: tuple[float, ...] | None = None
    """See `DenoiseRequest.guidance_steps`."""
    nag: Nag | None = None
    """See `DenoiseRequest.nag`."""


def parse_scales(text: str) -> tuple[float, ...] | None:
    """Numbers with commas or spaces between them, as "4, 4, 3.5"; None where there are none.

    Raises RequestError for anything else.
    """
    words = [word for word in re.split(r"[\s,;]+", text) if word]
    scales = []
    for word in words:
        try:
            scale = float(word)
        except ValueError:
            scale = math.nan
        if not math.isfinite(scale):
            raise RequestError(f"guidance_steps has {word!r}: give numbers with commas between, as in 4, 4, 3.5, 1")
        scales.append(scale)
    return tuple(scales) or None
