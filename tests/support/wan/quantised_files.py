"""Tiny expert files in every fp8 layout, in GGUF types and in shards.

The markers for fp8 matrices have changed over time. `Fp8Layout` selects one variant.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import nn

from wanstream.testing.experts import block_linears, native_layer
from wanstream.testing.quantised import FP8, QuantisedLayers, TypeOf, is_matrix, quantise
from wanstream.tests.support.wan.number_formats import ENCODERS, json_tensor

ModelT = TypeVar("ModelT", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class Fp8Layout:
    """Layout of fp8 layers in a single file.

    Args:
        kind: "scaled_fp8", one marker tensor per file and a `scale_weight` per layer;
            "comfy_quant", a tensor with JSON text per layer; "metadata", the same text in the
            file's header. The last two name the scale `weight_scale`.
        scale_shape: (), (1,) or (1, 1). A scale is always one number.
        input_scale: add a `scale_input` of 1 to each layer ("scaled_fp8" only).
        full_precision: request matrix products in the compute dtype instead of fp8.
        marker_dtype: the marker tensor's dtype ("scaled_fp8" only), whose values are ignored. None:
            the weights' dtype.
        dtype: the weights' dtype, float8_e4m3fn or float8_e5m2.
    """

    kind: Literal["scaled_fp8", "comfy_quant", "metadata"] = "scaled_fp8"
    scale_shape: tuple[int, ...] = ()
    input_scale: bool = False
    full_precision: bool = False
    marker_dtype: torch.dtype | None = None
    dtype: torch.dtype = FP8

    def __call__(self, layers: Mapping[str, nn.Linear]) -> QuantisedLayers:
        """Quantise the layers and mark them."""
        tensors: dict[str, torch.Tensor] = {}
        metadata: dict[str, str] = {}
        precision = {"full_precision_matrix_mult": True} if self.full_precision else {}
        settings = {"format": str(self.dtype).removeprefix("torch."), **precision}
        for layer, linear in layers.items():
            tensors |= self._layer(layer, linear, settings)
        if self.kind == "scaled_fp8":
            values = 2 * self.full_precision
            tensors["scaled_fp8"] = torch.zeros(values, dtype=self.marker_dtype or self.dtype)
        if self.kind == "metadata":
            text = json.dumps({"layers": dict.fromkeys(layers, settings)})
            metadata["_quantization_metadata"] = text
        return QuantisedLayers(tensors, metadata)

    def _layer(self, layer, linear, settings):
        weight, scale = quantise(linear.weight, self.dtype)
        ending = "scale_weight" if self.kind == "scaled_fp8" else "weight_scale"
        tensors = {f"{layer}.weight": weight, f"{layer}.{ending}": scale.reshape(self.scale_shape)}
        if self.input_scale:
            tensors[f"{layer}.scale_input"] = torch.ones(self.scale_shape)
        if self.kind == "comfy_quant":
            tensors[f"{layer}.comfy_quant"] = json_tensor(settings)
        return tensors


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
    kind: Fp8Layout(kind=kind, dtype=torch.float8_e5m2)
    for kind in ("scaled_fp8", "comfy_quant", "metadata")
}


def dequantised(model, *, dtype, fp8=FP8):
    """Return the fp32 model with values as from a quantised file with other tensors in `dtype`."""
    rounded = in_dtype(model, dtype).float()
    originals = block_linears(model)
    for name, linear in block_linears(rounded).items():
        if isinstance(fp8, torch.dtype):
            weight, scale = quantise(originals[name].weight, fp8)
            linear.weight.copy_(weight.float() * scale)
        elif (number_format := fp8.format_of(native_layer(name))) is not None:
            linear.weight.copy_(ENCODERS[number_format](originals[name].weight).values)
    return rounded


def round_to_fp8_rows(model):
    """Round all block matrices by the plain formula, with a scale for each row."""
    for linear in block_linears(model).values():
        values = linear.weight.float()
        scale = values.abs().amax(1, keepdim=True) / 448.0
        linear.weight.data = ((values / scale).to(FP8).float() * scale).to(linear.weight.dtype)
    return model


def in_dtype(model: ModelT, dtype: torch.dtype) -> ModelT:
    """Return a copy with every parameter in `dtype`.

    Diffusers' `.to()` would warn about modules kept in fp32.
    """
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def save_shards(model, folder, *, dtype, shards):
    """Write a diffusers transformer folder in about `shards` files and an index."""
    model = in_dtype(model, dtype)
    total = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(folder, max_shard_size=total // shards)


def matrices(kind: str, *, others: str = "F32") -> TypeOf:
    """Return a mapping with all the model's matrices in one type, other tensors in `others`."""
    return lambda name: kind if is_matrix(name) else others


@dataclass(frozen=True, kw_only=True)
class Form:
    """Form of a file's quantised matrices without layer formats."""

    dtype: torch.dtype = torch.float8_e4m3fn
    scale: torch.dtype = torch.float32
    shape: str = "[out, 1]"
    key: str = "weight_scale"
    marker: str = ""
    """File marker, or text in each layer marker."""

    def quantise(self, matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return codes, scales and fp32 values."""
        is_int8 = self.dtype == torch.int8
        rows = len(matrix)
        blocks = {"n": matrix.shape[1] // 64, "2": 2}.get(self.shape.removeprefix("[out, ")[0], 1)
        parts = matrix.view(rows if "out" in self.shape else 1, blocks, -1)
        largest = 127.0 if is_int8 else 400.0
        scales = (parts.abs().amax(dim=2, keepdim=True) / largest).to(self.scale)
        codes = parts / scales.float()
        codes = (codes.round() if is_int8 else codes).to(self.dtype)
        values = (codes.float() * scales.float()).view(matrix.shape)
        sizes = {"out": rows, "n": blocks}
        shape = [sizes.get(one) or int(one) for one in self.shape.strip("[]").split(", ") if one]
        return codes.view(matrix.shape), scales.reshape(shape), values
