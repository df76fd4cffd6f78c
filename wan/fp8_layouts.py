"""The layouts in which fp8_scaled checkpoints say which weights carry a scale, and where the scale is.

| layout      | marker                                                     | scale of a layer       |
|-------------|------------------------------------------------------------|------------------------|
| scaled_fp8  | one tensor `scaled_fp8` for the whole file                 | `<layer>.scale_weight` |
| comfy_quant | one tensor `<layer>.comfy_quant` per layer, JSON as bytes  | `<layer>.weight_scale` |
| metadata    | `_quantization_metadata` in the header, JSON for all layers| `<layer>.weight_scale` |

In all of them value = fp8 (e4m3fn) x scale, with one fp32 scale per weight. The scales of the inputs (`scale_input`,
`input_scale`) serve fp8 arithmetic and are not used: weights are decoded and computed with in the compute dtype.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..offload.safetensors_header import FileTensor
from .stored import PREFIX, CheckpointError

FP8 = torch.float8_e4m3fn
FORMAT = "float8_e4m3fn"

FILE_MARKER = "scaled_fp8"
LAYER_MARKER = ".comfy_quant"
METADATA_MARKER = "_quantization_metadata"

FILE_SCALE = ".scale_weight"
LAYER_SCALE = ".weight_scale"
INPUT_SCALES = (".scale_input", ".input_scale")

MAX_MARKER_BYTES = 4096

ReadTensors = Callable[[Mapping[str, FileTensor]], Mapping[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class ScaledWeights:
    """The model's own tensors, and the scale of each fp8 weight under the weight's key."""

    weights: Mapping[str, FileTensor]
    scales: Mapping[str, FileTensor]


def resolve_scales(
    path: Path, tensors: Mapping[str, FileTensor], metadata: Mapping[str, str], read: ReadTensors
) -> ScaledWeights:
    """Separate weights from scales, whatever the layout; a file without fp8 passes through.

    `read` is asked for the `comfy_quant` markers only, some 70 bytes each.

    Raises:
        CheckpointError: a scale without a marker, a marked or fp8 weight without a scale, a scale that does not fit its
            weight, an unknown quantisation format.
    """
    marked = _marked_layers(path, tensors, metadata, read)
    scales: dict[str, FileTensor] = {}
    for layer, key in _scale_keys(tensors):
        if key != marked.get(layer):
            raise CheckpointError(path, f"{key} is a scale, but nothing marks {layer} as quantised")
        _check_scale(path, layer, key, tensors)
        scales[f"{layer}.weight"] = tensors[key]
    for layer, key in marked.items():
        if f"{layer}.weight" not in scales:
            raise CheckpointError(path, f"{layer} is marked as quantised, but its scale {key} is missing")
    weights = {key: tensor for key, tensor in tensors.items() if not _is_about_quantisation(key)}
    for key, tensor in weights.items():
        if tensor.dtype == FP8 and key not in scales:
            raise CheckpointError(path, f"{key} is fp8 without a scale: use an fp8_scaled or a bf16 file")
    return ScaledWeights(weights=weights, scales=scales)


def _marked_layers(
    path: Path, tensors: Mapping[str, FileTensor], metadata: Mapping[str, str], read: ReadTensors
) -> dict[str, str]:
    """Layer -> the key under which its scale has to be."""
    if METADATA_MARKER in metadata:
        layers = _parse(path, METADATA_MARKER, metadata[METADATA_MARKER]).get("layers")
        if not isinstance(layers, dict):
            raise CheckpointError(path, f"{METADATA_MARKER} has no layers")
        for layer, settings in layers.items():
            _check_format(path, layer, settings)
        return {layer: layer + LAYER_SCALE for layer in (name.removeprefix(PREFIX) for name in layers)}
    if FILE_MARKER in tensors:
        fp8 = [key.removesuffix(".weight") for key, tensor in tensors.items() if tensor.dtype == FP8]
        return {layer: layer + FILE_SCALE for layer in fp8 if layer != FILE_MARKER}
    markers = {key: tensor for key, tensor in tensors.items() if key.endswith(LAYER_MARKER)}
    for key, marker in markers.items():
        if marker.dtype != torch.uint8 or marker.nbytes > MAX_MARKER_BYTES:
            raise CheckpointError(path, f"{key} is {marker.dtype} {list(marker.shape)}; a marker is a short JSON text")
    for key, text in read(markers).items():
        _check_format(path, key.removesuffix(LAYER_MARKER), _parse(path, key, bytes(text.tolist())))
    return {layer: layer + LAYER_SCALE for layer in (key.removesuffix(LAYER_MARKER) for key in markers)}


def _scale_keys(tensors: Iterable[str]) -> list[tuple[str, str]]:
    """(layer, key) of every scale in the file, marked or not."""
    return [(key.removesuffix(end), key) for key in tensors for end in (FILE_SCALE, LAYER_SCALE) if key.endswith(end)]


def _check_scale(path: Path, layer: str, key: str, tensors: Mapping[str, FileTensor]) -> None:
    weight, scale = tensors.get(f"{layer}.weight"), tensors[key]
    if weight is None:
        raise CheckpointError(path, f"{key} is the scale of a weight that is missing")
    if weight.dtype != FP8:
        raise CheckpointError(path, f"{key} is the scale of a weight in {weight.dtype}; only {FP8} weights have scales")
    if math.prod(scale.shape) != 1 or scale.dtype != torch.float32:
        raise CheckpointError(path, f"{key} is {scale.dtype} {list(scale.shape)}; a scale is one float32 number")


def _check_format(path: Path, layer: str, settings: object) -> None:
    found = settings.get("format") if isinstance(settings, dict) else settings
    if not isinstance(settings, dict) or found != FORMAT:
        raise CheckpointError(path, f"{layer} is stored in the quantisation format {found!r}; only {FORMAT} is known")


def _parse(path: Path, key: str, text: str | bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError) as err:
        raise CheckpointError(path, f"{key} is not JSON: {err}") from err
    if not isinstance(parsed, dict):
        raise CheckpointError(path, f"{key} is not a JSON object")
    return parsed


def _is_about_quantisation(key: str) -> bool:
    return key == FILE_MARKER or key.endswith((LAYER_MARKER, FILE_SCALE, LAYER_SCALE, *INPUT_SCALES))
