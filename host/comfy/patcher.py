"""Streamed experts, here or in workers, as a model in ComfyUI's memory manager."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import comfy.patcher_extension
import comfy.supported_models
import torch

from ...sampling import working_bytes
from ...schema import ExpertsRef
from ...wan import WAN22, ExpertPair
from ..api import LoadedExperts
from .patcher_memory import PolicyMemory, StreamedPatcher

logger = logging.getLogger("wanstream.memory")


class ExpertsModel(comfy.model_base.BaseModel):  # type: ignore[misc]
    """Model object for ComfyUI, with Wan's settings and without a diffusion model; the weights belong to the pair.

    All patchers of the same files share it: ComfyUI identifies clones by their model.

    Args:
        ref: names the files.
        experts: opens pairs, and keeps the last requested one open.
    """

    def __init__(self, ref: ExpertsRef, experts: Callable[[ExpertsRef], ExpertPair]) -> None:
        pair, supported = experts(ref), comfy.supported_models
        keeps_frames = pair.latent_channels == WAN22.channels
        family = supported.WAN22_T2V if keeps_frames else supported.WAN21_T2V
        settings = {"image_model": "wan2.1", "model_type": "t2v", "disable_unet_model_creation": True}
        super().__init__(family(settings), comfy.model_base.ModelType.FLOW)
        self.ref = ref
        self._experts = experts
        self.pair = pair
        self.keeps_frames = keeps_frames
        """True if masked frames stay noise-free with timestep 0, as in TI2V-5B; other models get them with noise."""
        self.memory = PolicyMemory("experts")
        self.activation_bytes: Callable[[ExpertPair, Sequence[int]], int] = partial(working_bytes, sides=(0, 0))
        """Estimate for the next run; set here, because ComfyUI queries `memory_required` before it loads the policy."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as err:
            # With `name` and `obj`, unlike torch's error, so that the guider can recognise it.
            raise AttributeError(str(err), name=name, obj=self) from None

    def open(self, ref: ExpertsRef) -> None:
        """Open `ref` again: other experts or LoRAs may have been opened since the last run."""
        self.pair = self._experts(ref)

    def get_dtype(self) -> torch.dtype:
        return self.pair.compute_dtype

    def memory_required(self, input_shape: Sequence[int], cond_shapes: Mapping[str, Any] | None = None) -> int:
        """Return the activation bytes for latents of `input_shape`, with a negative lane for each sample.

        ComfyUI estimates a model's minimum without negatives, because it can compute them in a separate pass. Our
        engine never does, and it uses all memory above the minimum for blocks.
        """
        return self.activation_bytes(self.pair, input_shape)

    def scale_latent_inpaint(self, latent_image: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """Return the masked part of the latent at the noise level of a step."""
        if self.keeps_frames:
            return latent_image
        kept: torch.Tensor = super().scale_latent_inpaint(latent_image=latent_image, **inputs)
        return kept

    def extra_conds(self, **_: object) -> dict[str, Any]:
        """Return nothing: the guider reads the conditioning itself."""
        return {}

    def apply_model(self, *_: object, **__: object) -> torch.Tensor:
        raise ValueError(
            "the streamed experts cannot run as a MODEL, because only their guider selects the expert of a step: use "
            "Wan Guider with SamplerCustomAdvanced, or Wan Sampler"
        )


class ExpertsPatcher(StreamedPatcher):
    """Entry of the experts in ComfyUI's list of loaded models."""

    # Of the class, because the base class's __init__ calls `model_size`.
    model: ExpertsModel
    ref: ExpertsRef
    """Names experts and LoRAs."""

    @property
    def weights(self) -> ExpertPair:
        return self.model.pair

    def clone(self, *args: Any, **settings: Any) -> ExpertsPatcher:
        cloned: ExpertsPatcher = super().clone(*args, **settings)
        cloned.ref = self.ref
        return cloned

    def loaded_experts(self) -> LoadedExperts:
        """Return the loaded pair; ComfyUI must have loaded this patcher."""
        assert self.memory.policy is not None, "ComfyUI has not loaded the experts"
        return LoadedExperts(pair=self.model.pair, policy=self.memory.policy, device=self.load_device)

    def partially_load(
        self, device_to: torch.device, extra_memory: float = 0, force_patch_weights: bool = False
    ) -> int:
        """Load as much of the policy as up to `extra_memory` more device bytes allow; return the added bytes."""
        with self.use_ejected(skip_and_inject_on_exit_only=True):
            self.unpatch_model(self.offload_device, unpatch_weights=False)
            self.patch_model(load_weights=False)
        try:
            self.model.open(self.ref)
            return self.load_policy(device_to, extra_memory)
        except BaseException:
            self.detach()  # not on ComfyUI's list yet, so ComfyUI would never detach it
            raise


def workers_patcher(release_memory: Callable[[], bool], load_device: torch.device) -> comfy.model_patcher.ModelPatcher:
    """Return the entry of the workers in ComfyUI's list of loaded models, until ComfyUI unloads it.

    Its size is 0, as the model has no parameters: ComfyUI makes no room for it, and unloads it whole.

    Args:
        release_memory: releases the workers' weights; returns False during a run, when it cannot.
        load_device: device of this process, which one of the workers shares.
    """

    def on_detach(_: object, unpatch_all: bool) -> None:
        if unpatch_all:  # otherwise ComfyUI is about to load them again
            logger.info(
                "the workers have unloaded their experts"
                if release_memory()
                else "the workers are running: not unloaded"
            )

    model = type("WorkersModel", (torch.nn.Module,), {})()  # ComfyUI shows the name of the class
    patcher = comfy.model_patcher.ModelPatcher(model, load_device, torch.device("cpu"))
    patcher.add_callback(comfy.patcher_extension.CallbacksMP.ON_DETACH, on_detach)
    return patcher
