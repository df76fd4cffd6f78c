"""Tiny experts and LoRAs on disk, in every form of the real ones.

A diffusers folder (one file, or shards with an index), or ComfyUI's single file: plain, or with
block matrices in fp8 and one scale per matrix.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import save_file
from torch import nn

from ..wan.checkpoint import native_transformer_name
from .quantised import QuantiseLayers, save_single_file

# LoRA files for ComfyUI have this prefix before the layer names.
PREFIX = "diffusion_model."


def make_lora(
    model: WanTransformer3DModel, *, seed: int, rank: int = 4, alpha: float = 2.0
) -> dict[str, torch.Tensor]:
    """Return a random fp32 LoRA for every block matrix in `model`.

    It has `diff_b` for the biases in the first block. It changes every matrix by about a tenth, so
    it changes the result visibly and keeps it of order 1.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, linear in block_linears(model).items():
        layer = PREFIX + native_layer(name)
        rows, columns = linear.weight.shape
        # Gives a row of the product about a tenth of a matrix row's norm.
        size = 0.1 * (rank / alpha) / (rank * columns) ** 0.5
        tensors[f"{layer}.lora_down.weight"] = torch.randn(rank, columns, generator=generator)
        tensors[f"{layer}.lora_up.weight"] = size * torch.randn(rows, rank, generator=generator)
        tensors[f"{layer}.alpha"] = torch.tensor(alpha)
        if name.startswith("blocks.0."):
            tensors[f"{layer}.diff_b"] = 0.05 * torch.randn(rows, generator=generator)
    return tensors


def save_lora(tensors: dict[str, torch.Tensor], path: Path, *, dtype: torch.dtype) -> None:
    """Write a LoRA with all tensors in `dtype`."""
    save_single_file({key: tensor.to(dtype) for key, tensor in tensors.items()}, path)


def save_expert_folder(model: WanTransformer3DModel, folder: Path, *, dtype: torch.dtype) -> None:
    """Write a diffusers transformer folder in `dtype`, without a copy of the model."""
    model.save_config(folder)
    save_file(
        _stored(model, dtype), folder / "diffusion_pytorch_model.safetensors", {"format": "pt"}
    )


def save_expert_file(
    model: WanTransformer3DModel,
    path: Path,
    *,
    dtype: torch.dtype,
    prefix: Literal["", "model.diffusion_model."] = "",
    quantised: QuantiseLayers | None = None,
) -> None:
    """Write ComfyUI's single file in `dtype`. `quantised` writes the block matrices."""
    tensors = {
        native_transformer_name(name): tensor for name, tensor in _stored(model, dtype).items()
    }
    layers = {native_layer(name): linear for name, linear in block_linears(model).items()}
    save_single_file(tensors, path, layers=layers, quantised=quantised, prefix=prefix)


def _stored(model: WanTransformer3DModel, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    # safetensors refuses tensors that are not contiguous.
    return {name: tensor.to(dtype).contiguous() for name, tensor in model.state_dict().items()}


def block_linears(model: WanTransformer3DModel) -> dict[str, nn.Linear]:
    """Return the linear layers in the blocks by name. Their matrices are streamed."""
    named = model.blocks.named_modules(prefix="blocks")
    return {name: module for name, module in named if isinstance(module, nn.Linear)}


def native_layer(name: str) -> str:
    """Return a layer's native name."""
    return native_transformer_name(f"{name}.weight").removesuffix(".weight")
