"""File tensors in the form that ComfyUI detects and loads.

| in the file                                       | for ComfyUI                                |
|---------------------------------------------------|--------------------------------------------|
| a prefix unknown to ComfyUI, wrapped module parts | removed                                    |
| markers as a bare format name, and in the header  | JSON in a tensor of each layer             |
| scales in fp16, bf16 and fp64                     | fp32                                       |
| unmarked scales, in a format of this ComfyUI      | marked                                     |
| other unmarked scales: fp8 for each row or block  | tensors without values, decoded on arrival |
| GGUF patch embeddings with merged dimensions      | with the dimensions required by their bias |
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import comfy.model_detection
import torch

from .....offload.formats import CheckpointFileError, EightBit
from .....offload.sources import StoredFile
from .....wan.checkpoint import (
    OTHER_MODELS_OF_A_CHECKPOINT,
    WRAPPERS,
    UnmarkedLayer,
    header_settings,
    marker_settings,
    own_layers,
    patch_shape,
    unmarked_layers,
)
from ... import versions

QUANTISATION = "_quantization_metadata"
"""Safetensors header field with the format for each quantised layer."""

FILE_MARKER = "scaled_fp8"
MARKER = ".comfy_quant"
SCALES = (".weight_scale", ".weight_scale_2", ".scale_weight", ".input_scale", ".scale_input")
WIDE_DTYPES = (torch.float16, torch.bfloat16, torch.float64)
"""Scale dtypes in which ComfyUI would multiply instead of fp32."""

FP8_FORMATS = ("float8_e4m3fn", "float8_e5m2")

NEEDED_SCALES = {
    **dict.fromkeys((*FP8_FORMATS, "int8_tensorwise", "mxfp8"), (".weight_scale",)),
    "nvfp4": (".weight_scale", ".weight_scale_2"),
}
"""Key endings for layer scales, by format."""

GGUF = ".gguf"

Tensors = dict[str, torch.Tensor]
Settings = Mapping[str, Mapping[str, Any]]
Detect = Callable[[Mapping[str, torch.Tensor]], bool]

_FIRST_BLOCK = re.compile(r"((?:[^.]+\.)+?)\w*(?:blocks|layers)\.0\.")
_PATCHES = re.compile(r"(\w+_)?patch_embedding(_\w+)?\.weight")


def native_tensors(path: Path, file: StoredFile, detect: Detect) -> tuple[Tensors, dict[str, str]]:
    """Return tensors and metadata for ComfyUI. `detect` returns True for model tensors.

    Raises:
        CheckpointFileError: a marker or scale cannot be used, or two prefixes each hold a model.
    """
    keys = _bare_keys(path, file, detect)
    tensors = _tensors(path, file, keys)
    metadata = dict(file.metadata)
    settings = _mark(path, tensors, metadata)
    _read_unmarked(path, file, keys, tensors, settings)
    for key, tensor in tensors.items():
        if key.endswith(SCALES) and tensor.dtype in WIDE_DTYPES:
            tensors[key] = tensor.float()
    return versions.with_marked_layers(tensors, metadata)


def _bare_keys(path: Path, file: StoredFile, detect: Detect) -> dict[str, str]:
    """Return the file key for each diffusion model tensor, by bare key."""
    keys = {WRAPPERS.sub("", key): key for key in file.tensors}
    # ComfyUI reads only the keys here.
    prefix = comfy.model_detection.unet_prefix_from_state_dict(dict.fromkeys(keys))
    below = _below(keys, prefix) or keys
    if detect(_tensors(path, file, below)):
        return below
    starts = Counter(match[1] for match in map(_FIRST_BLOCK.match, keys) if match is not None)
    others = tuple(f"{name}." for name in OTHER_MODELS_OF_A_CHECKPOINT)
    candidates = {start: _below(keys, start) for start in starts if not start.startswith(others)}
    found = [start for start, each in candidates.items() if detect(_tensors(path, file, each))]
    if len(found) > 1:
        named = " and ".join(map(repr, found))
        raise CheckpointFileError(
            path,
            f"holds {len(found)} diffusion models, under the prefixes {named}: save one in a file "
            "of its own",
        )
    if found:
        return candidates[found[0]]
    return below


def _below(keys: Mapping[str, str], prefix: str) -> dict[str, str]:
    """Return the keys below a prefix, without the prefix, plus the file marker."""
    below = {
        bare.removeprefix(prefix): key for bare, key in keys.items() if bare.startswith(prefix)
    }
    if below and FILE_MARKER in keys:
        below = {FILE_MARKER: keys[FILE_MARKER], **below}
    return below


def _tensors(path: Path, file: StoredFile, keys: Mapping[str, str]) -> Tensors:
    tensors = {bare: file.tensors[key] for bare, key in keys.items()}
    if path.suffix.lower() == GGUF:
        tensors = _with_patch_shapes(tensors)
    return tensors


def _mark(path: Path, tensors: Tensors, metadata: dict[str, str]) -> Settings:
    """Write layer markers as JSON into the marker tensors, and return settings by layer."""
    settings: dict[str, dict[str, Any]] = {}
    if QUANTISATION in metadata:
        named = header_settings(path, metadata.pop(QUANTISATION))
        settings = {layer: named[name] for layer, name in own_layers(named, tensors).items()}
    for key in [key for key in tensors if key.endswith(MARKER)]:
        text = tensors.pop(key)
        if text.dtype != torch.uint8:
            raise CheckpointFileError(
                path, f"{key} is {text.dtype} {list(text.shape)}; a marker is a short JSON text"
            )
        settings[key.removesuffix(MARKER)] = marker_settings(path, key, bytes(text.tolist()))
    for layer, each in settings.items():
        _check_marked(path, layer, each.get("format"), tensors)
        tensors[layer + MARKER] = _marker(each)
    if settings:
        tensors.pop(FILE_MARKER, None)  # means nothing next to other markers
    return settings


def _check_marked(path: Path, layer: str, name: object, tensors: Tensors) -> None:
    known = versions.quantised_formats()
    if not isinstance(name, str) or name not in known:
        have = ", ".join(known) or "none of this kind"
        reason = (
            f"which this ComfyUI does not have (it has {have}): update ComfyUI, or use another file"
        )
        raise CheckpointFileError(path, f"layer {layer} is quantised as {name}, {reason}")
    weight = tensors.get(f"{layer}.weight")
    if weight is None:
        raise CheckpointFileError(
            path, f"layer {layer} is marked as {name}, but {layer}.weight is missing"
        )
    for ending in NEEDED_SCALES.get(name, ()):
        if layer + ending not in tensors:
            raise CheckpointFileError(
                path, f"layer {layer} is marked as {name}, but {layer}{ending} is missing"
            )
    if name in NEEDED_SCALES and weight.dtype != known[name]:
        raise CheckpointFileError(
            path, f"layer {layer} is marked as {name}, but {layer}.weight is {weight.dtype}"
        )
    if name not in FP8_FORMATS:
        return
    scale = tensors[f"{layer}.weight_scale"]
    rows = weight.shape[0]
    if scale.numel() != 1 and scale.shape not in ((rows,), (rows, 1)):
        raise CheckpointFileError(
            path,
            f"{layer}.weight_scale is {list(scale.shape)}; {name} has one scale, or [{rows}, 1]",
        )
    tensors[f"{layer}.weight_scale"] = _by_row(scale)


def _by_row(scale: torch.Tensor) -> torch.Tensor:
    """Return a scale as one number or as [rows, 1]."""
    if scale.numel() == 1:
        return scale
    return scale.view(-1, 1)


def _marker(settings: Mapping[str, Any]) -> torch.Tensor:
    return torch.tensor(list(json.dumps(settings).encode()), dtype=torch.uint8)


def _read_unmarked(
    path: Path, file: StoredFile, keys: Mapping[str, str], tensors: Tensors, settings: Settings
) -> None:
    """Mark layers with an unmarked scale, or replace their weights by packed ones."""
    places = {bare: file.places[key] for bare, key in keys.items()}
    rotated = any(each.get("convrot") or each.get("params") for each in settings.values())
    layers = unmarked_layers(path, places, settings, rotated=rotated)
    if not layers or (FILE_MARKER in tensors and all(map(_is_scaled_fp8, layers.values()))):
        return  # ComfyUI reads such a file
    of_file = tensors.pop(FILE_MARKER, None)
    more = {}
    # Two numbers mean products in full precision, as in ComfyUI's `convert_old_quants`.
    if of_file is not None and of_file.numel() == 2:
        more = {"full_precision_matrix_mult": True}
    others = [layer for layer, each in layers.items() if not _has_format(each)]
    if others and settings:
        found = (
            f"{others[0]} is {layers[others[0]].format} with scales that this ComfyUI does not read"
        )
        raise CheckpointFileError(
            path, f"{found}, next to layers with markers: use a file with one format"
        )
    for layer, each in layers.items():
        if each.weight.packing is None:
            found = f"{layer} is {each.format} {list(each.weight.shape)} with a scale"
            raise CheckpointFileError(
                path, f"{found}, which ComfyUI does not read: use another file"
            )
        if others:
            tensors[f"{layer}.weight"] = file.pack(each.weight)
            for ending in SCALES:
                # The packed weight contains the scales.
                tensors.pop(layer + ending, None)
        else:
            tensors[layer + MARKER] = _marker({"format": each.format, **more})
            tensors[f"{layer}.weight_scale"] = _by_row(tensors.pop(each.scale_key).float())


def _is_scaled_fp8(layer: UnmarkedLayer) -> bool:
    """Return True for a layer that `scaled_fp8` explains to ComfyUI."""
    packing = layer.weight.packing
    one_number = isinstance(packing, EightBit) and not packing.block and not packing.by_row
    return one_number and layer.format in FP8_FORMATS and layer.scale_key.endswith(".scale_weight")


def _has_format(layer: UnmarkedLayer) -> bool:
    """Return True if ComfyUI computes a layer with this format and these scales."""
    packing = layer.weight.packing
    if (
        layer.format not in versions.quantised_formats()
        or not isinstance(packing, EightBit)
        or packing.block
    ):
        return False
    return layer.format not in FP8_FORMATS or not packing.by_row


def _with_patch_shapes(tensors: Tensors) -> Tensors:
    """Restore the patch embedding shapes. ComfyUI derives the channels from them."""
    for name in filter(_PATCHES.fullmatch, tensors):
        bias = tensors.get(f"{name.removesuffix('weight')}bias")
        if bias is not None:
            tensors[name] = tensors[name].view(
                patch_shape(tuple(tensors[name].shape), tuple(bias.shape))
            )
    return tensors
