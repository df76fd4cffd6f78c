"""Temporary replacement of `block.forward`; refuses to restore it if another hook was added on top."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from diffusers.models.transformers.transformer_wan import WanTransformerBlock


class PatchedForwards:
    """Replacement of the forward of blocks from construction until `detach`; nothing else of a block changes.

    Attach before other hooks (context parallelism, caches) and remove those before `detach`: both replace `forward`,
    and the outer one keeps a reference to the inner one.

    Args:
        blocks: those of diffusers' `WanTransformer3DModel`, with their original forward.
        make_forward: returns the replacement for a block.
        name: of the replacement, for messages.

    Raises:
        RuntimeError: the forward of a block is already replaced; nothing was changed.
    """

    def __init__(
        self,
        blocks: Iterable[WanTransformerBlock],
        make_forward: Callable[[WanTransformerBlock], Callable[..., torch.Tensor]],
        *,
        name: str,
    ) -> None:
        self._name = name
        to_patch = list(blocks)
        # All blocks are checked before any is changed, so that an error leaves none half patched.
        for index, block in enumerate(to_patch):
            if "forward" in vars(block):
                raise RuntimeError(f"a hook wraps block {index}: attach the {name} forward before any other hook")
        self._patched = [(block, make_forward(block)) for block in to_patch]
        for block, forward in self._patched:
            # An instance attribute hides the method of the class: `del` restores it, and diffusers' hooks wrap it.
            block.forward = forward

    def detach(self) -> None:
        """Restore the original forward of the blocks. Detaching twice is allowed.

        Raises:
            RuntimeError: a hook was put around a block since; nothing was changed.
        """
        for index, (block, forward) in enumerate(self._patched):
            # Restoring under a hook would leave that hook with a reference to the replacement.
            if vars(block).get("forward") is not forward:
                raise RuntimeError(f"a hook wraps block {index}: remove it before detaching the {self._name} forward")
        for block, _ in self._patched:
            del block.forward
        self._patched = []
