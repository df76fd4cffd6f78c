"""Tokens next to a lane's video: a reference image (Fun Control), contexts (Bernini).

Contexts are videos and images.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from ...shapes import ContextWindows, patch_grid
from ...wan.latents import SPACES, normalise
from ..steps.errors import ConditioningError, RequestError

REFERENCE_KEY = "reference_latents"
CONTEXT_KEY = "context_latents"
"""CONDITIONING keys, each for a list of raw latents."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ExtraTokens:
    """Tokens next to the video in one CFG side's lanes.

    Latents are normalised, and for one sample or for each of B.
    """

    reference: torch.Tensor | None = None
    """[1 or B, C, 1, h, w]: a reference image in the video's size, before the video. Models without
    `ref_conv` ignore it, as in ComfyUI."""
    context: tuple[torch.Tensor, ...] = ()
    """[1 or B, C, t, h, w] each, in any length and size: sources 1, 2, ..., behind the video."""
    foreign_reference: str = ""
    """Description of a reference that is not a Wan latent. Only models with `ref_conv` refuse
    it."""

    def __bool__(self) -> bool:
        return self.reference is not None or bool(self.context)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All latents, in token order."""
        if self.reference is None:
            return self.context
        return (self.reference, *self.context)

    @property
    def words(self) -> str:
        """Description of the shapes, equal in requests that can be merged."""
        words = ["reference"] * (self.reference is not None)
        words += [" x ".join(map(str, latents.shape[2:])) for latents in self.tensors]
        return ", ".join(words) or "none"

    def count(self, frames: int, windows: ContextWindows | None, *, reads_reference: bool) -> int:
        """Return the number of tokens in a lane.

        Args:
            frames: latent frames in the video.
            windows: context windows. Each lane has one.
            reads_reference: the model has a `ref_conv`.
        """
        count = 0
        for latents in self.read_by(reads_reference).tensors:
            length, *size = latents.shape[2:]
            if windows is not None and is_cut(latents, frames):
                length = windows.frames
            count += prod(patch_grid((length, *size)))
        return count

    def read_by(self, reads_reference: bool) -> ExtraTokens:
        """Return the tokens read by a model with or without a `ref_conv`."""
        if reads_reference:
            return self
        return replace(self, reference=None)

    def of_sample(self, sample: int) -> ExtraTokens:
        """Return one sample's tokens, as views."""
        return self.mapped(
            lambda latents: latents if len(latents) == 1 else latents[sample : sample + 1]
        )

    def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> ExtraTokens:
        """Return a copy with `change` applied to all latents."""
        reference = self.reference
        if reference is not None:
            reference = change(reference)
        return replace(self, reference=reference, context=tuple(map(change, self.context)))


NO_TOKENS = ExtraTokens()


def tokens_by_side(
    positive: ExtraTokens, negative: ExtraTokens
) -> tuple[ExtraTokens, ExtraTokens, ExtraTokens]:
    """Return tokens by CFG side number."""
    # The third side has no context, but keeps the reference.
    return positive, negative, replace(negative, context=())


def is_cut(context: torch.Tensor, frames: int) -> bool:
    """Return True if a context is cut with a video's windows, as in ComfyUI.

    A context is cut if it has more than one frame and `frames` latent frames, like the video.
    References stay whole.
    """
    return context.shape[2] > 1 and context.shape[2] == frames


def same_tokens(one: ExtraTokens, other: ExtraTokens) -> bool:
    """Return True if both sides have equal tokens."""
    if (one.words, one.foreign_reference) != (other.words, other.foreign_reference):
        return False
    pairs = zip(one.tensors, other.tensors, strict=True)
    return all(a is b or torch.equal(a, b) for a, b in pairs)


def check_tokens(name: str, tokens: ExtraTokens, *, batch: int) -> None:
    """Raise RequestError for latents that cannot be tokens in a request with `batch` samples."""
    if tokens.reference is not None:
        check_batch(f"the reference of {name}", tokens.reference, batch, "C, t, h, w")
    for number, latents in enumerate(tokens.context, 1):
        check_batch(f"context {number} of {name}", latents, batch, "C, t, h, w")


