"""Differences between ComfyUI versions, and ComfyUI's private names used in this pack.

Public names are used everywhere in `host/comfy`: `comfy_api`, `folder_paths`, `comfy.cli_args`,
functions and classes in ComfyUI's modules without a leading underscore, and the `ModelPatcher`,
`BaseModel` and `CFGGuider` attributes meant for subclasses and node packs.

Private names appear only in this file:

* names with a leading underscore, and module variables,
* attributes that ComfyUI sets on layers, models and list entries for itself,
* dictionary keys and tuple layouts,
* everything missing in a supported version.

Supported versions are 0.3.64 and later. Comments mark names absent from 0.3.64, 0.18.1 or 0.33.0.
`tests/integration/comfy/inside/host/versions.py` tries each name on real ComfyUI objects.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid5
from weakref import ref

import comfy.float
import comfy.lora
import comfy.model_base
import comfy.model_detection
import comfy.model_management
import comfy.model_patcher
import comfy.ops
import comfy.patcher_extension
import comfy.sd
import comfy.utils
import comfy.weight_adapter
import comfyui_version
import folder_paths
import torch
from torch import nn

# The process: version, settings, server.


def version() -> str:
    return str(comfyui_version.__version__)


def settings_file() -> Path:
    """Return the default user's settings file. ComfyUI writes it after each change."""
    return Path(folder_paths.get_user_directory()) / "default" / "comfy.settings.json"


def shows_progress_bars() -> bool:
    """Return False if ComfyUI has turned off progress bars on the console."""
    shown: bool = comfy.utils.PROGRESS_BAR_ENABLED
    return shown


def server() -> Any:
    """Return the `PromptServer` in this process, or None before it exists."""
    # A script that uses ComfyUI has no server and need not import one.
    from server import PromptServer

    return getattr(PromptServer, "instance", None)


def has_viewers() -> bool:
    """Return True if at least one websocket is connected: a page or an API client."""
    running = server()
    return running is not None and bool(running.sockets)


class QueueItem(NamedTuple):
    """Running item in ComfyUI's queue."""

    graph: Mapping[str, Any]
    extra_data: Mapping[str, Any]


def running_item(prompt_id: str | None) -> QueueItem:
    """Return the running queue item with this id, or an empty one."""
    running = server()
    if running is None:
        return QueueItem({}, {})
    # An item is (number, id, graph, extra_data, outputs) and, in later versions, secrets.
    # `get_current_queue` would also deep-copy all pending items with their graphs.
    for _, item_id, graph, extra_data, *_ in running.prompt_queue.get_current_queue_volatile()[0]:
        if item_id == prompt_id:
            return QueueItem(graph, extra_data)
    return QueueItem({}, {})


# The memory manager.


def loaded_models(device: torch.device | None = None) -> list[Any]:
    """Return the `LoadedModel`s on one device or on all. They hold patchers by weak reference."""
    entries: list[Any] = comfy.model_management.current_loaded_models
    return [entry for entry in entries if device is None or entry.device == device]


def count_pinned_bytes(nbytes: int) -> None:
    """Add `nbytes` to ComfyUI's total of page-locked bytes. 0.3.64 has no total."""
    management = comfy.model_management
    # ComfyUI limits this total (`MAX_PINNED_MEMORY`), and our pages take from the same RAM.
    if hasattr(management, "TOTAL_PINNED_MEMORY"):
        management.TOTAL_PINNED_MEMORY = max(0, management.TOTAL_PINNED_MEMORY + nbytes)


def in_dynamic_vram() -> bool:
    """Return True if ComfyUI keeps models in dynamic VRAM."""
    memory = getattr(comfy, "memory_management", None)  # absent in 0.3.64
    return bool(getattr(memory, "aimdo_enabled", False))


def dynamic_vram_bytes() -> int | None:
    """Return the device bytes in ComfyUI's dynamic VRAM, or None without dynamic VRAM.

    0.12 and later use it on NVIDIA GPUs under Linux and Windows unless disabled.
    """
    if not in_dynamic_vram():
        return None
    from comfy_aimdo import control  # absent in 0.3.64

    return int(control.get_total_vram_usage())


def is_dynamic(patcher: Any) -> bool:
    """Return True for a MODEL in dynamic VRAM. 0.3.64 has no `is_dynamic`."""
    return hasattr(patcher, "is_dynamic") and bool(patcher.is_dynamic())


