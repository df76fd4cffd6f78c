"""Streaming for a MODEL from another loader: from the file if known, else from RAM."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.model_patcher
import comfy.patcher_extension
import torch
from torch import nn

from ....offload.sources import TensorSource
from ....plan.programs import BlockKey
from ....schema import OffloadPolicy
from ....schema.text import format_size
from ...api import Host
from ...native_models import WEIGHT_DTYPES, ModelStreaming
from .. import versions
from ..patcher_memory import StreamedPatcher
from .load import load_native, native_patcher
from .network.block_lists import NotStreamedError, blocks_to_stream
from .runs.lanes import KEY
from .streamed.model import CHECKPOINT_LOADER, MODEL_LOADER, outside_bytes, stream_weights
from .streamed.patcher import NativePatcher
from .streamed.weights import STACK, NativeWeights
from .twins import BoundElsewhereError, rebound, twin_of

logger = logging.getLogger("wanstream.memory")

FIRST = ModelStreaming(policy=OffloadPolicy.layerwise())
"""Settings for the first patcher over the weights. Clones get their users' settings."""


class ModelStreamer:
    """Streams MODELs from other loaders.

    Clones of one MODEL share one set of buffers, just as they share weights.

    Args:
        host: host of the runs.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._streamed: weakref.WeakKeyDictionary[nn.Module, weakref.ref[NativePatcher]] = (
            weakref.WeakKeyDictionary()
        )

    def stream(self, model: Any, streaming: ModelStreaming, **limits: int) -> NativePatcher:
        """Return a MODEL like `model`, with all patches, whose blocks stream.

        Args:
            model: a MODEL from any loader. It stays usable and keeps separate weights.
            streaming: block settings.
            limits: `smallest_block` and `smallest_model`, as for `open_native`.

        Raises:
            ValueError: the model is too small, has no block lists, is quantised in an unknown way,
                or has patches that refer to its own modules.
            OSError: the model file cannot be read.
        """
        if isinstance(model, NativePatcher):
            clone: NativePatcher = model.clone()
            return clone.with_settings(streaming)
        if isinstance(model, StreamedPatcher):
            raise ValueError(
                "this MODEL streams its experts already: set the policy where they are loaded"
            )
        source = self._streamed.get(model.model, lambda: None)()
        if source is None:
            source = _open(model, limits, self._host)
            # A weak reference, so that the weights go with the last MODEL.
            self._streamed[model.model] = weakref.ref(source)
        # Clones keep `source` alive as their `parent`.
        return _carry_over(model, source).with_settings(streaming)


def _open(model: Any, limits: Mapping[str, int], host: Host) -> NativePatcher:
    """Return a patcher for the same weights, without patches."""
    name = type(model.model).__name__
    file = _file_of(model)
    if file is not None:
        path, weight_dtype = file
        patcher = load_native(path, weight_dtype, FIRST, host, limits, _loader_of(model))
        if _parameter_names(patcher.model) == _parameter_names(model.model):
            logger.info("the blocks of %s stream from %s", name, path.name)
            return patcher
        logger.info("%s differs from %s: another node has changed its layers", name, path.name)
    patcher = _from_memory(model, host, limits)
    logger.info(
        "the file of %s is not known: its blocks stream from the %s of RAM that they occupy, which "
        "saves VRAM only; Load Diffusion Model (streamed) needs no RAM for them",
        name,
        format_size(sum(tensor.nbytes for tensor in patcher.model.stored.values())),
    )
    return patcher


def _file_of(model: Any) -> tuple[Path, str] | None:
    """Return a MODEL's file and weight dtype if its loader does the same as `open_native`."""
    file = versions.loaded_file(model)
    if file is None:
        return None
    fast = bool(file.options.get("fp8_optimizations"))
    if fast and file.is_checkpoint:  # the checkpoint loader ignores the option
        return None
    # Any other option, such as custom operations, may change layers or values.
    known_options = file.options.keys() <= {"dtype", "fp8_optimizations"}
    if not known_options or not str(file.path).endswith((".safetensors", ".sft")):
        return None
    for name, dtype in WEIGHT_DTYPES.items():
        if dtype == file.options.get("dtype") and name.endswith("_fast") == fast:
            return Path(file.path), name
    return None


def _loader_of(model: Any) -> str:
    file = versions.loaded_file(model)
    return CHECKPOINT_LOADER if file is not None and file.is_checkpoint else MODEL_LOADER


