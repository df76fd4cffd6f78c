"""MODEL of a native model whose blocks stream: ComfyUI loads, patches and evicts it like any other."""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import comfy.model_patcher
import comfy.patcher_extension
import comfy.utils
import torch
from torch import nn

from ....plan import AutoOffload
from ....schema import OffloadPolicy
from ...api import ModelStreaming, ShareVisits
from ..patcher_memory import StreamedPatcher
from .arrival import Arriving, arriving_patches
from .layers import detached, is_joined
from .weights import NativeWeights

EVERYTHING = 1e32
"""Bytes, as in ComfyUI's own requests to load a model whole."""

APPLY_MODEL = comfy.patcher_extension.WrappersMP.APPLY_MODEL

COMPILE_KEY = "torch.compile"
"""Key of ComfyUI's wrappers that put compiled modules in the place of a model's own."""


class NativePatcher(StreamedPatcher):
    """Patcher of a model from `open_native`; clones share its weights and its engine.

    Patches of tensors outside the blocks are added when they are loaded, as ComfyUI does. Patches of streamed matrices
    are added when a layer computes, as ComfyUI does for weights that it keeps in RAM; those of `lora_on_arrival` once,
    when their block arrives.
    """

    share_visits = ShareVisits.AUTO
    """Setting for conditions that do not fit into one forward pass."""
    lora_on_arrival = False
    """True to add plain LoRAs to a block once, when it arrives, not each time a layer computes."""
    auto: AutoOffload | None = None
    """Budgets of an automatic policy, which is chosen after the first model call."""

    @property
    def weights(self) -> NativeWeights:
        weights: NativeWeights = self.model.weights
        return weights

    def clone(self, *args: Any, **settings: Any) -> NativePatcher:
        cloned: NativePatcher = super().clone(*args, **settings)
        cloned.share_visits, cloned.lora_on_arrival = self.share_visits, self.lora_on_arrival
        cloned.auto = self.auto
        return cloned

    def with_settings(self, streaming: ModelStreaming) -> NativePatcher:
        """Set how the blocks of this MODEL stream, and return it.

        Raises ValueError if the policy does not fit the number of blocks.
        """
        policy = streaming.policy
        self.auto = policy if isinstance(policy, AutoOffload) else None
        self.policy = policy if isinstance(policy, OffloadPolicy) else None  # None: the one that was chosen last
        self.share_visits = streaming.share_visits
        if streaming.lora_on_arrival != self.lora_on_arrival:
            self.lora_on_arrival = streaming.lora_on_arrival
            self.patches_uuid = uuid.uuid4()  # so that the patches are loaded again
        self.model_size()  # raises for a wrong policy here, not later while ComfyUI changes its list of models
        return self

    def partially_load(
        self, device_to: torch.device, extra_memory: float = 0, force_patch_weights: bool = False
    ) -> int:
        """Load as much of the policy as up to `extra_memory` more device bytes allow; return the added bytes.

        During a run, when a node has loaded a VAE and loads all models again, the weights are as they should be.

        Raises:
            ValueError: the model is compiled as a whole, a node requires patches in the weights, or the patches are
                others during a run.
        """
        with self.use_ejected(skip_and_inject_on_exit_only=True):
            try:
                compiled = self._compiled()
                stale = self.model.current_weight_patches_uuid != self.patches_uuid or not self.weights.loaded_bytes
                running = self.weights.running
                self._refuse(compiled, force_patch_weights, other_patches=running and stale)
                self.unpatch_model(self.offload_device, unpatch_weights=stale)
                self.patch_model(load_weights=False)
                # A compiled module changes the paths of the layers in it, by which patches are found.
                with self._replaced({name: module._orig_mod for name, module in compiled.items()}):
                    if stale:
                        self._load_outside(device_to)
                added = 0 if running else self.load_policy(device_to, extra_memory)
                if stale:
                    self.weights.loaded_engine.set_patches(self._arriving().blocks)
                # Our hooks must be outside of what is compiled, also where ComfyUI puts it in place for each call only.
                with self._replaced(compiled):
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
        """Return weights and their patches; streamed matrices are read when they are used, and take no RAM here."""
        patches: dict[str, Any] = super().get_key_patches(filter_prefix)
        stored: Mapping[str, torch.Tensor] = self.model.stored
        self._refuse_packed("merged")
        for key in patches.keys() & stored.keys():
            (computed, convert), *added = patches[key]
            if computed.dtype != stored[key].dtype:
                convert = _rounded_to(computed.dtype, convert)
            patches[key] = [(stored[key], convert), *added]
        return patches

    def model_state_dict(self, filter_prefix: str | None = None) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = super().model_state_dict(filter_prefix)
        stored: Mapping[str, torch.Tensor] = self.model.stored
        return {key: detached(stored.get(key, tensor)) for key, tensor in state.items()}

    def state_dict_for_saving(self, *args: Any, **settings: Any) -> dict[str, torch.Tensor]:
        """Return all weights with their patches; those of streamed layers are read when they are written.

        Raises:
            ValueError: the file is a GGUF, or a patch is for a quantised weight.
        """
        self._refuse_packed("saved")
        stored: Mapping[str, torch.Tensor] = self.model.stored
        quantised = [key for key, tensor in stored.items() if is_joined(tensor)]
        if patched := [key for key in quantised if key in self.patches]:
            raise ValueError(
                f"{len(patched)} quantised weights that stream have patches, {patched[0]} and others, and would have "
                "to be quantised again to be saved: load this model with Load Diffusion Model"
            )

        def put(key: str, dtype: torch.dtype) -> torch.Tensor:
            # ComfyUI returns the weights of its own layers as parameters that call `patch_weight_to_device` when they
            # are written, for which it needs their shape only.
            is_lazy = hasattr(self.model.get_submodule(key.rpartition(".")[0]), "comfy_cast_weights")
            stored: torch.Tensor = self.model.stored[key]
            return torch.empty(stored.shape, dtype=dtype, device="meta") if is_lazy else stored.to(dtype)

        with self._put([key for key in stored if key not in quantised], put), self._as_they_are(quantised):
            state: dict[str, torch.Tensor] = super().state_dict_for_saving(*args, **settings)
        return state

    def patch_weight_to_device(self, key: str, *args: Any, **settings: Any) -> Any:
        """Return or install a weight with its patches; one that streams is read from the file and only returned."""
        keys = [key] if key in self.model.stored else []
        with self._put(keys, lambda key, dtype: self.model.stored[key].to(dtype)):
            return super().patch_weight_to_device(key, *args, **settings)

    def add_hook_patches(self, hook: Any, patches: Mapping[Any, Any], *args: Any, **settings: Any) -> Any:
        """Add the patches of a hook, which ComfyUI adds to the weights whenever a condition needs them.

        Raises:
            ValueError: one of them is for a matrix that streams.
        """
        keys = [key if isinstance(key, str) else key[0] for key in patches]
        streamed = [key for key in keys if key in self.model.stored]
        if streamed:
            raise ValueError(
                f"a hook changes {len(streamed)} weights that stream, {streamed[0]} and others, for some of the "
                "conditions only, which needs them in memory: use Load LoRA for the whole run, or two samplers with a "
                "MODEL each, or load this model with Load Diffusion Model"
            )
        return super().add_hook_patches(hook, patches, *args, **settings)

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
        arriving = self._arriving().keys
        self.model.model_lowvram = True  # `unpatch_model` then removes the patches below
        _move(self.model, device)
        for path, streaming in self._streaming().items():
            layer: Any = streaming
            casts = hasattr(layer, "comfy_cast_weights")
            for name, _ in layer.named_parameters(recurse=False):
                key = f"{path}.{name}"
                functions = [] if key not in self.patches or key in arriving else [self._patch_of(key)]
                functions += self.weight_wrapper_patches.get(key, [])
                if casts and name in ("weight", "bias"):
                    setattr(layer, f"{name}_function", functions)
                elif functions and _is_patched(layer):
                    raise ValueError(
                        f"a LoRA or another patch changes {key}, which streams, and its {type(layer).__name__} takes "
                        "no patches: remove that LoRA, or load this model with Load Diffusion Model"
                    )
            layer.comfy_force_cast_weights = self.force_cast_weights
            if casts and self.force_cast_weights and not hasattr(layer, "prev_comfy_cast_weights"):
                layer.prev_comfy_cast_weights, layer.comfy_cast_weights = layer.comfy_cast_weights, True
            comfy.model_patcher.move_weight_functions(layer, device)

    def _arriving(self) -> Arriving:
        return arriving_patches(self.patches if self.lora_on_arrival else {}, self.weights)

    def _patch_of(self, key: str) -> Any:
        _, set_function, convert = comfy.model_patcher.get_key_weight(self.model, key)
        return comfy.model_patcher.LowVramPatch(key, self.patches, convert, set_function)

    def _compiled(self) -> dict[str, Any]:
        """Return the compiled modules by their path, those of object patches and of ComfyUI's wrapper."""
        found: dict[str, Any] = {
            name: patch for name, patch in self.object_patches.items() if hasattr(patch, "_orig_mod")
        }
        for wrapper in self.get_wrappers(APPLY_MODEL, COMPILE_KEY):
            for value in inspect.getclosurevars(wrapper).nonlocals.values():
                found |= value if isinstance(value, dict) else {}
        return found

    def _refuse(self, compiled: Iterable[str], force_patch_weights: bool, *, other_patches: bool) -> None:
        blocks = [f"diffusion_model.{path}" for path in self.weights.blocks]
        whole = [name for name in compiled if any(block.startswith(f"{name}.") for block in blocks)]
        if whole:
            raise ValueError(
                f"{whole[0]} is compiled as a whole, but the weights of its {len(blocks)} blocks change places while "
                f"it runs: compile the blocks instead ({blocks[0]} and so on), with a node that compiles only them"
            )
        if force_patch_weights:
            raise ValueError(
                "a node needs all weights of the model in memory, with their patches in them, but the blocks stream: "
                "load the model with Load Diffusion Model for that node, or update ComfyUI, which then saves models "
                "weight by weight"
            )
        if other_patches:
            raise ValueError(
                "a node loads the model with other LoRAs or patches while it runs: give both samplers the same MODEL, "
                "or load the file twice, with a Load Diffusion Model (streamed) for each of them"
            )

    @contextmanager
    def _replaced(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Put modules at their paths for as long as the `with` body runs."""
        before = {name: comfy.utils.set_attr(self.model, name, module) for name, module in modules.items()}
        try:
            yield
        finally:
            for name, module in before.items():
                comfy.utils.set_attr(self.model, name, module)

    @contextmanager
    def _put(self, keys: Iterable[str], made: Callable[[str, torch.dtype], torch.Tensor]) -> Iterator[None]:
        """Replace streamed tensors by `made(key, dtype of the model)`, for as long as the `with` body runs."""
        replaced: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter | None]] = []
        try:
            for key in keys:
                path, _, name = key.rpartition(".")
                store = self.model.get_submodule(path)._parameters
                bound = store[name]
                assert bound is not None
                replaced.append((store, name, bound))
                store[name] = nn.Parameter(made(key, bound.dtype), requires_grad=False)
            yield
        finally:
            for store, name, bound in replaced:
                store[name] = bound

    @contextmanager
    def _as_they_are(self, quantised: Iterable[str]) -> Iterator[None]:
        """Let ComfyUI take the stored tensors of these weights, as it does for weights that have their patches."""
        layers = [self.model.get_submodule(key.rpartition(".")[0]) for key in quantised]
        for layer in layers:
            vars(layer)["comfy_patched_weights"] = True
        try:
            yield
        finally:
            for layer in layers:
                del layer.comfy_patched_weights

    def _refuse_packed(self, done: str) -> None:
        packed = [key for key, tensor in self.model.stored.items() if tensor.is_meta]
        if packed:
            raise ValueError(
                f"{len(packed)} weights of this model are packed (GGUF), {packed[0]} and others, and cannot be {done}: "
                "use the safetensors version of the model"
            )


def _is_patched(module: nn.Module) -> bool:
    """Return True if ComfyUI patches the parameters of a module: those next to modules with parameters it does not."""
    return not any(True for child in module.children() for _ in child.parameters())


def _rounded_to(dtype: torch.dtype, convert: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return `convert` for a weight in another dtype than the one that the model computes with."""

    def rounded(weight: torch.Tensor, **settings: Any) -> torch.Tensor:
        return convert(weight.to(dtype).to(weight.dtype), **settings)

    return rounded


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
