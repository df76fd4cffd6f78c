"""Wan transformer block over `block_kernels/`, with the parameters and names of diffusers' block.

A block is three token-wise stages around two attentions. One forward serves every run: all tokens
at once or in chunks, one timestep or several, one text or two (NAG), alone or sharing attention
with other workers, compiled or not. In chunks, intermediate values outside attention exist for one
chunk only, so attention sets the peak memory.

Chunks have the same arithmetic as the whole block. Last bits differ where a library selects a
kernel by row count, as oneDNN does for bf16 on processors with AMX.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from ...block_kernels import (
    ALL,
    ATTENTIONS,
    EXACT,
    INT8_ATTENTION,
    BlockMath,
    Codes,
    Fp8Linear,
    Int8Linear,
    Kernels,
    Norm,
    attention_function,
    chunk_slices,
)
from ...shapes import TEXT_TOKENS
from .compiled_block import BlockCompiler, get_compiler
from .nag import PARTS, Nag, Texts, guide
from .per_frame_timestep import FrameModulation, Modulation, rows_and_spans

if TYPE_CHECKING:
    from diffusers import WanTransformer3DModel
    from diffusers.models.transformers.transformer_wan import WanAttention, WanTransformerBlock

Outs: TypeAlias = "tuple[torch.Tensor | None, ...]"
"""Output tensors for a chunk's results. None: new ones are returned."""

Dispatch: TypeAlias = "Callable[..., torch.Tensor]"

logger = logging.getLogger("wanstream.kernels")


@dataclass(kw_only=True)
class BlockSettings:
    """Settings shared by the blocks of both experts. A change applies to the next visit."""

    math: BlockMath = EXACT
    chunk_tokens: int | None = None
    """Tokens computed at once outside attention. None: all."""
    compiler: BlockCompiler | None = None
    dispatch: Dispatch = field(default_factory=partial(attention_function, "default"))
    """Attention function with the interface of diffusers' dispatcher."""
    dispatch_self: Dispatch = field(default_factory=partial(attention_function, "default"))
    """Self-attention function, where an approximation saves most. Text attention costs little."""
    backend: str | None = None
    """`backend` argument of `dispatch`. None: the process's default."""
    self_backend: str | None = None
    """`backend` argument of `dispatch_self`."""
    parallel: Any = None
    """diffusers' `ParallelConfig`, if workers share self-attention."""
    exchanging: Callable[[torch.Tensor], None] | None = None
    """Called with the queries before each self-attention shared by workers."""
    nag: Nag | None = None
    """Guidance for lanes with two texts."""

    @property
    def compiles(self) -> bool:
        """True if blocks are compiled. Token chunks are not."""
        return self.compiler is not None and self.chunk_tokens is None

    @property
    def used_math(self) -> BlockMath:
        """Functions for a visit.

        A compiler fuses plain operations itself, and cannot optimise kernels.
        """
        return EXACT if self.compiles else self.math

    @property
    def graphs(self) -> int:
        """Number of block graphs compiled by this process so far.

        A step that compiles one gives no usable timing.
        """
        return 0 if self.compiler is None else self.compiler.graphs

    def set(self, kernels: Kernels, math: BlockMath, chunk_tokens: int | None) -> None:
        """Compute with `kernels` and `math`, and outside attention in chunks of `chunk_tokens`.

        None means all tokens at once.
        """
        self.math = math
        self.chunk_tokens = chunk_tokens
        self.compiler = None if kernels.compiler is None else get_compiler(kernels.compiler)
        self.dispatch_self = attention_function(kernels.attention)
        self.backend = ATTENTIONS[kernels.attention].backend
        self.self_backend = INT8_ATTENTION if kernels.attention == INT8_ATTENTION else self.backend
        if self.compiler is not None and chunk_tokens is not None:
            # A graph over all chunks of 2048 tokens needs 59 MB, a graph of the whole block 42 MB,
            # and chunks alone 34 MB.
            logger.warning(
                "blocks compute %d tokens at once to save memory: they are not compiled",
                chunk_tokens,
            )


@contextmanager
def changed(settings: BlockSettings, **values: Any) -> Iterator[None]:
    """Use other values for these settings until the end of the context."""
    before = {name: getattr(settings, name) for name in values}
    vars(settings).update(values)
    try:
        yield
    finally:
        vars(settings).update(before)


