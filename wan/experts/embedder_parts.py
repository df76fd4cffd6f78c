"""Parts of an expert's embedders and the rows that they make. Kept apart from embedders.py, which imports diffusers."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch

EmbedderPart = Literal["time", "text"]


PARTS: tuple[EmbedderPart, ...] = ("time", "text")


Rows: TypeAlias = "tuple[torch.Tensor, torch.Tensor, torch.Tensor]"
"""Time [1, D], modulation [1, 6 D] and text [1, L, D]."""


EMBEDDER = "condition_embedder."


def embedder_part(parameter: str) -> EmbedderPart | None:
    """Return the embedder part of a model parameter; None for other parameters, those of the image branch included."""
    if not parameter.startswith(EMBEDDER) or parameter.startswith(f"{EMBEDDER}image_embedder."):
        return None
    return "text" if parameter.startswith(f"{EMBEDDER}text_embedder.") else "time"
