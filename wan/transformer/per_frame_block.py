"""Block forwards that apply a timestep per token to lanes with per-frame timesteps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch

from .block_patching import BlockForwards
from .chunked_block import Rotary, chunked_forward
from .per_frame_timestep import FrameModulation

if TYPE_CHECKING:
    from diffusers.models.transformers.transformer_wan import WanTransformerBlock

    from .nag import Texts


class TimedBlocks(BlockForwards):
    """Blocks that take a `FrameModulation` too, from their making until `detach`; see `BlockForwards`."""

    def __init__(self, blocks: Iterable[WanTransformerBlock]) -> None:
        super().__init__(
            blocks,
            lambda block: partial(_forward, block),
            first="take timesteps of frames",
            last="the block is its own again",
        )


def _forward(
    block: WanTransformerBlock,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor | Texts,
    temb: torch.Tensor | FrameModulation,
    rotary_emb: Rotary,
) -> torch.Tensor:
    """See the block's own."""
    if isinstance(temb, FrameModulation):
        # All tokens in one chunk.
        return chunked_forward(block, hidden_states.shape[1], hidden_states, encoder_hidden_states, temb, rotary_emb)
    own: torch.Tensor = type(block).forward(block, hidden_states, encoder_hidden_states, temb, rotary_emb)
    return own


def forward_by_token(
    own: Callable[..., torch.Tensor],
    block: WanTransformerBlock,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor | Texts,
    rows: torch.Tensor,
    row_of_token: torch.Tensor,
    rotary_emb: Rotary,
) -> torch.Tensor:
    """For a compiler: the `own` forward of the block's class, for rows [R, 6, D] and the row of each token [S].

    A compiler reads the rows where it uses them; without one, each token would get a copy of six.
    """
    return own(block, hidden_states, encoder_hidden_states, rows[row_of_token].unsqueeze(0), rotary_emb)
