"""Denoising: requests, schedules, solvers, and the loop for all hosts and devices."""

from __future__ import annotations

from .cache.base import StepLanes
from .cache.calibrate import calibrate
from .cache.mag_table import NEAR_SIGMA, MagTable
from .cache.settings import PRESETS, CacheSettings, EasyCache, FirstBlockCache, MagCache, policy_with_cache
from .context_windows import StepWindows, computed_shape
from .denoise import DenoiseResult, check_fits, check_strengths, denoise
from .errors import InsufficientMemoryError, NonFiniteLatentError, RequestError, SamplingCancelled, SmallerPolicyError
from .estimate import offload_job, predicted_calls, predicted_timeline, request_job
from .inputs.batching import merge_requests, split_request
from .inputs.checks import check_guidance, check_step_plan, check_windows
from .inputs.conditioning import (
    IMAGE_EMBEDDING_KEY,
    IMAGE_KEY,
    LEFTOVER_KEY,
    MASK_INDEX_KEY,
    MASK_KEY,
    NativeInputs,
    leftover_mark,
    leftover_sigma,
    native_inputs,
    native_latent,
    single_entry,
)
from .inputs.continuation import Continuation, continuation, overlap_frames
from .inputs.control import (
    control_latents,
    control_mask,
    fitted_reference,
    fitted_video,
    reference_size,
    reference_streams,
    whole_latent_frames,
)
from .inputs.extra_tokens import CONTEXT_KEY, REFERENCE_KEY, ExtraTokens, native_tokens
from .inputs.first_frame import latent_with_first_frames, start_end_mask, start_frames, start_mask, video_with_start_end
from .inputs.request import DenoiseRequest, Guidance, check_nag, parse_scales
from .inputs.sides import sides_at
from .loop.denoiser import StepProgress
from .loop.lanes import LaneInputs, lane_names
from .loop.model_calls import ModelCalls
from .loop.oom_fallback import RunPolicy
from .loop.parallel import LOCAL_FORWARD, AllReduced, Compute, ParallelForward, RunSlice, RunState, Share
from .memory import check_room, extra_tokens_of, tokens_of, working_bytes
from .saved_states import SavedRun, file_versions, state_bytes
from .schedules import SCHEDULES, check_flow_shift, check_steps, schedule_sigmas, seeded_noise
from .solvers import SOLVERS

__all__ = [
    "CONTEXT_KEY",
    "IMAGE_EMBEDDING_KEY",
    "IMAGE_KEY",
    "LEFTOVER_KEY",
    "LOCAL_FORWARD",
    "MASK_INDEX_KEY",
    "MASK_KEY",
    "NEAR_SIGMA",
    "PRESETS",
    "REFERENCE_KEY",
    "SCHEDULES",
    "SOLVERS",
    "AllReduced",
    "CacheSettings",
    "Compute",
    "Continuation",
    "DenoiseRequest",
    "DenoiseResult",
    "EasyCache",
    "ExtraTokens",
    "FirstBlockCache",
    "Guidance",
    "InsufficientMemoryError",
    "LaneInputs",
    "MagCache",
    "MagTable",
    "ModelCalls",
    "NativeInputs",
    "NonFiniteLatentError",
    "ParallelForward",
    "RequestError",
    "RunPolicy",
    "RunSlice",
    "RunState",
    "SamplingCancelled",
    "SavedRun",
    "Share",
    "SmallerPolicyError",
    "StepLanes",
    "StepProgress",
    "StepWindows",
    "calibrate",
    "check_fits",
    "check_flow_shift",
    "check_guidance",
    "check_nag",
    "check_room",
    "check_step_plan",
    "check_steps",
    "check_strengths",
    "check_windows",
    "computed_shape",
    "continuation",
    "control_latents",
    "control_mask",
    "denoise",
    "extra_tokens_of",
    "file_versions",
    "fitted_reference",
    "fitted_video",
    "lane_names",
    "latent_with_first_frames",
    "leftover_mark",
    "leftover_sigma",
    "merge_requests",
    "native_inputs",
    "native_latent",
    "native_tokens",
    "offload_job",
    "overlap_frames",
    "parse_scales",
    "policy_with_cache",
    "predicted_calls",
    "predicted_timeline",
    "reference_size",
    "reference_streams",
    "request_job",
    "schedule_sigmas",
    "seeded_noise",
    "sides_at",
    "single_entry",
    "split_request",
    "start_end_mask",
    "start_frames",
    "start_mask",
    "state_bytes",
    "tokens_of",
    "video_with_start_end",
    "whole_latent_frames",
    "working_bytes",
]
