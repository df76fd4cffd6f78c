"""Compute kernels of an engine's blocks: token chunks, compiler or per-frame timesteps, and the attention backend."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch

from .block_patching import PatchedForwards
from .chunked_block import ChunkedBlocks, Rotary, chunked_forward
from .compiled_block import CompiledBlocks, get_compiler
from .int8_attention import Int8SelfAttention
from .kernels import ATTENTIONS, INT8_ATTENTION, Kernels
from .per_frame_timestep import FrameModulation

if TYPE_CHECKING:
    from diffusers.models.transformers.transformer_wan import WanTransformerBlock

    from .nag import Texts

logger = logging.getLogger("wanstream.kernels")


class BlockKernels:
    """Blocks of both experts and their compute kernels; initially those of diffusers.

    With `timed`, blocks also accept per-frame timesteps, with any kernels.
    """

    def __init__(self, blocks: Iterable[WanTransformerBlock], *, timed: bool = False) -> None:
        self._blocks = list(blocks)
        self._timed = timed
        self._kernels = Kernels()
        self._chunk_tokens: int | None = None
        self._attached: PatchedForwards | None = PerFrameBlocks(self._blocks) if timed else None
        self._int8: Int8SelfAttention | None = None

    @property
    def graphs(self) -> int:
        """Block graphs that this process has compiled so far; a step that compiles one gives no usable timing."""
        return 0 if self._kernels.compiler is None else get_compiler(self._kernels.compiler).graphs

    def set(self, kernels: Kernels, chunk_tokens: int | None) -> None:
        """Compute with `kernels`, and outside attention with `chunk_tokens` tokens at once (None: all).

        Raises:
            RuntimeError: a hook wraps a block; remove it first. Nothing was changed.
        """
        if (kernels, chunk_tokens) == (self._kernels, self._chunk_tokens):
            return
        # Each of these replaces `block.forward`: the former one is removed before the next is attached.
        if self._attached is not None:
            self._attached.detach()
            self._attached = None
        if self._int8 is not None:
            self._int8.detach()
            self._int8 = None
        self._attach_forwards(kernels, chunk_tokens)
        self._set_attention(kernels)
        self._kernels, self._chunk_tokens = kernels, chunk_tokens

    def _attach_forwards(self, kernels: Kernels, chunk_tokens: int | None) -> None:
        # Chunks save memory, which compiling them would undo: the graph of all chunks needs 59 MB in a block of 2048
        # tokens, the graph of the whole block 42 MB, chunks without a graph 34 MB.
        if kernels.compiler is not None and chunk_tokens is not None:
            logger.warning("blocks compute %d tokens at once to save memory: they are not compiled", chunk_tokens)
        # Chunked and compiled forwards handle per-frame timesteps themselves.
        if chunk_tokens is not None:
            self._attached = ChunkedBlocks(self._blocks, chunk_tokens)
        elif kernels.compiler is not None:
            self._attached = CompiledBlocks(self._blocks, get_compiler(kernels.compiler))
        elif self._timed:
            self._attached = PerFrameBlocks(self._blocks)

    def _set_attention(self, kernels: Kernels) -> None:
        for block in self._blocks:
            for processor in (block.attn1.processor, block.attn2.processor):
                processor._attention_backend = ATTENTIONS[kernels.attention].backend
                # Set on the instance even though the class default is None too: chunks leave an instance attribute
                # behind, and torch.compile recompiles when the attribute moves from class to instance.
                processor._parallel_config = None
        if kernels.attention == INT8_ATTENTION:
            self._int8 = Int8SelfAttention(self._blocks)


class PerFrameBlocks(PatchedForwards):
    """Blocks that also accept a `FrameModulation`; see `PatchedForwards`."""

    def __init__(self, blocks: Iterable[WanTransformerBlock]) -> None:
        super().__init__(blocks, lambda block: partial(_per_frame_forward, block), name="per-frame")


def _per_frame_forward(
    block: WanTransformerBlock,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor | Texts,
    temb: torch.Tensor | FrameModulation,
    rotary_emb: Rotary,
) -> torch.Tensor:
    """See `WanTransformerBlock.forward`."""
    if isinstance(temb, FrameModulation):
        # diffusers would need one modulation row per token, six times the hidden state. The chunked forward looks the
        # rows up per span of tokens; one chunk of all tokens makes it the plain forward otherwise.
        return chunked_forward(block, hidden_states.shape[1], hidden_states, encoder_hidden_states, temb, rotary_emb)
    output: torch.Tensor = type(block).forward(block, hidden_states, encoder_hidden_states, temb, rotary_emb)
    return output
