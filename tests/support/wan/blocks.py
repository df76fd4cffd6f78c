"""Blocks in tests: diffusers' own, and ours with the same parameters."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from torch.utils._python_dispatch import TorchDispatchMode

from wanstream.wan.transformer.block import BlockSettings, replace_blocks
from wanstream.wan.transformer.embedders import CachedEmbedder, Rows

HEAD = 128


def diffusers_block(heads=1, ffn_dim=256, dtype=torch.float32, *, seed=0, **more):
    """Return a block in `dtype`, but in fp32 the parameters kept so by `from_pretrained`."""
    torch.manual_seed(seed)
    block = WanTransformerBlock(HEAD * heads, ffn_dim, heads, cross_attn_norm=True, **more)
    for name, parameter in block.named_parameters():
        if not set(name.split(".")) & set(WanTransformer3DModel._keep_in_fp32_modules):
            parameter.data = parameter.data.to(dtype)
    return block.eval().requires_grad_(False)


def block_inputs(tokens, heads=1, dtype=torch.float32, *, words=7):
    """Return hidden state, text, modulation and rotary tables in a model's shapes."""
    draw = torch.Generator().manual_seed(tokens)
    angles = torch.rand(1, tokens, 1, HEAD // 2, generator=draw).repeat_interleave(2, dim=-1) * 6
    shapes = ((1, rows, HEAD * heads) for rows in (tokens, words, 6))
    hidden, text, temb = (torch.randn(shape, generator=draw).to(dtype) for shape in shapes)
    return hidden, text, temb, (angles.cos(), angles.sin())


def computed(block, hidden, text, temb, tables, **settings):
    """Return the tokens after one of our blocks, with rotary tables as in a diffusers model."""
    vars(block.settings).update(settings)
    return block(hidden, text, temb, block.settings.used_math.rotation(*tables))


class Operations(TorchDispatchMode):
    """Recorder of torch operations: names, arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.calls.append((str(func), args, made))
        return made

    def arguments(self, name: str) -> list[Any]:
        """Return the arguments of the operations with `name` in their names."""
        return [args for called, args, _ in self.calls if name in called]


class DirectEmbedder(CachedEmbedder):
    """A diffusers model's embedder without a cache: fake tensors have no values to look up."""

    def __init__(self, model: WanTransformer3DModel) -> None:
        self.dtype = model.patch_embedding.weight.dtype
        super().__init__(model.condition_embedder, self.dtype)
        # Not a module: its parameters have their names already.
        self._embed = model.condition_embedder.__call__

    def rows(self, timestep: torch.Tensor, texts: Sequence[torch.Tensor]) -> list[Rows]:
        return [self._embed(timestep, text.to(self.dtype), None)[:3] for text in texts]

    def time_rows(self, timesteps: Sequence[float]) -> tuple[torch.Tensor, torch.Tensor]:
        width = self.text_embedder.linear_1.in_features
        no_text = self.time_proj.weight.new_zeros(1, 1, width, dtype=self.dtype)
        rows = [self._embed(torch.tensor([time]), no_text, None)[:2] for time in timesteps]
        times, modulations = zip(*rows, strict=True)
        return torch.cat(times), torch.cat(modulations)


def with_our_blocks(model: WanTransformer3DModel, **settings: Any) -> WanTransformer3DModel:
    """Return a model with the same modules, but our blocks and embedder on the parameters."""
    made = copy.copy(model)
    made._modules = dict(model._modules)
    made.condition_embedder = DirectEmbedder(model)
    replace_blocks(made, BlockSettings(**settings))
    return made
