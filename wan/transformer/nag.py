"""Normalized attention guidance: a negative prompt without a second lane.

Where a lane without CFG attends to its text, its tokens attend to the negative text as well. The result is pushed away
from what that gives, kept from growing, and mixed with the original (Chen et al. 2025, arXiv 2505.21179):

    guided = scale x positive - (scale - 1) x negative
    guided = guided x min(1, tau x |positive| / |guided|)      sums of absolute values over a token's features
    result = alpha x guided + (1 - alpha) x positive
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .chunked_block import ChunkedAttention, image_and_text, parts_of

if TYPE_CHECKING:
    from diffusers import WanTransformer3DModel
    from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor

    from .chunked_block import Rotary

Texts = tuple[torch.Tensor, torch.Tensor]
"""The text of a lane [1, L, D], and the one that is held against it [1, M, D]."""

PARTS = 8
"""In how many parts the tokens attend to the negative text: what comes of one, in fp32 too, is there for a moment, and
takes less than one value of all tokens."""


@dataclass(frozen=True, kw_only=True)
class Nag:
    """How strongly the negative text is held against the positive one; defaults are those that are usual for Wan.

    Raises ValueError for numbers that guide nothing or make no sense.
    """

    scale: float = 11.0
    """1 changes nothing; higher pushes further away from the negative text."""
    tau: float = 2.5
    """How many times as large as the positive result the guided one may be."""
    alpha: float = 0.25
    """Share of the guided result: 0 changes nothing, 1 takes nothing else."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.scale) and self.scale >= 1):
            raise ValueError(f"NAG scale {self.scale:g}: give 1 (changes nothing) or more, 11 is usual")
        if not (math.isfinite(self.tau) and self.tau > 0):
            raise ValueError(f"NAG tau {self.tau:g}: give a number above 0, 2.5 is usual")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"NAG alpha {self.alpha:g}: give 0 (changes nothing) to 1, 0.25 is usual")


@contextmanager
def attach_nag(models: Iterable[WanTransformer3DModel], nag: Nag) -> Iterator[None]:
    """While this lasts, blocks of the models take two texts where one is given twice; with one they do as before.

    Raises ValueError for a block whose attention to the text is of a kind that is not known here.
    """
    from diffusers.models.transformers.transformer_wan import WanAttnProcessor

    replaced: list[tuple[WanAttention, WanAttnProcessor | ChunkedAttention]] = []
    try:
        for model in models:
            for block in model.blocks:
                own = block.attn2.processor
                if type(own) not in (WanAttnProcessor, ChunkedAttention):
                    kind = type(own).__name__
                    raise ValueError(f"NAG needs diffusers' own attention to the text, a block has {kind}: remove it")
                block.attn2.set_processor(NagAttention(own, nag))
                replaced.append((block.attn2, own))
        yield
    finally:
        for attention, own in replaced:
            attention.set_processor(own)


class NagAttention:
    """Attention to two texts, combined before the output projection; to one text it is that of `own`.

    As `own` does, it takes a few tokens at once, and then writes over the hidden states that it is given, or all.
    """

    def __init__(self, own: WanAttnProcessor | ChunkedAttention, nag: Nag) -> None:
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        self._own, self._nag = own, nag
        self._dispatch = dispatch_attention_fn
        self._at_once = own.chunk_tokens if isinstance(own, ChunkedAttention) else None
        self._attention_backend = own._attention_backend
        self._parallel_config = own._parallel_config

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | Texts,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: Rotary | None = None,
    ) -> torch.Tensor:
        if isinstance(encoder_hidden_states, torch.Tensor):
            whole: torch.Tensor = self._own(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)
            return whole
        positive, negative = encoder_hidden_states
        image, positive = image_and_text(attn, positive)
        query = self._query(attn, hidden_states)
        attended = self._attend(attn, query, *_keys_and_values(attn, positive))
        held = _keys_and_values(attn, negative)
        for part in parts_of(attended, -(-attended.shape[1] // PARTS)):
            against = self._attend(attn, query[:, part], *held)
            attended[:, part] = combined(attended[:, part], against, self._nag)
        if image is not None:
            key, value = attn.norm_added_k(attn.add_k_proj(image)), attn.add_v_proj(image)
            attended += self._attend(attn, query, key, value)
        del query
        projection, dropout = attn.to_out
        if self._at_once is None:
            projected: torch.Tensor = dropout(projection(attended))
            return projected
        for part in parts_of(attended, self._at_once):
            attended[:, part] = dropout(projection(attended[:, part]))
        return attended

    def _query(self, attn: WanAttention, hidden: torch.Tensor) -> torch.Tensor:
        if self._at_once is None:
            query: torch.Tensor = attn.norm_q(attn.to_q(hidden))
            return query
        for part in parts_of(hidden, self._at_once):
            hidden[:, part] = attn.norm_q(attn.to_q(hidden[:, part]))
        return hidden

    def _attend(self, attn: WanAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        attended: torch.Tensor = self._dispatch(
            *(tensor.unflatten(2, (attn.heads, -1)) for tensor in (query, key, value)),
            attn_mask=None,
            dropout_p=0.0,
            is_causal=False,
            backend=self._attention_backend,
            # Keys and values of texts and images are whole on every rank.
            parallel_config=None,
        )
        return attended.flatten(2, 3).type_as(query)


def _keys_and_values(attn: WanAttention, text: torch.Tensor) -> Texts:
    return attn.norm_k(attn.to_k(text)), attn.to_v(text)


def combined(positive: torch.Tensor, negative: torch.Tensor, nag: Nag) -> torch.Tensor:
    """What tokens make of both texts, [1, S, D] each, computed in fp32; returned in the dtype of `positive`."""
    kept = positive.float()
    guided = (negative.float() * (1 - nag.scale)).add_(kept, alpha=nag.scale)
    size = torch.linalg.vector_norm(guided, ord=1, dim=-1, keepdim=True)
    most = nag.tau * torch.linalg.vector_norm(kept, ord=1, dim=-1, keepdim=True)
    guided *= torch.where(size > most, most / size, 1.0)
    return guided.mul_(nag.alpha).add_(kept, alpha=1 - nag.alpha).type_as(positive)
