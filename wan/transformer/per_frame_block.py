"""Block forwards that accept per-frame timesteps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch

from .block_patching import PatchedForwards
from .chunked_block import Rotary, chunked_forward
from .per_frame_timestep import FrameModulation

if TYPE_CHECKING:
    from diffusers.models.transformers.transformer_wan import WanTransformerBlock

    from .nag import Texts


class PerFrameBlocks(PatchedForwards):
    """Blocks that also accept a `FrameModulation`; see `PatchedForwards`."""

    def __init__(self, blocks: Iterable[WanTransformerBlock]) -> None:
        super().__init__(blocks, lambda block: partial(_forward, block), name="per-frame")


def _forward(
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


def forward_by_token(
    original: Callable[..., torch.Tensor],
    block: WanTransformerBlock,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor | Texts,
    rows: torch.Tensor,
    row_of_token: torch.Tensor,
    rotary_emb: Rotary,
) -> torch.Tensor:
    """Call the block class' `original` forward with rows [R, 6, D] and the row index of each token [S].

    Only for compilers: these fuse the lookup into its use, whereas eager code would copy six rows for each token.
    """
    return original(block, hidden_states, encoder_hidden_states, rows[row_of_token].unsqueeze(0), rotary_emb)
