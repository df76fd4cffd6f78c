"""MagCache calibration: a run that measures a table of magnitude ratios."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from .cache.mag_table import MagTable
from .cache.magcache import Calibration
from .inputs.request import DenoiseRequest
from .steps.errors import RequestError


def calibrate(
    request: DenoiseRequest, run: Callable[[DenoiseRequest], object], *, source: str
) -> MagTable:
    """Return the table measured by a run of `request` without a cache.

    Args:
        run: runs a request, for example with `denoise`.
        source: description of the run, stored in the table.

    Raises:
        RequestError: the run is not the whole schedule, or a ratio is not a number above 0. Errors
            from `run` are raised too.
    """
    measured = Calibration()
    request = request.replaced(options=replace(request.options, cache=measured))
    step_plan = request.step_plan
    if step_plan.steps != range(step_plan.whole_steps):
        raise RequestError(
            f"the run takes steps {step_plan.start_step} to {step_plan.schedule.steps} of "
            f"{step_plan.whole_steps}, and a table needs all of them: calibrate a run of all steps"
        )
    # `measured` is also the run's cache, so it is filled here.
    run(request)
    ratios = measured.ratios(dict(enumerate(step_plan.experts)))
    if not all(math.isfinite(ratio) and ratio > 0 for each in ratios for ratio in each):
        raise RequestError(
            "the residual of a step is zero, NaN or infinite: this run cannot be calibrated"
        )
    return MagTable(
        sigmas=tuple(step_plan.schedule.sigmas),
        experts=step_plan.experts,
        ratios=ratios,
        marks=measured.marks,
        source=source,
    )
