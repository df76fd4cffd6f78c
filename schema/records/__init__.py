"""Records for a run: the timeline, advice on the policy, and notices to the user."""

from .advice import Advice
from .notices import Notice, NoticeLevel
from .timeline import (
    PHASES,
    RATE_BORDERS,
    STEP_FIGURES,
    MemorySample,
    PhaseRecord,
    RateRange,
    StepMemory,
    StepRecord,
    Timeline,
    Transfers,
    largest_known,
    limit_share,
    run_phases,
    together,
)

__all__ = [
    "PHASES",
    "RATE_BORDERS",
    "STEP_FIGURES",
    "Advice",
    "MemorySample",
    "Notice",
    "NoticeLevel",
    "PhaseRecord",
    "RateRange",
    "StepMemory",
    "StepRecord",
    "Timeline",
    "Transfers",
    "largest_known",
    "limit_share",
    "run_phases",
    "together",
]