class WanBlock(nn.Module):
    """Block with the submodules and parameters of diffusers' block.

    Args:
        original: diffusers' block.
        settings: shared by all blocks in a pair.
    """

    def __init__(self, original: WanTransformerBlock, settings: BlockSettings) -> None:
        super().__init__()
        self.attn1 = original.attn1
        self.norm2 = original.norm2
        self.attn2 = original.attn2
        self.ffn = original.ffn
        self.scale_shift_table = original.scale_shift_table
        # norm1 and norm3 have no parameters, and diffusers gives both the same eps.
        self.eps = original.norm1.eps
        self.settings = settings

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | Texts,
        temb: torch.Tensor | FrameModulation,
        rotary_emb: torch.Tensor,
    ) -> torch.Tensor:
        """Return the tokens after this block, in a new tensor.

        Args:
            hidden_states: tokens [1, S, D]. Never written to, because hooks and step caches may
                still read them.
            encoder_hidden_states: embedded text [1, L, D]. With an image branch, the image rows
                come first.
            temb: modulation [1, 6, D], or rows for consecutive tokens.
            rotary_emb: as returned by `BlockMath.rotation`.
        """
        # The first block's tokens may be a transposed view.
        tokens = hidden_states.contiguous()
        if self.settings.compiler is not None and self.settings.compiles:
            return self.settings.compiler.run(
                _traced, self, tokens, encoder_hidden_states, temb, rotary_emb
            )
        rows, spans = rows_and_spans(temb)
        # The sum is in fp32, as in diffusers.
        values = (self.scale_shift_table + rows.float()).unsqueeze(2).unbind(1)  # six [R, 1, D]
        return self.compute(tokens, encoder_hidden_states, Modulation(values, spans), rotary_emb)

    def compute(
        self,
        hidden: torch.Tensor,
        text: torch.Tensor | Texts,
        modulation: Modulation,
        rotation: torch.Tensor,
    ) -> torch.Tensor:
        """Compute the block without a compiler. See `forward`."""
        chunks = chunk_slices(hidden.shape[1], self.settings.chunk_tokens)
        qkv = _by_chunk(chunks, hidden, 3, partial(self._self_qkv, hidden, modulation, rotation))
        if self.settings.exchanging is not None:
            self.settings.exchanging(qkv[0])
        settings = self.settings
        # The result becomes the new state: `_enter_text` reads each chunk, then overwrites it.
        state = self._attend(settings.dispatch_self, settings.self_backend, settings.parallel, *qkv)
        # `del`, here and below: the next stage then takes this memory.
        del qkv
        [query] = _by_chunk(chunks, hidden, 1, partial(self._enter_text, hidden, state, modulation))
        attended = self._attend_texts(query, text)
        del query
        for at in chunks:
            self._leave_text(state[:, at], attended[:, at], modulation.part(at))
        return state

    def _self_qkv(
        self,
        hidden: torch.Tensor,
        modulation: Modulation,
        rotation: torch.Tensor,
        at: slice,
        outs: Outs,
    ) -> tuple[torch.Tensor, ...]:
        """Return a chunk's queries, keys and values."""
        attn = self.attn1
        math = self.settings.used_math
        codes = self._take_codes(attn.to_q, attn.to_k, attn.to_v)
        tokens = math.normed(hidden[:, at], modulation.part(at).norm(0, self.eps), codes=codes)
        query = math.rotate(_product(attn.to_q, tokens), attn.norm_q, rotation[:, at], outs[0])
        key = math.rotate(_product(attn.to_k, tokens), attn.norm_k, rotation[:, at], outs[1])
        value = _product(attn.to_v, tokens)
        return query, key, value if outs[2] is None else outs[2].copy_(value)

    def _enter_text(
        self,
        hidden: torch.Tensor,
        state: torch.Tensor,
        modulation: Modulation,
        at: slice,
        outs: Outs,
    ) -> tuple[torch.Tensor, ...]:
        """Turn a chunk's attended tokens `state` into the residual sum. Return text queries."""
        math = self.settings.used_math
        affine = Norm(self.norm2.weight, self.norm2.bias, self.norm2.eps, False)
        update = self._projected(self.attn1, state[:, at])
        gate = modulation.part(at).gate(2)
        codes = self._take_codes(self.attn2.to_q)
        tokens = math.normed(hidden[:, at], affine, update, gate, state[:, at], codes)
        del update
        return (math.rms_norm(_product(self.attn2.to_q, tokens), self.attn2.norm_q, outs[0]),)

    def _leave_text(
        self, state: torch.Tensor, attended: torch.Tensor, modulation: Modulation
    ) -> None:
        """Add a chunk's text attention and feed-forward to `state`."""
        math = self.settings.used_math
        update = self._projected(self.attn2, attended)
        # Without diffusers' activation: it is computed below, in place or while quantising.
        up = self.ffn.net[0].proj
        down = self.ffn.net[2]
        norm = modulation.norm(3, self.eps)
        codes = self._take_codes(up)
        tokens = math.normed(state, norm, update, None, state, codes)
        del update
        inner = _product(up, tokens)
        del tokens
        if self._take_codes(down):
            tokens = math.quantise(inner, gelu=True)
            del inner
            update = down.multiply(tokens)
        elif isinstance(down, Int8Linear) and down.takes_gelu:
            update = down.multiply_gelu(inner)
            del inner
        else:
            # In place, because `F.gelu` would allocate the largest tensor of a block again.
            update = down(torch.ops.aten.gelu_(inner, approximate="tanh"))
            del inner
        math.add(state, update, modulation.gate(5), out=state)

    def _attend_texts(self, query: torch.Tensor, text: torch.Tensor | Texts) -> torch.Tensor:
        """Attend to a text, to two texts with guidance, and to an image's rows before the text."""
        texts = (text,) if isinstance(text, torch.Tensor) else text
        image = None
        positive = texts[0]
        if self.attn2.add_k_proj is not None:
            # An image branch (Wan2.1 I2V). As in diffusers, the last 512 rows are the text.
            image = positive[:, :-TEXT_TOKENS]
            positive = positive[:, -TEXT_TOKENS:]
        # Each worker has the whole text.
        attend = partial(self._attend, self.settings.dispatch, self.settings.backend, None)
        attended = attend(query, *self._text_kv(positive))
        if len(texts) > 1:
            assert self.settings.nag is not None, "two texts without guidance"
            negative = self._text_kv(texts[1])
            for at in chunk_slices(attended.shape[1], -(-attended.shape[1] // PARTS)):
                against = attend(query[:, at], *negative)
                attended[:, at] = guide(attended[:, at], against, self.settings.nag)
        if image is not None:
            attn = self.attn2
            attended += attend(
                query, attn.norm_added_k(attn.add_k_proj(image)), attn.add_v_proj(image)
            )
        return attended

    def _attend(
        self,
        dispatch: Dispatch,
        backend: str | None,
        parallel_config: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        """Attend from `query` [1, S, D] to keys and values."""
        # Both attentions have the same number of heads.
        heads = self.attn1.heads
        attended = dispatch(
            *(tensor.unflatten(2, (heads, -1)) for tensor in (query, key, value)),
            attn_mask=None,
            dropout_p=0.0,
            is_causal=False,
            backend=backend,
            parallel_config=parallel_config,
        )
        return attended.flatten(2, 3).to(query.dtype)

    def _text_kv(self, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a text's keys and values."""
        attn = self.attn2
        tokens = self._quantised(text, attn.to_k, attn.to_v)
        key = self.settings.used_math.rms_norm(_product(attn.to_k, tokens), attn.norm_k)
        return key, _product(attn.to_v, tokens)

    def _projected(self, attn: WanAttention, attended: torch.Tensor) -> torch.Tensor:
        """Return an attention's output projection."""
        return _product(attn.to_out[0], self._quantised(attended, attn.to_out[0]))

    def _quantised(self, tokens: torch.Tensor, *layers: nn.Module) -> torch.Tensor | Codes:
        """Return `tokens`, or their codes if all of these layers multiply codes."""
        if self._take_codes(*layers):
            return self.settings.used_math.quantise(tokens)
        return tokens

    def _take_codes(self, *layers: nn.Module) -> bool:
        """Return True if all layers multiply codes, so that one pass quantises their tokens."""
        each = (isinstance(layer, Fp8Linear) and layer.takes_codes for layer in layers)
        return self.settings.used_math.quantises and all(each)


def _traced(
    block: WanBlock,
    tokens: torch.Tensor,
    text: torch.Tensor | Texts,
    rows: torch.Tensor,
    row_of_token: torch.Tensor | None,
    rotation: torch.Tensor,
) -> torch.Tensor:
    """Compute with rows [R, 6, D] and the row of each token [S]. None: all tokens have the first.

    A compiler fuses the lookup into its use. Eager code would copy six rows for each token.
    """
    table = block.scale_shift_table + rows.float()
    values = (
        table.unsqueeze(2).unbind(1)
        if row_of_token is None
        else table[row_of_token].unsqueeze(0).unbind(2)
    )
    return block.compute(tokens, text, Modulation(values, ()), rotation)


def _product(layer: nn.Module, tokens: torch.Tensor | Codes) -> torch.Tensor:
    if isinstance(tokens, Codes):
        assert isinstance(layer, Fp8Linear)
        return layer.multiply(tokens)
    product: torch.Tensor = layer(tokens)
    return product


def _by_chunk(
    chunks: Sequence[slice],
    like: torch.Tensor,
    count: int,
    compute: Callable[[slice, Outs], tuple[torch.Tensor, ...]],
) -> tuple[torch.Tensor, ...]:
    """Return `count` tensors like `like`, with chunk results that `compute` returns or writes."""
    # `compute` returns the tensors of a single chunk, so nothing is copied.
    if len(chunks) == 1:
        return compute(ALL, (None,) * count)
    filled = tuple(torch.empty_like(like) for _ in range(count))
    for at in chunks:
        compute(at, tuple(each[:, at] for each in filled))
    return filled


def replace_blocks(model: WanTransformer3DModel, settings: BlockSettings) -> None:
    """Replace the blocks in a diffusers model by ours, with the same parameters."""
    model.blocks = nn.ModuleList(WanBlock(block, settings) for block in model.blocks)


def settings_of(model: WanTransformer3DModel) -> BlockSettings:
    """Return a model's block settings."""
    settings: BlockSettings = model.blocks[0].settings
    return settings