def without_dynamic_vram(patcher: Any) -> Any:
    """Return a MODEL with weights in RAM, or None if ComfyUI cannot load the file again."""
    if patcher.cached_patcher_init is None:
        return None
    return patcher.clone(disable_dynamic=True)


# Model files and configurations.


class LoadedFile(NamedTuple):
    """A MODEL's file, and how ComfyUI loaded it."""

    path: str
    options: Mapping[str, Any]
    """The loader's model options."""
    is_checkpoint: bool
    """True for a file with all model parts."""


def loaded_file(patcher: Any) -> LoadedFile | None:
    """Return the file of a MODEL from ComfyUI's loaders, or None. Always None in 0.3.64."""
    loader = getattr(patcher, "cached_patcher_init", None)  # absent in 0.3.64
    if loader is None:
        return None
    function, arguments, *place = loader
    # The stored arguments are all positional, and their order differs between loaders.
    given = inspect.signature(function).bind(*arguments).arguments
    options = given.get("model_options", {})
    if function is comfy.sd.load_diffusion_model:
        return LoadedFile(given["unet_path"], options, is_checkpoint=False)
    # In 0.33.0 it is the loader for all parts, with the MODEL's index in the result.
    all_parts = function is comfy.sd.load_checkpoint_guess_config and place == [0]
    if all_parts or function.__name__ == "load_checkpoint_guess_config_model_only":
        return LoadedFile(given["ckpt_path"], options, is_checkpoint=True)
    return None


class LoadedClip(NamedTuple):
    """A CLIP's files, and how ComfyUI loaded them."""

    paths: Sequence[str]
    kind: str | None
    """`CLIPType` name, or None for a checkpoint."""
    options: Mapping[str, Any]
    """The loader's model options."""


def loaded_clip(patcher: Any) -> LoadedClip | None:
    """Return the files of a CLIP from ComfyUI's loaders, or None. Always None in 0.3.64."""
    loader = getattr(patcher, "cached_patcher_init", None)  # absent in 0.3.64
    if loader is None:
        return None
    function, arguments, *_ = loader
    given = inspect.signature(function).bind(*arguments).arguments
    if function.__name__ == "load_clip_model_patcher":
        options = given.get("model_options", {})
        return LoadedClip(given["ckpt_paths"], given["clip_type"].name.lower(), options)
    # The names in 0.33.0 and in 0.18.1.
    checkpoints = {"load_checkpoint_clip_patcher", "load_checkpoint_guess_config_clip_only"}
    if function.__name__ in checkpoints and not given.get("te_model_options"):
        return LoadedClip([given["ckpt_path"]], None, {})
    return None


def clip_kinds(files: int) -> list[str]:
    """Return the type choices in ComfyUI's loaders for one or two text encoder files."""
    # Only the loader nodes have this list. It differs between versions.
    loaders = import_module("nodes")
    loader = {1: loaders.CLIPLoader, 2: loaders.DualCLIPLoader}[files]
    return list(loader.INPUT_TYPES()["required"]["type"][0])


