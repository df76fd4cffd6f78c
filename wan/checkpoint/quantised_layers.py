"""Checkpoint layouts with quantised layers: markers, number formats, and scale keys.

| layout      | marker                                 | layer scale            | format           |
|-------------|----------------------------------------|------------------------|------------------|
| scaled_fp8  | tensor `scaled_fp8`, for the file      | `<layer>.scale_weight` | the marker's fp8 |
| comfy_quant | `<layer>.comfy_quant`, JSON as bytes   | `<layer>.weight_scale` | in the JSON      |
| metadata    | header's `_quantization_metadata`,     | `<layer>.weight_scale` | in the JSON      |
|             | for all layers                         |                        |                  |
| LightX2V    | `<layer>.input_global_scale`, `.alpha` | `<layer>.weight_scale` | nvfp4            |
| unmarked    | none                                   | either                 | fp8, int8, plain |
| plain cast  | none                                   | none                   | any fp8          |

| format                         | weight                    | scales                              |
|--------------------------------|---------------------------|-------------------------------------|
| float8_e4m3fn, float8_e5m2     | fp8 [rows, columns]       | `weight_scale`: one number, one per |
|                                |                           | row, or one per row and column      |
|                                |                           | block                               |
| int8_tensorwise                | int8 [rows, columns]      | the same                            |
| int8_tensorwise with "convrot" | int8 rotated              | one number, or one per row          |
| plain                          | fp32, fp16 or bf16        | the same                            |
| mxfp8                          | e4m3fn [rows, columns]    | `weight_scale` e8m0 in tiles        |
| nvfp4                          | uint8 [rows, columns / 2] | `weight_scale` e4m3fn in tiles, and |
|                                |                           | `weight_scale_2`                    |

`offload/formats/packing.py` describes rotation and tiles. Scales are fp32, fp16, bf16 or fp64, and
multiply in fp32. In some files `scaled_fp8` is not fp8, which means e4m3fn. With two values it
demands products in the compute dtype for the whole file, as "full_precision_matrix_mult" does for a
layer. Next to another marker it means nothing, as in ComfyUI. LightX2V puts the first of two nvfp4
values into the low bits, and has `alpha` x `input_global_scale` in place of `weight_scale_2`. Input
scales (`scale_input`, `input_scale`) are not used: each token has a separate scale. A plain cast
rounds the weights to fp8 without a scale and loses precision. It is loaded with a warning in the
log.

A scale without a marker (LightX2V, musubi-tuner, ModelOpt) multiplies the numbers next to it: the
weight dtype is the format. int8 next to rotated layers, and bytes, have no such meaning and are
refused.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from ...devices import dtype_name
from ...offload.formats import (
    FP8_DTYPES,
    MXFP8,
    NVFP4,
    EightBit,
    FileTensor,
    Microscaled,
    Packing,
    is_rotation,
)
from .files import CheckpointError
from .markers import (
    LAYER_MARKER,
    MAX_MARKER_BYTES,
    METADATA_MARKER,
    header_settings,
    marker_settings,
    own_layers,
)

FP8_FORMATS = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}

INT8 = "int8_tensorwise"
DEFAULT_GROUP = 256

FILE_MARKER = "scaled_fp8"

FILE_SCALE = ".scale_weight"
LAYER_SCALE = ".weight_scale"
GLOBAL_SCALE = ".weight_scale_2"
ALPHA = ".alpha"
INPUT_GLOBAL_SCALE = ".input_global_scale"
INPUT_FACTORS = ".pre_quant_scale"
NOT_WEIGHTS = (
    LAYER_MARKER,
    FILE_SCALE,
    LAYER_SCALE,
    GLOBAL_SCALE,
    INPUT_GLOBAL_SCALE,
    ".scale_input",
    ".input_scale",
)

FULL_PRECISION_VALUES = 2
"""Values in a `scaled_fp8` tensor for products in the compute dtype."""

SCALE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

OTHER_FORMATS = (
    (
        (".wscales", ".wtscale", ".smooth_factor", ".smooth_orig", ".proj_down"),
        "SVDQuant (nunchaku)",
    ),
    ((".qweight", ".qzeros", ".g_idx"), "GPTQ or AWQ"),
    ((".W_q",), "HQQ"),
    ((".absmax", ".quant_map", ".nested_absmax"), "bitsandbytes"),
    ((".SCB", ".bitsandbytes__nf4", ".bitsandbytes__fp4"), "bitsandbytes"),
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
    """Dtype of the stored numbers, or uint8 with two numbers per byte."""
    packing: Packing | None = None
    full_precision: bool = False
    """The file demands products in the compute dtype."""


LIGHTX2V_NVFP4 = LayerFormat(
    name="nvfp4", dtype=torch.uint8, packing=replace(NVFP4, high_first=False)
)
FORMATS = {
    **{name: LayerFormat(name=name, dtype=dtype) for name, dtype in FP8_FORMATS.items()},
    INT8: LayerFormat(name=INT8, dtype=torch.int8, packing=EightBit()),
    "mxfp8": LayerFormat(name="mxfp8", dtype=torch.float8_e4m3fn, packing=MXFP8),
    "nvfp4": LayerFormat(name="nvfp4", dtype=torch.uint8, packing=NVFP4),
}
"""Formats by marker name. "convrot" adds a rotation to int8."""

UNMARKED_FORMATS = {
    **{dtype: FORMATS[name] for name, dtype in FP8_FORMATS.items()},
    torch.int8: FORMATS[INT8],
    **{
        dtype: LayerFormat(name=dtype_name(dtype), dtype=dtype)
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
    },
}
"""Formats for weights with an unmarked scale, quantised and plain, by dtype."""


@dataclass(frozen=True, kw_only=True)
class QuantisedWeights:
    """Model tensors with layer packings, and scales by weight key."""

    weights: Mapping[str, FileTensor]
    scales: Mapping[str, FileTensor]
    full_precision: frozenset[str] = frozenset()
    """Weight keys for which the file demands products in the compute dtype."""


def resolve_quantisation(
    path: Path, tensors: Mapping[str, FileTensor], metadata: Mapping[str, str], read: ReadTensors
) -> QuantisedWeights:
    """Separate weights from scales in any layout. A file without quantised layers passes through.

    `read` is called for the `comfy_quant` markers only, about 70 bytes each.

    Raises:
        CheckpointError: a marked weight, or an fp8 weight next to others with scales, has no scale.
            A scale has no weight, or does not fit it. A format is unknown or does not match the
            weight.
    """
    refuse_other_formats(path, tensors)
    layers = _Layers(path, tensors)
    layers.refuse_other_scales(tensors)
    marked = layers.read_markers(metadata, read)
    rotated = any(
        isinstance(fmt.packing, EightBit) and fmt.packing.group for fmt in marked.values()
    )
    marked |= {
        layer: layers.unmarked_format(layer, rotated=rotated)
        for layer in layers.scale_keys
        if layer not in marked
    }
    resolved = {f"{layer}.weight": layers.resolve(layer, fmt) for layer, fmt in marked.items()}
    weights = {key: each for key, each in tensors.items() if not _is_beside(key, marked)}
    weights |= {key: weight for key, (weight, _) in resolved.items()}
    casts = [
        key for key, each in weights.items() if each.dtype in FP8_DTYPES and key not in resolved
    ]
    if casts and (marked or METADATA_MARKER in metadata):
        layers.refuse(
            f"{casts[0]} is fp8 without a scale, though others have one: download it again"
        )
    if casts:
        logger.warning(
            "%s: %d weights are plain casts to %s, without scales, and have lost the small numbers "
            "among them; an fp8_scaled or a GGUF file (Q8_0) is about as large and closer to the "
            "original",
            path,
            len(casts),
            dtype_name(weights[casts[0]].dtype),
        )
    return QuantisedWeights(
        weights=weights,
        scales={key: scale for key, (_, scale) in resolved.items() if scale is not None},
        full_precision=frozenset(
            f"{layer}.weight" for layer, fmt in marked.items() if fmt.full_precision
        ),
    )


class UnmarkedLayer(NamedTuple):
    """Layer weight with an unmarked scale."""

    format: str
    """Marker name of the format."""
    weight: FileTensor
    """Codes with the scales behind them, or an unquantised weight as in the file."""
    scale: FileTensor
    scale_key: str


def unmarked_layers(
    path: Path, tensors: Mapping[str, FileTensor], marked: Collection[str], *, rotated: bool = False
) -> dict[str, UnmarkedLayer]:
    """Return the layers with a scale but no marker, for any model family.

    Args:
        path: the file.
        tensors: file tensors by key.
        marked: layers with a marker.
        rotated: some marked layers are rotated, so an unmarked one may be.

    Raises:
        CheckpointError: as in `resolve_quantisation`.
    """
    others = {key: each for key, each in tensors.items() if key.rpartition(".")[0] not in marked}
    refuse_other_formats(path, others)
    layers = _Layers(path, tensors)
    layers.refuse_other_scales(others)
    layers.refuse_without_scales(others)
    found: dict[str, UnmarkedLayer] = {}
    for layer, key in layers.scale_keys.items():
        if layer in marked:
            continue
        fmt = layers.unmarked_format(layer, rotated=rotated)
        weight, scale = layers.resolve(layer, fmt)
        if scale is not None and weight.dtype in FP8_DTYPES:
            weight = with_scale_behind(weight, scale)
        found[layer] = UnmarkedLayer(fmt.name, weight, scale or weight.behind or tensors[key], key)
    return found


def with_scale_behind(matrix: FileTensor, scale: FileTensor) -> FileTensor:
    """Return an fp8 matrix as codes with the scale behind them.

    Unchanged if the scale cannot lie there.
    """
    # The codes must end at an aligned offset, because the scales follow there.
    if len(matrix.shape) != 2 or math.prod(matrix.shape) % max(4, scale.dtype.itemsize):
        return matrix
    return _packed(matrix, scale, EightBit(dtype=matrix.dtype))


def _packed(weight: FileTensor, scale: FileTensor, packing: EightBit) -> FileTensor:
    """Return codes with their scales behind them: one, one per row, or one per block in a row."""
    # The one scale of a matrix with one row is a row scale too.
    by_row = math.prod(scale.shape) > 1 or weight.shape[0] == 1
    packing = replace(packing, by_row=by_row, scale_dtype=scale.dtype)
    return replace(weight, dtype=torch.uint8, packing=packing, behind=scale)


def _is_beside(key: str, marked: Mapping[str, LayerFormat]) -> bool:
    """Return True for a marker or a scale."""
    return (
        key == FILE_MARKER
        or key.endswith(NOT_WEIGHTS)
        or (key.endswith(ALPHA) and key.removesuffix(ALPHA) in marked)
    )


def refuse_other_formats(path: Path, keys: Collection[str]) -> None:
    """Refuse a file with tensors found in another format only.

    Raises:
        CheckpointError: names the format and a tensor.
    """
    # Formats first: SVDQuant has keys of GPTQ too.
    for endings, name in OTHER_FORMATS:
        for key in keys:
            if key.endswith(endings):
                raise CheckpointError(
                    path, f"is quantised as {name}, which is not supported: it holds {key}"
                )


@dataclass(frozen=True)
class _Layers:
    """Layers in a file with quantised weights."""

    path: Path
    tensors: Mapping[str, FileTensor]

    def refuse(self, reason: str) -> NoReturn:
        raise CheckpointError(self.path, reason)

    @cached_property
    def scale_keys(self) -> dict[str, str]:
        """Scale key by layer, for layers with a scale."""
        keys: dict[str, str] = {}
        for key in self.tensors:
            if key.endswith((FILE_SCALE, LAYER_SCALE)):
                layer = key.rpartition(".")[0]
                if layer in keys:
                    self.refuse(
                        f"{layer} has two scales, {keys[layer]} and {key}: use another file"
                    )
                keys[layer] = key
        return keys

    def refuse_other_scales(self, tensors: Mapping[str, FileTensor]) -> None:
        """Refuse codes next to a scale name in an unknown spelling.

        Codes without a scale are noise.
        """
        for key in tensors:
            module, _, last = key.rpartition(".")
            spelt = _OTHER_SCALE.fullmatch(last)
            if spelt is None or key.endswith((*NOT_WEIGHTS, INPUT_FACTORS)):
                continue
            for layer in (module.removesuffix(".weight"), f"{module}.{spelt[1]}"):
                weight = tensors.get(f"{layer}.weight")
                if weight is None or weight.packing is not None or weight.dtype not in CODES:
                    continue
                if layer + FILE_SCALE not in tensors and layer + LAYER_SCALE not in tensors:
                    self.refuse(
                        f"{key} has the name of a scale of {layer} in an unknown spelling; "
                        f"{FILE_SCALE} and {LAYER_SCALE} are known: use another file"
                    )

    def refuse_without_scales(self, tensors: Mapping[str, FileTensor]) -> None:
        """Refuse codes without a scale, unless they are a plain cast.

        Refused are integers, and fp8 next to layers with a scale.
        """
        with_scales = self.scale_keys and FILE_MARKER not in tensors
        casts = () if with_scales else FP8_DTYPES
        for key, tensor in tensors.items():
            layer = key.removesuffix(".weight")
            if layer == key or layer in self.scale_keys or tensor.packing is not None:
                continue
            if tensor.dtype in CODES and tensor.dtype not in casts and len(tensor.shape) == 2:
                others = ", though others have one" if self.scale_keys else ""
                self.refuse(
                    f"{key} is {tensor.dtype} without a scale{others}: download it again, or use "
                    "another file"
                )

    def unmarked_format(self, layer: str, *, rotated: bool) -> LayerFormat:
        """Return the format of a layer with an unmarked scale, by weight dtype."""
        key = self.scale_keys[layer]
        weight = self.tensors.get(f"{layer}.weight")
        scale = self.tensors[key]
        if weight is None:
            self.refuse(f"{key} is a scale, but {layer}.weight is missing: download the file again")
        remedy = "the file lacks its markers (comfy_quant): use another file"
        if weight.packing is not None or scale.dtype not in SCALE_DTYPES:
            kind = str(weight.dtype) if weight.packing is None else weight.packing.name
            self.refuse(
                f"{layer} is {kind} with scales in {scale.dtype}, as in mxfp8 and nvfp4, but "
                f"nothing says which: {remedy}"
            )
        if weight.dtype == torch.int8 and rotated:
            self.refuse(
                f"{layer} is int8 next to rotated layers, but nothing says whether it is: {remedy}"
            )
        if weight.dtype not in UNMARKED_FORMATS:
            self.refuse(
                f"{layer} is {weight.dtype} with a scale, and nothing marks its format: {remedy}"
            )
        return UNMARKED_FORMATS[weight.dtype]

    def read_markers(
        self, metadata: Mapping[str, str], read: ReadTensors
    ) -> dict[str, LayerFormat]:
        """Return the format of each marked layer."""
        markers = {key: each for key, each in self.tensors.items() if key.endswith(LAYER_MARKER)}
        if FILE_MARKER in self.tensors and METADATA_MARKER not in metadata and not markers:
            return self._marked_by_file(self.tensors[FILE_MARKER])
        marked = {
            key.removesuffix(INPUT_GLOBAL_SCALE): LIGHTX2V_NVFP4
            for key in self.tensors
            if key.endswith(INPUT_GLOBAL_SCALE)
        }
        if METADATA_MARKER in metadata:
            layers = header_settings(self.path, metadata[METADATA_MARKER])
            marked |= {
                layer: self._format(layer, layers[name])
                for layer, name in own_layers(layers, self.tensors).items()
            }
        for key, marker in markers.items():
            if marker.dtype != torch.uint8 or marker.nbytes > MAX_MARKER_BYTES:
                found = f"{key} is {marker.dtype} {list(marker.shape)}"
                self.refuse(f"{found}; a marker is a short JSON text")
        # A layer's own marker overrides the header.
        for key, text in read(markers).items():
            layer = key.removesuffix(LAYER_MARKER)
            stated = marker_settings(self.path, key, bytes(text.tolist()))
            marked[layer] = self._format(layer, stated)
        return marked

    def _marked_by_file(self, marker: FileTensor) -> dict[str, LayerFormat]:
        by_dtype = {FORMATS[name].dtype: FORMATS[name] for name in FP8_FORMATS}
        fmt = replace(
            by_dtype.get(marker.dtype, FORMATS["float8_e4m3fn"]),
            full_precision=math.prod(marker.shape) == FULL_PRECISION_VALUES,
        )
        return {
            key.removesuffix(".weight"): fmt
            for key, tensor in self.tensors.items()
            if tensor.dtype in FP8_DTYPES and key != FILE_MARKER
        }

    def _format(self, layer: str, stated: Mapping[str, Any]) -> LayerFormat:
        """Return the format for the settings in a marker."""
        name = stated.get("format")
        if not isinstance(name, str) or name not in FORMATS:
            self.refuse(
                f"{layer} is stored in the quantisation format {name!r}; {', '.join(FORMATS)} are "
                "known"
            )
        nested = stated.get("params")
        # ComfyUI reads settings inside `params` too.
        if isinstance(nested, dict):
            stated = {**nested, **stated}
        full_precision = bool(stated.get("full_precision_matrix_mult", False))
        fmt = replace(FORMATS[name], full_precision=full_precision)
        if name != INT8 or not stated.get("convrot", False):
            return fmt
        group = stated.get("convrot_groupsize", DEFAULT_GROUP)
        if not isinstance(group, int) or not is_rotation(group):
            self.refuse(
                f"{layer} is rotated in groups of {group!r}; 4, 16, 64, 256 and 1024 are known"
            )
        return replace(fmt, packing=EightBit(group=group))

    def resolve(self, layer: str, fmt: LayerFormat) -> tuple[FileTensor, FileTensor | None]:
        """Return the packed layer weight, and the scale if it does not lie behind the weight."""
        weight = self.tensors.get(f"{layer}.weight")
        if weight is None:
            self.refuse(f"{layer} is marked as quantised, but {layer}.weight is missing")
        if layer not in self.scale_keys:
            ending = FILE_SCALE if FILE_MARKER in self.tensors else LAYER_SCALE
            self.refuse(f"{layer} is marked as quantised, but its scale {layer}{ending} is missing")
        if f"{layer}{INPUT_FACTORS}" in self.tensors:
            self.refuse(
                f"{layer}{INPUT_FACTORS} multiplies the input of a layer, which is not supported: "
                "use another file"
            )
        if weight.dtype != fmt.dtype or (fmt.packing is not None and len(weight.shape) != 2):
            self.refuse(
                f"{layer}.weight is {weight.dtype} {list(weight.shape)}; {fmt.name} in {fmt.dtype} "
                "is marked"
            )
        key = self.scale_keys[layer]
        if isinstance(fmt.packing, Microscaled):
            return self._resolve_microscaled(layer, fmt.packing, weight, self.tensors[key])
        scale = self._checked_scale(key, weight.shape)
        block = 0
        if len(scale.shape) == 2 and scale.shape[1] > 1:
            block = weight.shape[1] // scale.shape[1]
        if fmt.packing is None and not block:
            return weight, scale
        return self._with_scale(layer, fmt, weight, scale, block), None

    def _with_scale(
        self, layer: str, fmt: LayerFormat, weight: FileTensor, scale: FileTensor, block: int
    ) -> FileTensor:
        """Return a weight with one scale, one per row, or one per `block` columns in a row."""
        packing = fmt.packing
        if not isinstance(packing, EightBit):
            packing = EightBit(dtype=weight.dtype)
        if block and (weight.dtype.itemsize != 1 or packing.group):
            self.refuse(
                f"{layer}.weight is {fmt.name} and has {scale.shape[1]} scales for each row, which "
                "is known for fp8 and int8 that is not rotated: use another file"
            )
        columns = weight.shape[1]
        group = max(packing.group, scale.dtype.itemsize, 4)
        if columns % group:
            self.refuse(f"{layer}.weight has {columns} columns, which is no multiple of {group}")
        return _packed(weight, scale, replace(packing, block=block))

    def _resolve_microscaled(
        self, layer: str, packing: Microscaled, weight: FileTensor, scale: FileTensor
    ) -> tuple[FileTensor, FileTensor | None]:
        rows = weight.shape[0]
        columns = weight.shape[1] * 8 // packing.bits
        if columns % packing.values:
            self.refuse(
                f"{layer}.weight has {columns} columns, which is no multiple of the "
                f"{packing.values} of a scale"
            )
        expected = packing.scale_shape((rows, columns))
        dtypes = (torch.uint8,) if packing.bits == 8 else (torch.uint8, torch.float8_e4m3fn)
        if scale.shape != expected or scale.dtype not in dtypes:
            self.refuse(
                f"{layer}{LAYER_SCALE} is {scale.dtype} {list(scale.shape)}; the scales of "
                f"{packing.name} for [{rows}, {columns}] are bytes {list(expected)}"
            )
        packed = replace(
            weight, shape=(rows, columns), dtype=torch.uint8, packing=packing, behind=scale
        )
        if packing.bits == 8:
            return packed, None
        keys = (GLOBAL_SCALE,) if packing.high_first else (ALPHA, INPUT_GLOBAL_SCALE)
        for key in keys:
            if layer + key not in self.tensors:
                self.refuse(f"{layer} is marked as nvfp4, but its scale {layer + key} is missing")
            self._checked_scale(layer + key, (1,))
        first, *more = (self.tensors[layer + key] for key in keys)
        return packed, replace(first, times=more[0]) if more else first

    def _checked_scale(self, key: str, weight: tuple[int, ...]) -> FileTensor:
        """Return a scale as [] for one number, [rows, 1] for one per row, or [rows, blocks]."""
        scale = self.tensors[key]
        rows, columns = weight if len(weight) == 2 else (1, 1)
        shape = scale.shape
        if len(shape) == 3 and shape[-1] == 1:
            shape = shape[:-1]
        if scale.dtype in SCALE_DTYPES:
            if math.prod(shape) == 1:
                return replace(scale, shape=())
            if shape in ((rows,), (rows, 1)):
                return replace(scale, shape=(rows, 1))
            in_blocks = len(shape) == 2 and shape[0] == rows and 1 < shape[1] < columns
            if in_blocks and columns % shape[1] == 0:
                return replace(scale, shape=shape)
        expected = "one number in fp32, fp16, bf16 or fp64"
        if rows > 1:
            expected += f", one for each of the {rows} rows"
            expected += f", or one for each block of their {columns} columns"
        found = f"{key} is {scale.dtype} {list(scale.shape)}"
        raise CheckpointError(self.path, f"{found}; a scale is {expected}")
