"""Tokens of a lane next to its video: a reference image (Fun Control), context videos and images (Bernini)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from ...schema import patch_grid
from ...wan import SPACES, normalise
from ..errors import ConditioningError, RequestError

REFERENCE_KEY = "reference_latents"
CONTEXT_KEY = "context_latents"
"""Keys of a CONDITIONING, each a list of raw latents."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ExtraTokens:
    """Tokens of the lanes of one CFG side next to those of the video.

    Latents are normalised, and for one sample or for each of B.
    """

    reference: torch.Tensor | None = None
    """[1 or B, C, 1, h, w]: a reference image of the size of the video, before the video. Models without `ref_conv`
    ignore it, as in ComfyUI."""
    context: tuple[torch.Tensor, ...] = ()
    """[1 or B, C, t, h, w] each, of any length and size: sources 1, 2, ..., behind the video."""
    foreign_reference: str = ""
    """Description of a reference that is no latent of Wan. Only models with `ref_conv` refuse it."""

    def __bool__(self) -> bool:
        return self.reference is not None or bool(self.context)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All latents, in the order of their tokens."""
        return (*(() if self.reference is None else (self.reference,)), *self.context)

    @property
    def words(self) -> str:
        """Description of the shapes, which are equal in requests that can be merged."""
        shapes = [" x ".join(map(str, latents.shape[2:])) for latents in self.tensors]
        return ", ".join(["reference" * (self.reference is not None), *shapes]).strip(", ") or "none"

    def count(self, *, reads_reference: bool, frames: int, window: int) -> int:
        """Return the number of tokens.

        Args:
            reads_reference: the model has a `ref_conv`.
            frames: latent frames of the video.
            window: latent frames of a lane: those of a context window, or `frames`.
        """
        reference = () if self.reference is None or not reads_reference else (self.reference,)
        lengths = [(latents, latents.shape[2]) for latents in reference]
        lengths += [(latents, window if is_cut(latents, frames) else latents.shape[2]) for latents in self.context]
        return sum(prod(patch_grid((length, *latents.shape[3:]))) for latents, length in lengths)

    def to(self, device: torch.device) -> ExtraTokens:
        """Return a copy on `device`."""
        return self._mapped(lambda latents: latents.to(device))

    def of_sample(self, sample: int, *, reads_reference: bool) -> ExtraTokens:
        """Return the tokens of one sample, as views; without the reference for a model that ignores it."""
        own = self._mapped(lambda latents: latents if len(latents) == 1 else latents[sample : sample + 1])
        return own if reads_reference else replace(own, reference=None)

    def of_samples(self, samples: slice) -> ExtraTokens:
        """Return the part of some samples; latents that all samples share stay whole."""
        # Cloned, because a pickled view would carry the whole batch to the worker.
        return self._mapped(lambda latents: latents if len(latents) == 1 else latents[samples].clone())

    def expanded(self, batch: int) -> ExtraTokens:
        """Return latents for each of `batch` samples."""
        return self._mapped(lambda latents: latents.expand(batch, *latents.shape[1:]))

    def _mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> ExtraTokens:
        reference = None if self.reference is None else change(self.reference)
        return replace(self, reference=reference, context=tuple(change(latents) for latents in self.context))


NO_TOKENS = ExtraTokens()


def tokens_by_side(positive: ExtraTokens, negative: ExtraTokens) -> tuple[ExtraTokens, ExtraTokens, ExtraTokens]:
    """Return the tokens of each CFG side, at the index of its number."""
    return positive, negative, replace(negative, context=())


def is_cut(context: torch.Tensor, frames: int) -> bool:
    """Return True if a context is cut with the windows of a video of `frames` latent frames, as in ComfyUI.

    It is if it has more than one frame and as many as the video; references stay whole.
    """
    return context.shape[2] > 1 and context.shape[2] == frames


def stacked_tokens(each: Sequence[ExtraTokens], batches: Sequence[int]) -> ExtraTokens:
    """Return the tokens of several requests, of equal shapes, as those of one."""
    if not any(each) and not any(tokens.foreign_reference for tokens in each):
        return NO_TOKENS
    every = [tokens.expanded(batch) for tokens, batch in zip(each, batches, strict=True)]
    reference = None
    if every[0].reference is not None:
        reference = torch.cat([tokens.reference for tokens in every if tokens.reference is not None])
    return ExtraTokens(
        foreign_reference=next((tokens.foreign_reference for tokens in each if tokens.foreign_reference), ""),
        reference=reference,
        context=tuple(torch.cat(latents) for latents in zip(*(tokens.context for tokens in every), strict=True)),
    )


def same_tokens(one: ExtraTokens, other: ExtraTokens) -> bool:
    """Return True if both sides have equal tokens."""
    return (
        len(one.tensors) == len(other.tensors)
        and one.foreign_reference == other.foreign_reference
        and (one.reference is None) == (other.reference is None)
        and all(a is b or torch.equal(a, b) for a, b in zip(one.tensors, other.tensors, strict=True))
    )


def check_tokens(name: str, tokens: ExtraTokens, *, batch: int) -> None:
    """Raise RequestError for latents that cannot be tokens of a request of `batch` samples."""
    given = {"the reference": tokens.reference} if tokens.reference is not None else {}
    given |= {f"context {number}": latents for number, latents in enumerate(tokens.context, 1)}
    for what, latents in given.items():
        shape = list(latents.shape)
        if latents.ndim != 5 or 0 in shape or shape[0] not in (1, batch) or not latents.is_floating_point():
            wanted = " or ".join(str(size) for size in sorted({1, batch}))
            raise RequestError(f"{what} of {name} is {shape} ({latents.dtype}): give [{wanted}, C, t, h, w]")


def check_tokens_fit(
    tokens: ExtraTokens, shape: Sequence[int], *, in_channels: int, reference_channels: int | None
) -> None:
    """Raise RequestError unless a model can embed the tokens next to a video of `shape` [B, C, T, h, w].

    Args:
        in_channels: input channels of the model's patch embedding.
        reference_channels: those of its `ref_conv`; None: it has none, and ignores a reference.
    """
    if tokens.foreign_reference and reference_channels is not None:
        raise RequestError(
            f"{tokens.foreign_reference}, and this model reads a latent of Wan there: remove the node for another "
            "model that made it"
        )
    reference, wanted = tokens.reference, (reference_channels, 1, *shape[3:])
    if reference is not None and reference_channels is not None and reference.shape[1:] != wanted:
        raise RequestError(
            f"the reference image ({REFERENCE_KEY}) is a latent of {list(reference.shape)}, and a video of this size "
            f"takes {[1, *wanted]}: give the reference and the video the same width and height"
        )
    for number, context in enumerate(tokens.context, 1):
        if context.shape[1] != in_channels:
            raise RequestError(
                f"context {number} ({CONTEXT_KEY}) has {context.shape[1]} channels, and these experts take "
                f"{in_channels}: remove the node that made it, or choose Bernini's experts, which are text-to-video"
            )


def native_tokens(side: str, options: Mapping[str, Any]) -> ExtraTokens:
    """Return the tokens of a native CONDITIONING entry.

    Raises:
        ConditioningError: a context is not a list of raw latents [b, C, t, h, w]; the message has the side and the key.
    """
    references, context = _listed(options.get(REFERENCE_KEY)), _listed(options.get(CONTEXT_KEY))
    if foreign := next((_foreign(side, CONTEXT_KEY, latents) for latents in context if not _is_wan(latents)), None):
        raise ConditioningError(f"{foreign}: remove the node for another model that made it")
    # Native sampling reads the first frame of the last one. Graphs for several models carry those of others.
    last = references[-1] if references else None
    if last is not None and not _is_wan(last):
        found = ExtraTokens(foreign_reference=_foreign(side, REFERENCE_KEY, last))
    else:
        found = ExtraTokens(reference=None if last is None else normalise(last[:, :, :1].float()))
    return replace(found, context=tuple(normalise(latents.float()) for latents in context))


def _listed(value: object) -> Sequence[Any]:
    return () if value is None else value if isinstance(value, list | tuple) else (value,)


def _is_wan(latents: object) -> bool:
    channels = [space.channels for space in SPACES]
    return isinstance(latents, torch.Tensor) and latents.ndim == 5 and latents.shape[1] in channels


def _foreign(side: str, key: str, latents: object) -> str:
    what = list(latents.shape) if isinstance(latents, torch.Tensor) else type(latents).__name__
    channels = " or ".join(str(space.channels) for space in SPACES)
    return f"{side} carries {what} under '{key}', and a latent of Wan is [b, {channels}, t, h, w]"
