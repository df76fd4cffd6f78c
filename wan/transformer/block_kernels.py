"""Kernels of an engine's blocks, attached in order: attention, chunks, compiler."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .chunked_block import ChunkedBlocks
from .compiled_block import CompiledBlocks, compiler_named
from .kernels import ATTENTIONS, Kernels
from .per_frame_block import TimedBlocks

if TYPE_CHECKING:
    from diffusers.models.transformers.transformer_wan import WanTransformerBlock

logger = logging.getLogger("wanstream.kernels")


class BlockKernels:
    """Blocks of both experts, and what they compute with. At first they compute as diffusers has made them.

    Blocks that are `timed` take frames with timesteps of their own too, whatever they compute with.
    """

    def __init__(self, blocks: Iterable[WanTransformerBlock], *, timed: bool = False) -> None:
        self._blocks = list(blocks)
        self._timed = TimedBlocks(self._blocks) if timed else None
        self._kernels = Kernels()
        self._chunk_tokens: int | None = None
        self._chunked: ChunkedBlocks | None = None
        self._compiled: CompiledBlocks | None = None

    @property
    def graphs(self) -> int:
        """Graphs that this process has compiled for blocks so far; while a step makes one, its time says nothing."""
        return 0 if self._kernels.compiler is None else compiler_named(self._kernels.compiler).graphs

    def set(self, kernels: Kernels, chunk_tokens: int | None) -> None:
        """Compute with `kernels`, and that many tokens at once where tokens do not meet; None: all of them.

        Chunks are there to save memory, and a graph of all chunks takes more of it than a graph of the whole block (59
        against 42 MB in a block of 2048 tokens, and 34 MB in chunks without one): so they go without the compiler.

        Raises:
            RuntimeError: hooks were put around the blocks since; remove them first. Nothing was changed.
        """
        if (kernels, chunk_tokens) == (self._kernels, self._chunk_tokens):
            return
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
                # Chunks leave it on the processor itself, and to a graph an attribute of its class is another one.
                processor._parallel_config = None
        self._kernels = kernels
        if kernels.compiler is not None and chunk_tokens is not None:
            logger.warning("blocks take %d tokens at once to save memory: they are not compiled", chunk_tokens)
        elif kernels.compiler is not None:
            self._compiled = CompiledBlocks(self._blocks, compiler_named(kernels.compiler))
        if self._timed is not None and self._compiled is None and chunk_tokens is None:
            self._timed = TimedBlocks(self._blocks)

    def _set_chunk(self, chunk_tokens: int | None) -> None:
        if self._chunked is not None:
            self._chunked.detach()
            self._chunked = None
        if chunk_tokens is not None:
            self._chunked = ChunkedBlocks(self._blocks, chunk_tokens)
        self._chunk_tokens = chunk_tokens
