"""Blocks in tests: diffusers' own, and ours with the same parameters."""

from __future__ import annotations

import copy
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanTransformerBlock

from wanstream.wan.transformer.block import BlockSettings, WanBlock, replace_blocks

HEAD = 128


def diffusers_block(
    heads: int = 1, ffn_dim: int = 256, dtype: torch.dtype = torch.float32, *, seed: int = 0, **more: Any
) -> WanTransformerBlock:
    """Return a block in `dtype`, with the parameters in fp32 that `from_pretrained` keeps in fp32."""
    torch.manual_seed(seed)
    block = WanTransformerBlock(HEAD * heads, ffn_dim, heads, cross_attn_norm=True, **more)
    for name, parameter in block.named_parameters():
        if not set(name.split(".")) & set(WanTransformer3DModel._keep_in_fp32_modules):
            parameter.data = parameter.data.to(dtype)
    return block.eval().requires_grad_(False)


def block_inputs(
    tokens: int, heads: int = 1, dtype: torch.dtype = torch.float32, *, words: int = 7
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Return hidden state, text, modulation and rotary tables in the shapes of a model."""
    draw = torch.Generator().manual_seed(tokens)
    angles = torch.rand(1, tokens, 1, HEAD // 2, generator=draw).repeat_interleave(2, dim=-1) * 6
    hidden, text, temb = (torch.randn(1, rows, HEAD * heads, generator=draw).to(dtype) for rows in (tokens, words, 6))
    return hidden, text, temb, (angles.cos(), angles.sin())


def computed(block: WanBlock, hidden: torch.Tensor, text: Any, temb: Any, tables: Any, **settings: Any) -> torch.Tensor:
    """Return the tokens after a block of ours, as of a model of diffusers: with its rotary tables."""
    vars(block.settings).update(settings)
    result: torch.Tensor = block(hidden, text, temb, block.settings.used_math.rotation(*tables))
    return result


def with_our_blocks(model: WanTransformer3DModel, **settings: Any) -> WanTransformer3DModel:
    """Return a model with the modules of this one, except for its blocks, which are ours with the same parameters."""
    made = copy.copy(model)
    made._modules = dict(model._modules)
    replace_blocks(made, BlockSettings(**settings))
    return made
