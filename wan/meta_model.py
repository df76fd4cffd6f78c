"""The model without its weights: built on the meta device in a tenth of a second, filled tensor by tensor."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

import torch
from diffusers import WanTransformer3DModel
from torch import nn

from .detect import Shape, WanConfig


def build_model(config: WanConfig) -> WanTransformer3DModel:
    """Return the model in eval mode: every parameter on meta, the position tables, which no file holds, real."""
    with torch.device("meta"):
        model = WanTransformer3DModel(**config.model_arguments())
    model.rope = type(model.rope)(
        model.config.attention_head_dim, model.config.patch_size, model.config.rope_max_seq_len
    )
    return model.eval().requires_grad_(False)


def parameter_shapes(config: WanConfig) -> dict[str, Shape]:
    """Return the name and shape of every parameter of the model that `config` describes."""
    one_block = build_model(replace(config, num_layers=1))
    block = {f".{name}": tuple(tensor.shape) for name, tensor in one_block.blocks[0].named_parameters()}
    outer = {
        name: tuple(tensor.shape) for name, tensor in one_block.named_parameters() if not name.startswith("blocks.")
    }
    blocks = itertools.product(range(config.num_layers), block.items())
    return outer | {f"blocks.{index}{name}": shape for index, (name, shape) in blocks}


def parameter_dtype(name: str, compute_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype a parameter computes in: `compute_dtype`, or fp32 for what diffusers always keeps in fp32."""
    in_fp32 = set(name.split(".")) & set(WanTransformer3DModel._keep_in_fp32_modules)
    return torch.float32 if in_fp32 else compute_dtype


def set_parameters(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Put real tensors in the places of meta parameters, whose data could not be set."""
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        model.get_submodule(module).register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
