"""fp8_scaled: matrices in fp8 with one scale each, in every layout that ComfyUI reads.

How a file says that its matrices are fp8 has changed over time; `Fp8Layout` names the variants.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

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
    marker_dtype: of the marker tensor, whose values mean nothing ("scaled_fp8" only); None for that of the weights.
    dtype: of the weights, float8_e4m3fn or float8_e5m2.
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

# ComfyUI takes every scaled weight for e4m3fn, so these are not for tests against it.
FP8_E5M2_LAYOUTS = {
    kind: Fp8Layout(kind=kind, dtype=torch.float8_e5m2) for kind in ("scaled_fp8", "comfy_quant", "metadata")
}


def quantise(weight: torch.Tensor, dtype: torch.dtype = FP8) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8 values and the one fp32 scale, shape [], that makes the largest of them the largest fp8 number."""
    scale = weight.abs().amax().float() / torch.finfo(dtype).max
    return (weight / scale).to(dtype), scale


def fp8_tensors(layers: Mapping[str, nn.Linear], layout: Fp8Layout) -> dict[str, torch.Tensor]:
    """The tensors of a file that has the weights of `layers`, by their names in that file, in fp8; without biases."""
    tensors: dict[str, torch.Tensor] = {}
    for layer, linear in layers.items():
        tensors |= _fp8_layer(layer, linear, layout)
    if layout.kind == "scaled_fp8":
        marker_dtype = layout.marker_dtype or layout.dtype
        tensors["scaled_fp8"] = torch.zeros(2 if layout.full_precision else 0, dtype=marker_dtype)
    return tensors


def fp8_metadata(layers: Mapping[str, nn.Linear], layout: Fp8Layout) -> dict[str, str]:
    """What the header of the file says about its fp8 layers."""
    if layout.kind != "metadata":
        return {}
    return {"_quantization_metadata": json.dumps({"layers": dict.fromkeys(layers, _quantisation(layout))})}


def _fp8_layer(layer: str, linear: nn.Linear, layout: Fp8Layout) -> dict[str, torch.Tensor]:
    weight, scale = quantise(linear.weight, layout.dtype)
    scale_name = "scale_weight" if layout.kind == "scaled_fp8" else "weight_scale"
    tensors = {f"{layer}.weight": weight, f"{layer}.{scale_name}": scale.reshape(layout.scale_shape)}
    if layout.input_scale:
        tensors[f"{layer}.scale_input"] = torch.ones(layout.scale_shape)
    if layout.kind == "comfy_quant":
        text = json.dumps(_quantisation(layout)).encode()
        tensors[f"{layer}.comfy_quant"] = torch.tensor(list(text), dtype=torch.uint8)
    return tensors


def _quantisation(layout: Fp8Layout) -> dict[str, object]:
    precision = {"full_precision_matrix_mult": True} if layout.full_precision else {}
    return {"format": str(layout.dtype).removeprefix("torch."), **precision}
