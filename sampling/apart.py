"""One request as several: the way back from `joined`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from .checks import Texts
from .errors import RequestError
from .request import DenoiseRequest


def apart(request: DenoiseRequest, sizes: Sequence[int]) -> list[DenoiseRequest]:
    """Requests for the first `sizes[0]` samples, the next `sizes[1]` and so on; joined, they are `request` again.

    Each sample comes out as from the whole request, bit for bit. What all samples share, every part has. A request for
    all samples stays what it is.

    Raises RequestError for sizes that are not those of parts of this request.
    """
    if sum(sizes) != request.batch or any(size < 1 for size in sizes):
        raise RequestError(
            f"parts of {list(sizes)} samples are no parts of {request.batch}: give sizes that make it up"
        )
    if len(sizes) == 1:
        return [request]
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    return [_part(request, slice(end - size, end)) for end, size in zip(ends, sizes, strict=True)]


def _part(request: DenoiseRequest, samples: slice) -> DenoiseRequest:
    return replace(
        request,
        noise=request.noise[samples].clone(),
        positive=_texts(request.positive, samples),
        negative=None if request.negative is None else _texts(request.negative, samples),
        image_condition=_tensor(request.image_condition, samples),
        latent=_tensor(request.latent, samples),
        mask=_tensor(request.mask, samples),
        image_embedding=_tensor(request.image_embedding, samples),
    )


def _texts(texts: Texts, samples: slice) -> Texts:
    if isinstance(texts, torch.Tensor):
        return texts if len(texts) == 1 else texts[samples].clone()
    return tuple(texts[samples])


def _tensor(tensor: torch.Tensor | None, samples: slice) -> torch.Tensor | None:
    """Those of the samples; one for all is everybody's. A copy, as a part travels without the rest."""
    return tensor if tensor is None or len(tensor) == 1 else tensor[samples].clone()
