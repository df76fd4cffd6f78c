"""Single files of tiny models: plain, with fp8 or other quantised matrices, and GGUF.

The markers of fp8 matrices have changed over time; `Fp8Layout` selects one of the variants.

The gguf package can quantise to F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0. Tensors of other types get random
packs with the standard deviation of the tensor's values. So the values in the file differ from the given model;
`save_expert_gguf` returns the model that the file contains.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import save_file
from torch import nn

from ..wan import native_transformer_name
from .number_formats import ENCODERS, MixedLayout

# Functions import gguf: it writes test models only, and only the development requirements contain it.
if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, kw_only=True)
class Fp8Layout:
    """Layout of the fp8 layers of a single file.

    Args:
        kind: "scaled_fp8", one marker tensor per file and a `scale_weight` per layer; "comfy_quant", a tensor with JSON
            text per layer; "metadata", the same text in the header of the file. The last two name the scale
            `weight_scale`.
        scale_shape: (), (1,) or (1, 1); a scale is always one number.
        input_scale: add a `scale_input` of 1 to each layer ("scaled_fp8" only).
        full_precision: request matrix products in the compute dtype instead of fp8.
        marker_dtype: dtype of the marker tensor, whose values are ignored ("scaled_fp8" only); None: that of the
            weights.
        dtype: dtype of the weights, float8_e4m3fn or float8_e5m2.
    """

    kind: Literal["scaled_fp8", "comfy_quant", "metadata"] = "scaled_fp8"
    scale_shape: tuple[int, ...] = ()
    input_scale: bool = False
    full_precision: bool = False
    marker_dtype: torch.dtype | None = None
    dtype: torch.dtype = FP8


FP8_LAYOUTS = {
    "scaled_fp8": Fp8Layout(),
    "scaled_fp8, scales [1]": Fp8Layout(scale_shape=(1,)),
    "scaled_fp8, scales [1, 1]": Fp8Layout(scale_shape=(1, 1)),
    "scaled_fp8, input scales": Fp8Layout(input_scale=True),
    "scaled_fp8, full precision": Fp8Layout(full_precision=True),
    "scaled_fp8, fp32 marker": Fp8Layout(marker_dtype=torch.float32),
    "comfy_quant": Fp8Layout(kind="comfy_quant"),
    "comfy_quant, full precision": Fp8Layout(kind="comfy_quant", full_precision=True),
    "metadata": Fp8Layout(kind="metadata"),
}

# ComfyUI reads every scaled weight as e4m3fn, so these cannot be used in tests against it.
FP8_E5M2_LAYOUTS = {
    kind: Fp8Layout(kind=kind, dtype=torch.float8_e5m2) for kind in ("scaled_fp8", "comfy_quant", "metadata")
}


def quantise(weight: torch.Tensor, dtype: torch.dtype = FP8) -> tuple[torch.Tensor, torch.Tensor]:
    """Return fp8 values and their fp32 scale, of shape [], which maps the largest value to the largest fp8 number."""
    scale = weight.abs().amax().float() / torch.finfo(dtype).max
    return (weight / scale).to(dtype), scale


def save_single_file(
    tensors: Mapping[str, torch.Tensor],
    path: Path,
    *,
    layers: Mapping[str, nn.Linear] = MappingProxyType({}),
    fp8: Fp8Layout | MixedLayout | None = None,
    prefix: str = "",
) -> None:
    """Write ComfyUI's single file, with `prefix` before every key; `fp8` quantises the matrices of `layers`."""
    stored, metadata = dict(tensors), {"format": "pt"}
    if isinstance(fp8, MixedLayout):
        _add_mixed_layers(stored, metadata, layers, fp8)
    elif fp8 is not None:
        precision = {"full_precision_matrix_mult": True} if fp8.full_precision else {}
        quantisation = {"format": str(fp8.dtype).removeprefix("torch."), **precision}
        for layer, linear in layers.items():
            stored |= _fp8_layer(layer, linear, fp8, quantisation)
        if fp8.kind == "scaled_fp8":
            stored["scaled_fp8"] = torch.zeros(2 if fp8.full_precision else 0, dtype=fp8.marker_dtype or fp8.dtype)
        if fp8.kind == "metadata":
            metadata["_quantization_metadata"] = json.dumps({"layers": dict.fromkeys(layers, quantisation)})
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({f"{prefix}{name}": tensor for name, tensor in stored.items()}, path, metadata)


def _add_mixed_layers(
    stored: dict[str, torch.Tensor], metadata: dict[str, str], layers: Mapping[str, nn.Linear], layout: MixedLayout
) -> None:
    settings: dict[str, Any] = {}
    for layer, linear in layers.items():
        if (name := layout.format_of(layer)) is None:
            continue
        encoded = ENCODERS[name](linear.weight)
        stored |= {f"{layer}.{ending}": tensor.contiguous() for ending, tensor in encoded.tensors.items()}
        if "alpha" not in encoded.tensors:  # LightX2V has no markers
            settings[layer] = encoded.settings
    if layout.markers == "names":
        settings = {layer: each["format"] for layer, each in settings.items()}
    if layout.markers == "nested":
        settings = {layer: {"format": each.pop("format"), "params": each} for layer, each in settings.items()}
    if layout.markers in ("metadata", "names"):
        metadata["_quantization_metadata"] = json.dumps({"format_version": "1.0", "layers": settings})
    else:
        stored |= {f"{layer}.comfy_quant": _json_tensor(each) for layer, each in settings.items()}


def _json_tensor(settings: Mapping[str, Any]) -> torch.Tensor:
    return torch.tensor(list(json.dumps(settings).encode()), dtype=torch.uint8)


