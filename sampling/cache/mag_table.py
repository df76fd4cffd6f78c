"""Measured magnitude ratios for a model, and the conditions under which they are valid."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import torch

from ..steps.errors import RequestError
from ..steps.sides import Side

FORMAT = "wanstream magnitude ratios 1"
"""File format mark."""

NEAR_SIGMA = 1e-4
"""Largest difference between equal noise levels."""
MARK_VALUES = 8
"""Number of weights in an expert's mark."""
NEAR_MARK = 0.02
"""Largest relative difference between equal marks: files store the same weights as fp32, bf16 or
fp16."""

SIDE_WORDS = {Side.NEGATIVE: "guidance", Side.NO_CONTEXT: "context_guidance"}
"""Settings that add lanes for these CFG sides."""
CALIBRATE_REMEDY = (
    "calibrate a table for this run with Wan Cache Calibration, or use the first-block cache"
)


@dataclass(frozen=True, kw_only=True)
class MagTable:
    """Residual magnitude in each step relative to the previous one, for one schedule and model.

    Raises:
        RequestError: the numbers are inconsistent or out of range.
    """

    sigmas: tuple[float, ...]
    """Noise levels: steps + 1 values."""
    experts: tuple[str, ...]
    """Expert by step."""
    ratios: tuple[tuple[float, ...], ...]
    """Ratios by step, for each CFG side with lanes, starting with the positive one.

    1 in an expert's first step, and where this or the previous step had no such lanes.
    """
    marks: Mapping[str, tuple[float, ...]]
    """Some weights of each measured expert, to identify it."""
    source: str = ""
    """Description of the calibration run."""

    def __post_init__(self) -> None:
        lengths = {len(each) for each in self.ratios} | {len(self.experts), len(self.sigmas) - 1}
        if len(lengths) != 1 or not self.ratios:
            raise RequestError(
                f"{len(self.sigmas)} noise levels, {len(self.experts)} experts and "
                f"{[len(each) for each in self.ratios]} ratios are not a table of magnitude "
                "ratios: calibrate it again"
            )
        if not all(math.isfinite(ratio) and ratio > 0 for each in self.ratios for ratio in each):
            raise RequestError(
                "a magnitude ratio is not a number above 0: calibrate the table again"
            )
        if not all(map(math.isfinite, chain(self.sigmas, *self.marks.values()))):
            raise RequestError(
                "a noise level or a mark of an expert is NaN or infinite: calibrate the table again"
            )

    def check_steps(
        self, sigmas: Sequence[float], experts: Sequence[str], sides: Sequence[Sequence[Side]]
    ) -> None:
        """Raise RequestError unless the table was measured under these conditions.

        Args:
            sigmas: all noise levels in the schedule.
            experts: expert by step, from the schedule's first step to the run's last one.
            sides: CFG sides by step. All must have been measured.
        """
        steps = len(sigmas) - 1
        measured = len(self.experts)
        if steps != measured:
            raise RequestError(
                f"the cache was calibrated for {measured} steps, this run has {steps}: "
                f"{CALIBRATE_REMEDY}"
            )
        for step, (own, other) in enumerate(zip(sigmas, self.sigmas, strict=True)):
            if abs(own - other) > NEAR_SIGMA:
                raise RequestError(
                    f"the cache was calibrated for noise level {other:.4f} before step {step}, "
                    f"this run has {own:.4f} there (another schedule or flow shift): "
                    f"{CALIBRATE_REMEDY}"
                )
        # Not strict: a run may end before the schedule does.
        for step, (expert, known) in enumerate(zip(experts, self.experts, strict=False)):
            if expert != known:
                raise RequestError(
                    f"the cache was calibrated with the {known}-noise expert in step {step}, this "
                    f"run takes the {expert}-noise expert there: {CALIBRATE_REMEDY}"
                )
        for step in range(1, len(sides)):
            # Nothing is reused across a switch, so no ratio is needed there.
            if experts[step - 1] != experts[step]:
                continue
            lasting = set(sides[step - 1]) & set(sides[step])
            if missing := [side for side in sorted(lasting) if not self._has(side, step)]:
                raise RequestError(
                    f"the cache was calibrated without {SIDE_WORDS[missing[0]]} around step "
                    f"{step}, and this run has it there: {CALIBRATE_REMEDY}"
                )

    def check_model(self, expert: str, mark: Sequence[float]) -> None:
        """Raise RequestError unless an expert with this mark was measured."""
        known = self.marks.get(expert)
        if known is None or len(known) != len(mark):
            raise RequestError(
                f"the cache was not calibrated for the {expert}-noise expert: {CALIBRATE_REMEDY}"
            )
        # The absolute term is for weights near 0.
        if any(
            abs(own - other) > NEAR_MARK * abs(other) + NEAR_SIGMA
            for own, other in zip(mark, known, strict=True)
        ):
            raise RequestError(
                f"the cache was calibrated for another model: values of the {expert}-noise expert "
                f"begin with {mark[0]:.4f}, those of the calibrated one with {known[0]:.4f}: "
                f"{CALIBRATE_REMEDY}"
            )

    def _has(self, side: Side, step: int) -> bool:
        """Return True if lanes on a CFG side were measured in this step and the previous one."""
        # 1 marks a step without such lanes.
        return side == Side.POSITIVE or (len(self.ratios) > side and self.ratios[side][step] != 1)

    def to_dict(self) -> dict[str, Any]:
        """Return a dict that JSON can encode."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_dict(cls, data: object) -> MagTable:
        """Return the table from a `to_dict` result.

        Raises:
            RequestError: `data` is not such a dict.
        """
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise RequestError(
                "this file is not a table of magnitude ratios: choose one that Wan Cache "
                "Calibration wrote"
            )
        try:
            return cls(
                sigmas=tuple(float(sigma) for sigma in data["sigmas"]),
                experts=tuple(str(expert) for expert in data["experts"]),
                ratios=tuple(tuple(float(ratio) for ratio in each) for each in data["ratios"]),
                marks={
                    str(name): tuple(float(value) for value in mark)
                    for name, mark in data["marks"].items()
                },
                source=str(data.get("source", "")),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as err:
            raise RequestError(
                f"this table of magnitude ratios is damaged ({err}): calibrate it again"
            ) from err


def model_mark(model: torch.nn.Module) -> tuple[float, ...]:
    """Return values from an expert's output modulation [1, 2, dim], which LoRAs do not change."""
    table = model.get_parameter("scale_shift_table").detach().flatten()
    return tuple(round(value, 6) for value in table[:MARK_VALUES].float().tolist())
