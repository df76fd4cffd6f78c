"""Denoising: requests, schedules, solvers, and the loop for all hosts and devices."""

from __future__ import annotations

from .cache.base import CachedCalls
from .cache.calibrate import calibrate, calibration_bytes, calibration_job
from .cache.mag_table import NEAR_SIGMA, MagTable
from .cache.settings import PRESETS, CacheSettings, FirstBlockCache, MagCache, cached_policy
from .context_windows import StepWindows, computed_shape
from .denoise import DenoiseResult, denoise, denoise_part
from .errors import Cancelled, NonFiniteLatentError, NoRoomError, RequestError, SmallerPolicyError
from .estimate import cached_job, offload_job, predicted_calls, predicted_timeline, request_job
from .inputs.batching import apart, joined
from .inputs.checks import check_course, check_guidance, check_windows, check_windows_stay
from .inputs.conditioning import NativeInputs, native_inputs, native_latent, single_entry
from .inputs.conditioning_keys import IMAGE_SEEN
from .inputs.first_frame import begun_latent, framed_video, start_end_mask, start_frames, start_mask
from .inputs.model_checks import check_fits
from .inputs.request import DenoiseRequest, Guidance, check_nag, parse_scales
from .loop.denoiser import StepProgress
from .loop.lanes import LaneInputs, LaneName, foretell, lane_names
from .loop.model_calls import Passes
from .loop.oom_fallback import RunPolicy
from .loop.parallel import ALONE, Agreed, Compute, Part, Share, Split
from .loop.resume import RunState
from .memory import check_room, tokens_of, working_bytes
from .noise import seeded_noise
from .schedules import SCHEDULES, check_flow_shift, check_steps, schedule_sigmas
from .solvers import SOLVERS

__all__ = [
    "ALONE",
    "IMAGE_SEEN",
    "NEAR_SIGMA",
    "PRESETS",
    "SCHEDULES",
    "SOLVERS",
    "Agreed",
    "CacheSettings",
    "CachedCalls",
    "Cancelled",
    "Compute",
    "DenoiseRequest",
    "DenoiseResult",
    "FirstBlockCache",
    "Guidance",
    "LaneInputs",
    "LaneName",
    "MagCache",
    "MagTable",
    "NativeInputs",
    "NoRoomError",
    "NonFiniteLatentError",
    "Part",
    "Passes",
    "RequestError",
    "RunPolicy",
    "RunState",
    "Share",
    "SmallerPolicyError",
    "Split",
    "StepProgress",
    "StepWindows",
    "apart",
    "begun_latent",
    "cached_job",
    "cached_policy",
    "calibrate",
    "calibration_bytes",
    "calibration_job",
    "check_course",
    "check_fits",
    "check_flow_shift",
    "check_guidance",
    "check_nag",
    "check_room",
    "check_steps",
    "check_windows",
    "check_windows_stay",
    "computed_shape",
    "denoise",
    "denoise_part",
    "foretell",
    "framed_video",
    "joined",
    "lane_names",
    "native_inputs",
    "native_latent",
    "offload_job",
    "parse_scales",
    "predicted_calls",
    "predicted_timeline",
    "request_job",
    "schedule_sigmas",
    "seeded_noise",
    "single_entry",
    "start_end_mask",
    "start_frames",
    "start_mask",
    "tokens_of",
    "working_bytes",
]