def _fp8_layer(
    layer: str, linear: nn.Linear, layout: Fp8Layout, quantisation: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    weight, scale = quantise(linear.weight, layout.dtype)
    scale_name = "scale_weight" if layout.kind == "scaled_fp8" else "weight_scale"
    tensors = {f"{layer}.weight": weight, f"{layer}.{scale_name}": scale.reshape(layout.scale_shape)}
    if layout.input_scale:
        tensors[f"{layer}.scale_input"] = torch.ones(layout.scale_shape)
    if layout.kind == "comfy_quant":
        tensors[f"{layer}.comfy_quant"] = _json_tensor(quantisation)
    return tensors


QUANTISED = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")

# Byte offsets of the fp16 scale of a pack and of its minimum, if it has one, and the ratio of minimum to scale that
# centres the values around zero. (K-quants subtract the minimum.)
_SCALES: dict[str, tuple[int, int | None, float]] = {
    "Q4_0": (0, None, 0.0),
    "Q4_1": (0, 2, -7.5),
    "Q5_0": (0, None, 0.0),
    "Q5_1": (0, 2, -15.5),
    "Q8_0": (0, None, 0.0),
    "Q2_K": (80, 82, 1.5),
    "Q3_K": (108, None, 0.0),
    "Q4_K": (0, 2, 7.5),
    "Q5_K": (0, 2, 15.5),
    "Q6_K": (208, None, 0.0),
    "IQ4_NL": (0, None, 0.0),
    "IQ4_XS": (0, None, 0.0),
}

PATCHES = "patch_embedding.weight"
IMAGE_NORMS = ("img_emb.proj.0.", "img_emb.proj.4.")

TypeOf = Callable[[str], str]
"""Maps the native name of a tensor to the name of its type."""


def q4_k_m(name: str) -> str:
    """Return the type in the mixture Q4_K_M: some matrices are Q6_K, small tensors are not quantised."""
    if not _is_matrix(name):
        return "F16" if name == PATCHES else "F32"
    return "Q6_K" if name.endswith(("self_attn.v.weight", "ffn.2.weight")) else "Q4_K"


def matrices(kind: str, *, others: str = "F32") -> TypeOf:
    """Return a mapping with all matrices of the model in one type, and all other tensors in `others`."""
    return lambda name: kind if _is_matrix(name) else others


def save_expert_gguf(
    model: WanTransformer3DModel,
    path: Path,
    *,
    types: TypeOf,
    prefix: Literal["", "model.diffusion_model."] = "",
    patches: Literal["shape field", "five dimensions", "merged"] = "shape field",
    architecture: str = "wan",
    seed: int = 0,
) -> WanTransformer3DModel:
    """Write ComfyUI's single file as GGUF.

    Args:
        types: type of each tensor, by its native name.
        patches: layout of the five dimensions of the patch embedding: two, with the shape in a metadata field; all
            five; or four, which loses the number of channels.
        architecture: architecture field of the file.
        seed: seed of the random packs.

    Returns:
        The fp32 model with the values in the file.
    """
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import dequantize, quantize

    dequantised = copy.deepcopy(model)
    parameters = dict(dequantised.named_parameters())
    random = np.random.default_rng(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(path, architecture)
    for name, tensor in model.state_dict().items():
        key = native_transformer_name(name)
        kind = GGMLQuantizationType[types(key)]
        shape = tuple(tensor.shape)
        stored_shape = shape
        if key == PATCHES and patches != "five dimensions":
            merged = (shape[0], tensor[0].numel()) if patches == "shape field" else (shape[0] * shape[1], *shape[2:])
            stored_shape = merged
            if patches == "shape field":
                writer.add_array(f"comfy.gguf.orig_shape.{prefix}{key}", shape)
        values = tensor.reshape(stored_shape).numpy()
        packs = quantize(values, kind) if kind.name in QUANTISED else random_packs(values, kind, random)
        parameters[name].data.copy_(torch.from_numpy(dequantize(packs, kind).copy()).reshape(shape))
        writer.add_tensor(prefix + key, packs, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return dequantised


def random_groups(
    kind: GGMLQuantizationType, count: int, random: np.random.Generator, *, scale: float = 1.0
) -> npt.NDArray[np.uint8]:
    """Return random packs of a quantised type, [count, bytes], with the given scale."""
    from gguf import GGML_QUANT_SIZES

    packs = random.integers(0, 256, (count, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    at, minimum_at, ratio = _SCALES[kind.name]
    _put_half(packs, at, scale)
    if minimum_at is not None:
        _put_half(packs, minimum_at, scale * ratio)
    return packs


def random_packs(
    values: npt.NDArray[np.float32], kind: GGMLQuantizationType, random: np.random.Generator
) -> npt.NDArray[np.uint8]:
    """Return random packs with the shape and standard deviation of `values`: [..., bytes of a row]."""
    from gguf import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    per_pack, pack_bytes = GGML_QUANT_SIZES[kind]
    spread = float(dequantize(random_groups(kind, 256, random), kind).std())
    packs = random_groups(kind, values.size // per_pack, random, scale=float(values.std()) / spread)
    return packs.reshape(*values.shape[:-1], values.shape[-1] // per_pack * pack_bytes)


def _put_half(packs: npt.NDArray[np.uint8], at: int, number: float) -> None:
    packs[:, at : at + 2] = np.frombuffer(np.float16(number).tobytes(), dtype=np.uint8)


def _is_matrix(name: str) -> bool:
    parts: Sequence[str] = name.split(".")
    if name.startswith(IMAGE_NORMS):
        return False
    return name.endswith(".weight") and name != PATCHES and not any(part.startswith("norm") for part in parts)
