"""Measured magnitude ratios of a model, and the conditions that they are valid for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import torch

from ..errors import RequestError
from ..inputs.sides import NEGATIVE, NO_CONTEXT, POSITIVE

FORMAT = "wanstream magnitude ratios 1"
"""Identifies the file format."""

NEAR_SIGMA = 1e-4
"""Largest difference between equal noise levels."""
MARK_VALUES = 8
"""Number of weights in an expert's mark."""
NEAR_MARK = 0.02
"""Largest relative difference between equal marks: files store the same weights as fp32, bf16 or fp16."""

SIDE_WORDS = {NEGATIVE: "guidance", NO_CONTEXT: "context_guidance"}
"""Settings that add lanes of these CFG sides."""
CALIBRATE_REMEDY = "calibrate a table for this run with Wan Cache Calibration, or use the first-block cache"


@dataclass(frozen=True, kw_only=True)
class MagTable:
    """Magnitude of each step's residual relative to the step before, for one schedule and model.

    Raises:
        RequestError: the numbers are inconsistent or out of range.
    """

    sigmas: tuple[float, ...]
    """Noise levels of the schedule: steps + 1 values."""
    experts: tuple[str, ...]
    """Expert of each step."""
    ratios: tuple[tuple[float, ...], ...]
    """Ratios by step, for each CFG side from the positive one on that had lanes.

    1 in the first step of an expert, and where there were no such lanes in that step or the one before.
    """
    marks: Mapping[str, tuple[float, ...]]
    """Some weights of each measured expert, which identify it."""
    source: str = ""
    """Description of the calibration run."""

    def __post_init__(self) -> None:
        lengths = {len(each) for each in self.ratios} | {len(self.experts), len(self.sigmas) - 1}
        if len(lengths) != 1 or not self.ratios:
            raise RequestError(
                f"{len(self.sigmas)} noise levels, {len(self.experts)} experts and "
                f"{[len(each) for each in self.ratios]} ratios are not a table of magnitude ratios: calibrate it again"
            )
        if not all(math.isfinite(ratio) and ratio > 0 for each in self.ratios for ratio in each):
            raise RequestError("a magnitude ratio is not a number above 0: calibrate the table again")
        if not all(map(math.isfinite, chain(self.sigmas, *self.marks.values()))):
            raise RequestError("a noise level or a mark of an expert is NaN or infinite: calibrate the table again")

    def check_steps(self, sigmas: Sequence[float], experts: Sequence[str], sides: Sequence[Sequence[int]]) -> None:
        """Raise RequestError unless the table was measured under these conditions.

        Args:
            sigmas: all noise levels of the schedule.
            experts: expert of each step that the run takes, from the first one of the schedule on.
            sides: CFG sides of each of these steps, all of which must have been measured.
        """
        steps, measured = len(sigmas) - 1, len(self.experts)
        if steps != measured:
            raise RequestError(
                f"the cache was calibrated for {measured} steps, this run has {steps}: {CALIBRATE_REMEDY}"
            )
        for step, (own, other) in enumerate(zip(sigmas, self.sigmas, strict=True)):
            if abs(own - other) > NEAR_SIGMA:
                raise RequestError(
                    f"the cache was calibrated for noise level {other:.4f} before step {step}, this run has {own:.4f} "
                    f"there (another schedule or flow shift): {CALIBRATE_REMEDY}"
                )
        for step, (expert, known) in enumerate(zip(experts, self.experts, strict=False)):
            if expert != known:
                raise RequestError(
                    f"the cache was calibrated with the {known}-noise expert in step {step}, this run takes the "
                    f"{expert}-noise expert there: {CALIBRATE_REMEDY}"
                )
        for step in range(1, len(sides)):
            lasting = set(sides[step - 1]) & set(sides[step]) if experts[step - 1] == experts[step] else set()
            if missing := [side for side in sorted(lasting) if not self._has(side, step)]:
                raise RequestError(
                    f"the cache was calibrated without {SIDE_WORDS[missing[0]]} around step {step}, and this run has "
                    f"it there: {CALIBRATE_REMEDY}"
                )

    def check_model(self, expert: str, mark: Sequence[float]) -> None:
        """Raise RequestError unless the expert with that mark was measured."""
        known = self.marks.get(expert)
        if known is None or len(known) != len(mark):
            raise RequestError(f"the cache was not calibrated for the {expert}-noise expert: {CALIBRATE_REMEDY}")
        if any(abs(own - other) > NEAR_MARK * abs(other) + NEAR_SIGMA for own, other in zip(mark, known, strict=True)):
            raise RequestError(
                f"the cache was calibrated for another model: values of the {expert}-noise expert begin with "
                f"{mark[0]:.4f}, those of the calibrated one with {known[0]:.4f}: {CALIBRATE_REMEDY}"
            )

    def _has(self, side: int, step: int) -> bool:
        """Return True if lanes of a CFG side were measured in that step and the one before."""
        return side == POSITIVE or (len(self.ratios) > side and self.ratios[side][step] != 1)

    def to_dict(self) -> dict[str, Any]:
        """Return a dict that JSON can encode."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_dict(cls, data: object) -> MagTable:
        """Return the table of `to_dict`.

        Raises:
            RequestError: `data` is not such a dict.
        """
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise RequestError(
                "this file is not a table of magnitude ratios: choose one that Wan Cache Calibration wrote"
            )
        try:
            return cls(
                sigmas=tuple(float(sigma) for sigma in data["sigmas"]),
                experts=tuple(str(expert) for expert in data["experts"]),
                ratios=tuple(tuple(float(ratio) for ratio in each) for each in data["ratios"]),
                marks={str(name): tuple(float(value) for value in mark) for name, mark in data["marks"].items()},
                source=str(data.get("source", "")),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as err:
            raise RequestError(f"this table of magnitude ratios is damaged ({err}): calibrate it again") from err


def model_mark(table: torch.Tensor) -> tuple[float, ...]:
    """Return some values of an expert's output modulation [1, 2, dim], which LoRAs do not change."""
    return tuple(round(value, 6) for value in table.detach().flatten()[:MARK_VALUES].float().tolist())
