"""A decode for which the memory was too short is made again in smaller tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from ..offload.shortage import forget, is_out_of_memory
from ..plan.vae_room import DecodeNeeds, VaeRoomError, smaller_tiling
from ..plan.vae_tiles import Tiling

Made = TypeVar("Made")


class NoRoomToDecodeError(VaeRoomError, torch.OutOfMemoryError):
    """The device has too little memory for even the smallest tile; the message says what was tried.

    Also an error of torch's kind: hosts know by it that other models should go.
    """


def with_smaller_tiles(
    decode: Callable[[Tiling | None], Made],
    needs: DecodeNeeds,
    first: Tiling | None,
    on_change: Callable[[str], None] = lambda change: None,
    *,
    is_short: Callable[[RuntimeError], bool] = is_out_of_memory,
) -> Made:
    """What `decode` makes in tiles of `first`, None for whole frames, or in smaller ones where memory runs out.

    Each try halves the area; nothing of a try is left when the next one begins. `on_change` is told of each in words.
    `is_short` says which errors mean that memory ran out.

    Raises:
        NoRoomToDecodeError: the smallest tiles are too large; whatever else `decode` raises goes through.
    """
    tiling = first
    while True:
        try:
            return decode(tiling)
        except RuntimeError as err:
            if not is_short(err):
                raise
            said = forget(err)
        smaller = smaller_tiling(needs, tiling)
        if smaller is None:
            raise NoRoomToDecodeError(f"no memory for {needs.doing} {in_words(tiling)}, the least that can be: {said}")
        on_change(f"no memory for {needs.doing} {in_words(tiling)}: goes on with {in_words(smaller)}")
        tiling = smaller


def in_words(tiling: Tiling | None) -> str:
    """`tiles of 256 pixels`, or `whole frames`."""
    return "whole frames" if tiling is None else f"tiles of {tiling.pixels} pixels"
