"""Tiny experts and LoRAs on disk, in every form that real ones have.

A diffusers folder (one file, or shards with an index), or ComfyUI's single file: plain, or with the matrices of the
blocks in fp8 and one scale per matrix.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import save_file
from torch import nn

from ..wan import native_transformer_name
from .number_formats import ENCODERS, MixedLayout
from .quantised import FP8, Fp8Layout, quantise, save_single_file
from .weights import in_dtype

PREFIX = "diffusion_model."


def make_lora(model: WanTransformer3DModel, *, seed: int, rank: int = 4, alpha: float = 2.0) -> dict[str, torch.Tensor]:
    """Return a random fp32 LoRA for every matrix in the blocks of `model`, and `diff_b` for the biases of the first.

    It changes every matrix by about a tenth, so that it changes the result visibly and keeps it of order 1.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, linear in block_linears(model).items():
        layer = PREFIX + native_layer(name)
        rows, columns = linear.weight.shape
        # Gives a row of the product about a tenth of the norm of a row of the matrix.
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


def save_expert_folder(model: WanTransformer3DModel, folder: Path, *, dtype: torch.dtype, shards: int = 1) -> None:
    """Write a diffusers transformer folder with all tensors in `dtype`, in about `shards` files and an index."""
    if shards == 1:  # avoids the copy of the model in `in_dtype`, which takes most of the time
        model.save_config(folder)
        save_file(_stored(model, dtype), folder / "diffusion_pytorch_model.safetensors", {"format": "pt"})
        return
    model = in_dtype(model, dtype)
    total = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(folder, max_shard_size=total // shards)


def save_expert_file(
    model: WanTransformer3DModel,
    path: Path,
    *,
    dtype: torch.dtype,
    prefix: Literal["", "model.diffusion_model."] = "",
    fp8: Fp8Layout | MixedLayout | None = None,
) -> None:
    """Write ComfyUI's single file in `dtype`; `fp8` quantises the matrices of the blocks."""
    tensors = {native_transformer_name(name): tensor for name, tensor in _stored(model, dtype).items()}
    layers = {native_layer(name): linear for name, linear in block_linears(model).items()}
    save_single_file(tensors, path, layers=layers, fp8=fp8, prefix=prefix)


def dequantised(
    model: WanTransformer3DModel, *, dtype: torch.dtype, fp8: torch.dtype | MixedLayout = FP8
) -> WanTransformer3DModel:
    """Return the fp32 model with the values of a quantised file of `model` whose other tensors are in `dtype`."""
    rounded = in_dtype(model, dtype).float()
    originals = block_linears(model)
    for name, linear in block_linears(rounded).items():
        if isinstance(fp8, torch.dtype):
            weight, scale = quantise(originals[name].weight, fp8)
            linear.weight.copy_(weight.float() * scale)
        elif (number_format := fp8.format_of(native_layer(name))) is not None:
            linear.weight.copy_(ENCODERS[number_format](originals[name].weight).values)
    return rounded


def _stored(model: WanTransformer3DModel, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: tensor.to(dtype).contiguous() for name, tensor in model.state_dict().items()}


def block_linears(model: WanTransformer3DModel) -> dict[str, nn.Linear]:
    """Return the linear layers of the blocks by name; their matrices are streamed."""
    named = model.blocks.named_modules(prefix="blocks")
    return {name: module for name, module in named if isinstance(module, nn.Linear)}


def native_layer(name: str) -> str:
    """Return the native name of a layer."""
    return native_transformer_name(f"{name}.weight").removesuffix(".weight")
