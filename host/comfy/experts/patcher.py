"""Streamed experts, here or in workers, as a model in ComfyUI's memory manager."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import comfy.patcher_extension
import comfy.supported_models
import torch

from ....sampling import working_bytes
from ....schema import OffloadPolicy
from ....schema.refs import ExpertsRef
from ....wan import ExpertPair, ExpertsRegistry
from ....wan.latents import WAN22
from ....wan.measurement import with_resolved_precision
from ...machine_profile import PROBE_BYTES
from ...models import LoadedExperts
from .. import versions
from ..patcher_memory import PolicyMemory, StreamedPatcher
from ..samplers import FlowSampling

logger = logging.getLogger("wanstream.memory")


class ExpertsModel(comfy.model_base.BaseModel):  # type: ignore[misc]
    """Model object for ComfyUI, with Wan's settings and without a diffusion model.

    The weights belong to the pair.

    All patchers for the same files share it: ComfyUI identifies clones by their model.

    Args:
        ref: names the files.
        experts: opens pairs, and keeps the last requested one open.
    """

    def __init__(self, ref: ExpertsRef, experts: Callable[[ExpertsRef], ExpertPair]) -> None:
        pair = experts(ref)
        keeps_frames = pair.high.config.out_channels == WAN22.channels
        family = comfy.supported_models.WAN21_T2V
        if keeps_frames:
            family = comfy.supported_models.WAN22_T2V
        config = versions.config_without_network(
            family, {"image_model": "wan2.1", "model_type": "t2v"}
        )
        super().__init__(config, comfy.model_base.ModelType.FLOW)
        self.ref = ref
        self._experts = experts
        self.pair = pair
        self.keeps_frames = keeps_frames
        """True if masked frames stay noise-free with timestep 0, as in TI2V-5B. Other models get
        them with noise."""
        self.memory = PolicyMemory("experts")
        self.activation_bytes: Callable[[ExpertPair, Sequence[int]], int] = partial(
            working_bytes, sides=(0, 0)
        )
        """Estimate for the next run. Set here because ComfyUI calls `memory_required` before it
        loads the policy."""

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

    def memory_required(
        self, input_shape: Sequence[int], cond_shapes: Mapping[str, Any] | None = None
    ) -> int:
        """Return the activation bytes for latents with `input_shape`, with a negative per sample.

        ComfyUI estimates a model's minimum without negatives, because it can compute them in a
        separate pass. Our engine never does, and it uses all memory above the minimum for blocks.
        """
        return self.activation_bytes(self.pair, input_shape)

    def scale_latent_inpaint(self, latent_image: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """Return the masked part of the latent at a step's noise level."""
        if self.keeps_frames:
            return latent_image
        kept: torch.Tensor = super().scale_latent_inpaint(latent_image=latent_image, **inputs)
        return kept

    def extra_conds(self, **_: object) -> dict[str, Any]:
        """Return nothing: the guider reads the conditioning itself."""
        return {}

    def apply_model(self, *_: object, **__: object) -> torch.Tensor:
        raise ValueError(
            "the streamed experts cannot run as a MODEL, because only their guider selects the "
            "expert of a step: use Wan Guider with SamplerCustomAdvanced, or Wan Sampler"
        )


class ExpertsPatcher(StreamedPatcher):
    """The experts as an entry in ComfyUI's list of loaded models."""

    # On the class, because the base class's __init__ calls `model_size`.
    model: ExpertsModel
    ref: ExpertsRef
    """Names experts and LoRAs."""
    cloned = ("policy", "ref")

    @property
    def weights(self) -> ExpertPair:
        return self.model.pair

    def loaded_experts(self) -> LoadedExperts:
        """Return the loaded pair. ComfyUI must have loaded this patcher."""
        assert self.memory.policy is not None, "ComfyUI has not loaded the experts"
        return LoadedExperts(
            pair=self.model.pair, policy=self.memory.policy, device=self.load_device
        )

    def partially_load(
        self, device_to: torch.device, extra_memory: float = 0, force_patch_weights: bool = False
    ) -> int:
        """Load as much of the policy as fits into `extra_memory` additional device bytes.

        Return the added bytes.
        """
        # As in ComfyUI's own `partially_load`.
        with self.use_ejected(skip_and_inject_on_exit_only=True):
            self.unpatch_model(self.offload_device, unpatch_weights=False)
            self.patch_model(load_weights=False)
        try:
            self.model.open(self.ref)
            return self.load_policy(device_to, extra_memory)
        except BaseException:
            self.detach()  # not on ComfyUI's list yet, so ComfyUI would never detach it
            raise


