"""Layouts of checkpoints with quantised layers: markers, number formats, and keys of the scales.

| layout      | marker                                                 | scale of a layer       | format            |
|-------------|--------------------------------------------------------|------------------------|-------------------|
| scaled_fp8  | tensor `scaled_fp8`, for the whole file                | `<layer>.scale_weight` | the marker's, fp8 |
| comfy_quant | tensor `<layer>.comfy_quant`, JSON as bytes            | `<layer>.weight_scale` | named in the JSON |
| metadata    | `_quantization_metadata` in the header, for all layers | `<layer>.weight_scale` | named in the JSON |
| LightX2V    | tensors `<layer>.input_global_scale` and `.alpha`      | `<layer>.weight_scale` | nvfp4             |
| plain cast  | none                                                   | none                   | any fp8           |

| format                         | weight                    | scales                                               |
|--------------------------------|---------------------------|------------------------------------------------------|
| float8_e4m3fn, float8_e5m2     | fp8 [rows, columns]       | `weight_scale` fp32: one number, or one for each row |
| int8_tensorwise                | int8 [rows, columns]      | the same                                             |
| int8_tensorwise with "convrot" | int8 rotated              | the same                                             |
| mxfp8                          | e4m3fn [rows, columns]    | `weight_scale` e8m0 in tiles                         |
| nvfp4                          | uint8 [rows, columns / 2] | `weight_scale` e4m3fn in tiles, and `weight_scale_2` |

`offload/formats/packing.py` describes rotation and tiles. A `scaled_fp8` tensor that is not fp8, as in some files,
means e4m3fn; one with two values demands products in the compute dtype for the whole file, as
"full_precision_matrix_mult" does for a layer. Beside another marker it means nothing, as in ComfyUI. LightX2V has the
first of two nvfp4 values in the low bits, and `alpha` x `input_global_scale` in place of `weight_scale_2`. The scales
of the inputs (`scale_input`, `input_scale`) are not used: each token gets its own. A plain cast rounds the weights to
fp8 without a scale, which costs precision; it is loaded with a warning in the log.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ...offload import MXFP8, NVFP4, EightBit, FileTensor, Microscaled, Packing, is_rotation
from .files import CheckpointError, json_object

FP8_FORMATS = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
FP8_DTYPES = tuple(FP8_FORMATS.values())

INT8 = "int8_tensorwise"
DEFAULT_GROUP = 256

FILE_MARKER = "scaled_fp8"
LAYER_MARKER = ".comfy_quant"
METADATA_MARKER = "_quantization_metadata"

FILE_SCALE = ".scale_weight"
LAYER_SCALE = ".weight_scale"
GLOBAL_SCALE = ".weight_scale_2"
ALPHA, INPUT_GLOBAL_SCALE = ".alpha", ".input_global_scale"
INPUT_FACTORS = ".pre_quant_scale"
NOT_WEIGHTS = (LAYER_MARKER, FILE_SCALE, LAYER_SCALE, GLOBAL_SCALE, INPUT_GLOBAL_SCALE, ".scale_input", ".input_scale")

FULL_PRECISION_VALUES = 2
"""Values of a `scaled_fp8` tensor by which a file demands products in the compute dtype."""

MAX_MARKER_BYTES = 4096  # a larger tensor of that name is not a marker and is not read

logger = logging.getLogger("wanstream.checkpoint")

ReadTensors = Callable[[Mapping[str, FileTensor]], Mapping[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class LayerFormat:
    """Number format of one layer's weight."""

    name: str
    dtype: torch.dtype
    """Dtype of the stored numbers, or of the bytes that contain two of them."""
    packing: Packing | None = None
    full_precision: bool = False
    """The file demands products in the compute dtype."""


LIGHTX2V_NVFP4 = LayerFormat(name="nvfp4", dtype=torch.uint8, packing=replace(NVFP4, high_first=False))
FORMATS = {
    **{name: LayerFormat(name=name, dtype=dtype) for name, dtype in FP8_FORMATS.items()},
    INT8: LayerFormat(name=INT8, dtype=torch.int8, packing=EightBit()),
    "mxfp8": LayerFormat(name="mxfp8", dtype=torch.float8_e4m3fn, packing=MXFP8),
    "nvfp4": LayerFormat(name="nvfp4", dtype=torch.uint8, packing=NVFP4),
}
"""Formats that a marker can name; "convrot" adds a rotation to int8."""


@dataclass(frozen=True, kw_only=True)
class QuantisedWeights:
    """Tensors of the model with the packing of their layer, and the scale of each scaled weight under its key."""

    weights: Mapping[str, FileTensor]
    scales: Mapping[str, FileTensor]
    full_precision: frozenset[str] = frozenset()
    """Keys of weights for which the file demands products in the compute dtype."""


