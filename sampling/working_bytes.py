"""How much device memory a run computes in, told before it begins."""

from __future__ import annotations

from collections.abc import Sequence

from ..plan import ExpertShape
from ..plan.shapes import HEAD_DIM, PATCH
from ..wan import ExpertPair
from .cache_settings import CacheSettings
from .split import WHOLE_STEP, Share


def working_bytes(
    pair: ExpertPair,
    shape: Sequence[int],
    *,
    guided: bool,
    chunk_tokens: int | None = None,
    share: Share = WHOLE_STEP,
    cache: CacheSettings | None = None,
    kept_states: int = 0,
) -> int:
    """Memory beside the weights for steps on latents of `shape` [B, 16, T, h, w]; see `ExpertShape.working_bytes`.

    `guided` counts a negative lane beside each positive one; `chunk_tokens` is the policy's, `share` the split's. What
    a cache keeps from step to step is among it, and so are `kept_states` more tensors of the size of each lane's hidden
    state.
    """
    expert = _shape_of(pair)
    lanes = shape[0] * (2 if guided else 1)
    return expert.working_bytes(
        tokens_of(shape),
        lanes=-(-lanes // share.cfg),
        value_bytes=pair.compute_dtype.itemsize,
        chunk_tokens=chunk_tokens,
        ring=share.ring,
        ulysses=share.ulysses,
        kept_states=kept_states + (0 if cache is None else cache.kept_states),
    )


def visit_flops(pair: ExpertPair, shape: Sequence[int], *, guided: bool) -> int:
    """Floating point operations of a block for all lanes of latents of `shape` [B, C, T, h, w]."""
    return shape[0] * (2 if guided else 1) * _shape_of(pair).block_flops(tokens_of(shape))


def _shape_of(pair: ExpertPair) -> ExpertShape:
    config = pair.high.config
    return ExpertShape(
        width=config.num_attention_heads * HEAD_DIM, ffn_width=config.ffn_dim, image_width=config.image_dim
    )


def tokens_of(shape: Sequence[int]) -> int:
    """Tokens of one lane of latents [B, 16, T, h, w]."""
    _, _, frames, height, width = shape
    return (frames // PATCH[0]) * (height // PATCH[1]) * (width // PATCH[2])
