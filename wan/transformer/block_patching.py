"""Temporary replacement of `block.forward`; refuses to restore it if another hook was added on top."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from diffusers.models.transformers.transformer_wan import WanTransformerBlock


class BlockForwards:
    """The forward of blocks, replaced from the making until `detach`; everything else about them stays as it is.

    Attach before hooks are put around the blocks (context parallelism, caches), and take those off before `detach`:
    both replace `forward`, and the outer one holds the inner one.

    Args:
        blocks: of diffusers' `WanTransformer3DModel`, with their own forward.
        forward_of: what a block computes by meanwhile.
        first: for the message, what is to be done before any other hook.
        last: for the message, what a hook is to be removed before.

    Raises:
        RuntimeError: something else has replaced the forward of a block; nothing was changed.
    """

    def __init__(
        self,
        blocks: Iterable[WanTransformerBlock],
        forward_of: Callable[[WanTransformerBlock], Callable[..., torch.Tensor]],
        *,
        first: str,
        last: str,
    ) -> None:
        self._last = last
        replaced = list(blocks)
        for index, block in enumerate(replaced):
            if "forward" in vars(block):
                raise RuntimeError(f"a hook lies around block {index}: {first} before any other hook")
        self._replaced = [(block, forward_of(block)) for block in replaced]
        for block, ours in self._replaced:
            block.forward = ours

    def detach(self) -> None:
        """Give the blocks back their own forward. Detaching twice is allowed.

        Raises:
            RuntimeError: something was put around the forward of a block since; nothing was changed.
        """
        for index, (block, ours) in enumerate(self._replaced):
            if vars(block).get("forward") is not ours:
                raise RuntimeError(f"a hook lies around block {index}: remove it before {self._last}")
        for block, _ in self._replaced:
            del block.forward
        self._replaced = []
