"""Sample experts on disk, in every form that real ones come in.

A diffusers folder (one file or shards with an index), or ComfyUI's single file: plain, or with the blocks' matrices in
fp8 and a scale beside each. How a file says so has changed over time; `Fp8Layout` names the variants.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import save_file
from torch import nn

from ..wan.native_keys import native_transformer_name

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, kw_only=True)
class Fp8Layout:
    """How a single file marks its fp8 layers.

    kind: "scaled_fp8", one marker tensor for the file and a `scale_weight` per layer; "comfy_quant", a JSON text in a
        tensor per layer; "metadata", the same text in the header of the file. The last two call the scale
        `weight_scale`.
    scale_shape: (), (1,) or (1, 1); always one number.
    input_scale: whether the layers carry a `scale_input` of 1 as well ("scaled_fp8" only).
    full_precision: whether the file asks for matrix products in the compute dtype instead of fp8.
    marker_dtype: of the marker tensor, whose values mean nothing ("scaled_fp8" only).
    """

    kind: Literal["scaled_fp8", "comfy_quant", "metadata"] = "scaled_fp8"
    scale_shape: tuple[int, ...] = ()
    input_scale: bool = False
    full_precision: bool = False
    marker_dtype: torch.dtype = FP8


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


def save_expert_folder(model: WanTransformer3DModel, folder: Path, *, dtype: torch.dtype, shards: int = 1) -> None:
    """Write a diffusers transformer folder with all tensors in `dtype`, in about `shards` files and an index."""
    model = _in_dtype(model, dtype)
    total = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(folder, max_shard_size=total if shards == 1 else total // shards)


def save_expert_file(
    model: WanTransformer3DModel,
    path: Path,
    *,
    dtype: torch.dtype,
    prefix: Literal["", "model.diffusion_model."] = "",
    fp8: Fp8Layout | None = None,
) -> None:
    """Write ComfyUI's single file; with `fp8` the matrices of the blocks are quantised, all the rest is in `dtype`."""
    tensors = {native_transformer_name(name): tensor.to(dtype) for name, tensor in model.state_dict().items()}
    metadata = {"format": "pt"}
    if fp8 is not None:
        layers = {
            native_transformer_name(f"{name}.weight")[: -len(".weight")]: linear
            for name, linear in _block_linears(model)
        }
        for layer, linear in layers.items():
            tensors |= _fp8_layer(layer, linear, fp8)
        if fp8.kind == "scaled_fp8":
            tensors["scaled_fp8"] = torch.zeros(2 if fp8.full_precision else 0, dtype=fp8.marker_dtype)
        if fp8.kind == "metadata":
            metadata["_quantization_metadata"] = json.dumps({"layers": dict.fromkeys(layers, _quantisation(fp8))})
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({f"{prefix}{name}": tensor.contiguous() for name, tensor in tensors.items()}, path, metadata)


def dequantised(model: WanTransformer3DModel, *, dtype: torch.dtype) -> WanTransformer3DModel:
    """The fp32 model that an fp8 file of `model`, its other tensors in `dtype`, stands for."""
    rounded = _in_dtype(model, dtype).float()
    originals = dict(_block_linears(model))
    for name, linear in _block_linears(rounded):
        weight, scale = quantise(originals[name].weight)
        linear.weight.copy_(weight.float() * scale)
    return rounded


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8 values and the one fp32 scale, shape [], that makes the largest of them the largest fp8 number."""
    scale = weight.abs().amax().float() / torch.finfo(FP8).max
    return (weight / scale).to(FP8), scale


def _fp8_layer(layer: str, linear: nn.Linear, layout: Fp8Layout) -> dict[str, torch.Tensor]:
    weight, scale = quantise(linear.weight)
    tensors = {f"{layer}.weight": weight}
    scale_name = "scale_weight" if layout.kind == "scaled_fp8" else "weight_scale"
    tensors[f"{layer}.{scale_name}"] = scale.reshape(layout.scale_shape).clone()
    if layout.input_scale:
        tensors[f"{layer}.scale_input"] = torch.ones(layout.scale_shape)
    if layout.kind == "comfy_quant":
        text = json.dumps(_quantisation(layout)).encode()
        tensors[f"{layer}.comfy_quant"] = torch.tensor(list(text), dtype=torch.uint8)
    return tensors


def _quantisation(layout: Fp8Layout) -> dict[str, object]:
    precision = {"full_precision_matrix_mult": True} if layout.full_precision else {}
    return {"format": "float8_e4m3fn", **precision}


def _block_linears(model: WanTransformer3DModel) -> list[tuple[str, nn.Linear]]:
    named = model.named_modules()
    return [(name, module) for name, module in named if name.startswith("blocks.") and isinstance(module, nn.Linear)]


def _in_dtype(model: WanTransformer3DModel, dtype: torch.dtype) -> WanTransformer3DModel:
    """A copy with every parameter in `dtype`; the model's own `.to()` would warn about its fp32 islands."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model
