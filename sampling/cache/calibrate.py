"""Calibration of MagCache: the magnitude of each step's residual relative to the step before.

As in diffusers' MagCache, it is the mean over tokens of the ratio of the residuals' norms. Lanes of one CFG side are
averaged; context windows count in steps where the step before had them too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

import torch

from ...plan import OffloadJob
from ...schema import OUTPUT_TOKENS, OffloadPolicy
from ...telemetry import TelemetryOptions
from ...wan import ExpertPair, SkipDecision
from ..denoise import DenoiseResult, check_run, run_part
from ..errors import RequestError
from ..estimate import request_job
from ..inputs.request import DenoiseRequest
from ..loop.denoiser import StepProgress
from ..loop.lanes import LaneName
from ..loop.parallel import WHOLE_RUN
from ..memory import working_bytes
from .mag_table import MagTable, model_mark

KEPT_STATES = 1
"""Tensors of the size of a hidden state that calibration keeps for each lane: the input of the blocks."""


class Calibration:
    """A `StepCache` that skips nothing, and measures the residuals."""

    def __init__(self) -> None:
        self._lengths: dict[int, dict[LaneName, torch.Tensor]] = {}
        self.marks: dict[str, tuple[float, ...]] = {}
        """Marks of each expert that ran; see `MagTable.marks`."""

    def known_skips(self, steps: Mapping[int, tuple[str, Sequence[LaneName]]]) -> frozenset[int]:
        """See `StepCache.known_skips`."""
        return frozenset()

    def begin(
        self, step: int, expert: str, lanes: Sequence[LaneName], own: Sequence[LaneName], model: torch.nn.Module
    ) -> CalibrationPass:
        """See `StepCache.begin`."""
        self.marks.setdefault(expert, model_mark(model.get_parameter("scale_shift_table")))
        lengths = self._lengths[step] = {}
        return CalibrationPass(own, lengths)

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
        return fmean(_mean_ratio(lengths[name], before_lengths[name]) for name in shared) if shared else 1.0


class CalibrationPass:
    """Forward pass of one step; see `BlockCache`."""

    whole = skips_rest = False
    skipped_lanes = 0

    def __init__(self, names: Sequence[LaneName], lengths: dict[LaneName, torch.Tensor]) -> None:
        self._names, self._lengths = names, lengths
        self._entered: dict[int, torch.Tensor] = {}

    def skip_all(self, lane: int, tokens: torch.Tensor) -> torch.Tensor:
        """See `BlockCache.without_blocks`."""
        raise AssertionError("calibration skips nothing")

    def entered(self, lane: int, tokens: torch.Tensor, hidden: torch.Tensor) -> None:
        """See `BlockCache.entered`."""
        self._entered[lane] = tokens

    def choose(self) -> SkipDecision:
        """See `BlockCache.choose`."""
        return SkipDecision(range(len(self._entered)), True)

    def skip_rest(self, lane: int, hidden: torch.Tensor) -> torch.Tensor:
        """See `BlockCache.from_first`."""
        raise AssertionError("calibration skips nothing")

    def ended(self, lane: int, hidden: torch.Tensor) -> None:
        """See `BlockCache.ended`."""
        # In pieces of tokens: a whole residual would take as much memory as another hidden state.
        parts = zip(
            hidden.split(OUTPUT_TOKENS, dim=1), self._entered.pop(lane).split(OUTPUT_TOKENS, dim=1), strict=True
        )
        self._lengths[self._names[lane]] = torch.cat(
            [(after - before).float().norm(dim=-1) for after, before in parts], dim=1
        )


def calibration_job(pair: ExpertPair, request: DenoiseRequest, device: torch.device) -> OffloadJob:
    """Return the planner's job for `calibrate` with `request`."""
    return replace(request_job(pair, replace(request, cache=None), device), cached_states=KEPT_STATES)


def calibration_bytes(pair: ExpertPair, request: DenoiseRequest, *, chunk_tokens: int | None) -> int:
    """Estimate the bytes that `calibrate` needs in addition to the weights; see `working_bytes`."""
    shape, guided = request.computed_shape, request.guided
    return working_bytes(pair, shape, guided=guided, chunk_tokens=chunk_tokens, cached_states=KEPT_STATES)


def calibrate(
    pair: ExpertPair,
    request: DenoiseRequest,
    *,
    policy: OffloadPolicy,
    device: torch.device | str,
    source: str,
    on_step: Callable[[StepProgress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    observe: TelemetryOptions | None = None,
) -> tuple[MagTable, DenoiseResult]:
    """Run `request` without a cache and return the measured table, with the result of the run.

    Args:
        source: description of the run, stored in the table.

    Raises:
        RequestError: the run is not the whole schedule, or a ratio is not a number above 0; and as `denoise`.
    """
    plain = replace(request, cache=None)
    step_plan, whole = plain.step_plan, replace(plain, end_step=None).step_plan
    if step_plan.start_step > 0 or step_plan.schedule.steps < whole.schedule.steps:
        raise RequestError(
            f"the run takes steps {step_plan.start_step} to {step_plan.schedule.steps} of {whole.schedule.steps}, "
            "and a table needs all of them: calibrate a run of all steps"
        )
    measured = Calibration()
    run_policy = check_run(pair, plain, WHOLE_RUN, policy, device)
    result = run_part(
        plain, WHOLE_RUN, run_policy, on_step=on_step, should_stop=should_stop, observe=observe, cache=measured
    )
    ratios = measured.ratios(dict(enumerate(step_plan.experts)))
    if not all(math.isfinite(ratio) and ratio > 0 for each in ratios for ratio in each):
        raise RequestError("the residual of a step is zero, NaN or infinite: this run cannot be calibrated")
    table = MagTable(
        sigmas=tuple(step_plan.schedule.sigmas),
        experts=step_plan.experts,
        ratios=ratios,
        marks=measured.marks,
        source=source,
    )
    return table, result


def _mean_ratio(now: torch.Tensor, before: torch.Tensor) -> float:
    return float((now / (before + 1e-8)).mean())