def resolve_quantisation(
    path: Path, tensors: Mapping[str, FileTensor], metadata: Mapping[str, str], read: ReadTensors
) -> QuantisedWeights:
    """Separate weights from scales in any layout; a file without quantised layers passes through.

    `read` is called for the `comfy_quant` markers only, about 70 bytes each.

    Raises:
        CheckpointError: a scale has no marker; a marked weight, or an fp8 or int8 weight in a file with markers, has no
            scale; a scale does not fit its weight; a format is unknown or does not match the weight.
    """
    ending, marked = _read_markers(path, tensors, metadata, read)
    layers = {f"{name}.weight": _resolve_layer(path, tensors, name, each, ending) for name, each in marked.items()}
    for key in tensors:
        layer, _, last = key.rpartition(".")
        if key.endswith((FILE_SCALE, LAYER_SCALE)) and (layer not in marked or f".{last}" != ending):
            raise CheckpointError(path, f"{key} is a scale, but nothing marks {layer} as quantised")
    weights = {
        key: layers[key][0] if key in layers else tensor
        for key, tensor in tensors.items()
        if not _is_beside(key, marked)
    }
    scales = {key: scale for key, (_, scale) in layers.items() if scale is not None}
    casts = [key for key, tensor in weights.items() if tensor.dtype in FP8_DTYPES and key not in layers]
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
    full_precision = frozenset(f"{name}.weight" for name, each in marked.items() if each.full_precision)
    return QuantisedWeights(weights=weights, scales=scales, full_precision=full_precision)


def _is_beside(key: str, marked: Mapping[str, LayerFormat]) -> bool:
    """Return True for a tensor that is not a weight: a marker or a scale."""
    return key == FILE_MARKER or key.endswith(NOT_WEIGHTS) or (key.endswith(ALPHA) and key[: -len(ALPHA)] in marked)


def _read_markers(
    path: Path, tensors: Mapping[str, FileTensor], metadata: Mapping[str, str], read: ReadTensors
) -> tuple[str, dict[str, LayerFormat]]:
    """Return the ending of the scales' keys in this layout, and the format of each marked layer."""
    markers = {key: tensor for key, tensor in tensors.items() if key.endswith(LAYER_MARKER)}
    if FILE_MARKER in tensors and METADATA_MARKER not in metadata and not markers:
        declared = tensors[FILE_MARKER].dtype
        fmt = FORMATS[next((name for name, dtype in FP8_FORMATS.items() if dtype == declared), "float8_e4m3fn")]
        fmt = replace(fmt, full_precision=math.prod(tensors[FILE_MARKER].shape) == FULL_PRECISION_VALUES)
        fp8 = [key.removesuffix(".weight") for key, tensor in tensors.items() if tensor.dtype in FP8_DTYPES]
        return FILE_SCALE, {layer: fmt for layer in fp8 if layer != FILE_MARKER}
    marked = {
        key.removesuffix(INPUT_GLOBAL_SCALE): LIGHTX2V_NVFP4 for key in tensors if key.endswith(INPUT_GLOBAL_SCALE)
    }
    if METADATA_MARKER in metadata:
        layers = json_object(path, metadata[METADATA_MARKER], f"{METADATA_MARKER} ").get("layers")
        if not isinstance(layers, dict):
            raise CheckpointError(path, f"{METADATA_MARKER} has no layers")
        marked |= {layer: _format(path, layer, layers[name]) for layer, name in _own_layers(layers, tensors).items()}
    for key, marker in markers.items():
        if marker.dtype != torch.uint8 or marker.nbytes > MAX_MARKER_BYTES:
            raise CheckpointError(path, f"{key} is {marker.dtype} {list(marker.shape)}; a marker is a short JSON text")
    for key, text in read(markers).items():
        layer = key.removesuffix(LAYER_MARKER)
        marked[layer] = _format(path, layer, json_object(path, bytes(text.tolist()), f"{key} "))
    return LAYER_SCALE, marked


def _own_layers(names: Collection[str], tensors: Mapping[str, FileTensor]) -> dict[str, str]:
    """Return the name in the metadata of each layer of the model; other names are those of other models.

    The names may have a prefix, which need not be that of the file's keys.
    """
    prefixes: Counter[str] = Counter()
    for name in names:
        parts = name.split(".")
        found = (at for at in range(len(parts)) if f"{'.'.join(parts[at:])}.weight" in tensors)
        if (at := next(found, None)) is not None:
            prefixes["".join(f"{part}." for part in parts[:at])] += 1
    [(prefix, _)] = prefixes.most_common(1) or [("", 0)]
    layers = {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}
    return {layer: name for layer, name in layers.items() if f"{layer}.weight" in tensors}


