"""Token chunks: feed-forward hidden states exist for one chunk at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from ..shapes import SHORT_CHUNK

MIN_TOKENS = SHORT_CHUNK + 1
"""Minimum size of a last chunk. MKL has other kernels for fewer fp32 rows, and the last bits
differ."""
ALL = slice(None)
FEED_FORWARD_LAYERS = (2, 3)
"""Numbers of linear layers in a feed-forward: without and with a separate gate."""


def chunk_slices(tokens: int, chunk_tokens: int | None) -> list[slice]:
    """Return slices with `chunk_tokens` tokens.

    A remainder below `MIN_TOKENS` joins the previous chunk.
    """
    if chunk_tokens is None:
        return [ALL]
    slices = []
    start = 0
    while start < tokens:
        end = start + chunk_tokens if tokens - start >= chunk_tokens + MIN_TOKENS else tokens
        slices.append(slice(start, end))
        start = end
    return slices


def feed_forwards(block: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules in `block` with the structure of a feed-forward, with their paths.

    Two or three linear layers lead from the token width to a larger one and back. Some models'
    attention has this structure too. Only a computation shows the difference.
    """
    for path, module in block.named_modules():
        layers = [
            layer
            for layer in module.modules()
            # Not by class: the linear layers in ComfyUI's quantised models are not `nn.Linear`.
            if hasattr(layer, "in_features") and hasattr(layer, "out_features")
        ]
        if len(layers) not in FEED_FORWARD_LAYERS:
            continue
        width = layers[0].in_features
        hidden = layers[-1].in_features
        if layers[-1].out_features == width < hidden:
            yield path, module


class TokenChunks:
    """Feed-forwards in a model that compute a limited number of tokens at once.

    The first call of each computes two chunks together and apart. Further calls are computed in
    chunks only if all bits are equal: attention may have the structure of a feed-forward, and some
    formats scale their inputs by all tokens.

    Args:
        blocks: returns the blocks by path, without compiled ones.
        note: called with sentences about the feed-forwards.

    Attributes:
        chunk_tokens: tokens per chunk. None: all tokens at once.
    """

    def __init__(
        self, blocks: Callable[[], Mapping[str, nn.Module]], note: Callable[[str], None]
    ) -> None:
        self._blocks = blocks
        self._note = note
        self.chunk_tokens: int | None = None
        self._equal: dict[nn.Module, bool] = {}
        """By feed-forward, once it has computed: True if chunks give the bits of the whole."""
        self._replaced: list[tuple[nn.Module, object]] = []

    @property
    def may_help(self) -> bool:
        """True if the blocks have feed-forwards that are not known to differ in chunks."""
        if self.chunk_tokens is None:
            return any(any(feed_forwards(block)) for block in self._blocks().values())
        return any(self._equal.get(module, True) for module, _ in self._replaced)

    def use(self, chunk_tokens: int | None) -> None:
        """Compute this number of tokens at once from now on. None: remove everything."""
        if chunk_tokens == self.chunk_tokens:
            return
        for module, forward in self._replaced:
            # Another pack's code around it keeps it, and computes whole.
            if vars(module).get("forward") is forward:
                del module.forward
        self._replaced.clear()
        self._equal.clear()
        self.chunk_tokens = chunk_tokens
        if chunk_tokens is None:
            return
        for path, block in self._blocks().items():
            for within, module in feed_forwards(block):
                # Another pack's method, which may look at all tokens, stays as it is.
                if "forward" not in vars(module):
                    forward = partial(self._forward, f"{path}.{within}", module, module.forward)
                    module.forward = forward
                    self._replaced.append((module, forward))
        if not self._replaced:
            self._note(
                f"chunk_tokens {chunk_tokens} has no effect: no feed-forward was found in the "
                "blocks, or they are compiled"
            )

    def _forward(
        self,
        path: str,
        module: nn.Module,
        whole: Callable[..., Any],
        tokens: Any,
        *arguments: Any,
        **named: Any,
    ) -> Any:
        """Return the result of `whole`, a method that takes tokens along dim -2."""
        # More arguments may be about positions.
        if arguments or named or not _has_tokens(tokens) or not self._equal.get(module, True):
            return whole(tokens, *arguments, **named)
        slices = chunk_slices(tokens.shape[-2], self.chunk_tokens)
        if len(slices) == 1:
            return whole(tokens)
        if module not in self._equal:
            self._equal[module] = self._compare(path, whole, tokens, slices)
            if not self._equal[module]:
                return whole(tokens)
        # The first chunk gives the dtype and the width. Both may differ from the tokens'.
        first = whole(tokens[..., slices[0], :])
        result = first.new_empty((*tokens.shape[:-1], first.shape[-1]))
        result[..., slices[0], :] = first
        # Freed before the next chunk takes memory.
        del first
        for at in slices[1:]:
            result[..., at, :] = whole(tokens[..., at, :])
        return result

    def _compare(
        self, path: str, whole: Callable[..., Any], tokens: torch.Tensor, slices: list[slice]
    ) -> bool:
        """Return True if the last two chunks have the bits of both computed together."""
        last = slices[-2:]
        # Copies: a feed-forward may overwrite the input.
        together = whole(tokens[..., last[0].start :, :].clone())
        apart = [whole(tokens[..., at, :].clone()) for at in last]
        results = (together, *apart)
        equal = all(isinstance(each, torch.Tensor) for each in results) and torch.equal(
            together, torch.cat(apart, dim=-2)
        )
        words = "computed" if equal else "not computed, because the bits would differ,"
        self._note(
            f"feed-forwards ({_kind(path)}) are {words} in chunks of {self.chunk_tokens} tokens"
        )
        return equal


def _kind(path: str) -> str:
    """Return a module path with a star for the block's position in a list."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", path, count=1)


def _has_tokens(tokens: Any) -> bool:
    return isinstance(tokens, torch.Tensor) and tokens.dim() >= 2
