"""Writer of tiny experts as GGUF, in the layout of ComfyUI's converters; needs the gguf package.

The gguf package can quantise to F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0. Tensors of other types get random
packs with the standard deviation of the tensor's values. So the values in the file differ from the given model;
`save_expert_gguf` returns the model that the file contains.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from diffusers import WanTransformer3DModel
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize

from ..wan import native_transformer_name

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

MOST_DIMENSIONS = 4
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
        packs = quantize(values, kind) if kind.name in QUANTISED else _random_packs(values, kind, random)
        parameters[name].data.copy_(torch.from_numpy(dequantize(packs, kind).copy()).reshape(shape))
        writer.add_tensor(prefix + key, packs, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return dequantised


def random_packs(
    kind: GGMLQuantizationType, count: int, random: np.random.Generator, *, scale: float = 1.0
) -> npt.NDArray[np.uint8]:
    """Return random packs of a quantised type, [count, bytes], with the given scale."""
    packs = random.integers(0, 256, (count, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    at, minimum_at, ratio = _SCALES[kind.name]
    _put_half(packs, at, scale)
    if minimum_at is not None:
        _put_half(packs, minimum_at, scale * ratio)
    return packs


def _random_packs(
    values: npt.NDArray[np.float32], kind: GGMLQuantizationType, random: np.random.Generator
) -> npt.NDArray[np.uint8]:
    """Return random packs with the shape and standard deviation of `values`: [..., bytes of a row]."""
    per_pack, pack_bytes = GGML_QUANT_SIZES[kind]
    spread = float(dequantize(random_packs(kind, 256, random), kind).std())
    packs = random_packs(kind, values.size // per_pack, random, scale=float(values.std()) / spread)
    return packs.reshape(*values.shape[:-1], values.shape[-1] // per_pack * pack_bytes)


def _put_half(packs: npt.NDArray[np.uint8], at: int, number: float) -> None:
    packs[:, at : at + 2] = np.frombuffer(np.float16(number).tobytes(), dtype=np.uint8)


def _is_matrix(name: str) -> bool:
    parts: Sequence[str] = name.split(".")
    if name.startswith(IMAGE_NORMS):
        return False
    return name.endswith(".weight") and name != PATCHES and not any(part.startswith("norm") for part in parts)
