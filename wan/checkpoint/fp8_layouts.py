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

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ...offload import FileTensor
from .files import PREFIX, CheckpointError, json_object

FORMATS = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
FP8_DTYPES = tuple(FORMATS.values())

FILE_MARKER = "scaled_fp8"
LAYER_MARKER = ".comfy_quant"
METADATA_MARKER = "_quantization_metadata"

FILE_SCALE = ".scale_weight"
LAYER_SCALE = ".weight_scale"
INPUT_SCALES = (".scale_input", ".input_scale")
NOT_WEIGHTS = (LAYER_MARKER, FILE_SCALE, LAYER_SCALE, *INPUT_SCALES)

MAX_MARKER_BYTES = 4096  # a larger tensor of that name is not a marker and is not read

logger = logging.getLogger("wanstream.checkpoint")

ReadTensors = Callable[[Mapping[str, FileTensor]], Mapping[str, torch.Tensor]]


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
    ending, marked = _read_markers(path, tensors, metadata, read)
    scales: dict[str, FileTensor] = {}
    for key in (key for key in tensors if key.endswith((FILE_SCALE, LAYER_SCALE))):
        layer = key.rpartition(".")[0]
        if layer not in marked or key != layer + ending:
            raise CheckpointError(path, f"{key} is a scale, but nothing marks {layer} as quantised")
        _check_scale(path, key, tensors[key], tensors.get(f"{layer}.weight"), marked[layer])
        scales[f"{layer}.weight"] = tensors[key]
    for layer in marked:
        if f"{layer}.weight" not in scales:
            raise CheckpointError(path, f"{layer} is marked as quantised, but its scale {layer + ending} is missing")
    weights = {key: tensor for key, tensor in tensors.items() if not key.endswith(NOT_WEIGHTS) and key != FILE_MARKER}
    casts = [key for key, tensor in weights.items() if tensor.dtype in FP8_DTYPES and key not in scales]
    if casts and (marked or METADATA_MARKER in metadata):
        raise CheckpointError(path, f"{casts[0]} is fp8 without a scale, though others have one: download it again")
    if casts:
        logger.warning(
            "%s: %d weights are plain casts to %s, without scales, and have lost the small numbers among them; an "
            "fp8_scaled or a GGUF file (Q8_0) is about as large and closer to the original",
            path,
            len(casts),
            str(weights[casts[0]].dtype).removeprefix("torch."),
        )
    return ScaledWeights(weights=weights, scales=scales)


def _read_markers(
    path: Path, tensors: Mapping[str, FileTensor], metadata: Mapping[str, str], read: ReadTensors
) -> tuple[str, dict[str, torch.dtype]]:
    """Return the ending of the scales' keys in this layout, and the dtype of each marked layer's weight."""
    if METADATA_MARKER in metadata:
        layers = json_object(path, metadata[METADATA_MARKER], f"{METADATA_MARKER} ").get("layers")
        if not isinstance(layers, dict):
            raise CheckpointError(path, f"{METADATA_MARKER} has no layers")
        return LAYER_SCALE, {name.removeprefix(PREFIX): _format(path, name, layers[name]) for name in layers}
    if FILE_MARKER in tensors:
        declared = tensors[FILE_MARKER].dtype
        dtype = declared if declared in FP8_DTYPES else torch.float8_e4m3fn
        fp8 = [key.removesuffix(".weight") for key, tensor in tensors.items() if tensor.dtype in FP8_DTYPES]
        return FILE_SCALE, {layer: dtype for layer in fp8 if layer != FILE_MARKER}
    markers = {key: tensor for key, tensor in tensors.items() if key.endswith(LAYER_MARKER)}
    for key, marker in markers.items():
        if marker.dtype != torch.uint8 or marker.nbytes > MAX_MARKER_BYTES:
            raise CheckpointError(path, f"{key} is {marker.dtype} {list(marker.shape)}; a marker is a short JSON text")
    settings = {key: json_object(path, bytes(text.tolist()), f"{key} ") for key, text in read(markers).items()}
    layers = {key.removesuffix(LAYER_MARKER): each for key, each in settings.items()}
    return LAYER_SCALE, {layer: _format(path, layer, each) for layer, each in layers.items()}


def _check_scale(path: Path, key: str, scale: FileTensor, weight: FileTensor | None, marked: torch.dtype) -> None:
    if weight is None:
        raise CheckpointError(path, f"{key} is the scale of a weight that is missing")
    if weight.dtype != marked:
        raise CheckpointError(path, f"{key} is the scale of a weight in {weight.dtype}; {marked} is marked")
    if math.prod(scale.shape) != 1 or scale.dtype != torch.float32:
        raise CheckpointError(path, f"{key} is {scale.dtype} {list(scale.shape)}; a scale is one float32 number")


def _format(path: Path, layer: str, settings: object) -> torch.dtype:
    """Return the dtype of a layer's weight from the settings of its marker."""
    found = settings.get("format") if isinstance(settings, dict) else settings
    if not isinstance(settings, dict) or not isinstance(found, str) or found not in FORMATS:
        known = " and ".join(FORMATS)
        raise CheckpointError(path, f"{layer} is stored in the quantisation format {found!r}; {known} are known")
    return FORMATS[found]
