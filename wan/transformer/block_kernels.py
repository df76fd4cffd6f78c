"""Compute kernels of an engine's blocks: attention backend, token chunks and compiler, attached in that order."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .chunked_block import ChunkedBlocks
from .compiled_block import CompiledBlocks, get_compiler
from .kernels import ATTENTIONS, Kernels
from .per_frame_block import PerFrameBlocks

if TYPE_CHECKING:
    from diffusers.models.transformers.transformer_wan import WanTransformerBlock

logger = logging.getLogger("wanstream.kernels")


class BlockKernels:
    """Blocks of both experts and their compute kernels; initially those of diffusers.

    With `timed`, blocks also accept per-frame timesteps, with any kernels.
    """

    def __init__(self, blocks: Iterable[WanTransformerBlock], *, timed: bool = False) -> None:
        self._blocks = list(blocks)
        self._timed = PerFrameBlocks(self._blocks) if timed else None
        self._kernels = Kernels()
        self._chunk_tokens: int | None = None
        self._chunked: ChunkedBlocks | None = None
        self._compiled: CompiledBlocks | None = None

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
        if self._timed is not None:
            self._timed.detach()
        if self._compiled is not None:
            self._compiled.detach()
            self._compiled = None
        if chunk_tokens != self._chunk_tokens:
            self._set_chunk(chunk_tokens)
        for block in self._blocks:
            for processor in (block.attn1.processor, block.attn2.processor):
                processor._attention_backend = ATTENTIONS[kernels.attention].backend
                # Set on the instance even though the class default is None too: chunks leave an instance attribute
                # behind, and torch.compile recompiles when the attribute moves from class to instance.
                processor._parallel_config = None
        self._kernels = kernels
        # Chunks save memory, which compiling them would undo: the graph of all chunks needs 59 MB in a block of 2048
        # tokens, the graph of the whole block 42 MB, chunks without a graph 34 MB.
        if kernels.compiler is not None and chunk_tokens is not None:
            logger.warning("blocks compute %d tokens at once to save memory: they are not compiled", chunk_tokens)
        elif kernels.compiler is not None:
            self._compiled = CompiledBlocks(self._blocks, get_compiler(kernels.compiler))
        # Chunked and compiled forwards handle per-frame timesteps themselves.
        if self._timed is not None and self._compiled is None and chunk_tokens is None:
            self._timed = PerFrameBlocks(self._blocks)

    def _set_chunk(self, chunk_tokens: int | None) -> None:
        if self._chunked is not None:
            self._chunked.detach()
            self._chunked = None
        if chunk_tokens is not None:
            self._chunked = ChunkedBlocks(self._blocks, chunk_tokens)
        self._chunk_tokens = chunk_tokens
