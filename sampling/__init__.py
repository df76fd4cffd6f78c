"""L4: denoises."""

from __future__ import annotations

from .apart import apart
from .conditioning import NativeInputs, native_inputs, native_latent
from .denoise import DenoiseResult, denoise, denoise_part
from .denoising import StepProgress
from .errors import (
    Cancelled,
    ConditioningError,
    NonFiniteLatentError,
    NoRoomError,
    RequestError,
    SmallerPolicyError,
)
from .joined import joined
from .lane_room import check_room
from .noise import seeded_noise
from .offload_job import offload_job, request_job
from .passes import Passes
from .request import Course, DenoiseRequest
from .run_state import RunState
from .schedules import SCHEDULES, Schedule, explicit_schedule, make_schedule, simple_schedule, wan_schedule
from .solvers import SOLVERS, Solver, make_solver
from .split import Part, Share, Split
from .working_bytes import working_bytes

__all__ = [
    "SCHEDULES",
    "SOLVERS",
    "Cancelled",
    "ConditioningError",
    "Course",
    "DenoiseRequest",
    "DenoiseResult",
    "NativeInputs",
    "NoRoomError",
    "NonFiniteLatentError",
    "Part",
    "Passes",
    "RequestError",
    "RunState",
    "Schedule",
    "Share",
    "SmallerPolicyError",
    "Solver",
    "Split",
    "StepProgress",
    "apart",
    "check_room",
    "denoise",
    "denoise_part",
    "explicit_schedule",
    "joined",
    "make_schedule",
    "make_solver",
    "native_inputs",
    "native_latent",
    "offload_job",
    "request_job",
    "seeded_noise",
    "simple_schedule",
    "wan_schedule",
    "working_bytes",
]
