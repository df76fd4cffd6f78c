"""MODEL for a native model with streamed blocks: ComfyUI loads, patches and evicts it as usual."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar, cast

import comfy.model_patcher
import comfy.utils
import torch
from torch import nn

from .....devices.machine import available_bytes
from .....plan import AVAILABLE_SHARE, AutoOffload
from .....schema import OffloadPolicy
from ....auto_policy import smaller_limit
from ....native_models import ModelStreaming
from ... import versions
from ...patcher_memory import StreamedPatcher
from ..network.layers import detached, is_in_memory, is_joined
from .arrival import Arriving, arriving_patches, is_patched
from .weights import STACK, NativeWeights

logger = logging.getLogger("wanstream.memory")

EVERYTHING = 1e32
"""Bytes, as in ComfyUI's own requests to load a whole model."""


class NativePatcher(StreamedPatcher):
    """Patcher for a model from `open_native`. Clones share weights and engine.

    Patches outside the blocks are added while loading, as in ComfyUI. Patches for streamed matrices
    are added when a block arrives.
    """

    streaming = ModelStreaming(policy=AutoOffload())
    """User settings."""
    cloned: ClassVar[Sequence[str]] = ("policy", "streaming")

    def clone(self, *args: Any, **settings: Any) -> NativePatcher:
        """Return another MODEL with the same weights.

        Raises ValueError for a deep copy, because it needs memory for all weights.
        """
        if settings.get("force_deepcopy"):
            raise ValueError(
                "a node needs a copy of all weights of the model, as training does, but the blocks "
                f"stream: load the model with {self.plain_loader} for that node"
            )
        cloned: NativePatcher = super().clone(*args, **settings)
        return cloned

    @property
    def weights(self) -> NativeWeights:
        weights: NativeWeights = self.model.weights
        return weights

    @property
    def plain_loader(self) -> str:
        """ComfyUI's node for the weight files, recommended in errors."""
        loader: str = self.model.plain_loader
        return loader

    @property
    def auto(self) -> AutoOffload | None:
        """Budgets for an automatic policy. It is chosen after the first model call."""
        if isinstance(self.streaming.policy, AutoOffload):
            return self.streaming.policy
        return None

    def with_settings(self, streaming: ModelStreaming) -> NativePatcher:
        """Set how this MODEL's blocks stream, and return the MODEL.

        Raises ValueError if the policy does not fit the number of blocks.
        """
        self.streaming = streaming
        self.policy = None  # without a policy, the last chosen one is loaded
        if isinstance(streaming.policy, OffloadPolicy):
            self.policy = streaming.policy
        # Raises for a wrong policy now, not later while ComfyUI changes the list of models.
        self.model_size()
        return self

    def partially_load(
        self, device_to: torch.device, extra_memory: float = 0, force_patch_weights: bool = False
    ) -> int:
        """Load as much of the policy as fits into `extra_memory` additional device bytes.

        Return the added bytes.

        Nothing changes during a run, when a node has loaded a VAE and ComfyUI loads all models
        again.

        Raises:
            ValueError: the model is compiled as a whole, a node requires patches in the weights, or
                the patches changed during a run.
        """
        self.model.runs.close_alone()
        parts = self.parts()
        with ExitStack() as ejected:
            for part in parts.values():
                # As in ComfyUI's own `partially_load`: injections are applied once, on exit.
                ejected.enter_context(part.use_ejected(skip_and_inject_on_exit_only=True))
            try:
                return self._load(parts, device_to, extra_memory, force_patch_weights)
            except BaseException:
                self.detach()  # not on ComfyUI's list yet, so ComfyUI would never detach it
                raise

    def _load_weights(self, device_to: torch.device, extra_memory: float) -> int:
        """Load the policy. If none was ever loaded, use one for a first model call.

        Return the added bytes.
        """
        memory = self.memory
        if self.auto is None or memory.policy is not None:
            return self.load_policy(device_to, extra_memory)
        free = int(AVAILABLE_SHARE * available_bytes())
        ram_bytes = smaller_limit(self.auto.budgets.ram_bytes, free)
        assert ram_bytes is not None, "what is free is a limit"
        memory.requested = self.weights.first_policy(ram_bytes)
        try:
            return self.load_policy(device_to, extra_memory)
        except OSError as err:
            if memory.requested.source == "file":
                raise
            logger.info("no block is kept in RAM in the first model call: %s", err)
            memory.requested = OffloadPolicy.layerwise()
            return self.load_policy(device_to, extra_memory)

    def parts(self) -> Mapping[str, NativePatcher]:
        """Return the patcher for each stack, with all patches for the stack's model."""
        return {STACK: self}

    def models(self) -> Sequence[Any]:
        """Return ComfyUI's models, one per stack."""
        return [self.model]

    def unpatch_model(
        self, device_to: torch.device | None = None, unpatch_weights: bool = True
    ) -> None:
        # Without a device: `to` on the whole model would touch the streamed tensors.
        super().unpatch_model(None, unpatch_weights)

    def partially_unload(self, *args: Any, **settings: Any) -> int:
        self.model.runs.close_alone()
        return super().partially_unload(*args, **settings)

    def detach(self, unpatch_all: bool = True) -> Any:
        self.model.runs.close_alone()
        model = super().detach(unpatch_all)
        if unpatch_all and not self.weights.running:
            model.runs.detach()
            for each in self.models():
                _move(each, self.offload_device)
                # ComfyUI's `unpatch_model` sets it only when called with a device.
                each.device = self.offload_device
        return model

    def get_key_patches(self, filter_prefix: str | None = None) -> dict[str, Any]:
        """Return weights and patches.

        Streamed matrices are read on use and take no RAM here.
        """
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

    def tensors_to_save(
        self, collect: Callable[[], dict[str, torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        """Return all weights with patches, except weights that no file has.

        Weights in streamed layers are read when they are written.

        Raises:
            ValueError: the file is a GGUF, or a patch is for a quantised weight.
        """
        self._refuse_packed("saved")
        stored: Mapping[str, torch.Tensor] = self.model.stored
        quantised = [key for key, tensor in stored.items() if is_joined(tensor)]
        patched = [key for key in quantised if key in self.patches]
        if patched:
            raise ValueError(
                f"{len(patched)} quantised weights that stream have patches, {patched[0]} and "
                "others, and would have to be quantised again to be saved: load this model with "
                f"{self.plain_loader}"
            )

        def put(key: str, dtype: torch.dtype) -> torch.Tensor:
            # ComfyUI returns its own layers' weights as parameters that call
            # `patch_weight_to_device` when written. Until then only the shape matters.
            if versions.casts_weights(self._layer(key)):
                return torch.empty(stored[key].shape, dtype=dtype, device="meta")
            return stored[key].to(dtype)

        layers = [self._layer(key) for key in quantised]
        with (
            self._put([key for key in stored if key not in quantised], put),
            versions.marked_as_patched(layers),
        ):
            state = super().tensors_to_save(collect)
        absent = {key for key, tensor in self.model.in_file.items() if tensor.is_meta}
        return {key: tensor for key, tensor in state.items() if key not in absent}

    def patch_weight_to_device(self, key: str, *args: Any, **settings: Any) -> Any:
        """Return or install a weight with patches.

        A streamed weight is read from the file and only returned.
        """
        before = None
        if settings.get("return_weight"):
            # From the original, or the patches would be added a second time.
            before = versions.weight_before_patches(self, key)

        def unpatched(key: str, dtype: torch.dtype) -> torch.Tensor:
            return self.model.stored[key].to(dtype) if before is None else before

        keys = {key} if before is not None else self.model.stored.keys() & {key}
        with self._put(keys, unpatched):
            return super().patch_weight_to_device(key, *args, **settings)

    def add_hook_patches(
        self,
        hook: Any,
        patches: Mapping[Any, Any],
        strength_patch: float = 1.0,
        strength_model: float = 1.0,
    ) -> Any:
        """Add hook patches. ComfyUI adds them to the weights if a condition needs them.

        Raises:
            ValueError: a patch is for a streamed matrix.
        """
        if strength_patch == 0 and strength_model == 1:
            patches = {}  # as for the CLIP of a LoRA that is for the MODEL only
        keys = (key if isinstance(key, str) else key[0] for key in patches)
        streamed = [key for key in keys if key in self.model.stored]
        if streamed:
            raise ValueError(
                f"a hook changes {len(streamed)} weights that stream, {streamed[0]} and others, "
                "for some of the conditions only, which needs them in memory: use Load LoRA for "
                "the whole run, or two samplers with a MODEL each, or load this model with "
                f"{self.plain_loader}"
            )
        return super().add_hook_patches(hook, patches, strength_patch, strength_model)

    def not_loaded(self) -> Iterable[nn.Module]:
        return self._streaming().values()

    def _layer(self, key: str) -> nn.Module:
        """Return the layer with a tensor."""
        layer: nn.Module = self.model.get_submodule(key.rpartition(".")[0])
        return layer

    def _streaming(self) -> dict[str, nn.Module]:
        """Return the layers with a matrix that streams or stays in the file, by path."""
        keys = (*self.model.stored, *self.model.in_file)
        return {key.rpartition(".")[0]: self._layer(key) for key in keys}

    def _load(
        self,
        parts: Mapping[str, NativePatcher],
        device: torch.device,
        extra_memory: float,
        force_patch_weights: bool,
    ) -> int:
        weights = self.weights
        running = weights.running
        stale = not weights.is_on(device) or any(map(versions.has_other_patches, parts.values()))
        for part in parts.values():
            part._refuse(force_patch_weights, other_patches=running and stale)
        if stale:  # refused before anything is loaded
            arriving = Arriving.joined(
                [arriving_patches(stack, part.model, part.patches) for stack, part in parts.items()]
            )
            # Before the policy is loaded, because the policy must leave this memory free.
            weights.patch_bytes = arriving.device_bytes
        for part in parts.values():
            part._patch(device, weights=stale)
        added = 0 if running else self._load_weights(device, extra_memory)
        if stale:
            # After the policy, because loading may create the engine.
            weights.loaded_engine.set_patches(arriving.blocks)
        with ExitStack() as replaced:
            # Our hooks must be outside compiled code, even where ComfyUI puts it in place only
            # during a call.
            for part in parts.values():
                replaced.enter_context(part._replaced(versions.compiled_modules(part)))
            self.model.runs.attach(
                {stack: part.model.get_submodule(weights.network) for stack, part in parts.items()}
            )
        return added

    def _patch(self, device: torch.device, *, weights: bool) -> None:
        """Replace patched attributes that do not stream. With `weights`, load such weights too."""
        self.unpatch_model(self.offload_device, unpatch_weights=weights)
        self.patch_model(load_weights=False)
        # A compiled module changes the paths of inner layers, and patches are found by path.
        compiled = versions.compiled_modules(self)
        with self._replaced({name: module._orig_mod for name, module in compiled.items()}):
            if weights:
                self._load_outside(device)

    def _load_outside(self, device: torch.device) -> None:
        """Load all tensors that do not stream, patched, and weight functions for streamed ones."""
        # Not `full_load`: ComfyUI would call `to` on the whole model.
        self.load(device, lowvram_model_memory=EVERYTHING)
        # After `load`, which resets the flag.
        versions.remove_functions_later(self.model)
        # `load` skips the parameters of modules with children that have parameters too, and the
        # layers in `not_loaded`.
        _move(self.model, device)
        for path, layer in self._streaming().items():
            casts = versions.casts_weights(layer)
            for name, _ in layer.named_parameters(recurse=False):
                key = f"{path}.{name}"
                functions = versions.weight_functions(self, key)
                if key in self.patches and key not in self.model.stored and is_patched(layer):
                    self.patch_weight_to_device(key, device_to=device)
                if casts and name in ("weight", "bias"):
                    versions.set_weight_functions(layer, name, functions)
                elif functions and is_patched(layer):
                    raise ValueError(
                        f"a node changes {key} when it computes, which streams, and its "
                        f"{type(layer).__name__} takes no such functions: remove that node, or "
                        f"load this model with {self.plain_loader}"
                    )
            versions.force_casts(layer, forced=self.force_cast_weights)
            comfy.model_patcher.move_weight_functions(layer, device)

    def _refuse(self, force_patch_weights: bool, *, other_patches: bool) -> None:
        compiled = versions.compiled_modules(self)
        blocks = [f"{self.weights.prefix}{path}" for path in self.weights.blocks]
        whole = [name for name in compiled if any(block.startswith(f"{name}.") for block in blocks)]
        if whole:
            raise ValueError(
                f"{whole[0]} is compiled as a whole, but the weights of its {len(blocks)} blocks "
                f"change places while it runs: compile the blocks instead ({blocks[0]} and so on), "
                "with a node that compiles only them"
            )
        if force_patch_weights:
            raise ValueError(
                "a node needs all weights of the model in memory, with their patches in them, but "
                f"the blocks stream: load the model with {self.plain_loader} for that node, or "
                "update ComfyUI, which then saves models weight by weight"
            )
        if other_patches:
            raise ValueError(
                "a node loads the model with other LoRAs or patches while it runs: give both "
                "samplers the same MODEL, or load the file twice, with a "
                f"{self.plain_loader} (streamed) for each of them"
            )

    @contextmanager
    def _replaced(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Put modules at their paths during the `with` body."""
        before = {
            name: comfy.utils.set_attr(self.model, name, module) for name, module in modules.items()
        }
        try:
            yield
        finally:
            for name, module in before.items():
                comfy.utils.set_attr(self.model, name, module)

    @contextmanager
    def _put(
        self, keys: Iterable[str], made: Callable[[str, torch.dtype], torch.Tensor]
    ) -> Iterator[None]:
        """Replace streamed tensors by `made(key, model dtype)` during the `with` body."""
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

    def _refuse_packed(self, done: str) -> None:
        packed = [key for key, tensor in self.model.stored.items() if tensor.is_meta]
        if packed:
            raise ValueError(
                f"{len(packed)} weights of this model are packed (GGUF), {packed[0]} and others, "
                f"and cannot be {done}: use the safetensors version of the model"
            )


def _rounded_to(
    dtype: torch.dtype, convert: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """Return `convert` for a weight whose stored dtype differs from the compute dtype."""

    def rounded(weight: torch.Tensor, **settings: Any) -> torch.Tensor:
        return convert(weight.to(dtype).to(weight.dtype), **settings)

    return rounded


def _move(model: nn.Module, device: torch.device) -> None:
    """Move all loaded tensors one by one: streamed ones must stay where they are."""
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            tensors = cast("dict[str, torch.Tensor | None]", store)
            for name, tensor in tensors.items():
                if tensor is None or not is_in_memory(tensor) or not tensor.numel():
                    continue
                if tensor.device == device:
                    continue
                moved = tensor.detach().to(device)
                if name in module._parameters:
                    moved = nn.Parameter(moved, requires_grad=False)
                tensors[name] = moved
