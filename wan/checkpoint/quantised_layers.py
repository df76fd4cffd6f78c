"""Checkpoint layouts with quantised layers: markers, number formats, and scale keys.

| layout      | marker                                                 | layer scale            | format            |
|-------------|--------------------------------------------------------|------------------------|-------------------|
| scaled_fp8  | tensor `scaled_fp8`, for the whole file                | `<layer>.scale_weight` | the marker's, fp8 |
| comfy_quant | tensor `<layer>.comfy_quant`, JSON as bytes            | `<layer>.weight_scale` | named in the JSON |
| metadata    | `_quantization_metadata` in the header, for all layers | `<layer>.weight_scale` | named in the JSON |
| LightX2V    | tensors `<layer>.input_global_scale` and `.alpha`      | `<layer>.weight_scale` | nvfp4             |
| unmarked    | none                                                   | either                 | fp8, int8, plain  |
| plain cast  | none                                                   | none                   | any fp8           |

| format                         | weight                    | scales                                               |
|--------------------------------|---------------------------|------------------------------------------------------|
| float8_e4m3fn, float8_e5m2     | fp8 [rows, columns]       | `weight_scale`: one number, one per row, or one per  |
|                                |                           | row and column block                                 |
| int8_tensorwise                | int8 [rows, columns]      | the same                                             |
| int8_tensorwise with "convrot" | int8 rotated              | one number, or one per row                           |
| plain                          | fp32, fp16 or bf16        | the same                                             |
| mxfp8                          | e4m3fn [rows, columns]    | `weight_scale` e8m0 in tiles                         |
| nvfp4                          | uint8 [rows, columns / 2] | `weight_scale` e4m3fn in tiles, and `weight_scale_2` |

`offload/formats/packing.py` describes rotation and tiles. Scales are fp32, fp16, bf16 or fp64, and multiply in fp32. In
some files `scaled_fp8` is not fp8: this means e4m3fn. With two values it demands products in the compute dtype for the
whole file, as "full_precision_matrix_mult" does for a layer. Beside another marker it means nothing, as in ComfyUI.
LightX2V has the first of two nvfp4 values in the low bits, and `alpha` x `input_global_scale` in place of
`weight_scale_2`. Input scales (`scale_input`, `input_scale`) are not used: each token has a separate scale. A plain
cast rounds the weights to fp8 without a scale, which costs precision. It is loaded with a warning in the log.

A scale without a marker (LightX2V, musubi-tuner, ModelOpt) multiplies the numbers next to it: the weight dtype is the
format. int8 next to rotated layers, and bytes, have no such meaning and are refused.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...offload import MXFP8, NVFP4, EightBit, FileTensor, Microscaled, Packing, is_rotation
from .files import CheckpointError
from .markers import LAYER_MARKER, MAX_MARKER_BYTES, METADATA_MARKER, header_settings, marker_settings, own_layers

FP8_FORMATS = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
FP8_DTYPES = tuple(FP8_FORMATS.values())

INT8 = "int8_tensorwise"
DEFAULT_GROUP = 256

FILE_MARKER = "scaled_fp8"

FILE_SCALE = ".scale_weight"
LAYER_SCALE = ".weight_scale"
GLOBAL_SCALE = ".weight_scale_2"
ALPHA, INPUT_GLOBAL_SCALE = ".alpha", ".input_global_scale"
INPUT_FACTORS = ".pre_quant_scale"
NOT_WEIGHTS = (LAYER_MARKER, FILE_SCALE, LAYER_SCALE, GLOBAL_SCALE, INPUT_GLOBAL_SCALE, ".scale_input", ".input_scale")

FULL_PRECISION_VALUES = 2
"""Values in a `scaled_fp8` tensor that demands products in the compute dtype."""

SCALE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

OTHER_FORMATS = (
    ((".wscales", ".wtscale", ".smooth_factor", ".smooth_orig", ".proj_down"), "SVDQuant (nunchaku)"),
    ((".qweight", ".qzeros", ".g_idx"), "GPTQ or AWQ"),
    ((".W_q",), "HQQ"),
    ((".absmax", ".quant_map", ".nested_absmax", ".SCB", ".bitsandbytes__nf4", ".bitsandbytes__fp4"), "bitsandbytes"),
    (("._data", "._scale", "._shift"), "quanto"),
    (("_weight_qdata", "_weight_scale", "_weight_zero_point"), "torchao"),
    ((".zero_point", ".svd_up", ".svd_down"), "SDNQ"),
    ((".weight_packed", ".weight_zero_point", ".weight_g_idx"), "compressed-tensors"),
    ((".weight_scale_inv",), "fp8 in blocks of rows and columns (DeepSeek)"),
    ((".weight_s_rel", ".weight_s_channel", ".weight_codebook"), "asym_w4a8_int8"),
    ((".weight_zeros",), "awq_w4a16"),
    (("_quantizer._amax", "_quantizer._scale"), "ModelOpt before its export"),
)
"""Key endings found in one other format only, and the format name."""

CODES = (*FP8_DTYPES, torch.int8, torch.uint8)
_OTHER_SCALE = re.compile(r"(\w*?)_?(?:w(?:eight)?_)?scal\w*")

logger = logging.getLogger("wanstream.checkpoint")

ReadTensors = Callable[[Mapping[str, FileTensor]], Mapping[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class LayerFormat:
    """Number format of a layer weight."""

    name: str
    dtype: torch.dtype
    """Dtype of the stored numbers, or of bytes with two numbers each."""
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
"""Formats by marker name. "convrot" adds a rotation to int8."""

PLAIN_FORMATS = [
    LayerFormat(name=str(dtype).removeprefix("torch."), dtype=dtype)
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
]
"""Formats of unquantised weights with a scale."""


@dataclass(frozen=True, kw_only=True)
class QuantisedWeights:
    """Model tensors with their layer's packing, and the scale of each scaled weight under the weight key."""

    weights: Mapping[str, FileTensor]
    scales: Mapping[str, FileTensor]
    full_precision: frozenset[str] = frozenset()
    """Keys of weights for which the file demands products in the compute dtype."""