def _format(path: Path, layer: str, settings: object) -> LayerFormat:
    """Return the format that a marker describes: an object, or the bare name of the format."""
    stated = settings if isinstance(settings, dict) else {"format": settings}
    name = stated.get("format")
    if not isinstance(name, str) or name not in FORMATS:
        raise CheckpointError(
            path, f"{layer} is stored in the quantisation format {name!r}; {', '.join(FORMATS)} are known"
        )
    nested = stated.get("params")
    stated = {**(nested if isinstance(nested, dict) else {}), **stated}
    fmt = replace(FORMATS[name], full_precision=bool(stated.get("full_precision_matrix_mult", False)))
    if name != INT8 or not stated.get("convrot", False):
        return fmt
    group = stated.get("convrot_groupsize", DEFAULT_GROUP)
    if not isinstance(group, int) or not is_rotation(group):
        raise CheckpointError(path, f"{layer} is rotated in groups of {group!r}; 4, 16, 64, 256 and 1024 are known")
    return replace(fmt, packing=EightBit(group=group))


def _resolve_layer(
    path: Path, tensors: Mapping[str, FileTensor], layer: str, fmt: LayerFormat, ending: str
) -> tuple[FileTensor, FileTensor | None]:
    """Return the weight of a layer with its packing, and its scale."""
    weight, scale = tensors.get(f"{layer}.weight"), tensors.get(layer + ending)
    if weight is None:
        raise CheckpointError(path, f"{layer} is marked as quantised, but {layer}.weight is missing")
    if scale is None:
        raise CheckpointError(path, f"{layer} is marked as quantised, but its scale {layer + ending} is missing")
    if f"{layer}{INPUT_FACTORS}" in tensors:
        raise CheckpointError(
            path, f"{layer}{INPUT_FACTORS} multiplies the input of a layer, which is not supported: use another file"
        )
    if weight.dtype != fmt.dtype or (fmt.packing is not None and len(weight.shape) != 2):
        raise CheckpointError(
            path, f"{layer}.weight is {weight.dtype} {list(weight.shape)}; {fmt.name} in {fmt.dtype} is marked"
        )
    if isinstance(fmt.packing, Microscaled):
        return _resolve_microscaled(path, tensors, layer, fmt.packing, weight, scale)
    _check_scale(path, layer + ending, scale, weight.shape[0] if len(weight.shape) == 2 else 1)
    if not isinstance(fmt.packing, EightBit):
        return weight, scale
    columns, group = weight.shape[1], fmt.packing.group or 4
    if columns % group:
        raise CheckpointError(path, f"{layer}.weight has {columns} columns, which is no multiple of {group}")
    packing = replace(fmt.packing, by_row=math.prod(scale.shape) > 1 or weight.shape[0] == 1)
    return replace(weight, dtype=torch.uint8, packing=packing, behind=scale), None


def _resolve_microscaled(
    path: Path,
    tensors: Mapping[str, FileTensor],
    layer: str,
    packing: Microscaled,
    weight: FileTensor,
    scale: FileTensor,
) -> tuple[FileTensor, FileTensor | None]:
    rows, columns = weight.shape[0], weight.shape[1] * 8 // packing.bits
    if columns % packing.values:
        raise CheckpointError(
            path, f"{layer}.weight has {columns} columns, which is no multiple of the {packing.values} of a scale"
        )
    expected = packing.scale_shape((rows, columns))
    dtypes = (torch.uint8,) if packing.bits == 8 else (torch.uint8, torch.float8_e4m3fn)
    if scale.shape != expected or scale.dtype not in dtypes:
        raise CheckpointError(
            path,
            f"{layer}{LAYER_SCALE} is {scale.dtype} {list(scale.shape)}; the scales of {packing.name} for "
            f"[{rows}, {columns}] are bytes {list(expected)}",
        )
    packed = replace(weight, shape=(rows, columns), dtype=torch.uint8, packing=packing, behind=scale)
    if packing.bits == 8:
        return packed, None
    keys = (GLOBAL_SCALE,) if packing.high_first else (ALPHA, INPUT_GLOBAL_SCALE)
    factors = [tensors.get(layer + key) for key in keys]
    for key, factor in zip(keys, factors, strict=True):
        if factor is None:
            raise CheckpointError(path, f"{layer} is marked as nvfp4, but its scale {layer + key} is missing")
        _check_scale(path, layer + key, factor, 1)
    [first, *more] = [factor for factor in factors if factor is not None]
    return packed, replace(first, times=more[0]) if more else first


def _check_scale(path: Path, key: str, scale: FileTensor, rows: int) -> None:
    by_row = scale.shape in ((rows,), (rows, 1))
    if not (math.prod(scale.shape) == 1 or by_row) or scale.dtype != torch.float32:
        raise CheckpointError(
            path,
            f"{key} is {scale.dtype} {list(scale.shape)}; a scale is one float32 number"
            + (f", or one for each of the {rows} rows" if rows > 1 else ""),
        )
