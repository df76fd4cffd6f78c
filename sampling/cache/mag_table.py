"""Measured magnitude ratios of a model, and the conditions that they are valid for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import torch

from ..errors import RequestError

FORMAT = "wanstream magnitude ratios 1"
"""Says what a file is."""

NEAR_SIGMA = 1e-4
MARK_VALUES = 8
NEAR_MARK = 0.02
"""Relative: files keep the same values as fp32, bf16 or fp16."""

CALIBRATE_REMEDY = "calibrate a table for this run with Wan Cache Calibration, or use the first-block cache"


@dataclass(frozen=True, kw_only=True)
class MagTable:
    """For every step of a schedule, how large what the blocks added was, by its size in the step before.

    Raises RequestError for numbers that make no table.
    """

    sigmas: tuple[float, ...]
    """Noise levels of the schedule: steps + 1."""
    experts: tuple[str, ...]
    """Of every step."""
    ratios: tuple[tuple[float, ...], ...]
    """Of the positive lanes, and of the negative ones where there were some; by step.

    1 in the first step of an expert, and where there were none in that step or the one before.
    """
    marks: Mapping[str, tuple[float, ...]]
    """Some weights of each expert that was measured, by which it is known again."""
    source: str = ""
    """What was run to measure it, in words."""

    def __post_init__(self) -> None:
        lengths = {len(each) for each in self.ratios} | {len(self.experts), len(self.sigmas) - 1}
        if len(lengths) != 1 or not self.ratios:
            raise RequestError(
                f"{len(self.sigmas)} noise levels, {len(self.experts)} experts and "
                f"{[len(each) for each in self.ratios]} ratios make no table of magnitude ratios: calibrate it again"
            )
        if not all(math.isfinite(ratio) and ratio > 0 for each in self.ratios for ratio in each):
            raise RequestError("a magnitude ratio is not a number above 0: calibrate the table again")
        if not all(map(math.isfinite, chain(self.sigmas, *self.marks.values()))):
            raise RequestError("a noise level or a mark of an expert is no number: calibrate the table again")

    def check_steps(self, sigmas: Sequence[float], experts: Sequence[str], guidance: Sequence[float]) -> None:
        """Raise RequestError unless a run on all of `sigmas`, whose first steps are of `experts`, was measured.

        `guidance` are the CFG scales of these first steps: what was never measured of negative lanes is not guessed.
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
        for step in range(1, len(guidance)):
            lasting = experts[step - 1] == experts[step] and 1 not in (guidance[step - 1], guidance[step])
            if lasting and not self._has_negative(step):
                raise RequestError(
                    f"the cache was calibrated without guidance around step {step}, this run has a guidance of "
                    f"{guidance[step]:g} there: {CALIBRATE_REMEDY}"
                )

    def check_model(self, expert: str, mark: Sequence[float]) -> None:
        """Raise RequestError unless that expert was measured."""
        known = self.marks.get(expert)
        if known is None or len(known) != len(mark):
            raise RequestError(f"the cache was not calibrated for the {expert}-noise expert: {CALIBRATE_REMEDY}")
        if any(abs(own - other) > NEAR_MARK * abs(other) + NEAR_SIGMA for own, other in zip(mark, known, strict=True)):
            raise RequestError(
                f"the cache was calibrated for another model: values of the {expert}-noise expert begin with "
                f"{mark[0]:.4f}, those of the calibrated one with {known[0]:.4f}: {CALIBRATE_REMEDY}"
            )

    def _has_negative(self, step: int) -> bool:
        """Whether negative lanes were measured in that step and the one before: a ratio of just 1 says no."""
        return len(self.ratios) > 1 and self.ratios[1][step] != 1

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_dict(cls, data: object) -> MagTable:
        """The inverse of `to_dict`. Raises RequestError for anything else."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise RequestError("this file is no table of magnitude ratios: choose one that Wan Cache Calibration wrote")
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
    """Some values of an expert's output modulation [1, 2, dim]; LoRAs leave them alone, other experts have others."""
    return tuple(round(value, 6) for value in table.detach().flatten()[:MARK_VALUES].float().tolist())
