"""Calibration of MagCache: a run that measures a table of magnitude ratios."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from ..errors import RequestError
from ..inputs.request import DenoiseRequest
from .mag_table import MagTable
from .magcache import Calibration


def calibrate(request: DenoiseRequest, run: Callable[[DenoiseRequest], object], *, source: str) -> MagTable:
    """Return the table that a run of `request` without a cache measures.

    Args:
        run: runs the request that it is called with, for example by `denoise`.
        source: description of the run, stored in the table.

    Raises:
        RequestError: the run is not the whole schedule, or a ratio is not a number above 0; and the errors of `run`.
    """
    measured = Calibration()
    request = replace(request, cache=measured)
    step_plan, whole = request.step_plan, replace(request, end_step=None).step_plan
    if step_plan.start_step > 0 or step_plan.schedule.steps < whole.schedule.steps:
        raise RequestError(
            f"the run takes steps {step_plan.start_step} to {step_plan.schedule.steps} of {whole.schedule.steps}, "
            "and a table needs all of them: calibrate a run of all steps"
        )
    run(request)
    ratios = measured.ratios(dict(enumerate(step_plan.experts)))
    if not all(math.isfinite(ratio) and ratio > 0 for each in ratios for ratio in each):
        raise RequestError("the residual of a step is zero, NaN or infinite: this run cannot be calibrated")
    return MagTable(
        sigmas=tuple(step_plan.schedule.sigmas),
        experts=step_plan.experts,
        ratios=ratios,
        marks=measured.marks,
        source=source,
    )
