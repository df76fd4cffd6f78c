"""Chunked forward of a Wan block: everything except attention is computed a few tokens at a time.

Norms, projections, rotary embedding, feed-forward and residuals of a token do not depend on other tokens. Their
intermediate values therefore exist for one chunk only, and results overwrite tensors that are not read again. The peak
memory of a block is then that of attention: its input, q, k, v and its output.

The arithmetic is that of the whole block. Last bits differ where a library selects its kernel by the number of rows, as
oneDNN does for bf16 on processors with AMX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch

from ...schema import SHORT_CHUNK, TEXT_TOKENS
from .block_patching import PatchedForwards
from .per_frame_timestep import FrameModulation, rows_and_spans, split_by_row

if TYPE_CHECKING:
    from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor, WanTransformerBlock

Rotary = tuple[torch.Tensor, torch.Tensor]

MIN_TOKENS = SHORT_CHUNK + 1
"""Minimum size of a last chunk. MKL multiplies 1, 2 or 3 fp32 rows with another kernel, and the last bits differ."""


class ChunkedBlocks(PatchedForwards):
    """Blocks with a chunked forward and attention, from construction until `detach`.

    Submodules are called as modules, the norms and the feed-forward once per chunk. The input of a block is never
    written to. For the order with other hooks see `PatchedForwards`.

    Args:
        blocks: those of diffusers' `WanTransformer3DModel`, with its original attention processors.
        chunk_tokens: tokens that are computed at once, 1 or more.

    Raises:
        RuntimeError: the forward of a block is already replaced.
        ValueError: a block has an attention processor of another class.
    """

    def __init__(self, blocks: Iterable[WanTransformerBlock], chunk_tokens: int) -> None:
        assert chunk_tokens >= 1, f"{chunk_tokens} tokens at once"
        chunked_blocks = list(blocks)
        for index, block in enumerate(chunked_blocks):
            _check(index, block)
        # Before context parallelism: its hooks wrap the forward that they find and split the tokens in front of it, so
        # that chunks are parts of one rank's tokens.
        super().__init__(chunked_blocks, lambda block: partial(chunked_forward, block, chunk_tokens), name="chunked")
        self._processors: list[tuple[WanAttention, WanAttnProcessor, ChunkedAttention]] = []
        for block in chunked_blocks:
            for attention in (block.attn1, block.attn2):
                original = attention.processor
                chunked = ChunkedAttention(original, chunk_tokens)
                attention.set_processor(chunked)
                self._processors.append((attention, original, chunked))

    def detach(self) -> None:
        """Restore the original forward and processors of the blocks. Detaching twice is allowed.

        Raises:
            RuntimeError: a hook was put around a block since; nothing was changed.
        """
        super().detach()
        for attention, original, chunked in self._processors:
            # Keep a backend or parallel config that diffusers has set since.
            _copy_settings(chunked, original)
            attention.set_processor(original)
        self._processors = []


class AttentionParts:
    """Base of attention processors that replace `original`, with its settings.

    Args:
        original: processor that is replaced.
        chunk_tokens: tokens that are projected at once, in place; None: all, in new tensors.
        dispatch: function with the arguments of diffusers' dispatcher; None: the dispatcher.
    """

    def __init__(
        self,
        original: WanAttnProcessor | AttentionParts,
        chunk_tokens: int | None,
        dispatch: Callable[..., torch.Tensor] | None = None,
    ) -> None:
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        self.chunk_tokens = chunk_tokens
        self._dispatch = dispatch_attention_fn if dispatch is None else dispatch
        # diffusers sets these two attributes on every processor of a model.
        self._attention_backend: object = None
        self._parallel_config: object = None
        _copy_settings(original, self)

    def query_of(self, attn: WanAttention, hidden: torch.Tensor) -> torch.Tensor:
        """Return the queries of cross-attention; chunks overwrite `hidden`."""
        if self.chunk_tokens is None:
            query: torch.Tensor = attn.norm_q(attn.to_q(hidden))
            return query
        for chunk in chunk_slices(hidden, self.chunk_tokens):
            hidden[:, chunk] = attn.norm_q(attn.to_q(hidden[:, chunk]))
        return hidden

    def attend(
        self,
        attn: WanAttention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        shared: bool = False,
    ) -> torch.Tensor:
        """Attend from `query` [B, S, D] to keys and values.

        `shared`: the ranks hold parts of the keys. Those of text and image are complete on every rank.
        """
        attended: torch.Tensor = self._dispatch(
            *(tensor.unflatten(2, (attn.heads, -1)) for tensor in (query, key, value)),
            attn_mask=mask,
            dropout_p=0.0,
            is_causal=False,
            backend=self._attention_backend,
            parallel_config=self._parallel_config if shared else None,
        )
        return attended.flatten(2, 3).type_as(query)

    def add_image(
        self, attn: WanAttention, attended: torch.Tensor, query: torch.Tensor, image: torch.Tensor | None
    ) -> None:
        """Add attention to the rows of the image, if there are any, to `attended`."""
        if image is not None:
            key, value = attn.norm_added_k(attn.add_k_proj(image)), attn.add_v_proj(image)
            attended += self.attend(attn, query, key, value)

    def project(self, attn: WanAttention, attended: torch.Tensor) -> torch.Tensor:
        """Return the output projection; chunks overwrite `attended`."""
        projection, dropout = attn.to_out
        if self.chunk_tokens is None:
            projected: torch.Tensor = dropout(projection(attended))
            return projected
        for chunk in chunk_slices(attended, self.chunk_tokens):
            attended[:, chunk] = dropout(projection(attended[:, chunk]))
        return attended


class ChunkedAttention(AttentionParts):
    """Attention processor of Wan with chunked projections and one attention call for all tokens.

    Chunks overwrite the hidden states of the caller: with v in self-attention, with q in cross-attention.
    """

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: Rotary | None = None,
    ) -> torch.Tensor:
        if encoder_hidden_states is None:
            qkv = self._self_qkv(attn, hidden_states, rotary_emb)
            attended = self.attend(attn, *qkv, attention_mask, shared=True)
            del qkv
        else:
            image, text = split_image_and_text(attn, encoder_hidden_states)
            query = self.query_of(attn, hidden_states)
            attended = self.attend(attn, query, *keys_and_values(attn, text), attention_mask)
            self.add_image(attn, attended, query, image)
        return self.project(attn, attended)

    def _self_qkv(
        self, attn: WanAttention, hidden: torch.Tensor, rotary: Rotary | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query, key = torch.empty_like(hidden), torch.empty_like(hidden)
        if self.chunk_tokens is None:
            every = slice(None)
            _write_rotated(attn.norm_q(attn.to_q(hidden)), rotary, every, attn.heads, out=query)
            _write_rotated(attn.norm_k(attn.to_k(hidden)), rotary, every, attn.heads, out=key)
            return query, key, attn.to_v(hidden)
        for chunk in chunk_slices(hidden, self.chunk_tokens):
            tokens = hidden[:, chunk]
            _write_rotated(attn.norm_q(attn.to_q(tokens)), rotary, chunk, attn.heads, out=query)
            _write_rotated(attn.norm_k(attn.to_k(tokens)), rotary, chunk, attn.heads, out=key)
            # Last, because v overwrites the tokens that q and k are projected from.
            hidden[:, chunk] = attn.to_v(tokens)
        return query, key, hidden


def chunked_forward(
    block: WanTransformerBlock,
    chunk_tokens: int,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor | tuple[torch.Tensor, ...],
    temb: torch.Tensor | FrameModulation,
    rotary_emb: Rotary,
) -> torch.Tensor:
    """Return the output of the block's original forward, in a new tensor.

    `temb` is [1, 6, D], or one modulation row per span of tokens.
    """
    chunks = list(chunk_slices(hidden_states, chunk_tokens))
    rows, spans = rows_and_spans(temb, hidden_states.shape[1])
    shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = (block.scale_shift_table + rows.float()).chunk(6, dim=1)

    # Contiguous, because the first block's tokens are a transposed view and `empty_like` would copy its strides.
    normed = torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
    for chunk in chunks:
        for piece, row in split_by_row(chunk, spans):
            normed[:, piece] = block.norm1(hidden_states[:, piece].float()) * (1 + scale[row]) + shift[row]
    # The output of attention is a new tensor: residuals are added to it, never to `hidden_states`, which other hooks
    # and step caches may still read.
    state: torch.Tensor = block.attn1(normed, None, None, rotary_emb)
    for chunk in chunks:
        for piece, row in split_by_row(chunk, spans):
            state[:, piece] = hidden_states[:, piece].float() + state[:, piece] * gate[row]

    for chunk in chunks:
        normed[:, chunk] = block.norm2(state[:, chunk].float())
    state += block.attn2(normed, encoder_hidden_states, None, None)
    del normed

    for chunk in chunks:
        modulated = [
            (block.norm3(state[:, piece].float()) * (1 + ffn_scale[row]) + ffn_shift[row]).type_as(state)
            for piece, row in split_by_row(chunk, spans)
        ]
        tokens = modulated[0] if len(modulated) == 1 else torch.cat(modulated, dim=1)
        del modulated
        tokens = block.ffn(tokens)
        for piece, row in split_by_row(chunk, spans):
            within = slice(piece.start - chunk.start, piece.stop - chunk.start)
            state[:, piece] = state[:, piece].float() + tokens[:, within].float() * ffn_gate[row]
    return state


def split_image_and_text(attn: WanAttention, rows: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Split the rows of a block with an image branch (Wan2.1 I2V); as in diffusers, the last 512 are the text."""
    if attn.add_k_proj is None:
        return None, rows
    return rows[:, :-TEXT_TOKENS], rows[:, -TEXT_TOKENS:]


