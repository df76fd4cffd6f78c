"""Single files for tiny models: plain, with quantised matrices, and GGUF.

The gguf package can quantise to F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0. Tensors with other
types get random packs with the standard deviation of the tensor's values. The file then differs
from the given model, and `save_expert_gguf` returns the model in the file.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import save_file
from torch import nn

from ..wan.checkpoint import native_transformer_name

# Functions import gguf, because it writes test models only, and only the development requirements
# contain it.
if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

FP8 = torch.float8_e4m3fn


class QuantisedLayers(NamedTuple):
    """Quantised layers for a single file."""

    tensors: Mapping[str, torch.Tensor]
    """Weights, scales and markers by key."""
    metadata: Mapping[str, str] = MappingProxyType({})
    """Header fields."""


QuantiseLayers = Callable[[Mapping[str, nn.Linear]], QuantisedLayers]
"""Function that quantises linear layers by native name."""


def quantise(weight: torch.Tensor, dtype: torch.dtype = FP8) -> tuple[torch.Tensor, torch.Tensor]:
    """Return fp8 values and their fp32 scale, with shape [].

    The scale maps the largest value to the largest fp8 number.
    """
    scale = weight.abs().amax().float() / torch.finfo(dtype).max
    return (weight / scale).to(dtype), scale


def scaled_fp8(layers: Mapping[str, nn.Linear]) -> QuantisedLayers:
    """Return the most common layout: a marker for the file, and one scale per matrix."""
    tensors = {"scaled_fp8": torch.zeros(0, dtype=FP8)}
    for layer, linear in layers.items():
        weight, scale = quantise(linear.weight)
        tensors |= {f"{layer}.weight": weight, f"{layer}.scale_weight": scale}
    return QuantisedLayers(tensors)


def save_single_file(
    tensors: Mapping[str, torch.Tensor],
    path: Path,
    *,
    layers: Mapping[str, nn.Linear] = MappingProxyType({}),
    quantised: QuantiseLayers | None = None,
    prefix: str = "",
) -> None:
    """Write ComfyUI's single file, with `prefix` before every key.

    `quantised` writes the matrices in `layers`.
    """
    stored = dict(tensors)
    metadata = {"format": "pt"}
    if quantised is not None:
        added = quantised(layers)
        # The quantised matrices have the same names and replace the plain ones.
        stored |= added.tensors
        metadata |= added.metadata
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({f"{prefix}{name}": tensor for name, tensor in stored.items()}, path, metadata)


QUANTISED = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")

# Byte offsets of a pack's fp16 scale and minimum, if it has one, and the ratio of minimum to scale
# that centres the values around zero. (K-quants subtract the minimum.)
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
"""Function from a tensor's native name to its type name."""


def q4_k_m(name: str) -> str:
    """Return the type in the mixture Q4_K_M: Q6_K for some matrices, small tensors unquantised."""
    if not is_matrix(name):
        return "F16" if name == PATCHES else "F32"
    if name.endswith(("self_attn.v.weight", "ffn.2.weight")):
        return "Q6_K"
    return "Q4_K"


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
        types: tensor type by native name.
        patches: layout of the five patch embedding dimensions: two, with the shape in a metadata
            field; all five; or four, which loses the channel count.
        architecture: architecture field in the file.
        seed: seed for the random packs.

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
        if key == PATCHES and patches == "shape field":
            stored_shape = (shape[0], tensor[0].numel())
            writer.add_array(f"comfy.gguf.orig_shape.{prefix}{key}", shape)
        elif key == PATCHES and patches != "five dimensions":
            stored_shape = (shape[0] * shape[1], *shape[2:])
        values = tensor.reshape(stored_shape).numpy()
        packs = (
            quantize(values, kind) if kind.name in QUANTISED else random_packs(values, kind, random)
        )
        parameters[name].data.copy_(torch.from_numpy(dequantize(packs, kind).copy()).reshape(shape))
        # For numpy, packs are only bytes, so the type must be given.
        writer.add_tensor(prefix + key, packs, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return dequantised


def random_groups(
    kind: GGMLQuantizationType, count: int, random: np.random.Generator, *, scale: float = 1.0
) -> npt.NDArray[np.uint8]:
    """Return random packs in a quantised type, [count, bytes], with the given scale."""
    from gguf import GGML_QUANT_SIZES

    packs = random.integers(0, 256, (count, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    at, minimum_at, ratio = _SCALES[kind.name]
    # Random fp16 bits would be NaN or infinity now and then.
    _put_half(packs, at, scale)
    if minimum_at is not None:
        _put_half(packs, minimum_at, scale * ratio)
    return packs


def random_packs(
    values: npt.NDArray[np.float32], kind: GGMLQuantizationType, random: np.random.Generator
) -> npt.NDArray[np.uint8]:
    """Return random packs [..., bytes per row] with the shape and deviation of `values`."""
    from gguf import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    per_pack, pack_bytes = GGML_QUANT_SIZES[kind]
    # The deviation with scale 1, from enough packs for a stable estimate.
    spread = float(dequantize(random_groups(kind, 256, random), kind).std())
    packs = random_groups(kind, values.size // per_pack, random, scale=float(values.std()) / spread)
    return packs.reshape(*values.shape[:-1], values.shape[-1] // per_pack * pack_bytes)


def _put_half(packs: npt.NDArray[np.uint8], at: int, number: float) -> None:
    packs[:, at : at + 2] = np.frombuffer(np.float16(number).tobytes(), dtype=np.uint8)


def is_matrix(name: str) -> bool:
    """Return True for a matrix's native name. Norms and the patch embedding do not count."""
    if name.startswith(IMAGE_NORMS) or name == PATCHES or not name.endswith(".weight"):
        return False
    return not any(part.startswith("norm") for part in name.split("."))
