"""MODELs for native models with streamed blocks, and their last run."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.patcher_extension
import comfy.sd
import folder_paths

from ....offload.sources import StoredFile
from ...api import Host
from ...native_models import Checkpoint, ModelRun, ModelStreaming
from .. import versions
from .encoders import checkpoint_clip
from .runs.hooks import FollowedRun, NativeRuns
from .runs.lanes import KEY
from .runs.run import calc_cond_batch, sampler_sample
from .streamed.model import CHECKPOINT_LOADER, MODEL_LOADER, open_native
from .streamed.patcher import NativePatcher

WRAPPERS = comfy.patcher_extension.WrappersMP


def native_patcher(
    model: Any,
    streaming: ModelStreaming,
    host: Host,
    kind: type[NativePatcher] = NativePatcher,
) -> NativePatcher:
    """Return the first MODEL for ComfyUI's `model`, whose `weights` stream.

    Other MODELs are clones.

    `host` shows the runs and has memory for them. `kind` is the MODEL class.
    """
    runs = model.runs = NativeRuns(model.weights)
    weakref.finalize(model, runs.detach).atexit = False  # hooks keep the blocks alive
    management = comfy.model_management
    patcher = kind(model, management.get_torch_device(), management.unet_offload_device())
    # ComfyUI has loaded the model before SAMPLER_SAMPLE, but not before OUTER_SAMPLE.
    patcher.add_wrapper_with_key(WRAPPERS.SAMPLER_SAMPLE, KEY, partial(sampler_sample, host))
    # This wrapper runs inside ComfyUI's context windows, so each window is one call.
    patcher.add_wrapper_with_key(WRAPPERS.CALC_COND_BATCH, KEY, calc_cond_batch)
    return patcher.with_settings(streaming)


def load_native(
    path: Path,
    weight_dtype: str,
    streaming: ModelStreaming,
    host: Host,
    limits: Mapping[str, int],
    loader: str = MODEL_LOADER,
) -> NativePatcher:
    """Return the first MODEL for a file; see `open_native` and `native_patcher`.

    ComfyUI can load it again for each additional GPU.
    """
    model = open_native(path, weight_dtype, loader=loader, **limits)
    patcher = native_patcher(model, streaming, host)
    arguments = (path, weight_dtype, streaming, host, limits, loader)
    versions.set_loader(patcher, load_native, arguments)
    return patcher


def load_checkpoint(
    path: Path, streaming: ModelStreaming, host: Host, limits: Mapping[str, int]
) -> Checkpoint:
    """Return the parts of a checkpoint. A large CLIP streams and keeps no block.

    ComfyUI loads the VAE and other CLIPs from a mapped file and reads no MODEL values there.
    """
    patcher = load_native(path, "default", streaming, host, limits, CHECKPOINT_LOADER)
    file = StoredFile(path)
    if not versions.is_checkpoint(file.tensors, file.metadata):
        # ComfyUI would load a MODEL without key prefix whole. This VAE raises when used.
        return Checkpoint(model=patcher, clip=None, vae=comfy.sd.VAE(sd={}))
    embeddings = folder_paths.get_folder_paths("embeddings")
    streamed = checkpoint_clip(file, limits)
    _, clip, vae, _ = comfy.sd.load_checkpoint_guess_config(
        str(path),
        output_clip=streamed is None,
        embedding_directory=embeddings,
        output_model=False,
    )
    return Checkpoint(model=patcher, clip=streamed or clip, vae=vae)


def last_run(model: object) -> ModelRun:
    """Return a MODEL's last run. Raises ValueError if it does not stream or has not run."""
    if not isinstance(model, NativePatcher):
        raise ValueError(
            "this MODEL does not stream: connect that of Load Diffusion Model (streamed) or Stream "
            "Model"
        )
    last: FollowedRun | None = model.model.runs.last
    if last is None or last.shown.timeline is None:
        raise ValueError(
            "this MODEL has no finished run: connect the LATENT of the sampler that runs it, too"
        )
    settings = last.shown.settings
    named = {
        "Model": type(model.model).__name__,
        "Size": settings.size,
        "Computes in": settings.dtype,
        "Policy": settings.policy,
        "LoRA": settings.lora,
    }
    return ModelRun(
        timeline=last.shown.timeline,
        settings={name: text for name, text in named.items() if text},
        device=model.load_device,
        node_id=last.shown.node_id,
    )