def _parameter_names(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters()}


def _from_memory(model: Any, host: Host, limits: Mapping[str, int]) -> NativePatcher:
    """Return a patcher for a second model whose blocks stream from the same tensors."""
    model = _in_memory(model)
    name = type(model.model).__name__
    twin = twin_of(model.model)
    try:
        blocks = blocks_to_stream(
            twin.diffusion_model,
            _matrix_bytes,
            kind=name,
            layers=versions.linear_layers(twin),
            remedy="use it as it is, without Stream Model",
            **limits,
        )
    except NotStreamedError as err:
        raise ValueError(f"the model {err}") from err
    tensors: dict[BlockKey, dict[str, torch.Tensor]] = {}
    twin.stored = {}
    twin.in_file = {}
    twin.plain_loader = _loader_of(model)
    for index, (path, block) in enumerate(blocks.items()):
        taken = _take_matrices(block)
        tensors[BlockKey(STACK, index)] = taken
        twin.stored |= {f"diffusion_model.{path}.{each}": tensor for each, tensor in taken.items()}
    weights = NativeWeights(
        {STACK: blocks},
        partial(TensorSource, tensors),
        quantised={},
        outside_bytes=outside_bytes(twin),
        device=comfy.model_management.get_torch_device(),
    )
    stream_weights(twin, weights, name)
    return native_patcher(twin, FIRST, host)


def _in_memory(model: Any) -> Any:
    """Return a MODEL with unpatched weights in RAM."""
    name = type(model.model).__name__
    if versions.is_dynamic(model):
        model = versions.without_dynamic_vram(model)
        if model is None:
            raise ValueError(
                f"{name} was loaded by a node that does not name its file, into ComfyUI's dynamic "
                "VRAM, which moves the weights itself: use Load Diffusion Model (streamed), or "
                "start ComfyUI with --disable-dynamic-vram"
            )
    others = [each for each in versions.loaded_models() if not model.is_clone(each.model)]
    # More bytes than any device has: ComfyUI unloads this model wholly, and keeps the others.
    comfy.model_management.free_memory(1e32, model.load_device, others)
    for path, tensor in model.model.named_parameters():
        # A Parameter made from a tensor subclass has the type of the subclass.
        if type(tensor) is not nn.Parameter or type(tensor.data) is not torch.Tensor:
            raise ValueError(
                f"{name} is quantised by its loader: {path} is a {type(tensor.data).__name__}, "
                "which only that loader's layers can read: load the file with Load Diffusion Model "
                "(streamed)"
            )
        if tensor.device.type != "cpu":
            raise ValueError(
                f"{name} stays on {tensor.device} because of --highvram or --gpu-only: start "
                "ComfyUI without these"
            )
    return model


def _matrix_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters() if parameter.dim() > 1)


def _take_matrices(block: nn.Module) -> dict[str, torch.Tensor]:
    """Return the matrices in a block by name, leaving only their shapes in the block."""
    taken: dict[str, torch.Tensor] = {}
    for path, module in block.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dim() > 1:
                taken[f"{path}.{name}".lstrip(".")] = parameter.detach()
                absent = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                module._parameters[name] = nn.Parameter(absent, requires_grad=False)
    return taken


def _carry_over(model: Any, source: NativePatcher) -> NativePatcher:
    """Return a clone of `source` with everything `model` has except weights."""
    carrier: NativePatcher = source.clone()
    versions.carry_over(model, carrier)
    # `carry_over` shares lists and dictionaries with `model`. This second clone copies them.
    carried: NativePatcher = carrier.clone()
    if versions.is_compiled_by_wrapper(carried):
        raise _bound_elsewhere("torch.compile", model)
    try:
        carried.object_patches = rebound(carried.object_patches, model, carried)
    except BoundElsewhereError as err:
        raise _bound_elsewhere(str(err), model) from err
    # `carry_over` has replaced all wrappers, also ours.
    for kind, wrappers in source.wrappers.items():
        for wrapper in wrappers.get(KEY, []):
            carried.add_wrapper_with_key(kind, KEY, wrapper)
    return carried


def _bound_elsewhere(name: str, model: Any) -> ValueError:
    return ValueError(
        f"a node in front of Stream Model has patched {name} of {type(model.model).__name__} with "
        "an object that holds the model's own layers, which do not stream: put that node behind "
        "Stream Model"
    )