def resolve_quantisation(
    path: Path, tensors: Mapping[str, FileTensor], metadata: Mapping[str, str], read: ReadTensors
) -> QuantisedWeights:
    """Separate weights from scales in any layout. A file without quantised layers passes through.

    `read` is called for the `comfy_quant` markers only, about 70 bytes each.

    Raises:
        CheckpointError: a marked weight, or an fp8 weight next to others with scales, has no scale. A scale has no
            weight, or does not fit it. A format is unknown or does not match the weight.
    """
    refuse_other_formats(path, tensors)
    _refuse_other_scales(path, tensors)
    marked = _read_markers(path, tensors, metadata, read)
    scale_keys = _scale_keys(path, tensors)
    rotated = any(isinstance(fmt.packing, EightBit) and fmt.packing.group for fmt in marked.values())
    marked |= {
        layer: _unmarked_format(path, tensors, layer, key, rotated=rotated)
        for layer, key in scale_keys.items()
        if layer not in marked
    }
    layers = {f"{name}.weight": _resolve_layer(path, tensors, name, each, scale_keys) for name, each in marked.items()}
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


class UnmarkedLayer(NamedTuple):
    """Layer weight with an unmarked scale."""

    format: str
    """Name that a marker would have."""
    weight: FileTensor
    """Codes with the scales behind them, or an unquantised weight as in the file."""
    scale: FileTensor
    scale_key: str


