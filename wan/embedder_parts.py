"""The parts of an expert's embedder, and the rows that it makes; `projections.py` has the embedder itself."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch

EmbedderPart = Literal["time", "text"]
PARTS: tuple[EmbedderPart, ...] = ("time", "text")

Rows: TypeAlias = "tuple[torch.Tensor, torch.Tensor, torch.Tensor]"
"""Time [1, D], modulation [1, 6 D], text [1, L, D]."""

EMBEDDER = "condition_embedder."


def part_of(parameter: str) -> EmbedderPart | None:
    """The part of the embedder that a parameter of the model belongs to; None: to neither, or to the image branch."""
    if not parameter.startswith(EMBEDDER) or parameter.startswith(f"{EMBEDDER}image_embedder."):
        return None
    return "text" if parameter.startswith(f"{EMBEDDER}text_embedder.") else "time"
