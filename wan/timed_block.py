"""Blocks as they are, but for lanes whose frames have timesteps of their own; see `frame_times.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch

from .chunked_block import Rotary, chunked_forward
from .frame_times import FrameModulation

if TYPE_CHECKING:
    from diffusers.models.transformers.transformer_wan import WanTransformerBlock

    from .nag import Texts


class TimedBlocks:
    """Blocks that take a `FrameModulation` too, from their making until `detach`.

    Attach before hooks are put around the blocks (context parallelism, caches), and take those off before `detach`.

    Raises:
        RuntimeError: something else has replaced the forward of a block.
    """

    def __init__(self, blocks: Iterable[WanTransformerBlock]) -> None:
        self._blocks = list(blocks)
        for index, block in enumerate(self._blocks):
            if "forward" in vars(block):
                raise RuntimeError(f"a hook lies around block {index}: take timesteps of frames before any other hook")
        self._forwards: list[Callable[..., torch.Tensor]] = []
        for block in self._blocks:
            block.forward = partial(_forward, block)
            self._forwards.append(block.forward)

    def detach(self) -> None:
        """Give the blocks back their own forward. Detaching twice is allowed.

        Raises:
            RuntimeError: something was put around the forward of a block since; nothing was changed.
        """
        for index, (block, ours) in enumerate(zip(self._blocks, self._forwards, strict=True)):
            if vars(block).get("forward") is not ours:
                raise RuntimeError(f"a hook lies around block {index}: remove it before the block is its own again")
        for block in self._blocks:
            del block.forward
        self._blocks, self._forwards = [], []


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
