"""Run inputs: requests, checks, native ComfyUI values, masks."""

from .batching import merge_requests, split_request
from .conditioning import leftover_sigma, marked_latent, native_inputs, native_latent, side_tokens
from .conditioning_keys import IMAGE_EMBEDDING_KEY
from .continuation import continuation, overlap_frames
from .control import context_values, control_values
from .extra_tokens import ExtraTokens
from .first_frame import latent_with_first_frames, start_image_values
from .request import DenoiseRequest, RequestOptions

__all__ = [
    "IMAGE_EMBEDDING_KEY",
    "DenoiseRequest",
    "ExtraTokens",
    "RequestOptions",
    "context_values",
    "continuation",
    "control_values",
    "latent_with_first_frames",
    "leftover_sigma",
    "marked_latent",
    "merge_requests",
    "native_inputs",
    "native_latent",
    "overlap_frames",
    "side_tokens",
    "split_request",
    "start_image_values",
]