def check_batch(name: str, values: torch.Tensor, batch: int, size: str, content: str = "") -> None:
    """Raise RequestError unless values are floating-point numbers [1 or batch, *size].

    Args:
        size: dimension names after the first one, for the message.
        content: description of the values to give, for the message.
    """
    shape = list(values.shape)
    # Two dimensions, batch and first name, and one more for each comma in `size`.
    fits = len(shape) == 2 + size.count(",") and 0 not in shape and shape[0] in (1, batch)
    if not fits or not values.is_floating_point():
        wanted = " or ".join(map(str, sorted({1, batch})))
        raise RequestError(f"{name} is {shape} ({values.dtype}): give {content}[{wanted}, {size}]")


def check_tokens_fit(
    tokens: ExtraTokens, shape: Sequence[int], *, in_channels: int, reference_channels: int | None
) -> None:
    """Raise RequestError unless a model embeds tokens next to a video with `shape` [B, C, T, h, w].

    Args:
        in_channels: input channels of the model's patch embedding.
        reference_channels: input channels of its `ref_conv`. None: there is none, and a reference
            is ignored.
    """
    if tokens.foreign_reference and reference_channels is not None:
        raise RequestError(
            f"{tokens.foreign_reference}, and this model reads a latent of Wan there: remove the "
            "node for another model that made it"
        )
    reference = tokens.reference
    wanted = (reference_channels, 1, *shape[3:])
    if reference is not None and reference_channels is not None and reference.shape[1:] != wanted:
        raise RequestError(
            f"the reference image ({REFERENCE_KEY}) is a latent of {list(reference.shape)}, and a "
            f"video of this size takes {[1, *wanted]}: give the reference and the video the same "
            "width and height"
        )
    for number, context in enumerate(tokens.context, 1):
        if context.shape[1] != in_channels:
            raise RequestError(
                f"context {number} ({CONTEXT_KEY}) has {context.shape[1]} channels, and these "
                f"experts take {in_channels}: remove the node that made it, or choose Bernini's "
                "experts, which are text-to-video"
            )


def native_tokens(side: str, options: Mapping[str, Any]) -> ExtraTokens:
    """Return the tokens in a native CONDITIONING entry.

    Raises:
        ConditioningError: a context is not a list of raw latents [b, C, t, h, w]. The message has
            the side and the key.
    """
    references = _listed(options.get(REFERENCE_KEY))
    context = _listed(options.get(CONTEXT_KEY))
    for latents in context:
        if not _is_wan(latents):
            raise ConditioningError(
                f"{_foreign(side, CONTEXT_KEY, latents)}: remove the node for another model that "
                "made it"
            )
    found = ExtraTokens(context=tuple(normalise(latents.float()) for latents in context))
    # Native sampling reads the first frame of the last one. Graphs for several models also carry
    # other models' references.
    if not references or references[-1] is None:
        return found
    if not _is_wan(references[-1]):
        return replace(found, foreign_reference=_foreign(side, REFERENCE_KEY, references[-1]))
    return replace(found, reference=normalise(references[-1][:, :, :1].float()))


def _listed(value: object) -> Sequence[Any]:
    if value is None:
        return ()
    if isinstance(value, list | tuple):
        return value
    return (value,)


def _is_wan(latents: object) -> bool:
    channels = [space.channels for space in SPACES]
    return isinstance(latents, torch.Tensor) and latents.ndim == 5 and latents.shape[1] in channels


def _foreign(side: str, key: str, latents: object) -> str:
    what = list(latents.shape) if isinstance(latents, torch.Tensor) else type(latents).__name__
    channels = " or ".join(str(space.channels) for space in SPACES)
    return f"{side} carries {what} under '{key}', and a latent of Wan is [b, {channels}, t, h, w]"