def unmarked_layers(
    path: Path, tensors: Mapping[str, FileTensor], marked: Collection[str], *, rotated: bool = False
) -> dict[str, UnmarkedLayer]:
    """Return the layers with a scale but no marker, for models of any family.

    Args:
        path: the file.
        tensors: file tensors by key.
        marked: layers with a marker.
        rotated: some marked layers are rotated, so an unmarked one may be.

    Raises:
        CheckpointError: as `resolve_quantisation`.
    """
    others = {key: each for key, each in tensors.items() if key.rpartition(".")[0] not in marked}
    refuse_other_formats(path, others)
    _refuse_other_scales(path, others)
    scale_keys = _scale_keys(path, tensors)
    _refuse_without_scales(path, others, scale_keys)
    found: dict[str, UnmarkedLayer] = {}
    for layer, key in scale_keys.items():
        if layer in marked:
            continue
        fmt = _unmarked_format(path, tensors, layer, key, rotated=rotated)
        weight, scale = _resolve_layer(path, tensors, layer, fmt, scale_keys)
        if scale is not None and weight.dtype in FP8_DTYPES:
            weight = with_scale_behind(weight, scale)
        found[layer] = UnmarkedLayer(fmt.name, weight, scale or weight.behind or tensors[key], key)
    return found


def with_scale_behind(matrix: FileTensor, scale: FileTensor) -> FileTensor:
    """Return an fp8 matrix as codes with the scale behind them. Unchanged if the scale cannot lie there."""
    if len(matrix.shape) != 2 or math.prod(matrix.shape) % max(4, scale.dtype.itemsize):
        return matrix
    by_row = math.prod(scale.shape) > 1 or matrix.shape[0] == 1
    packing = EightBit(dtype=matrix.dtype, by_row=by_row, scale_dtype=scale.dtype)
    return replace(matrix, dtype=torch.uint8, packing=packing, behind=scale)


def _is_beside(key: str, marked: Mapping[str, LayerFormat]) -> bool:
    """Return True for a marker or a scale."""
    return key == FILE_MARKER or key.endswith(NOT_WEIGHTS) or (key.endswith(ALPHA) and key[: -len(ALPHA)] in marked)


def refuse_other_formats(path: Path, keys: Collection[str]) -> None:
    """Refuse a file with tensors found in another format only.

    Raises:
        CheckpointError: names the format and a tensor.
    """
    # Formats first: SVDQuant has keys of GPTQ too.
    for endings, name in OTHER_FORMATS:
        for key in keys:
            if key.endswith(endings):
                raise CheckpointError(path, f"is quantised as {name}, which is not supported: it holds {key}")


def _refuse_other_scales(path: Path, tensors: Mapping[str, FileTensor]) -> None:
    """Refuse codes next to a scale name in an unknown spelling: without the scale they are noise."""
    for key in tensors:
        module, _, last = key.rpartition(".")
        found = _OTHER_SCALE.fullmatch(last)
        if found is None or key.endswith((*NOT_WEIGHTS, INPUT_FACTORS)):
            continue
        for layer in (module.removesuffix(".weight"), f"{module}.{found[1]}"):
            weight = tensors.get(f"{layer}.weight")
            if weight is None or any(layer + ending in tensors for ending in (FILE_SCALE, LAYER_SCALE)):
                continue
            if weight.packing is None and weight.dtype in CODES:
                known = " and ".join((FILE_SCALE, LAYER_SCALE))
                reason = f"{key} has the name of a scale of {layer} in an unknown spelling; {known} are known"
                raise CheckpointError(path, f"{reason}: use another file")


def _refuse_without_scales(path: Path, tensors: Mapping[str, FileTensor], scale_keys: Mapping[str, str]) -> None:
    """Refuse codes without a scale, unless they are a plain cast: integers, and fp8 next to layers with a scale."""
    casts = () if scale_keys and FILE_MARKER not in tensors else FP8_DTYPES
    for key, tensor in tensors.items():
        layer = key.removesuffix(".weight")
        if layer == key or layer in scale_keys or tensor.packing is not None or tensor.dtype not in CODES:
            continue
        if tensor.dtype not in casts and len(tensor.shape) == 2:
            reason = f"{key} is {tensor.dtype} without a scale" + (", though others have one" if scale_keys else "")
            raise CheckpointError(path, f"{reason}: download it again, or use another file")


