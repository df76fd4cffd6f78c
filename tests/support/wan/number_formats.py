"""Number formats for quantised layers: writers, and the written values by the plain definitions.

Values are computed in float64, one rounding after the other as each format defines them, and share
no code with the readers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from wanstream.testing.quantised import QuantisedLayers

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of 4-bit floats."""


class Encoded(NamedTuple):
    """One quantised matrix."""

    tensors: Mapping[str, torch.Tensor]
    """By key ending: "weight", "weight_scale", ..."""
    settings: Mapping[str, Any]
    """The marker's JSON."""
    values: torch.Tensor
    """fp32 [rows, columns]: the stored values."""

    @property
    def in_memory(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The stored matrix in engine layout, and the fp32 scale."""
        weight = self.tensors["weight"]
        scales = self.tensors["weight_scale"]
        stored = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in (weight, scales)])
        if "alpha" in self.tensors:
            return stored, self.tensors["alpha"] * self.tensors["input_global_scale"]
        return stored, self.tensors.get("weight_scale_2")


def int8(weight: torch.Tensor, *, rows: bool = True) -> Encoded:
    """Quantise to int8 with one scale, or one for each row."""
    scale = (weight.abs().amax(1, keepdim=True) if rows else weight.abs().amax()).float() / 127
    scale = scale.clamp(min=1e-30)
    codes = (weight.float() / scale).round().clamp(-128, 127).to(torch.int8)
    tensors = {"weight": codes, "weight_scale": scale}
    return Encoded(tensors, {"format": "int8_tensorwise"}, codes.float() * scale)


def rotation(group: int) -> torch.Tensor:
    """Return ConvRot's matrix, float64 [group, group]."""
    four = torch.ones(4, 4, dtype=torch.float64) - 2 * torch.eye(4).flip(1)
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < group:
        matrix = torch.kron(matrix, four)
    return matrix / math.sqrt(group)


def rotated(weight: torch.Tensor, group: int) -> torch.Tensor:
    """Rotate each column group, in float64."""
    return (weight.double().reshape(-1, group) @ rotation(group)).view(weight.shape)


def int8_convrot(weight: torch.Tensor, *, group: int = 256) -> Encoded:
    """Rotate, then quantise to int8 with one scale for each row."""
    plain = int8(rotated(weight, group).float())
    codes = plain.tensors["weight"]
    scale = plain.tensors["weight_scale"]
    # Code sums are exact, and so is the rotation factor: only the product with the scale is
    # rounded.
    values = (rotated(codes, group) * scale).float()
    settings = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": group}
    return Encoded(plain.tensors, settings, values)


def mxfp8(weight: torch.Tensor) -> Encoded:
    """Quantise to e4m3fn with a power of two per 32 values."""
    groups = weight.double().reshape(len(weight), -1, 32)
    largest = groups.abs().amax(-1)
    exponents = torch.where(largest > 0, (largest / E4M3_MAX).log2().ceil() + 127, 0).clamp(0, 254)
    scales = torch.exp2(exponents - 127).unsqueeze(-1)
    codes = (groups / scales).clamp(-E4M3_MAX, E4M3_MAX).float().to(torch.float8_e4m3fn)
    tensors = {"weight": codes.view(weight.shape), "weight_scale": tiled(exponents.to(torch.uint8))}
    values = (codes.double() * scales).float().view(weight.shape)
    return Encoded(tensors, {"format": "mxfp8"}, values)


def nvfp4(weight: torch.Tensor, *, high_first: bool = True) -> Encoded:
    """Quantise to e2m1 with an e4m3fn scale for each 16 values and one for the matrix."""
    groups = weight.double().reshape(len(weight), -1, 16)
    overall = (groups.abs().amax() / (E4M3_MAX * E2M1_MAX)).float()
    scales = (groups.abs().amax(-1) / E2M1_MAX / overall).clamp(max=E4M3_MAX)
    scales = scales.float().to(torch.float8_e4m3fn)
    total = scales.float() * overall
    magnitudes = groups.abs() / total.double().unsqueeze(-1).clamp(min=1e-300)
    codes = (magnitudes.unsqueeze(-1) - torch.tensor(E2M1, dtype=torch.float64)).abs().argmin(-1)
    values = torch.tensor(E2M1)[codes] * groups.sign().float() * total.unsqueeze(-1)
    codes += 8 * (groups < 0)
    first, second = codes.view(len(weight), -1, 2).unbind(-1)
    packed = (first * 16 + second if high_first else second * 16 + first).to(torch.uint8)
    stored = tiled(scales.view(torch.uint8)).view(torch.float8_e4m3fn)
    tensors = {"weight": packed, "weight_scale": stored}
    if high_first:
        tensors["weight_scale_2"] = overall
    else:
        tensors |= {"alpha": overall / 4, "input_global_scale": torch.tensor(4.0)}
    return Encoded(tensors, {"format": "nvfp4"}, values.view(weight.shape))


def tiled(scales: torch.Tensor) -> torch.Tensor:
    """Return scales [rows, columns] in cuBLAS order, in the padded matrix's shape."""
    rows = -(-scales.shape[0] // 128) * 128
    columns = -(-scales.shape[1] // 4) * 4
    flat = torch.zeros(rows * columns, dtype=scales.dtype)
    row = torch.arange(scales.shape[0]).unsqueeze(1)
    column = torch.arange(scales.shape[1])
    tile = row // 128 * (columns // 4) + column // 4
    flat[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4] = scales
    return flat.view(rows, columns)


ENCODERS: Mapping[str, Callable[[torch.Tensor], Encoded]] = {
    "int8": lambda weight: int8(weight, rows=False),
    "int8 rows": int8,
    "int8 ConvRot": int8_convrot,
    "int8 ConvRot 64": lambda weight: int8_convrot(weight, group=64),
    "mxfp8": mxfp8,
    "nvfp4": nvfp4,
    "nvfp4 LightX2V": lambda weight: nvfp4(weight, high_first=False),
}
"""Writers by format name."""


@dataclass(frozen=True, kw_only=True)
class MixedLayout:
    """Layers in different formats in a single file.

    Args:
        format_of: encoder name for each layer, by the layer's native name. None: the layer is not
            quantised.
        markers: "tensors", one with JSON text for each layer; "metadata", an object for each layer
            in the header; "names", the bare format name there; "nested", tensors whose settings
            are inside `params`.
    """

    format_of: Callable[[str], str | None]
    markers: str = "tensors"

    def __call__(self, layers: Mapping[str, nn.Linear]) -> QuantisedLayers:
        """Quantise the layers and mark them."""
        tensors: dict[str, torch.Tensor] = {}
        settings: dict[str, Any] = {}
        for layer, linear in layers.items():
            if (name := self.format_of(layer)) is None:
                continue
            encoded = ENCODERS[name](linear.weight)
            for ending, tensor in encoded.tensors.items():
                tensors[f"{layer}.{ending}"] = tensor.contiguous()
            if "alpha" not in encoded.tensors:  # LightX2V has no markers
                settings[layer] = encoded.settings
        if self.markers == "names":
            settings = {layer: each["format"] for layer, each in settings.items()}
        if self.markers == "nested":
            for each in settings.values():
                each["params"] = {name: each.pop(name) for name in {*each} - {"format"}}
        if self.markers in ("metadata", "names"):
            text = json.dumps({"format_version": "1.0", "layers": settings})
            return QuantisedLayers(tensors, {"_quantization_metadata": text})
        markers = {f"{layer}.comfy_quant": json_tensor(each) for layer, each in settings.items()}
        return QuantisedLayers(tensors | markers)


def json_tensor(settings: Mapping[str, Any]) -> torch.Tensor:
    """Return a marker's JSON text."""
    return torch.tensor(list(json.dumps(settings).encode()), dtype=torch.uint8)


def mixture(layer: str) -> str | None:
    """Return a layer's format by native name: five per block, none for cross_attn.o."""
    if layer.endswith("cross_attn.o"):
        return None
    of_part = {"self_attn.q": "int8", "self_attn": "nvfp4", "ffn.0": "int8 ConvRot"}
    of_part["ffn"] = "int8 rows"
    return next((name for part, name in of_part.items() if part in layer), "mxfp8")
