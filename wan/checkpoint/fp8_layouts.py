"""Layouts of fp8 checkpoints: markers of scaled weights, and keys of their scales.

| layout      | marker                                                    | scale of a layer       | number format     |
|-------------|-----------------------------------------------------------|------------------------|-------------------|
| scaled_fp8  | tensor `scaled_fp8`, for the whole file                   | `<layer>.scale_weight` | the marker's      |
| comfy_quant | tensor `<layer>.comfy_quant`, JSON as bytes               | `<layer>.weight_scale` | named in the JSON |
| metadata    | `_quantization_metadata` in the header, for all layers    | `<layer>.weight_scale` | named in the JSON |
| plain cast  | none                                                      | none                   | any               |

The number formats are e4m3fn and e5m2; a `scaled_fp8` tensor of any other dtype, as in some files, means e4m3fn. In the
first three layouts value = fp8 x scale, with one fp32 scale per weight. The scales of the inputs (`scale_input`,
`input_scale`) are for fp8 arithmetic and are not used: weights are decoded to the compute dtype. A plain cast rounds
the weights to fp8 without a scale, which costs precision; it is loaded with a warning in the log.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...offload import FileTensor
from .files import PREFIX, CheckpointError

FORMATS = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
FP8_DTYPES = tuple(FORMATS.values())

FILE_MARKER = "scaled_fp8"
LAYER_MARKER = ".comfy_quant"
METADATA_MARKER = "_quantization_metadata"

FILE_SCALE = ".scale_weight"
LAYER_SCALE = ".weight_scale"
INPUT_SCALES = (".scale_input", ".input_scale")

MAX_MARKER_BYTES = 4096  # a larger tensor of that name is not a marker and is not read

logger = logging.getLogger("wanstream.checkpoint")

ReadTensors = Callable[[Mapping[str, FileTensor]], Mapping[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class _Marker:
    """Marker of a quantised layer."""

    scale: str
    """Key of the layer's scale."""
    dtype: torch.dtype
    """Dtype of the layer's weight."""


@dataclass(frozen=True, kw_only=True)
class ScaledWeights:
    """Tensors of the model, and the scale of each scaled fp8 weight under the key of the weight."""

    weights: Mapping[str, FileTensor]
    scales: Mapping[str, FileTensor]


def resolve_scales(
    path: Path, tensors: Mapping[str, FileTensor], metadata: Mapping[str, str], read: ReadTensors
) -> ScaledWeights:
    """Separate weights from scales in any layout; a file without fp8 passes through.

    `read` is called for the `comfy_quant` markers only, about 70 bytes each.

    Raises:
        CheckpointError: a scale has no marker; a marked weight, or an fp8 weight in a file with markers, has no scale;
            a scale does not fit its weight; a quantisation format is unknown or does not match the weight's dtype.
    """
    marked = _read_markers(path, tensors, metadata, read)
    scales: dict[str, FileTensor] = {}
    for layer, key in _scale_keys(tensors):
        if layer not in marked or key != marked[layer].scale:
            raise CheckpointError(path, f"{key} is a scale, but nothing marks {layer} as quantised")
        _check_scale(path, layer, marked[layer], tensors)
        scales[f"{layer}.weight"] = tensors[key]
    for layer, marker in marked.items():
        if f"{layer}.weight" not in scales:
            raise CheckpointError(path, f"{layer} is marked as quantised, but its scale {marker.scale} is missing")
    weights = {key: tensor for key, tensor in tensors.items() if not _is_quantisation_key(key)}
    casts = [key for key, tensor in weights.items() if tensor.dtype in FP8_DTYPES and key not in scales]
    if casts and (marked or METADATA_MARKER in metadata):
        raise CheckpointError(path, f"{casts[0]} is fp8 without a scale, though others have one: download it again")
    if casts:
        _warn_about_plain_casts(path, casts, weights[casts[0]].dtype)
    return ScaledWeights(weights=weights, scales=scales)


