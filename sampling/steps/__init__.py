"""Steps of a run: noise levels, solvers, CFG sides, context windows, worker shares, errors."""

from .context_windows import StepWindows, computed_shape
from .errors import (
    InsufficientMemoryError,
    NonFiniteLatentError,
    RequestError,
    SamplingCancelled,
    SmallerPolicyError,
    check_ram,
)
from .guidance import Guidance
from .parallel import LOCAL_FORWARD, AllReduced, ParallelForward, RunSlice, RunState
from .results import DenoiseResult, StepProgress
from .schedules import SCHEDULES, check_flow_shift, partial_sigmas, schedule_sigmas, seeded_noise
from .settings import StepSettings
from .sides import Side
from .solvers import SOLVERS

__all__ = [
    "LOCAL_FORWARD",
    "SCHEDULES",
    "SOLVERS",
    "AllReduced",
    "DenoiseResult",
    "Guidance",
    "InsufficientMemoryError",
    "NonFiniteLatentError",
    "ParallelForward",
    "RequestError",
    "RunSlice",
    "RunState",
    "SamplingCancelled",
    "Side",
    "SmallerPolicyError",
    "StepProgress",
    "StepSettings",
    "StepWindows",
    "check_flow_shift",
    "check_ram",
    "computed_shape",
    "partial_sigmas",
    "schedule_sigmas",
    "seeded_noise",
]