def _scale_keys(path: Path, tensors: Mapping[str, FileTensor]) -> dict[str, str]:
    """Return the scale key of each layer with a scale."""
    keys: dict[str, str] = {}
    for key in tensors:
        if key.endswith((FILE_SCALE, LAYER_SCALE)):
            layer = key.rpartition(".")[0]
            if layer in keys:
                raise CheckpointError(path, f"{layer} has two scales, {keys[layer]} and {key}: use another file")
            keys[layer] = key
    return keys


def _unmarked_format(
    path: Path, tensors: Mapping[str, FileTensor], layer: str, key: str, *, rotated: bool
) -> LayerFormat:
    """Return the format of a layer with the unmarked scale `key`: the weight dtype."""
    weight = tensors.get(f"{layer}.weight")
    scale = tensors[key]
    if weight is None:
        raise CheckpointError(path, f"{key} is a scale, but {layer}.weight is missing: download the file again")
    remedy = "the file lacks its markers (comfy_quant): use another file"
    if weight.packing is not None or scale.dtype not in SCALE_DTYPES:
        kind = str(weight.dtype) if weight.packing is None else weight.packing.name
        reason = f"{layer} is {kind} with scales in {scale.dtype}, as in mxfp8 and nvfp4, but nothing says which"
        raise CheckpointError(path, f"{reason}: {remedy}")
    if weight.dtype == torch.int8 and rotated:
        raise CheckpointError(path, f"{layer} is int8 next to rotated layers, but nothing says whether it is: {remedy}")
    known = {fmt.dtype: fmt for fmt in (*(FORMATS[name] for name in FP8_FORMATS), FORMATS[INT8], *PLAIN_FORMATS)}
    if weight.dtype not in known:
        raise CheckpointError(path, f"{layer} is {weight.dtype} with a scale, and nothing marks its format: {remedy}")
    return known[weight.dtype]


def _read_markers(
    path: Path, tensors: Mapping[str, FileTensor], metadata: Mapping[str, str], read: ReadTensors
) -> dict[str, LayerFormat]:
    """Return the format of each marked layer."""
    markers = {key: tensor for key, tensor in tensors.items() if key.endswith(LAYER_MARKER)}
    if FILE_MARKER in tensors and METADATA_MARKER not in metadata and not markers:
        declared = tensors[FILE_MARKER].dtype
        fmt = FORMATS[next((name for name, dtype in FP8_FORMATS.items() if dtype == declared), "float8_e4m3fn")]
        fmt = replace(fmt, full_precision=math.prod(tensors[FILE_MARKER].shape) == FULL_PRECISION_VALUES)
        fp8 = [key.removesuffix(".weight") for key, tensor in tensors.items() if tensor.dtype in FP8_DTYPES]
        return {layer: fmt for layer in fp8 if layer != FILE_MARKER}
    marked = {
        key.removesuffix(INPUT_GLOBAL_SCALE): LIGHTX2V_NVFP4 for key in tensors if key.endswith(INPUT_GLOBAL_SCALE)
    }
    if METADATA_MARKER in metadata:
        layers = header_settings(path, metadata[METADATA_MARKER])
        marked |= {layer: _format(path, layer, layers[name]) for layer, name in own_layers(layers, tensors).items()}
    for key, marker in markers.items():
        if marker.dtype != torch.uint8 or marker.nbytes > MAX_MARKER_BYTES:
            raise CheckpointError(path, f"{key} is {marker.dtype} {list(marker.shape)}; a marker is a short JSON text")
    for key, text in read(markers).items():
        layer = key.removesuffix(LAYER_MARKER)
        marked[layer] = _format(path, layer, marker_settings(path, key, bytes(text.tolist())))
    return marked


