"""MODELs of native models whose blocks stream, and their last run."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.patcher_extension

from ....plan import AutoOffload
from ....schema import OffloadPolicy
from ...api import ModelRun, ModelStreaming, ShareVisits
from .hooks import FollowedRun, NativeRuns
from .lanes import KEY
from .model import open_native
from .patcher import NativePatcher
from .run import calc_cond_batch, sampler_sample

WRAPPERS = comfy.patcher_extension.WrappersMP


def load_native(
    path: Path,
    weight_dtype: str,
    policy: OffloadPolicy | AutoOffload,
    *,
    share_visits: ShareVisits = ShareVisits.AUTO,
    lora_on_arrival: bool = False,
    **limits: int,
) -> NativePatcher:
    """Return a MODEL whose blocks stream from a file.

    Args:
        path, weight_dtype, limits: see `open_native`, which raises the errors.
        policy, share_visits, lora_on_arrival: see `ModelStreaming`.
    """
    streaming = ModelStreaming(policy=policy, share_visits=share_visits, lora_on_arrival=lora_on_arrival)
    return native_patcher(open_native(path, weight_dtype, **limits), streaming)


def native_patcher(model: Any, streaming: ModelStreaming) -> NativePatcher:
    """Return the first MODEL of ComfyUI's `model`, whose `weights` stream; the others are its clones."""
    runs = model.runs = NativeRuns(model.weights)
    weakref.finalize(model, runs.detach).atexit = False  # hooks keep the blocks alive
    management = comfy.model_management
    patcher = NativePatcher(model, management.get_torch_device(), management.unet_offload_device())
    patcher.add_wrapper_with_key(WRAPPERS.SAMPLER_SAMPLE, KEY, sampler_sample)
    patcher.add_wrapper_with_key(WRAPPERS.CALC_COND_BATCH, KEY, calc_cond_batch)
    return patcher.with_settings(streaming)


def last_run(model: object) -> ModelRun:
    """Return the last run of a MODEL. Raises ValueError for one that does not stream or has not run."""
    if not isinstance(model, NativePatcher):
        raise ValueError("this MODEL does not stream: connect that of Load Diffusion Model (streamed) or Stream Model")
    run: FollowedRun | None = model.model.runs.last
    if run is None or run.timeline is None:
        raise ValueError("this MODEL has no finished run: connect the LATENT of the sampler that runs it, too")
    settings = run.settings
    named = {"Size": settings.size, "Computes in": settings.dtype, "Policy": settings.policy, "LoRA": settings.lora}
    return ModelRun(
        timeline=run.timeline,
        settings={"Model": type(model.model).__name__} | {name: text for name, text in named.items() if text},
        device=model.load_device,
        node_id=run.node_id,
    )