def keys_and_values(attn: WanAttention, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values of a text."""
    return attn.norm_k(attn.to_k(text)), attn.to_v(text)


def chunk_slices(tokens: torch.Tensor, chunk_tokens: int) -> Iterator[slice]:
    """Yield slices of `chunk_tokens` tokens along dim 1; a remainder below `MIN_TOKENS` joins the chunk before it."""
    start, count = 0, tokens.shape[1]
    while start < count:
        end = start + chunk_tokens if count - start >= chunk_tokens + MIN_TOKENS else count
        yield slice(start, end)
        start = end


def _write_rotated(tokens: torch.Tensor, rotary: Rotary | None, chunk: slice, heads: int, *, out: torch.Tensor) -> None:
    """Apply the rotary embedding of the chunk's positions to [B, c, D]; write into `chunk` of `out` [B, S, D]."""
    if rotary is None:
        out[:, chunk] = tokens
        return
    cos, sin = rotary[0][:, chunk, :, 0::2], rotary[1][:, chunk, :, 1::2]
    x, y = tokens.unflatten(2, (heads, -1, 2)).unbind(-1)
    rotated = out[:, chunk].unflatten(2, (heads, -1, 2))
    rotated[..., 0] = x * cos - y * sin
    rotated[..., 1] = x * sin + y * cos


def _copy_settings(source: WanAttnProcessor | AttentionParts, target: WanAttnProcessor | AttentionParts) -> None:
    """Copy the settings that diffusers makes on processors: attention backend and parallel config."""
    target._attention_backend = source._attention_backend
    target._parallel_config = source._parallel_config


def _check(index: int, block: WanTransformerBlock) -> None:
    from diffusers.models.transformers.transformer_wan import WanAttnProcessor

    for attention in (block.attn1, block.attn2):
        if type(attention.processor) is not WanAttnProcessor:
            kind = type(attention.processor).__name__
            raise ValueError(
                f"block {index} has the attention processor {kind}: chunks need diffusers' WanAttnProcessor"
            )
