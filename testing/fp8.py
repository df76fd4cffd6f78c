"""fp8_scaled files: matrices in fp8 with one scale each, in every layout that ComfyUI reads.

The markers of fp8 matrices have changed over time; `Fp8Layout` selects one of the variants.
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


def fp8_tensors(layers: Mapping[str, nn.Linear], layout: Fp8Layout) -> dict[str, torch.Tensor]:
    """Return the tensors of a file with the weights of `layers` in fp8, by name, without biases."""
    tensors: dict[str, torch.Tensor] = {}
    for layer, linear in layers.items():
        tensors |= _fp8_layer(layer, linear, layout)
    if layout.kind == "scaled_fp8":
        marker_dtype = layout.marker_dtype or layout.dtype
        tensors["scaled_fp8"] = torch.zeros(2 if layout.full_precision else 0, dtype=marker_dtype)
    return tensors


def fp8_metadata(layers: Mapping[str, nn.Linear], layout: Fp8Layout) -> dict[str, str]:
    """Return the metadata of the fp8 layers in the header of the file."""
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
