"""Streaming of a MODEL that another loader has made: from its file if that is known, else from the RAM it occupies."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import comfy.patcher_extension
import comfy.sd
import torch
from torch import nn

from ....offload import TensorSource
from ....plan import BlockKey
from ....schema import OffloadPolicy
from ...api import ModelStreaming
from ..patcher_memory import PolicyMemory, StreamedPatcher, size
from .block_lists import SMALLEST_BLOCK, SMALLEST_MODEL, find_blocks, refusal
from .build import WEIGHT_DTYPES
from .lanes import KEY
from .load import native_patcher
from .model import open_native
from .patcher import COMPILE_KEY, NativePatcher
from .weights import STACK, NativeWeights

MODEL_OF_CHECKPOINT = "load_checkpoint_guess_config_model_only"
"""Name of ComfyUI's loader of the MODEL of a checkpoint, which 0.3.64 does not have."""

logger = logging.getLogger("wanstream.memory")

# fmt: off
OF_THE_WEIGHTS = frozenset({
    "model", "load_device", "offload_device", "size", "parent", "policy", "weight_inplace_update", "is_injected",
    "pinned", "backup", "backup_buffers", "object_patches_backup", "hook_backup", "cached_hook_patches",
    "current_hooks",
})
# fmt: on
"""Attributes of a patcher that belong to its weights and their state; all others are carried over."""


class ModelStreamer:
    """Streams MODELs of other loaders. Clones of one MODEL share one set of buffers, as they share their weights."""

    def __init__(self) -> None:
        self._streamed: weakref.WeakKeyDictionary[nn.Module, weakref.ref[NativePatcher]] = weakref.WeakKeyDictionary()

    def stream(self, model: Any, policy: OffloadPolicy, **limits: int) -> NativePatcher:
        """Return a MODEL like `model`, with all its patches, whose blocks stream under `policy`.

        Args:
            model: a MODEL of any loader; it can still be used, and has weights of its own.
            policy: resident blocks, prefetch depth, and RAM-resident blocks.
            limits: `smallest_block` and `smallest_model`, as for `open_native`.

        Raises:
            ValueError: the model is too small or has no lists of blocks, is quantised in a way that is not known, or
                has patches that refer to its own modules.
            OSError: the file of the model cannot be read.
        """
        if isinstance(model, NativePatcher):
            changed: NativePatcher = model.clone()
            changed.policy = policy
            return changed
        if isinstance(model, StreamedPatcher):
            raise ValueError("this MODEL streams its experts already: set the policy where they are loaded")
        known = self._streamed.get(model.model)
        source = None if known is None else known()
        if source is None:
            source = _open(model, policy, limits)
            self._streamed[model.model] = weakref.ref(source)
        return _carry_over(model, source, policy)


class _File(NamedTuple):
    """Arguments of `load_native` that make the model of a MODEL again."""

    path: Path
    weight_dtype: str


def _open(model: Any, policy: OffloadPolicy, limits: Mapping[str, int]) -> NativePatcher:
    """Return a patcher without patches of the same weights."""
    name, file = type(model.model).__name__, _file_of(model)
    if file is not None:
        patcher = native_patcher(open_native(file.path, file.weight_dtype, **limits), ModelStreaming(policy=policy))
        if _parameter_names(patcher.model) == _parameter_names(model.model):
            logger.info("the blocks of %s stream from %s", name, file.path.name)
            return patcher
        logger.info("%s differs from %s: another node has changed its layers", name, file.path.name)
    patcher = _from_memory(model, policy, **limits)
    logger.info(
        "the file of %s is not known: its blocks stream from the %s of RAM that they occupy, which saves VRAM only; "
        "Load Diffusion Model (streamed) needs no RAM for them",
        name,
        size(sum(tensor.nbytes for tensor in patcher.model.stored.values())),
    )
    return patcher


def _file_of(model: Any) -> _File | None:
    """Return the file of a MODEL if its loader is known to do the same as `load_native`."""
    loader = getattr(model, "cached_patcher_init", None)  # missing in ComfyUI 0.3.64
    if loader is None:
        return None
    function, arguments, *place = loader
    given = signature(function).bind(*arguments).arguments
    # Newer versions name the loader of all parts of a checkpoint, and the place of the MODEL in its result.
    whole_checkpoint = (comfy.sd.load_checkpoint_guess_config, [0])
    if function is comfy.sd.load_diffusion_model:
        path = given["unet_path"]
    elif (function, place) == whole_checkpoint or function.__name__ == MODEL_OF_CHECKPOINT:
        path = given["ckpt_path"]
    else:
        return None
    options = given.get("model_options", {})
    if options.get("fp8_optimizations") and function is not comfy.sd.load_diffusion_model:  # which it ignores
        return None
    if not options.keys() <= {"dtype", "fp8_optimizations"} or not str(path).endswith((".safetensors", ".sft")):
        return None
    wanted = options.get("dtype"), bool(options.get("fp8_optimizations"))
    for name, dtype in WEIGHT_DTYPES.items():
        if (dtype, name.endswith("_fast")) == wanted:
            return _File(Path(path), name)
    return None


def _parameter_names(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters()}


class _MemoryWeights(NativeWeights):
    """Weights whose blocks stream from tensors in RAM."""

    def __init__(
        self,
        blocks: Mapping[str, nn.Module],
        tensors: Mapping[BlockKey, Mapping[str, torch.Tensor]],
        *,
        outside_bytes: int,
        device: torch.device,
    ) -> None:
        self._tensors = tensors
        super().__init__(blocks, {}, {}, {}, outside_bytes=outside_bytes, device=device)

    def _source(self) -> TensorSource:
        return TensorSource(self._tensors)


