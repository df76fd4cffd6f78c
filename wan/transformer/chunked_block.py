"""A Wan block that takes a few tokens at a time wherever tokens do not meet: everywhere but in the attention itself.

Norms, projections, rotary embedding, feed-forward and residuals of one token do not depend on any other. Beside the
hidden state of all tokens, what they need is then there for one chunk only, and a value is written over one that nobody
reads any more. What is left of a block's memory is the attention: its input, q, k, v and its output.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch

from ...schema import SHORT_CHUNK, TEXT_TOKENS
from .block_patching import BlockForwards
from .per_frame_timestep import FrameModulation, pieces_of, rows_and_runs

if TYPE_CHECKING:
    from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor, WanTransformerBlock

Rotary = tuple[torch.Tensor, torch.Tensor]

LEAST_TOKENS = SHORT_CHUNK + 1
"""Fewer rows are another kernel's: MKL multiplies 1, 2 or 3 rows in fp32 with other last bits than many."""


class ChunkedBlocks:
    """Blocks whose forward is chunked, from their making until `detach`; everything else about them stays as it is.

    Submodules are called as modules, the norms and the feed-forward once per chunk. The input of a block is never
    written to. Hooks are put around the blocks after, and taken off before, as of `BlockForwards`.

    Args:
        blocks: of diffusers' `WanTransformer3DModel`, with its own attention processors.
        chunk_tokens: how many tokens are taken at once, 1 or more.

    Raises:
        RuntimeError: something else has replaced the forward of a block.
        ValueError: a block has an attention processor of another kind.
    """

    def __init__(self, blocks: Iterable[WanTransformerBlock], chunk_tokens: int) -> None:
        assert chunk_tokens >= 1, f"{chunk_tokens} tokens at once"
        chunked_blocks = list(blocks)
        for index, block in enumerate(chunked_blocks):
            _check(index, block)
        self._forwards = BlockForwards(
            chunked_blocks,
            lambda block: partial(chunked_forward, block, chunk_tokens),
            first="attach chunks",
            last="the chunks of the block change",
        )
        self._processors: list[tuple[WanAttention, WanAttnProcessor, ChunkedAttention]] = []
        for block in chunked_blocks:
            for attention in (block.attn1, block.attn2):
                own, chunked = attention.processor, ChunkedAttention(chunk_tokens)
                _hand_over(own, chunked)
                attention.set_processor(chunked)
                self._processors.append((attention, own, chunked))

    def detach(self) -> None:
        """Give the blocks back their own forward and processors. Detaching twice is allowed.

        Raises:
            RuntimeError: something was put around the forward of a block since; nothing was changed.
        """
        self._forwards.detach()
        for attention, own, chunked in self._processors:
            _hand_over(chunked, own)
            attention.set_processor(own)
        self._processors = []


