"""Step records with some different figures."""

from __future__ import annotations

from typing import Any

from wanstream.schema.records import StepRecord


def changed_step(step: StepRecord, **figures: Any) -> StepRecord:
    """Return the step with other values for `STEP_FIGURES`."""
    return StepRecord.of(**{**step.to_dict(), **figures})