def _format(path: Path, layer: str, stated: Mapping[str, Any]) -> LayerFormat:
    """Return the format for the settings in a marker."""
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
    path: Path, tensors: Mapping[str, FileTensor], layer: str, fmt: LayerFormat, scale_keys: Mapping[str, str]
) -> tuple[FileTensor, FileTensor | None]:
    """Return the packed layer weight, and the scale."""
    weight = tensors.get(f"{layer}.weight")
    key = scale_keys.get(layer)
    if weight is None:
        raise CheckpointError(path, f"{layer} is marked as quantised, but {layer}.weight is missing")
    if key is None:
        ending = FILE_SCALE if FILE_MARKER in tensors else LAYER_SCALE
        raise CheckpointError(path, f"{layer} is marked as quantised, but its scale {layer}{ending} is missing")
    if f"{layer}{INPUT_FACTORS}" in tensors:
        raise CheckpointError(
            path, f"{layer}{INPUT_FACTORS} multiplies the input of a layer, which is not supported: use another file"
        )
    if weight.dtype != fmt.dtype or (fmt.packing is not None and len(weight.shape) != 2):
        raise CheckpointError(
            path, f"{layer}.weight is {weight.dtype} {list(weight.shape)}; {fmt.name} in {fmt.dtype} is marked"
        )
    if isinstance(fmt.packing, Microscaled):
        return _resolve_microscaled(path, tensors, layer, fmt.packing, weight, tensors[key])
    scale = _checked_scale(path, key, tensors[key], weight.shape)
    block = weight.shape[1] // scale.shape[1] if len(scale.shape) == 2 and scale.shape[1] > 1 else 0
    if not isinstance(fmt.packing, EightBit) and not block:
        return weight, scale
    packing = fmt.packing if isinstance(fmt.packing, EightBit) else EightBit(dtype=weight.dtype)
    if block and (weight.dtype.itemsize != 1 or packing.group):
        found = f"has {scale.shape[1]} scales for each row, which is known for fp8 and int8 that is not rotated"
        raise CheckpointError(path, f"{layer}.weight is {fmt.name} and {found}: use another file")
    columns = weight.shape[1]
    group = max(packing.group, scale.dtype.itemsize, 4)
    if columns % group:
        raise CheckpointError(path, f"{layer}.weight has {columns} columns, which is no multiple of {group}")
    by_row = bool(block) or math.prod(scale.shape) > 1 or weight.shape[0] == 1
    packing = replace(packing, by_row=by_row, block=block, scale_dtype=scale.dtype)
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
        _checked_scale(path, layer + key, factor, (1,))
    [first, *more] = [factor for factor in factors if factor is not None]
    return packed, replace(first, times=more[0]) if more else first


def _checked_scale(path: Path, key: str, scale: FileTensor, weight: tuple[int, ...]) -> FileTensor:
    """Return a scale as [] for one number, [rows, 1] for one for each row, or [rows, blocks]."""
    rows, columns = weight if len(weight) == 2 else (1, 1)
    shape = scale.shape[:-1] if len(scale.shape) == 3 and scale.shape[-1] == 1 else scale.shape
    if scale.dtype in SCALE_DTYPES:
        if math.prod(shape) == 1:
            return replace(scale, shape=())
        if shape in ((rows,), (rows, 1)):
            return replace(scale, shape=(rows, 1))
        if len(shape) == 2 and shape[0] == rows and 1 < shape[1] < columns and columns % shape[1] == 0:
            return replace(scale, shape=shape)
    expected = "one number in fp32, fp16, bf16 or fp64"
    if rows > 1:
        expected += f", one for each of the {rows} rows, or one for each block of their {columns} columns"
    raise CheckpointError(path, f"{key} is {scale.dtype} {list(scale.shape)}; a scale is {expected}")
