"""Diffusers pipelines with tiny models, to compare runs with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers import UniPCMultistepScheduler

from wanstream.sampling.inputs import DenoiseRequest


def make_pipeline(kind: Callable[..., Any], *, flow_shift: float, **components: Any) -> Any:
    """Return a `kind` pipeline with UniPC and these components.

    It has no text encoder and no progress bar.
    """
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=flow_shift
    )
    pipeline = kind(tokenizer=None, text_encoder=None, scheduler=scheduler, **components)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def pipeline_arguments(
    request: DenoiseRequest, *, height: int, width: int, frames: int, steps: int
) -> dict[str, Any]:
    """Return the arguments a pipeline needs to compute the latents for `request`."""
    return {
        "height": height,
        "width": width,
        "num_frames": frames,
        "num_inference_steps": steps,
        "guidance_scale": request.guidance[0],
        "prompt_embeds": request.positive,
        "negative_prompt_embeds": request.negative,
        "latents": request.noise,
        "output_type": "latent",
    }


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference, relative to the norm of `expected`."""
    return float((found - expected).norm() / expected.norm())
