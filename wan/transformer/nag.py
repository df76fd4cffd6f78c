"""Normalized attention guidance (NAG): a negative prompt without a second lane.

In a lane without CFG, tokens attend to the positive and to the negative text. The positive result is pushed away from
the negative one, limited in size and mixed with the original (Chen et al. 2025, arXiv 2505.21179):

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

from .chunked_block import AttentionParts, ChunkedAttention, chunk_slices, keys_and_values, split_image_and_text

if TYPE_CHECKING:
    from diffusers import WanTransformer3DModel
    from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor

    from .chunked_block import Rotary

Texts = tuple[torch.Tensor, torch.Tensor]
"""Positive text [1, L, D] and negative text [1, M, D] of a lane."""

PARTS = 8
"""Parts in which the tokens attend to the negative text, so that its result and the fp32 copies for the guidance take
less memory than one value of all tokens."""


@dataclass(frozen=True, kw_only=True)
class Nag:
    """Strength of the guidance; the defaults are usual for Wan.

    Raises:
        ValueError: a number is out of its range.
    """

    scale: float = 11.0
    """1 changes nothing; higher pushes further away from the negative text."""
    tau: float = 2.5
    """Maximum size of the guided result, as a multiple of the positive one."""
    alpha: float = 0.25
    """Share of the guided result in the mix: 0 changes nothing, 1 replaces the original."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.scale) and self.scale >= 1):
            raise ValueError(f"NAG scale {self.scale:g}: give 1 (changes nothing) or more, 11 is usual")
        if not (math.isfinite(self.tau) and self.tau > 0):
            raise ValueError(f"NAG tau {self.tau:g}: give a number above 0, 2.5 is usual")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"NAG alpha {self.alpha:g}: give 0 (changes nothing) to 1, 0.25 is usual")


@contextmanager
def attach_nag(models: Iterable[WanTransformer3DModel], nag: Nag) -> Iterator[None]:
    """Let the blocks of `models` accept `Texts` in place of one text; blocks that get one text compute as before.

    Raises:
        ValueError: the cross-attention of a block has a processor of another class.
    """
    from diffusers.models.transformers.transformer_wan import WanAttnProcessor

    replaced: list[tuple[WanAttention, WanAttnProcessor | ChunkedAttention]] = []
    try:
        for model in models:
            for block in model.blocks:
                original = block.attn2.processor
                if type(original) not in (WanAttnProcessor, ChunkedAttention):
                    kind = type(original).__name__
                    raise ValueError(
                        f"NAG needs diffusers' attention processor in cross-attention, not {kind}: remove it"
                    )
                block.attn2.set_processor(NagAttention(original, nag))
                replaced.append((block.attn2, original))
        yield
    finally:
        for attention, original in replaced:
            attention.set_processor(original)


class NagAttention(AttentionParts):
    """Attention to two texts, combined before the output projection; one text is left to the `original` processor.

    If the original is chunked, this one is too, and overwrites the hidden states of its caller.
    """

    def __init__(self, original: WanAttnProcessor | ChunkedAttention, nag: Nag) -> None:
        super().__init__(original, original.chunk_tokens if isinstance(original, ChunkedAttention) else None)
        self._original, self._nag = original, nag

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | Texts,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: Rotary | None = None,
    ) -> torch.Tensor:
        if isinstance(encoder_hidden_states, torch.Tensor):
            plain: torch.Tensor = self._original(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)
            return plain
        positive, negative = encoder_hidden_states
        image, positive = split_image_and_text(attn, positive)
        query = self.query_of(attn, hidden_states)
        attended = self.attend(attn, query, *keys_and_values(attn, positive))
        negative_kv = keys_and_values(attn, negative)
        for part in chunk_slices(attended, -(-attended.shape[1] // PARTS)):
            negative_part = self.attend(attn, query[:, part], *negative_kv)
            attended[:, part] = guide(attended[:, part], negative_part, self._nag)
        self.add_image(attn, attended, query, image)
        del query
        return self.project(attn, attended)


def guide(positive: torch.Tensor, negative: torch.Tensor, nag: Nag) -> torch.Tensor:
    """Combine the attention results of both texts, [1, S, D] each, in fp32; return the dtype of `positive`."""
    exact = positive.float()
    guided = (negative.float() * (1 - nag.scale)).add_(exact, alpha=nag.scale)
    size = torch.linalg.vector_norm(guided, ord=1, dim=-1, keepdim=True)
    limit = nag.tau * torch.linalg.vector_norm(exact, ord=1, dim=-1, keepdim=True)
    # `where` instead of a clamped ratio: 0 / 0 of a token of zeros would be NaN.
    guided *= torch.where(size > limit, limit / size, 1.0)
    return guided.mul_(nag.alpha).add_(exact, alpha=1 - nag.alpha).type_as(positive)
