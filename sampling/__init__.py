"""Denoising: requests, schedules, solvers, and the loop for all hosts and devices."""

from .cache import EasyCache, FirstBlockCache, MagCache
from .calibrate import calibrate
from .denoise import check_fits, denoise, denoise_steps
from .estimate import predicted_calls, predicted_timeline, request_run_shape, run_shape
from .inputs.request import DenoiseRequest
from .loop.lanes import LaneInputs, lane_names
from .loop.memory import check_room, request_bytes, working_bytes
from .loop.model_calls import ModelCalls
from .loop.oom_fallback import RunPolicy
from .saved_states import SavedRun, file_versions, run_digest, state_bytes
from .steps.schedules import seeded_noise

__all__ = [
    "DenoiseRequest",
    "EasyCache",
    "FirstBlockCache",
    "LaneInputs",
    "MagCache",
    "ModelCalls",
    "RunPolicy",
    "SavedRun",
    "calibrate",
    "check_fits",
    "check_room",
    "denoise",
    "denoise_steps",
    "file_versions",
    "lane_names",
    "predicted_calls",
    "predicted_timeline",
    "request_bytes",
    "request_run_shape",
    "run_digest",
    "run_shape",
    "seeded_noise",
    "state_bytes",
    "working_bytes",
]