def _from_memory(
    model: Any, policy: OffloadPolicy, *, smallest_block: int = SMALLEST_BLOCK, smallest_model: int = SMALLEST_MODEL
) -> NativePatcher:
    """Return a patcher of a second model with the same tensors, whose blocks stream from them."""
    model = _in_memory(model)
    name, twin = type(model.model).__name__, _twin(model.model)
    blocks = find_blocks(twin.diffusion_model, _matrix_bytes, smallest=smallest_block)
    nbytes = sum(map(_matrix_bytes, blocks.values()))
    if not blocks or nbytes < smallest_model:
        limits = {"smallest_block": smallest_block, "smallest_model": smallest_model}
        total = sum(map(_matrix_bytes, find_blocks(twin.diffusion_model, _matrix_bytes, smallest=1).values()))
        raise ValueError(f"the model {refusal(name, total, **limits, remedy='use it as it is, without Stream Model')}")
    tensors: dict[BlockKey, dict[str, torch.Tensor]] = {}
    twin.stored = {}
    for index, (path, block) in enumerate(blocks.items()):
        tensors[BlockKey(STACK, index)] = taken = _take_matrices(block)
        twin.stored |= {f"diffusion_model.{path}.{each}": tensor for each, tensor in taken.items()}
    twin.weights = _MemoryWeights(
        blocks,
        tensors,
        outside_bytes=sum(tensor.nbytes for tensor in (*twin.parameters(), *twin.buffers()) if not tensor.is_meta),
        device=comfy.model_management.get_torch_device(),
    )
    twin.memory = PolicyMemory(f"blocks of {name}")
    # ComfyUI drops models from its cache without unloading them first.
    weakref.finalize(twin, twin.weights.close).atexit = False
    return native_patcher(twin, ModelStreaming(policy=policy))


def _in_memory(model: Any) -> Any:
    """Return a MODEL whose weights are in RAM, unpatched."""
    name = type(model.model).__name__
    if getattr(model, "is_dynamic", bool)():  # missing in ComfyUI 0.3.64
        if model.cached_patcher_init is None:
            raise ValueError(
                f"{name} was loaded by a node that does not name its file, into ComfyUI's dynamic VRAM, which moves "
                "the weights itself: use Load Diffusion Model (streamed), or start ComfyUI with --disable-dynamic-vram"
            )
        model = model.clone(disable_dynamic=True)
    management = comfy.model_management
    others = [each for each in management.current_loaded_models if not model.is_clone(each.model)]
    management.free_memory(1e32, model.load_device, others)
    for path, tensor in model.model.named_parameters():
        # A Parameter of a subclass has the type of the subclass.
        if type(tensor) is not nn.Parameter or type(tensor.data) is not torch.Tensor:
            raise ValueError(
                f"{name} is quantised by its loader: {path} is a {type(tensor.data).__name__}, which only that "
                "loader's layers can read: load the file with Load Diffusion Model (streamed)"
            )
        if tensor.device.type != "cpu":
            raise ValueError(
                f"{name} stays on {tensor.device} because of --highvram or --gpu-only: start ComfyUI without these"
            )
    return model


def _twin(model: comfy.model_base.BaseModel) -> Any:
    """Return a model with modules of its own and the same tensors, so that neither changes those of the other."""
    # ComfyUI's configurations cannot be copied, and are not changed.
    memo: dict[int, Any] = {id(model.model_config): model.model_config, id(model.current_patcher): None}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=False)
    memo |= {id(buffer): buffer.detach() for buffer in model.buffers()}
    try:
        return copy.deepcopy(model, memo)
    except (TypeError, RuntimeError) as err:  # of objects that cannot be copied, such as locks and graph tensors
        raise ValueError(
            f"{type(model).__name__} holds an object that cannot be copied ({err}): load the file with "
            "Load Diffusion Model (streamed)"
        ) from err


def _matrix_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters() if parameter.dim() > 1)


def _take_matrices(block: nn.Module) -> dict[str, torch.Tensor]:
    """Return the matrices of a block by name, and leave their shapes in it."""
    taken: dict[str, torch.Tensor] = {}
    for path, module in block.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dim() > 1:
                taken[f"{path}.{name}".lstrip(".")] = parameter.detach()
                absent = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                module._parameters[name] = nn.Parameter(absent, requires_grad=False)
    return taken


def _carry_over(model: Any, source: NativePatcher, policy: OffloadPolicy) -> NativePatcher:
    """Return a clone of `source` with everything that `model` has beyond its weights."""
    carrier: NativePatcher = source.clone()
    names = vars(carrier).keys() - OF_THE_WEIGHTS
    for name in names & vars(model).keys():
        setattr(carrier, name, getattr(model, name))
    carrier.policy = policy
    carried: NativePatcher = carrier.clone()
    if any(COMPILE_KEY in wrappers for wrappers in carried.wrappers.values()):
        raise _bound_elsewhere("torch.compile", model)
    paths = {id(module): path for path, module in model.model.named_modules()}
    for name, patch in carried.object_patches.items():
        if isinstance(patch, MethodType) and id(patch.__self__) in paths:
            module = carried.model.get_submodule(paths[id(patch.__self__)])
            carried.object_patches[name] = MethodType(patch.__func__, module)
        elif isinstance(patch, nn.Module) and any(id(module) in paths for module in patch.modules()):
            raise _bound_elsewhere(name, model)
    for kind, wrappers in source.wrappers.items():
        for wrapper in wrappers.get(KEY, []):
            carried.add_wrapper_with_key(kind, KEY, wrapper)
    return carried


def _bound_elsewhere(name: str, model: Any) -> ValueError:
    return ValueError(
        f"a node in front of Stream Model has patched {name} of {type(model.model).__name__} with an object that holds "
        "the model's own layers, which do not stream: put that node behind Stream Model"
    )
