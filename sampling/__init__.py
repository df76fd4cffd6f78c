"""Denoising: requests, schedules, solvers, and the loop for all hosts and devices."""

from __future__ import annotations

from .cache.base import CachedCalls
from .cache.calibrate import calibrate, calibration_bytes, calibration_job
from .cache.mag_table import NEAR_SIGMA, MagTable
from .cache.settings import PRESETS, CacheSettings, FirstBlockCache, MagCache, cached_policy
from .context_windows import StepWindows, computed_shape
from .denoise import DenoiseResult, denoise, denoise_part
from .errors import NonFiniteLatentError, NoRoomError, RequestError, SamplingCancelled, SmallerPolicyError
from .estimate import cached_job, offload_job, predicted_calls, predicted_timeline, request_job
from .inputs.batching import merge_requests, split_request
from .inputs.checks import check_guidance, check_step_plan, check_windows, check_windows_stay
from .inputs.conditioning import IMAGE_SEEN, NativeInputs, native_inputs, native_latent, single_entry
from .inputs.first_frame import begun_latent, framed_video, start_end_mask, start_frames, start_mask
from .inputs.model_checks import check_fits
from .inputs.request import DenoiseRequest, Guidance, check_nag, parse_scales
from .loop.denoiser import StepProgress
from .loop.lanes import LaneInputs, LaneName, lane_names, prefetch_embeddings
from .loop.model_calls import ModelCalls
from .loop.oom_fallback import RunPolicy
from .loop.parallel import LOCAL_FORWARD, AllReduced, Compute, ParallelForward, RunSlice, RunState, Share
from .memory import check_room, tokens_of, working_bytes
from .schedules import SCHEDULES, check_flow_shift, check_steps, schedule_sigmas, seeded_noise
from .solvers import SOLVERS

__all__ = [
    "IMAGE_SEEN",
    "LOCAL_FORWARD",
    "NEAR_SIGMA",
    "PRESETS",
    "SCHEDULES",
    "SOLVERS",
    "AllReduced",
    "CacheSettings",
    "CachedCalls",
    "Compute",
    "DenoiseRequest",
    "DenoiseResult",
    "FirstBlockCache",
    "Guidance",
    "LaneInputs",
    "LaneName",
    "MagCache",
    "MagTable",
    "ModelCalls",
    "NativeInputs",
    "NoRoomError",
    "NonFiniteLatentError",
    "ParallelForward",
    "RequestError",
    "RunPolicy",
    "RunSlice",
    "RunState",
    "SamplingCancelled",
    "Share",
    "SmallerPolicyError",
    "StepProgress",
    "StepWindows",
    "begun_latent",
    "cached_job",
    "cached_policy",
    "calibrate",
    "calibration_bytes",
    "calibration_job",
    "check_fits",
    "check_flow_shift",
    "check_guidance",
    "check_nag",
    "check_room",
    "check_step_plan",
    "check_steps",
    "check_windows",
    "check_windows_stay",
    "computed_shape",
    "denoise",
    "denoise_part",
    "framed_video",
    "lane_names",
    "merge_requests",
    "native_inputs",
    "native_latent",
    "offload_job",
    "parse_scales",
    "predicted_calls",
    "predicted_timeline",
    "prefetch_embeddings",
    "request_job",
    "schedule_sigmas",
    "seeded_noise",
    "single_entry",
    "split_request",
    "start_end_mask",
    "start_frames",
    "start_mask",
    "tokens_of",
    "working_bytes",
]