def set_loader(patcher: Any, load: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Make ComfyUI load a MODEL again for another GPU with `load(*arguments)`. Not in 0.3.64."""
    patcher.cached_patcher_init = load, arguments


def model_config(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> Any:
    """Return ComfyUI's configuration for these tensors, or None if it detects no model."""
    try:
        return comfy.model_detection.model_config_from_unet(tensors, "", metadata=metadata)
    except (KeyError, IndexError):  # a partial model lacks tensors needed for the sizes
        return None


def is_checkpoint(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bool:
    """Return True if ComfyUI's checkpoint loader detects a model below a prefix."""
    prefix = comfy.model_detection.unet_prefix_from_state_dict(tensors)
    # `convert_old_quants` pops keys from the mapping it receives.
    tensors = dict(tensors)
    metadata = dict(metadata)
    if hasattr(comfy.utils, "convert_old_quants"):  # absent in 0.3.64
        tensors, metadata = comfy.utils.convert_old_quants(tensors, prefix, metadata=metadata)
    config = comfy.model_detection.model_config_from_unet(tensors, prefix, metadata=metadata)
    return config is not None


def config_without_network(family: type, settings: Mapping[str, Any]) -> Any:
    """Return a configuration for `family` that builds no diffusion model."""
    return family({**settings, "disable_unet_model_creation": True})


def marks_layers(config: Any) -> bool:
    """Return True if quantised layers are marked one by one. 0.3.64 has only fp8 with scales."""
    # On the type, because a configuration warns about missing attributes.
    return hasattr(type(config), "quant_config")


def is_quantised(config: Any) -> bool:
    settings = config.quant_config if marks_layers(config) else config.scaled_fp8
    return settings is not None


def layers_of(config: Any, dtype: torch.dtype, cast: torch.dtype | None) -> Any:
    """Return the operations ComfyUI would choose for a configuration."""
    if config.custom_operations:
        return config.custom_operations
    if marks_layers(config):
        fast = config.optimizations.get("fp8", False)
        return comfy.ops.pick_operations(dtype, cast, fp8_optimizations=fast, model_config=config)
    scaled = config.scaled_fp8
    # 0.3.64 sets this option when it detects scales. A marker with two numbers sets it to False.
    fast = config.optimizations.get("fp8", scaled is not None)
    return comfy.ops.pick_operations(dtype, cast, fp8_optimizations=fast, scaled_fp8=scaled)


def set_layers(config: Any, operations: type) -> None:
    config.custom_operations = operations


def linear_layers(model: Any) -> tuple[type, ...]:
    """Return the linear layer classes. The mixed-precision one is not a torch Linear."""
    operations = model.model_config.custom_operations
    if operations is None:  # a MODEL from another loader
        return (nn.Linear,)
    return nn.Linear, operations.Linear


def multiply_in_fp8(config: Any) -> None:
    """Make layers multiply in fp8, as with the weight type "fp8_e4m3fn_fast"."""
    config.optimizations["fp8"] = True


def compute_dtype(model: Any) -> torch.dtype:
    """Return a model's compute dtype. 0.3.64 has no `get_dtype_inference`."""
    if not isinstance(model, comfy.model_base.BaseModel):
        return torch.float32  # text encoders
    dtype: torch.dtype = model.manual_cast_dtype or model.get_dtype()
    return dtype


def with_marked_layers(
    tensors: dict[str, torch.Tensor], metadata: dict[str, str]
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors with markers for quantised layers. 0.3.64 has no markers."""
    if not hasattr(comfy.utils, "convert_old_quants"):
        return tensors, metadata
    converted: tuple[dict[str, torch.Tensor], dict[str, str]] = comfy.utils.convert_old_quants(
        tensors, "", metadata=metadata
    )
    return converted


def quantised_formats() -> Mapping[str, torch.dtype]:
    """Return the stored dtype for each format of marked layers. Empty in 0.3.64."""
    if find_spec("comfy.quant_ops") is None:
        return {}
    from comfy import quant_ops  # absent in 0.3.64

    return {name: settings["storage_t"] for name, settings in quant_ops.QUANT_ALGOS.items()}


@contextmanager
def loading_by(network: nn.Module, load: Callable[..., Any]) -> Iterator[None]:
    """Replace a network's `load_state_dict` by `load(tensors, strict=..., **more)`.

    ComfyUI calls it with network keys. In some versions it copies the tensors even with torch's
    `assign`.
    """
    network.load_state_dict = load  # type: ignore[method-assign]
    try:
        yield
    finally:
        # The instance attribute hides the method. Without the attribute, the method is back.
        del network.load_state_dict


@contextmanager
def loading_clip_by(load: Callable[..., Any]) -> Iterator[None]:
    """Make new CLIPs load a state dict through `load(clip, load_sd, *arguments)`.

    `load_sd` is ComfyUI's own method. While a CLIP is being built the networks have no values, and
    only then can they be prepared for file tensors.
    """
    # On the class, because `CLIP.__init__` itself calls `load_sd`.
    own = comfy.sd.CLIP.load_sd

    def load_sd(clip: Any, *args: Any, **settings: Any) -> Any:
        return load(clip, own, *args, **settings)

    comfy.sd.CLIP.load_sd = load_sd
    try:
        yield
    finally:
        comfy.sd.CLIP.load_sd = own


def encoder_linear_layers(network: nn.Module) -> tuple[type, ...]:
    """Return the classes of linear layers, and of banks of experts, in text encoders."""
    found: list[Any] = [getattr(module, "operations", None) for module in network.modules()]
    operations = [each for each in found if each is not None]
    linear: set[type] = {each.Linear for each in operations}
    # Absent in 0.18.1, and in operations of plain layers.
    banks: set[type] = {each.MoEExperts for each in operations if hasattr(each, "MoEExperts")}
    return nn.Linear, *linear, *banks


def intended_dtype(layer: nn.Module, name: str, tensor: torch.Tensor) -> torch.dtype:
    """Return ComfyUI's dtype for a tensor in a layer it has built."""
    # Absent in 0.3.64. In dynamic VRAM it differs from the empty tensor's dtype.
    dtype: torch.dtype = getattr(layer, f"{name}_comfy_model_dtype", None) or tensor.dtype
    return dtype


# Layers and weights.


def casts_weights(layer: nn.Module) -> bool:
    """Return True for ComfyUI's own layers. They cast and patch weights when they compute."""
    return hasattr(layer, "comfy_cast_weights")


def set_weight_functions(
    layer: nn.Module, name: str, functions: Sequence[Callable[..., Any]]
) -> None:
    """Set the functions that a ComfyUI layer applies to "weight" or "bias" when it computes."""
    assert name in {"weight", "bias"}, name
    setattr(layer, f"{name}_function", functions)


def force_casts(layer: Any, *, forced: bool) -> None:
    """Make a layer cast weights that need no cast, until `ModelPatcher.unpatch_model`."""
    # `ModelPatcher.load` sets this, but it skips streamed layers.
    layer.comfy_force_cast_weights = forced
    if casts_weights(layer) and forced and not hasattr(layer, "prev_comfy_cast_weights"):
        # `unpatch_model` restores the flag from this attribute. Without the check, a second call
        # would store True.
        layer.prev_comfy_cast_weights = layer.comfy_cast_weights
        layer.comfy_cast_weights = True


@contextmanager
def marked_as_patched(layers: Collection[nn.Module]) -> Iterator[None]:
    """Make ComfyUI treat these layers' weights as if they contained the patches."""
    for layer in layers:
        # Otherwise 0.18.1 and 0.33.0 would patch the weight once more when the model is saved.
        vars(layer)["comfy_patched_weights"] = True
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["comfy_patched_weights"]


def load_on_any_device(layer: Any) -> None:
    """Make a built mixed-precision layer keep loaded tensors on their device."""
    # ComfyUI calls `to(device=...)` with this value, and `to(device=None)` keeps tensors on `meta`.
    layer.factory_kwargs = {**layer.factory_kwargs, "device": None}


def stored_names(weight: Any, key: str) -> dict[int, str]:
    """Return the state dict key for each tensor in a quantised weight, by `id`."""
    return {id(tensor): name for name, tensor in weight.state_dict(key).items()}


def with_tensors(
    patch: Sequence[Any], change: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[Any, ...]:
    """Return one weight patch with `change(tensor)` applied to all tensors.

    Numbers stay unchanged, and so do merged weights from other models.
    """
    strength, value, *rest = patch
    if isinstance(value, comfy.weight_adapter.WeightAdapterBase):
        # A copy, because all clones of a MODEL share the adapter.
        changed = copy.copy(value)
        changed.weights = _with_tensors(value.weights, change)
        return (strength, changed, *rest)
    if isinstance(value, tuple):  # a difference or similar; a list has whole models
        return (strength, _with_tensors(value, change), *rest)
    return (strength, value, *rest)


def _with_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor) and value.dim():
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_with_tensors(each, change) for each in value)
    return value


class ByIdentity:
    """Value equal only to itself. It is held by weak reference where Python allows it."""

    def __init__(self, value: Any) -> None:
        self._id = id(value)
        try:
            self._value: Callable[[], Any] = ref(value)
        except TypeError:  # a built-in type
            self._value = lambda: value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ByIdentity):
            return False
        value = self._value()
        # Not by id alone: Python reuses the id of a deleted object.
        return value is not None and value is other._value()

    def __hash__(self) -> int:
        return self._id


PATCHES_OF_WEIGHTS = ("patches", "weight_wrapper_patches")
"""MODEL attributes with weight patches by key."""


def has_patched_weights(patcher: Any) -> bool:
    """Return True if a MODEL has weight patches."""
    return any(getattr(patcher, name) for name in PATCHES_OF_WEIGHTS)


def add_patches_of_weights(source: Any, target: Any) -> None:
    """Add one MODEL's weight patches to another MODEL."""
    for name in PATCHES_OF_WEIGHTS:
        patches = getattr(target, name)
        for key, added in getattr(source, name).items():
            patches[key] = [*patches.get(key, []), *added]


def join_patch_identities(target: Any, *sources: Any) -> None:
    """Give a MODEL a patch identity that stays equal while the sources' identities do."""
    first, *others = sources
    joined = first.patches_uuid
    for other in others:
        joined = uuid5(joined, str(other.patches_uuid))
    target.patches_uuid = joined


def original_modules(patcher: Any) -> dict[str, Any]:
    """Return the attributes replaced by object patches in a model now, by path."""
    return dict(patcher.object_patches_backup)


def patch_identity(patch: Any) -> Hashable:
    """Return equal values for patches with the same tensors and numbers."""
    if isinstance(patch, comfy.weight_adapter.WeightAdapterBase):
        return type(patch), patch_identity(patch.weights)
    if isinstance(patch, (tuple, list)):
        return tuple(map(patch_identity, patch))
    if patch is None or isinstance(patch, (int, float, str)):
        return patch
    return ByIdentity(patch)


def patched_shape(patches: Sequence[Any], weight: torch.Tensor, key: str) -> Sequence[int]:
    """Return the shape of a patched weight."""
    calculate = getattr(comfy.lora, "calculate_shape", None)  # absent in 0.3.64
    return weight.shape if calculate is None else calculate(patches, weight, key)


def patched_weight(
    layer: nn.Module,
    key: str,
    weight: torch.Tensor,
    patches: Sequence[Any],
    *,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return a patched weight, as ComfyUI has it on the weight's device.

    Args:
        layer: layer with the weight. It is not changed.
        key: key in the model.
        weight: the weight, which may be changed.
        patches: ComfyUI's patches for the weight.
        dtype: the layer's compute dtype.
    """
    path, _, name = key.rpartition(".")
    # A shallow copy shares `_parameters` with the layer, so the twin gets another dictionary.
    twin: Any = copy.copy(layer)
    if not isinstance(weight, nn.Parameter):
        weight = nn.Parameter(weight, requires_grad=False)
    twin._parameters = {**layer._parameters, name: weight}
    # ComfyUI patches a weight by key in a model, so this one contains only the layer.
    place = root = nn.Module()
    *outer, last = path.split(".")
    for each in outer:
        place.add_module(each, nn.Module())
        place = place.get_submodule(each)
    place.add_module(last, twin)
    if not in_dynamic_vram() or not casts_weights(layer):
        patcher = comfy.model_patcher.ModelPatcher(root, weight.device, weight.device)
        patcher.patches = {key: patches}
        patcher.patch_weight_to_device(key, device_to=weight.device)
        return twin._parameters[name]  # type: ignore[no-any-return]
    # As layers in `comfy.ops` apply a `LowVramPatch` to a weight that stays on the device.
    # The seed comes from the layer's path here, but from the weight's key in
    # `patch_weight_to_device`.
    seed = comfy.utils.string_to_seed(path)
    _, set_weight, convert = comfy.model_patcher.get_key_weight(root, key)
    computed = weight.to(dtype)
    if convert is not None:
        computed = convert(computed)
    computed = comfy.lora.calculate_weight(patches, computed, key, intermediate_dtype=dtype)
    if set_weight is None:
        return comfy.float.stochastic_rounding(computed, weight.dtype, seed=seed)  # type: ignore[no-any-return]
    return set_weight(computed, seed=seed, return_weight=True)  # type: ignore[no-any-return]


# Patchers.


class StaticPatcher(comfy.model_patcher.ModelPatcher):  # type: ignore[misc]
    """ModelPatcher that is never in dynamic VRAM, with methods that only some versions call.

    Subclasses have `pinned_bytes`, the page-locked weight bytes, and `release_pinned` to release
    them when ComfyUI needs RAM.
    """

    def not_loaded(self) -> Iterable[nn.Module]:
        """Return the modules that `load` skips."""
        return ()

    def tensors_to_save(
        self, collect: Callable[[], dict[str, torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        """Return the tensors to save. `collect` takes them from the model."""
        return collect()

    def state_dict_for_saving(self, *args: Any, **settings: Any) -> dict[str, torch.Tensor]:
        """Return all tensors in a MODEL, for saving. 0.3.64 does not call this."""
        collect = partial(super().state_dict_for_saving, *args, **settings)
        if hasattr(super(), "model_state_dict_for_saving"):
            tensors: dict[str, torch.Tensor] = collect()  # through the next method
            return tensors
        return self.tensors_to_save(collect)

    def model_state_dict_for_saving(self, *args: Any, **settings: Any) -> dict[str, torch.Tensor]:
        """Return all tensors in a MODEL or CLIP, for saving. Only 0.33.0 calls this."""
        return self.tensors_to_save(partial(super().model_state_dict_for_saving, *args, **settings))

    def is_dynamic(self) -> bool:
        return False

    def pinned_memory_size(self) -> int:
        """Return the page-locked bytes. 0.3.64 does not call this."""
        pinned: int = self.pinned_bytes()
        return pinned

    def partially_unload_ram(self, ram_to_unload: float) -> None:
        """Release RAM. 0.3.64 never calls this, 0.33.0 only for dynamic VRAM."""
        if ram_to_unload > 0:
            self.release_pinned()

    def model_mmap_residency(self, free: bool = False) -> tuple[int, int]:
        """Return resident and required host bytes. Of the three versions, only 0.18.1 calls this.

        They are equal, so that ComfyUI frees no other model's RAM.
        """
        pinned = self.pinned_bytes()
        return pinned, pinned

    def _load_list(self, *args: Any, **settings: Any) -> list[Any]:
        left_out = set(map(id, self.not_loaded()))
        # (bytes, name, module, parameters), with more bytes in front in later versions.
        entries = super()._load_list(*args, **settings)
        return [entry for entry in entries if id(entry[-2]) not in left_out]


def has_other_patches(patcher: Any) -> bool:
    """Return True if the weights in memory lack this MODEL's patches."""
    return bool(patcher.model.current_weight_patches_uuid != patcher.patches_uuid)


def weight_before_patches(patcher: Any, key: str) -> torch.Tensor | None:
    """Return the original of a weight patched in memory, else None."""
    kept = patcher.backup.get(key)
    if kept is None:
        return None
    weight: torch.Tensor = kept.weight
    return weight


def remove_functions_later(model: nn.Module) -> None:
    """Make `ModelPatcher.unpatch_model` remove the layers' weight functions."""
    # `unpatch_model` wipes weight functions and restores cast flags only with this flag.
    model.model_lowvram = True  # type: ignore[assignment]


def weight_functions(patcher: Any, key: str) -> list[Callable[..., Any]]:
    """Return the functions that nodes added to the weight `key` with `add_weight_wrapper`."""
    functions: list[Callable[..., Any]] = patcher.weight_wrapper_patches.get(key, [])
    return functions


COMPILE_KEY = "torch.compile"
"""Key for the wrapper that swaps in a model's compiled modules for each call."""


def compiled_modules(patcher: Any) -> dict[str, Any]:
    """Return a MODEL's compiled modules by path, from object patches and ComfyUI's wrapper."""
    patches = patcher.object_patches.items()
    found = {name: patch for name, patch in patches if hasattr(patch, "_orig_mod")}
    kind = comfy.patcher_extension.WrappersMP.APPLY_MODEL
    for wrapper in patcher.get_wrappers(kind, COMPILE_KEY):
        # ComfyUI keeps the compiled modules only in the wrapper's closure.
        for value in inspect.getclosurevars(wrapper).nonlocals.values():
            if isinstance(value, dict):
                found |= value
    return found


def is_compiled_by_wrapper(patcher: Any) -> bool:
    return any(COMPILE_KEY in wrappers for wrappers in patcher.wrappers.values())


# fmt: off
OF_THE_WEIGHTS = frozenset({
    "model", "load_device", "offload_device", "size", "parent", "weight_inplace_update",
    "is_injected", "backup", "object_patches_backup", "hook_backup", "cached_hook_patches",
    "current_hooks",
    "pinned", "backup_buffers", "cached_patcher_init",  # absent in 0.3.64
})
# fmt: on
"""ModelPatcher attributes that belong to the weights and their state."""


def carry_over(source: Any, target: Any) -> None:
    """Copy everything a node can set on a MODEL to another one with other weights."""
    for name in vars(source).keys() & vars(target).keys() - OF_THE_WEIGHTS:
        # Both MODELs share the dictionaries and lists until the next `clone`.
        setattr(target, name, getattr(source, name))


OF_A_CLIP = frozenset(
    {"layer_idx", "use_clip_schedule", "apply_hooks_to_conds", "tokenizer", "tokenizer_options"}
)
"""CLIP attributes that nodes can set, besides the patcher."""


def architecture(model: Any) -> dict[str, Any]:
    """Return the settings that define a model's layers, by name, without the number format."""
    config: dict[str, Any] = model.model_config.unet_config
    return {name: value for name, value in config.items() if name != "dtype"}


def copy_run_state(source: Any, target: Any) -> None:
    """Copy the run values a guider has set on one model to another."""
    if "latent_shapes" in vars(source):  # absent in 0.18.1
        target.latent_shapes = source.latent_shapes


def twin_memo(model: Any) -> dict[int, Any]:
    """Return the memo for a deep copy with the same configuration and no current patcher."""
    # Configurations cannot be copied and never change.
    return {id(model.model_config): model.model_config, id(model.current_patcher): None}


# Samplers and model calls.


def sampler_function(sampler: Any) -> Any:
    """Return a SAMPLER's function, or the class if it has none.

    For some samplers, ComfyUI creates a new function in each run.
    """
    return getattr(sampler, "sampler_function", type(sampler))


def is_of_core(function: Any) -> bool:
    """Return True for a function defined in a ComfyUI module."""
    return str(getattr(function, "__module__", "")).startswith("comfy.")


def code_folder() -> Path:
    """Return the folder with ComfyUI's models. Code from other packs is elsewhere."""
    return Path(comfy.model_base.__file__).parent


def guidance_scale(guider: Any) -> object:
    """Return a guider's CFG scale, or None if another pack's guider has none."""
    return getattr(guider, "cfg", None)


def noise_of_run(arguments: Sequence[Any], settings: Mapping[str, Any]) -> torch.Tensor:
    """Return the noise among a SAMPLER_SAMPLE wrapper's arguments after the sigmas."""
    # After the sigmas: extra arguments, callback, noise, latent image, mask, progress bar.
    noise: torch.Tensor = arguments[2] if len(arguments) > 2 else settings["noise"]
    return noise


CONDITIONS_FUNCTION = "sampler_calc_cond_batch_function"
"""Model option key: a function that predicts all conditions in a call."""


def conditions_call(arguments: Mapping[str, Any]) -> tuple[torch.Tensor, Sequence[Any]]:
    """Return the latents and conditions passed to a function under `CONDITIONS_FUNCTION`.

    Conditions are positive and negative. None marks an uncomputed one.
    """
    return arguments["input"], arguments["conds"]


FUNCTION_WRAPPER = "model_function_wrapper"
"""Model option key: another node's function around each pass."""


IN_LAYERS = "transformer_options"
"""Model option key: options for the layers, including the next three."""
WRAPPERS = "wrappers"
"""Functions around parts of a model call, by wrapper kind and key."""
REPLACEMENTS = "patches_replace"
"""Functions that replace blocks or layers, by block kind."""
PATCHES = "patches"
"""Functions that change values in blocks, by kind."""


def in_layers(options: Mapping[str, Any], kind: str | None = None) -> Mapping[str, Any]:
    """Return the options for the layers, or one of the three."""
    found: Mapping[str, Any] = options.get(IN_LAYERS, {})
    if kind is not None:
        found = found.get(kind, {})
    return found


HOOKS = "hooks"
"""Condition key: weights of its own."""
DEFAULT = "default"
"""Condition key: computed wherever no other condition is."""
CONTROL = "control"
"""Condition key: a ControlNet."""


def estimated_bytes(model: Any, shape: Sequence[int], condition: Mapping[str, Any]) -> int:
    """Return ComfyUI's estimate of a one-condition pass's activations, in bytes."""
    shapes = {name: [value.size()] for name, value in condition.get("model_conds", {}).items()}
    return int(model.memory_required(list(shape), cond_shapes=shapes))


LOCKSTEP_MODELS = frozenset({
    "WAN21", "WAN21_Camera", "WAN21_HuMo", "WAN21_Vace", "WAN22", "WAN22_Animate", "WAN22_S2V",
    "Flux", "HunyuanVideo", "QwenImage", "Chroma", "Lumina2", "SD3",
    "WAN21_SCAIL", "HunyuanVideo15", "LTXAV",  # absent in 0.3.64
    "MiniMaxH3", "Krea2", "ErnieImage", "WAN_Animate2",  # absent in 0.18.1
})  # fmt: skip
"""Classes in `comfy.model_base` with the same bits in lockstep (tests/integration/comfy)."""