class OpenExperts:
    """The open experts, and their entries in ComfyUI's list of loaded models.

    Args:
        open_experts: opens a pair.
    """

    def __init__(self, open_experts: Callable[[ExpertsRef], ExpertPair]) -> None:
        self._experts = ExpertsRegistry(open_experts)
        # A strong reference to the open pair's patcher, because ComfyUI's list of loaded models
        # keeps only weak ones.
        self._patcher: ExpertsPatcher | None = None
        # One for all clones.
        self._patchers = WeakValueDictionary[ExpertsRef, ExpertsPatcher]()

    def get(self, ref: ExpertsRef) -> ExpertPair:
        """Return the pair named by `ref`, opening it if necessary."""
        ref = with_resolved_precision(
            ref, comfy.model_management.get_torch_device(), make_room_for_probes
        )
        try:
            return self._experts.get(ref)
        finally:
            self._count_pins()
            self._patcher = self._patchers.get(ref.opened)

    def free(self) -> None:
        """Close the open pair, if any."""
        self._experts.free()
        self._count_pins()
        self._patcher = None

    def patcher(
        self, ref: ExpertsRef, policy: OffloadPolicy, *, flow_shift: float | None = None
    ) -> ExpertsPatcher:
        """Return a patcher for `ref`, for ComfyUI's memory manager and guiders.

        It stays valid when other experts are opened. With `flow_shift` None, ComfyUI's default for
        Wan applies. Raises ValueError for a policy that does not fit the experts.
        """
        device = comfy.model_management.get_torch_device()
        ref = with_resolved_precision(ref, device)
        root = self._patchers.get(ref.opened)
        if root is None:
            root = ExpertsPatcher(ExpertsModel(ref, self.get), device, torch.device("cpu"))
            root.ref = ref
            self._patchers[ref.opened] = self._patcher = root
        # Clones have separate policies and shifts, but share the model and the engine.
        patcher: ExpertsPatcher = root.clone()
        patcher.ref = ref
        patcher.policy = policy
        # Raises for a wrong policy now, not later while ComfyUI changes the list of models.
        patcher.model_size()
        if flow_shift is not None:
            patcher.add_object_patch("model_sampling", FlowSampling(flow_shift))
        return patcher

    def _count_pins(self) -> None:
        # Opening or closing a pair may have closed another one and unlocked the pages.
        # `list` holds the patchers, so none is collected during the loop.
        for patcher in list(self._patchers.values()):
            patcher.memory.count_pins(patcher.weights)


def make_room_for_probes() -> None:
    """Evict other models: a GPU filled by one, such as a text encoder, cannot be measured."""
    device = comfy.model_management.get_torch_device()
    if device.type != "cpu":
        comfy.model_management.free_memory(PROBE_BYTES, device)


def workers_patcher(
    release_memory: Callable[[], bool], load_device: torch.device
) -> comfy.model_patcher.ModelPatcher:
    """Return the workers' entry in ComfyUI's list of loaded models, until ComfyUI unloads it.

    The size is 0, because the model has no parameters. ComfyUI makes no room for it and unloads
    it whole.

    Args:
        release_memory: releases the workers' weights. Returns False during a run, when it cannot.
        load_device: device of this process. One worker shares it.
    """

    def on_detach(_: object, unpatch_all: bool) -> None:
        if unpatch_all:  # otherwise ComfyUI is about to load them again
            logger.info(
                "the workers have unloaded their experts"
                if release_memory()
                else "the workers are running: not unloaded"
            )

    model = type("WorkersModel", (torch.nn.Module,), {})()  # ComfyUI shows the class name
    patcher = comfy.model_patcher.ModelPatcher(model, load_device, torch.device("cpu"))
    patcher.add_callback(comfy.patcher_extension.CallbacksMP.ON_DETACH, on_detach)
    return patcher