class ChunkedAttention:
    """diffusers' attention of Wan with the projections of a few tokens at a time, and one call for the attention.

    It writes over the hidden states that it is given: v takes their place in self-attention, q in cross-attention.
    Both attributes are those that diffusers sets on every processor.
    """

    def __init__(self, chunk_tokens: int) -> None:
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        self.chunk_tokens = chunk_tokens
        self._dispatch = dispatch_attention_fn
        self._attention_backend: object = None
        self._parallel_config: object = None

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: Rotary | None = None,
    ) -> torch.Tensor:
        if encoder_hidden_states is None:
            states = self._of_itself(attn, hidden_states, rotary_emb)
            attended = self._attended(attn, *states, attention_mask, shared=True)
        else:
            image, text = image_and_text(attn, encoder_hidden_states)
            states = self._of_text(attn, hidden_states, text)
            attended = self._attended(attn, *states, attention_mask)
            if image is not None:
                key, value = attn.norm_added_k(attn.add_k_proj(image)), attn.add_v_proj(image)
                attended += self._attended(attn, states[0], key, value, None)
        del states
        projection, dropout = attn.to_out
        for part in parts_of(attended, self.chunk_tokens):
            attended[:, part] = dropout(projection(attended[:, part]))
        return attended

    def _attended(
        self,
        attn: WanAttention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        shared: bool = False,
    ) -> torch.Tensor:
        """What `query` [B, S, D] makes of keys and values; those of text and image are whole on every rank."""
        attended: torch.Tensor = self._dispatch(
            *(tensor.unflatten(2, (attn.heads, -1)) for tensor in (query, key, value)),
            attn_mask=mask,
            dropout_p=0.0,
            is_causal=False,
            backend=self._attention_backend,
            parallel_config=self._parallel_config if shared else None,
        )
        return attended.flatten(2, 3).type_as(query)

    def _of_itself(
        self, attn: WanAttention, hidden: torch.Tensor, rotary: Rotary | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query, key = torch.empty_like(hidden), torch.empty_like(hidden)
        for part in parts_of(hidden, self.chunk_tokens):
            tokens = hidden[:, part]
            _put_rotated(attn.norm_q(attn.to_q(tokens)), rotary, part, attn.heads, into=query)
            _put_rotated(attn.norm_k(attn.to_k(tokens)), rotary, part, attn.heads, into=key)
            hidden[:, part] = attn.to_v(tokens)
        return query, key, hidden

    def _of_text(
        self, attn: WanAttention, hidden: torch.Tensor, text: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        for part in parts_of(hidden, self.chunk_tokens):
            hidden[:, part] = attn.norm_q(attn.to_q(hidden[:, part]))
        return hidden, attn.norm_k(attn.to_k(text)), attn.to_v(text)


def chunked_forward(
    block: WanTransformerBlock,
    chunk_tokens: int,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor | tuple[torch.Tensor, ...],
    temb: torch.Tensor | FrameModulation,
    rotary_emb: Rotary,
) -> torch.Tensor:
    """What the block's own forward returns for `temb` [1, 6, D], or for rows of runs of tokens, in its own memory."""
    parts = list(parts_of(hidden_states, chunk_tokens))
    rows, runs = rows_and_runs(temb, hidden_states.shape[1])
    shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = (block.scale_shift_table + rows.float()).chunk(6, dim=1)

    normed = torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
    for part in parts:
        for piece, row in pieces_of(part, runs):
            normed[:, piece] = block.norm1(hidden_states[:, piece].float()) * (1 + scale[row]) + shift[row]
    state: torch.Tensor = block.attn1(normed, None, None, rotary_emb)
    for part in parts:
        for piece, row in pieces_of(part, runs):
            state[:, piece] = hidden_states[:, piece].float() + state[:, piece] * gate[row]

    for part in parts:
        normed[:, part] = block.norm2(state[:, part].float())
    state += block.attn2(normed, encoder_hidden_states, None, None)
    del normed

    for part in parts:
        modulated = [
            (block.norm3(state[:, piece].float()) * (1 + ffn_scale[row]) + ffn_shift[row]).type_as(state)
            for piece, row in pieces_of(part, runs)
        ]
        tokens = modulated[0] if len(modulated) == 1 else torch.cat(modulated, dim=1)
        del modulated
        tokens = block.ffn(tokens)
        for piece, row in pieces_of(part, runs):
            within = slice(piece.start - part.start, piece.stop - part.start)
            state[:, piece] = state[:, piece].float() + tokens[:, within].float() * ffn_gate[row]
    return state


def image_and_text(attn: WanAttention, rows: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Where a block attends to images, as in Wan2.1 I2V, the last 512 rows are the text's: diffusers counts so too."""
    if attn.add_k_proj is None:
        return None, rows
    return rows[:, :-TEXT_TOKENS], rows[:, -TEXT_TOKENS:]


def parts_of(tokens: torch.Tensor, at_once: int) -> Iterator[slice]:
    """Slices along dim 1, in order, of `at_once` tokens; fewer than `LEAST_TOKENS` at the end join those before."""
    start, count = 0, tokens.shape[1]
    while start < count:
        end = start + at_once if count - start >= at_once + LEAST_TOKENS else count
        yield slice(start, end)
        start = end


def _put_rotated(tokens: torch.Tensor, rotary: Rotary | None, part: slice, heads: int, *, into: torch.Tensor) -> None:
    """Write [B, c, D], turned by the angles of its positions, into `part` of [B, S, D]."""
    if rotary is None:
        into[:, part] = tokens
        return
    cos, sin = rotary[0][:, part, :, 0::2], rotary[1][:, part, :, 1::2]
    x, y = tokens.unflatten(2, (heads, -1, 2)).unbind(-1)
    turned = into[:, part].unflatten(2, (heads, -1, 2))
    turned[..., 0] = x * cos - y * sin
    turned[..., 1] = x * sin + y * cos


def _hand_over(former: WanAttnProcessor | ChunkedAttention, latter: WanAttnProcessor | ChunkedAttention) -> None:
    """Give `latter` what diffusers set on `former`: the attention backend, and how attention is shared by ranks."""
    latter._attention_backend = former._attention_backend
    latter._parallel_config = former._parallel_config


def _check(index: int, block: WanTransformerBlock) -> None:
    from diffusers.models.transformers.transformer_wan import WanAttnProcessor

    for attention in (block.attn1, block.attn2):
        if type(attention.processor) is not WanAttnProcessor:
            kind = type(attention.processor).__name__
            raise ValueError(f"block {index} attends with {kind}: chunks need diffusers' own WanAttnProcessor")
