"""Streamed experts, here or in workers, as a model in ComfyUI's memory manager, which measures, loads, evicts it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import comfy.patcher_extension
import comfy.supported_models
import torch

from ...plan import keep_near_policy, shrink_to_budget
from ...sampling import working_bytes
from ...schema import ExpertsRef, OffloadPolicy, plan_residency
from ...wan import WAN22, ExpertPair
from ..api import LoadedExperts

logger = logging.getLogger("wanstream.memory")

SIZE_WHILE_RUNNING = 10**40
"""Reported size in bytes during a run.

ComfyUI detaches a model that is smaller than the bytes it wants to free, which may be 1e32, and drops it from its list.
During a run no memory can be released, and the model must still be on the list afterwards.
"""


class ExpertsModel(comfy.model_base.BaseModel):  # type: ignore[misc]
    """Model object for ComfyUI, with Wan's settings and without a diffusion model; the weights belong to the pair.

    All patchers of the same files share it: ComfyUI identifies clones by their model.

    Args:
        ref: names the files.
        experts: opens pairs, and keeps the last requested one open.
    """

    def __init__(self, ref: ExpertsRef, experts: Callable[[ExpertsRef], ExpertPair]) -> None:
        pair, supported = experts(ref), comfy.supported_models
        keeps_frames = pair.in_channels == WAN22.channels
        family = supported.WAN22_T2V if keeps_frames else supported.WAN21_T2V
        settings = {"image_model": "wan2.1", "model_type": "t2v", "disable_unet_model_creation": True}
        super().__init__(family(settings), comfy.model_base.ModelType.FLOW)
        self.ref = ref
        self._experts = experts
        self.pair = pair
        self.keeps_frames = keeps_frames
        """True if masked frames stay noise-free with timestep 0, as in TI2V-5B; other models get them with noise."""
        self.requested = OffloadPolicy.layerwise()
        """The policy of the last load request."""
        self.policy: OffloadPolicy | None = None
        """The loaded policy: the requested one, or a smaller one."""
        self.activation_bytes: Callable[[ExpertPair, Sequence[int]], int] = partial(working_bytes, guided=True)
        """Estimate for the next run; set here, because ComfyUI queries `memory_required` before it loads the policy."""
        self._counted_pins = 0

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as err:
            # With `name` and `obj`, unlike torch's error, so that the guider can recognise it.
            raise AttributeError(str(err), name=name, obj=self) from None

    def open(self, ref: ExpertsRef) -> None:
        """Open `ref` again: other experts or LoRAs may have been opened since the last run."""
        self.pair = self._experts(ref)

    def load(self, requested: OffloadPolicy, budget: float, device: torch.device) -> None:
        """Create the engine on `device`, with the largest part of the policy whose weights fit into `budget` bytes."""
        device_bytes = self.pair.device_bytes
        fitted = shrink_to_budget(requested, self.pair.block_counts, budget=budget, device_bytes=device_bytes)
        if self.policy is not None and self.requested == requested and self.pair.loaded_bytes:
            fitted = keep_near_policy(self.policy, fitted, budget=budget, device_bytes=device_bytes)
        if fitted != requested:
            logger.info(
                "%s are free for the experts: %s instead of %s",
                _size(max(0.0, budget)),
                self._describe(fitted),
                self._describe(requested),
            )
        # Allocated now, not at the first fetch: ComfyUI counts these bytes as used from here on.
        self.pair.engine(fitted, device).allocate_buffers()
        self.requested, self.policy = requested, fitted
        self.count_pins()

    def count_pins(self) -> None:
        """Add the pair's page-locked bytes to ComfyUI's total, in versions that have one."""
        pinned = self.pair.pinned_bytes
        management = comfy.model_management
        if hasattr(management, "TOTAL_PINNED_MEMORY"):
            management.TOTAL_PINNED_MEMORY = max(0, management.TOTAL_PINNED_MEMORY + pinned - self._counted_pins)
        self._counted_pins = pinned

    def _describe(self, policy: OffloadPolicy) -> str:
        residency, _ = plan_residency(policy, self.pair.block_counts)
        resident = min(len(blocks) for blocks in residency.residents.values())
        blocks = min(self.pair.block_counts.values())
        return f"{_size(self.pair.device_bytes(policy))} with {resident} of {blocks} blocks resident"

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


class ExpertsPatcher(comfy.model_patcher.ModelPatcher):  # type: ignore[misc]
    """Entry of the experts in ComfyUI's list of loaded models."""

    # Of the class, because the base class's __init__ calls `model_size`.
    model: ExpertsModel
    ref: ExpertsRef
    """Names experts and LoRAs."""
    policy: OffloadPolicy | None = None
    """The policy to load; None: the last requested one."""

    def clone(self, *args: Any, **settings: Any) -> ExpertsPatcher:
        cloned: ExpertsPatcher = super().clone(*args, **settings)
        cloned.ref, cloned.policy = self.ref, self.policy
        return cloned

    def loaded_experts(self) -> LoadedExperts:
        """Return the loaded pair; ComfyUI must have loaded this patcher."""
        assert self.model.policy is not None, "ComfyUI has not loaded the experts"
        return LoadedExperts(pair=self.model.pair, policy=self.model.policy, device=self.load_device)

    def model_size(self) -> int:
        """Return the device bytes that ComfyUI must provide: those of the policy, or the loaded ones if more."""
        pair = self.model.pair
        return max(pair.device_bytes(self.policy or self.model.requested), pair.loaded_bytes)

    def loaded_size(self) -> int:
        """Return the device bytes in use; `SIZE_WHILE_RUNNING` during a run."""
        self.model.count_pins()  # here, because ComfyUI calls this before each of its memory decisions
        pair = self.model.pair
        return SIZE_WHILE_RUNNING if pair.running else pair.loaded_bytes

    def pinned_memory_size(self) -> int:
        return self.model.pair.pinned_bytes

    def model_mmap_residency(self, free: bool = False) -> tuple[int, int]:
        """Return resident and required host bytes: equal, so that ComfyUI frees no other model's RAM for us."""
        pinned = self.pinned_memory_size()
        return pinned, pinned

    def partially_load(
        self, device_to: torch.device, extra_memory: float = 0, force_patch_weights: bool = False
    ) -> int:
        """Load as much of the policy as up to `extra_memory` more device bytes allow; return the added bytes."""
        with self.use_ejected(skip_and_inject_on_exit_only=True):
            self.unpatch_model(self.offload_device, unpatch_weights=False)
            self.patch_model(load_weights=False)
        before = self.loaded_size()
        try:
            self.model.open(self.ref)
            self.model.load(self.policy or self.model.requested, before + extra_memory, device_to)
        except BaseException:
            self.detach()  # not on ComfyUI's list yet, so ComfyUI would never detach it
            raise
        self.model.device = device_to
        return self.loaded_size() - before

    def partially_unload(
        self, device_to: torch.device, memory_to_free: float = 0, force_patch_weights: bool = False
    ) -> int:
        """Free whole blocks; return the freed bytes, 0 if all blocks together are too few.

        Frees nothing during a run, when a preview may load its VAE, but returns `memory_to_free`: otherwise ComfyUI
        would drop the experts from its list while they use memory. The other model gets the memory that is free.
        """
        pair = self.model.pair
        before = pair.loaded_bytes
        if pair.running:
            logger.info("the experts are running: their %s are not freed", _size(before))
            return math.ceil(memory_to_free)
        one, two = (pair.device_bytes(OffloadPolicy.layerwise(ahead)) for ahead in (0, 1))
        block = two - one
        outside = one - block  # the weights outside the blocks
        if memory_to_free > before - outside:
            return 0  # ComfyUI then detaches the experts
        freed = pair.release_memory(math.ceil(memory_to_free))
        self.model.count_pins()
        logger.info("freed %s of %s for another model: %d blocks", _size(freed), _size(before), round(freed / block))
        return freed

    def partially_unload_ram(self, ram_to_unload: float) -> None:
        """Release everything, on the device too, because page-locked blocks cannot be released one by one."""
        if ram_to_unload > 0 and self.model.requested.source == "pinned" and self.model.pair.pinned_bytes:
            self.detach()

    def detach(self, unpatch_all: bool = True) -> ExpertsModel:
        """Release all memory, except during a run.

        With `unpatch_all` False nothing is released: ComfyUI is about to load the experts again.
        """
        if unpatch_all:
            if self.model.pair.running:
                logger.info("the experts are running: they are not unloaded")
                return self.model
            before = self.loaded_size()
            self.model.pair.close()
            self.model.count_pins()
            if before:
                logger.info("freed %s: the experts are unloaded", _size(before))
        super().detach(unpatch_all)
        return self.model


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


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.1f} MB"
