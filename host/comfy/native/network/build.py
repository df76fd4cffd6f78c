"""ComfyUI's model for a file: detected, built, and loaded with tensors that refer to the file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import comfy.model_base
import comfy.model_detection
import comfy.model_management
import comfy.utils
import torch
from torch import nn

from .....offload.formats import CheckpointFileError
from .....offload.sources import StoredFile
from .....wan.checkpoint import is_merged
from ....native_models import WEIGHT_DTYPES
from ... import versions
from .entries import Dtypes, entries
from .layers import streamed_operations
from .tensors import GGUF, native_tensors

ARCHITECTURE = "general.architecture"
"""GGUF metadata field."""


def build_model(
    path: Path, file: StoredFile, weight_dtype: str
) -> tuple[comfy.model_base.BaseModel, Dtypes]:
    """Return ComfyUI's model with tensors referring to the file, and their intended dtypes.

    Raises:
        CheckpointFileError: ComfyUI detects no model in the file, or the file does not fit the
            model.
    """
    config, tensors = _detected(path, file, weight_dtype)
    management = comfy.model_management
    # From here on as in ComfyUI's `load_diffusion_model_state_dict`. ComfyUI ignores the stored
    # dtype too if layers are quantised.
    supported = config.supported_inference_dtypes
    quantised = versions.is_quantised(config)
    stored = None
    if not quantised:
        stored = comfy.utils.weight_dtype(tensors)
    dtype = WEIGHT_DTYPES[weight_dtype] or management.unet_dtype(
        model_params=comfy.utils.calculate_parameters(tensors),
        supported_dtypes=list(supported),
        weight_dtype=stored,
    )
    uncast = None if quantised else dtype
    cast = management.unet_manual_cast(uncast, management.get_torch_device(), supported)
    if file.is_packed:  # decoded on arrival, directly into the compute dtype
        dtype = cast or dtype
        cast = None
    config.set_inference_dtype(dtype, cast)
    if weight_dtype == "fp8_e4m3fn_fast":
        versions.multiply_in_fp8(config)
    versions.set_layers(config, streamed_operations(versions.layers_of(config, dtype, cast)))
    model = config.get_model(tensors, "")
    # Before loading, because `assign` also replaces the dtypes.
    dtypes = {entry.place: entry.tensor.dtype for entry in entries(model.diffusion_model)}
    with _referring(model.diffusion_model, path, file):
        try:
            model.load_model_weights(tensors, "")
        except RuntimeError as err:  # torch's error for different shapes
            _, *findings = str(err).splitlines()
            found = (findings or [str(err)])[0].strip()
            if len(findings) > 1:
                found += f" ({len(findings)} such findings)"
            raise CheckpointFileError(
                path, f"does not fit {type(model).__name__}: {found}"
            ) from err
    return model, dtypes


def check_native(path: Path, weight_dtype: str) -> None:
    """Raise the errors of `build_model` for a file without a model or quantised unusably."""
    _detected(path, StoredFile(path), weight_dtype)


def _detected(
    path: Path, file: StoredFile, weight_dtype: str
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return ComfyUI's configuration for the model in a file, and the tensors by ComfyUI's keys."""
    tensors, metadata = native_tensors(
        path, file, lambda tensors: _is_detected(tensors, file.metadata)
    )
    detected = _detect(tensors, metadata)
    if detected is None:
        kind = ""
        if ARCHITECTURE in metadata:
            kind = f"a GGUF of {metadata[ARCHITECTURE]!r}, and "
        raise CheckpointFileError(
            path,
            f"is {kind}not a diffusion model that this ComfyUI detects: it holds {len(tensors)} "
            f"tensors, {next(iter(tensors), 'none')} first; choose another file, or update ComfyUI",
        )
    if file.is_packed and weight_dtype != "default":
        reason = (
            "is quantised in a form whose blocks are decoded to the dtype that computes, such as "
            "GGUF"
        )
        raise CheckpointFileError(
            path, f"{reason}: choose the weight type default instead of {weight_dtype}"
        )
    return detected


@contextmanager
def _referring(network: nn.Module, path: Path, file: StoredFile) -> Iterator[None]:
    """Make loading refer to the given tensors.

    torch would copy them into memory, and so would some ComfyUI versions.

    GGUF tensors get the model's shape where it differs by merged dimensions or by ones.
    """
    load = network.load_state_dict
    shapes = {
        name: tuple(each.shape)
        for name, each in (*network.named_parameters(), *network.named_buffers())
    }

    def assign(tensors: dict[str, torch.Tensor], strict: bool = True, **_: object) -> Any:
        for name, tensor in tensors.items():
            if path.suffix.lower() == GGUF and is_merged(tuple(tensor.shape), shapes.get(name, ())):
                tensors[name] = tensor = tensor.view(shapes[name])
            if tensor.is_meta and tensor.numel() and file.locate(tensor) is None:
                reason = (
                    "changes when it loads the model, and its values are packed: use the "
                    "safetensors version"
                )
                raise CheckpointFileError(
                    path, f"{name} {list(tensor.shape)} is a tensor that ComfyUI {reason}"
                )
        # Without `assign`, torch would copy the values and so read the whole file.
        return load(tensors, strict=strict, assign=True)

    with versions.loading_by(network, assign):
        yield


def _detect(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> tuple[Any, dict[str, torch.Tensor]] | None:
    """Return ComfyUI's model configuration, and the tensors by ComfyUI's keys.

    Return None if ComfyUI detects no model.
    """
    config = versions.model_config(tensors, metadata)
    if config is not None:
        return config, dict(tensors)
    changed = _changed_by_conversion(tensors)
    if changed is None:
        return None
    values = {name: each.clone() if name in changed else each for name, each in tensors.items()}
    converted = comfy.model_detection.convert_diffusers_mmdit(values, "")
    config = versions.model_config(converted, metadata)
    if config is None:
        return None
    return config, converted


def _is_detected(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bool:
    found = versions.model_config(tensors, metadata)
    return found is not None or _changed_by_conversion(tensors) is not None


def _changed_by_conversion(tensors: Mapping[str, torch.Tensor]) -> frozenset[str] | None:
    """Return the tensors that ComfyUI's diffusers key conversion changes in place.

    Return None if the conversion does not apply.

    It swaps halves in some tensors, and tensors in a file cannot be changed.
    """
    # Inference tensors have no version counter, so `_version` would raise.
    with torch.inference_mode(False):
        without_values = {
            name: torch.empty(each.shape, dtype=each.dtype, device="meta")
            for name, each in tensors.items()
        }
        converted = comfy.model_detection.convert_diffusers_mmdit(dict(without_values), "")
    if converted is None:
        return None
    return frozenset(name for name, each in without_values.items() if each._version)
