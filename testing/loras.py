"""Writer of tiny LoRAs with the key names of the lightning LoRAs of Wan2.2."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import save_file

from .experts import block_linears, native_layer

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
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({key: tensor.to(dtype) for key, tensor in tensors.items()}, path, {"format": "pt"})
