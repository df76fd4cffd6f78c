"""ComfyUI's model for a file: detected, built, and loaded with tensors that refer to the file."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import comfy.model_base
import comfy.model_detection
import comfy.model_management
import comfy.ops
import comfy.utils
import torch
from torch import nn

from ....offload import CheckpointFileError, StoredFile
from ....wan import is_merged
from .entries import Dtypes, entries
from .layers import streamed_operations
from .tensors import GGUF, native_tensors

WEIGHT_DTYPES: Mapping[str, torch.dtype | None] = {
    "default": None,
    "fp8_e4m3fn": torch.float8_e4m3fn,
    "fp8_e4m3fn_fast": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""Choices in ComfyUI's own loader. None keeps the file dtype where the device computes with it."""

ARCHITECTURE = "general.architecture"
"""GGUF metadata field."""


def build_model(path: Path, file: StoredFile, weight_dtype: str) -> tuple[comfy.model_base.BaseModel, Dtypes]:
    """Return ComfyUI's model with tensors that refer to the file, and the dtypes that they should have.

    Raises:
        CheckpointFileError: ComfyUI detects no model in the file, or the file does not fit the model.
    """
    config, tensors = _detected(path, file, weight_dtype)
    management = comfy.model_management
    supported = config.supported_inference_dtypes
    quantised = (config.quant_config if _marks_layers(config) else config.scaled_fp8) is not None
    dtype = WEIGHT_DTYPES[weight_dtype] or management.unet_dtype(
        model_params=comfy.utils.calculate_parameters(tensors),
        supported_dtypes=list(supported),
        weight_dtype=None if quantised else comfy.utils.weight_dtype(tensors),
    )
    cast = management.unet_manual_cast(None if quantised else dtype, management.get_torch_device(), supported)
    if file.is_packed:  # decoded on arrival, so to the dtype that computes
        dtype, cast = cast or dtype, None
    config.set_inference_dtype(dtype, cast)
    if weight_dtype == "fp8_e4m3fn_fast":
        config.optimizations["fp8"] = True
    config.custom_operations = streamed_operations(config.custom_operations or _operations(config, dtype, cast))
    model = config.get_model(tensors, "")
    dtypes = {entry.place: entry.tensor.dtype for entry in entries(model.diffusion_model)}
    with _referring(model.diffusion_model, path, file):
        try:
            model.load_model_weights(tensors, "")
        except RuntimeError as err:  # torch's error for different shapes
            _, *findings = str(err).splitlines()
            first, more = (findings or [str(err)])[0].strip(), f" ({len(findings)} such findings)" * (len(findings) > 1)
            raise CheckpointFileError(path, f"does not fit {type(model).__name__}: {first}{more}") from err
    return model, dtypes


def check_native(path: Path, weight_dtype: str) -> None:
    """Raise the errors of `build_model` for a file without a model, or quantised in an unusable form."""
    _detected(path, StoredFile(path), weight_dtype)


def _detected(path: Path, file: StoredFile, weight_dtype: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return ComfyUI's configuration for the model in a file, and the tensors under ComfyUI's keys."""
    tensors, metadata = native_tensors(path, file, lambda tensors: _is_detected(tensors, file.metadata))
    detected = _detect(tensors, metadata)
    if detected is None:
        kind = f"a GGUF of {metadata[ARCHITECTURE]!r}, and " if ARCHITECTURE in metadata else ""
        raise CheckpointFileError(
            path,
            f"is {kind}not a diffusion model that this ComfyUI detects: it holds {len(tensors)} tensors, "
            f"{next(iter(tensors), 'none')} first; choose another file, or update ComfyUI",
        )
    if file.is_packed and weight_dtype != "default":
        reason = "is quantised in a form whose blocks are decoded to the dtype that computes, such as GGUF"
        raise CheckpointFileError(path, f"{reason}: choose the weight type default instead of {weight_dtype}")
    return detected


@contextmanager
def _referring(network: nn.Module, path: Path, file: StoredFile) -> Iterator[None]:
    """Let loading refer to the given tensors. torch would copy them to memory, as would ComfyUI in some versions.

    GGUF tensors get the model's shape, where it differs by merged dimensions or by ones.
    """
    load = network.load_state_dict
    shapes = {name: tuple(each.shape) for name, each in (*network.named_parameters(), *network.named_buffers())}

    def assign(tensors: dict[str, torch.Tensor], strict: bool = True, **_: object) -> Any:
        for name, tensor in tensors.items():
            if path.suffix.lower() == GGUF and is_merged(tuple(tensor.shape), shapes.get(name, ())):
                tensors[name] = tensor = tensor.view(shapes[name])
            if tensor.is_meta and tensor.numel() and file.locate(tensor) is None:
                reason = "changes when it loads the model, and its values are packed: use the safetensors version"
                raise CheckpointFileError(path, f"{name} {list(tensor.shape)} is a tensor that ComfyUI {reason}")
        return load(tensors, strict=strict, assign=True)

    network.load_state_dict = assign  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del network.load_state_dict


def _detect(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> tuple[Any, dict[str, torch.Tensor]] | None:
    """Return ComfyUI's model configuration, and the tensors under its keys. None if it detects no model."""
    config = _configuration(tensors, metadata)
    if config is not None:
        return config, dict(tensors)
    changed = _changed_by_conversion(tensors)
    if changed is None:
        return None
    values = {name: each.clone() if name in changed else each for name, each in tensors.items()}
    converted = comfy.model_detection.convert_diffusers_mmdit(values, "")
    config = _configuration(converted, metadata)
    return None if config is None else (config, converted)


def _is_detected(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bool:
    if _configuration(tensors, metadata) is not None:
        return True
    return _changed_by_conversion(tensors) is not None


def _changed_by_conversion(tensors: Mapping[str, torch.Tensor]) -> frozenset[str] | None:
    """Return the tensors that ComfyUI's diffusers key conversion changes in place. None if it does not apply.

    It exchanges halves of some, and tensors in a file cannot be changed.
    """
    # Inference tensors do not count their changes.
    with torch.inference_mode(False):
        without_values = {
            name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in tensors.items()
        }
        converted = comfy.model_detection.convert_diffusers_mmdit(dict(without_values), "")
    return None if converted is None else frozenset(name for name, each in without_values.items() if each._version)


def _configuration(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> Any:
    detect = comfy.model_detection.model_config_from_unet
    takes_metadata = "metadata" in inspect.signature(detect).parameters
    try:
        return detect(tensors, "", **({"metadata": metadata} if takes_metadata else {}))
    except (KeyError, IndexError):  # a partial model lacks tensors from which ComfyUI derives the sizes
        return None


def _operations(config: Any, dtype: torch.dtype, cast: torch.dtype | None) -> Any:
    """Return the layers that ComfyUI would choose for this configuration."""
    if _marks_layers(config):
        fast = config.optimizations.get("fp8", False)
        return comfy.ops.pick_operations(dtype, cast, fp8_optimizations=fast, model_config=config)
    fast = config.optimizations.get("fp8", config.scaled_fp8 is not None)
    return comfy.ops.pick_operations(dtype, cast, fp8_optimizations=fast, scaled_fp8=config.scaled_fp8)


def _marks_layers(config: Any) -> bool:
    """Return True if this ComfyUI marks quantised layers one by one. 0.3.64 has only fp8 with scales."""
    return hasattr(type(config), "quant_config")  # of the type: a configuration warns of missing attributes