def _warn_about_plain_casts(path: Path, keys: Sequence[str], dtype: torch.dtype) -> None:
    logger.warning(
        "%s: %d weights are plain casts to %s, without scales, and have lost the small numbers among them; an "
        "fp8_scaled or a GGUF file (Q8_0) is about as large and closer to the original",
        path,
        len(keys),
        str(dtype).removeprefix("torch."),
    )


def _read_markers(
    path: Path, tensors: Mapping[str, FileTensor], metadata: Mapping[str, str], read: ReadTensors
) -> dict[str, _Marker]:
    """Return the marker of each marked layer by layer name."""
    if METADATA_MARKER in metadata:
        layers = _parse(path, METADATA_MARKER, metadata[METADATA_MARKER]).get("layers")
        if not isinstance(layers, dict):
            raise CheckpointError(path, f"{METADATA_MARKER} has no layers")
        return {
            (name := layer.removeprefix(PREFIX)): _Marker(
                scale=name + LAYER_SCALE, dtype=_format(path, layer, settings)
            )
            for layer, settings in layers.items()
        }
    if FILE_MARKER in tensors:
        declared = tensors[FILE_MARKER].dtype
        dtype = declared if declared in FP8_DTYPES else torch.float8_e4m3fn
        fp8 = [key.removesuffix(".weight") for key, tensor in tensors.items() if tensor.dtype in FP8_DTYPES]
        return {layer: _Marker(scale=layer + FILE_SCALE, dtype=dtype) for layer in fp8 if layer != FILE_MARKER}
    markers = {key: tensor for key, tensor in tensors.items() if key.endswith(LAYER_MARKER)}
    for key, marker in markers.items():
        if marker.dtype != torch.uint8 or marker.nbytes > MAX_MARKER_BYTES:
            raise CheckpointError(path, f"{key} is {marker.dtype} {list(marker.shape)}; a marker is a short JSON text")
    return {
        (layer := key.removesuffix(LAYER_MARKER)): _Marker(
            scale=layer + LAYER_SCALE, dtype=_format(path, layer, _parse(path, key, bytes(text.tolist())))
        )
        for key, text in read(markers).items()
    }


def _scale_keys(tensors: Iterable[str]) -> list[tuple[str, str]]:
    """Return (layer, key) of every scale in the file, marked or not."""
    return [(key.removesuffix(end), key) for key in tensors for end in (FILE_SCALE, LAYER_SCALE) if key.endswith(end)]


def _check_scale(path: Path, layer: str, marker: _Marker, tensors: Mapping[str, FileTensor]) -> None:
    key = marker.scale
    weight, scale = tensors.get(f"{layer}.weight"), tensors[key]
    if weight is None:
        raise CheckpointError(path, f"{key} is the scale of a weight that is missing")
    if weight.dtype != marker.dtype:
        raise CheckpointError(path, f"{key} is the scale of a weight in {weight.dtype}; {marker.dtype} is marked")
    if math.prod(scale.shape) != 1 or scale.dtype != torch.float32:
        raise CheckpointError(path, f"{key} is {scale.dtype} {list(scale.shape)}; a scale is one float32 number")


def _format(path: Path, layer: str, settings: object) -> torch.dtype:
    """Return the dtype of a layer's weight from the settings of its marker."""
    found = settings.get("format") if isinstance(settings, dict) else settings
    if not isinstance(settings, dict) or not isinstance(found, str) or found not in FORMATS:
        known = " and ".join(FORMATS)
        raise CheckpointError(path, f"{layer} is stored in the quantisation format {found!r}; {known} are known")
    return FORMATS[found]


def _parse(path: Path, key: str, text: str | bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as err:
        raise CheckpointError(path, f"{key} is not JSON: {err}") from err
    if not isinstance(parsed, dict):
        raise CheckpointError(path, f"{key} is not a JSON object")
    return parsed


def _is_quantisation_key(key: str) -> bool:
    return key == FILE_MARKER or key.endswith((LAYER_MARKER, FILE_SCALE, LAYER_SCALE, *INPUT_SCALES))
