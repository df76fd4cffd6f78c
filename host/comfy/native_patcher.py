"""MODEL of a native model whose blocks stream: ComfyUI loads, patches and evicts it like any other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import comfy.lora
import comfy.model_patcher
import torch
from torch import nn

from ...plan import AutoOffload
from ...schema import OffloadPolicy
from .native_model import NativeWeights
from .patcher_memory import StreamedPatcher

EVERYTHING = 1e32
"""Bytes, as in ComfyUI's own requests to load a model whole."""


class NativePatcher(StreamedPatcher):
    """Patcher of a model from `open_native`; clones share its weights and its engine.

    Patches of tensors outside the blocks are added when they are loaded, as ComfyUI does. Patches of streamed matrices
    are added when a layer computes, as ComfyUI does for weights that it keeps in RAM.
    """

    share_visits = False
    """True if conditions that do not fit into one forward pass share each visit of a block."""
    auto: AutoOffload | None = None
    """Budgets of an automatic policy, which is chosen after the first model call."""

    @property
    def weights(self) -> NativeWeights:
        weights: NativeWeights = self.model.weights
        return weights

    def clone(self, *args: Any, **settings: Any) -> NativePatcher:
        cloned: NativePatcher = super().clone(*args, **settings)
        cloned.share_visits, cloned.auto = self.share_visits, self.auto
        return cloned

    def request(self, policy: OffloadPolicy | AutoOffload) -> None:
        """Set the policy of this MODEL. Raises ValueError if it does not fit the number of blocks."""
        self.auto = policy if isinstance(policy, AutoOffload) else None
        self.policy = policy if isinstance(policy, OffloadPolicy) else None  # None: the one that was chosen last
        self.model_size()

    def partially_load(
        self, device_to: torch.device, extra_memory: float = 0, force_patch_weights: bool = False
    ) -> int:
        """Load as much of the policy as up to `extra_memory` more device bytes allow; return the added bytes."""
        with self.use_ejected(skip_and_inject_on_exit_only=True):
            stale = self.model.current_weight_patches_uuid != self.patches_uuid or not self.weights.loaded_bytes
            self.unpatch_model(self.offload_device, unpatch_weights=stale)
            try:
                self.patch_model(load_weights=False)
                if stale:
                    self._load_outside(device_to)
                added = self.load_policy(device_to, extra_memory)
                self.model.runs.attach(self.model.diffusion_model)
                return added
            except BaseException:
                self.detach()  # not on ComfyUI's list yet, so ComfyUI would never detach it
                raise

    def unpatch_model(self, device_to: torch.device | None = None, unpatch_weights: bool = True) -> None:
        # Without a device: `to` on the whole model would touch the streamed tensors.
        super().unpatch_model(None, unpatch_weights)

    def detach(self, unpatch_all: bool = True) -> Any:
        model = super().detach(unpatch_all)
        if unpatch_all and not self.weights.running:
            model.runs.detach()
            _move(model, self.offload_device)
            model.device = self.offload_device
        return model

    def get_key_patches(self, filter_prefix: str | None = None) -> dict[str, Any]:
        """Return weights and their patches; those of streamed matrices are views of the file, which take no RAM."""
        patches: dict[str, Any] = super().get_key_patches(filter_prefix)
        stored: Mapping[str, torch.Tensor] = self.model.stored
        for key, view in stored.items():
            if key in patches:
                patches[key] = [(view, patches[key][0][1]), *patches[key][1:]]
        return patches

    def model_state_dict(self, filter_prefix: str | None = None) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = super().model_state_dict(filter_prefix)
        return {key: self.model.stored.get(key, tensor) for key, tensor in state.items()}

    def _load_list(self, *args: Any, **settings: Any) -> list[Any]:
        """Return ComfyUI's list of modules to load, without those that have a streamed matrix."""
        streaming = {id(module) for module in self._streaming().values()}
        return [entry for entry in super()._load_list(*args, **settings) if id(entry[-2]) not in streaming]

    def _streaming(self) -> dict[str, nn.Module]:
        """Return the layers with a streamed matrix, by path."""
        layers = (key.rpartition(".")[0] for key in self.model.stored)
        return {path: self.model.get_submodule(path) for path in layers}

    def _load_outside(self, device: torch.device) -> None:
        """Load all tensors that do not stream, patched, and set the patches of those that do."""
        self.load(device, lowvram_model_memory=EVERYTHING)
        self.model.model_lowvram = True  # `unpatch_model` then removes the patches below
        _move(self.model, device)
        for path, layer in self._streaming().items():
            for name in ("weight", "bias"):
                key = f"{path}.{name}"
                functions = [] if key not in self.patches else [self._patch_of(key)]
                functions += self.weight_wrapper_patches.get(key, [])
                setattr(layer, f"{name}_function", functions)
            comfy.model_patcher.move_weight_functions(layer, device)

    def _patch_of(self, key: str) -> Any:
        _, set_function, convert = comfy.model_patcher.get_key_weight(self.model, key)
        return comfy.model_patcher.LowVramPatch(key, self.patches, convert, set_function)


def _move(model: nn.Module, device: torch.device) -> None:
    """Move all tensors that are loaded, one by one: those that stream must stay as they are."""
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            tensors = cast("dict[str, torch.Tensor | None]", store)
            for name, tensor in tensors.items():
                if tensor is None or tensor.is_meta or not tensor.numel() or tensor.device == device:
                    continue
                moved = tensor.detach().to(device)
                tensors[name] = nn.Parameter(moved, requires_grad=False) if name in module._parameters else moved
