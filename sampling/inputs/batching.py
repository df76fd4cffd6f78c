"""Batching: merge several requests into one that shares the weight stream, and split a request."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..cache.settings import CacheSettings
from ..errors import RequestError
from .checks import Texts
from .conditioning import video_text
from .extra_tokens import stacked_tokens
from .request import DenoiseRequest

TENSORS = ("noise", "image_condition", "latent", "mask", "image_embedding")
"""Fields of a request with a tensor for each sample, or one for all of them; texts may also be sequences."""


def merge_requests(requests: Sequence[DenoiseRequest], *, reads_reference: bool = True) -> DenoiseRequest:
    """Return one request for the samples of all `requests`, in their order; a single request is returned as it is.

    The result of each sample is bit-equal to that of its own request; the weights are streamed once for all. Settings
    of steps must be equal in all requests; noise, texts, images and latents may differ.

    Args:
        requests: of one or more samples each.
        reads_reference: the model has a `ref_conv`. Others ignore reference images, which some of the requests may
            then lack.

    Raises:
        RequestError: there is no request, or one does not fit the first; the message has both values.
    """
    if not requests:
        raise RequestError("no lanes: give at least one")
    if len(requests) == 1:
        return requests[0]
    if not reads_reference and len({request.tokens_words for request in requests}) > 1:
        requests = [_without_reference(request) for request in requests]
    first, *others = requests
    for number, other in enumerate(others, 2):
        _check_fits(number, _traits(other), _traits(first))
    batches = [request.batch for request in requests]
    tensors: dict[str, Any] = {
        name: _stacked([getattr(request, name) for request in requests], batches) for name in TENSORS
    }
    return replace(
        first,
        positive=_merged_texts([request.positive for request in requests], batches),
        negative=_merged_texts([request.negative for request in requests], batches) if first.needs_negative else None,
        tokens=stacked_tokens([request.tokens for request in requests], batches),
        negative_tokens=None
        if all(request.negative_tokens is None for request in requests)
        else stacked_tokens([request.tokens_of_sides[1] for request in requests], batches),
        **tensors,
    )


def _without_reference(request: DenoiseRequest) -> DenoiseRequest:
    negative = request.negative_tokens
    return replace(
        request,
        tokens=replace(request.tokens, reference=None),
        negative_tokens=None if negative is None else replace(negative, reference=None),
    )


def _check_fits(number: int, traits: Mapping[str, object], first: Mapping[str, object]) -> None:
    """Raise RequestError for the first trait in which lane `number` differs from lane 1."""
    for name, value in first.items():
        if traits.get(name) != value:
            raise RequestError(
                f"lane {number} does not fit lane 1: {name} {traits.get(name)}, in lane 1 {value}. Lanes of one run "
                "must have the same size, steps and settings: run it separately"
            )


def _traits(request: DenoiseRequest) -> dict[str, object]:
    """Return the values, by name, that must be equal in merged requests."""
    step_plan = request.step_plan
    given = {"start image": request.image_condition, "latent": request.latent, "noise mask": request.mask}
    seen = request.image_embedding
    return {
        "size": video_text(request.noise.shape),
        "steps": len(step_plan.steps),
        "start step": step_plan.start_step,
        "solver": request.solver,
        "NAG": request.nag,
        "context windows": request.windows,
        "cache": "none" if request.cache is None else request.cache.words,
        "every number of the cache, as a digest,": _digest(request.cache),
        "guidance": tuple(request.guidance),
        "context guidance": request.context_guidance,
        "tokens next to the video": request.tokens_words,
        "image embedding": "none" if seen is None else f"{seen.shape[1]} x {seen.shape[2]}",
        "noise": "added" if request.add_noise else "not added",
        **{f"expert of step {step}": step_plan.experts[step] for step in step_plan.steps},
        **{f"guidance of step {step}": step_plan.guidance[step] for step in step_plan.steps},
        **{f"sigma before step {step}": sigma for step, sigma in enumerate(step_plan.schedule.sigmas)},
        **{f"timestep of step {step}": time for step, time in enumerate(step_plan.schedule.timesteps)},
        **{name: "none" if tensor is None else "given" for name, tensor in given.items()},
    }


def _digest(cache: CacheSettings | None) -> str:
    """Return a digest of a cache's settings: two tables of ratios may have the same description."""
    return hashlib.blake2b(repr(cache).encode(), digest_size=4).hexdigest()


def _merged_texts(texts: Sequence[Texts | None], batches: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Return one text for each sample; samples that share a text get the same tensor, which is embedded once."""
    merged: list[torch.Tensor] = []
    for given, batch in zip(texts, batches, strict=True):
        assert given is not None
        own = _single_texts(given) if isinstance(given, torch.Tensor) else list(given)
        merged += own * batch if len(own) == 1 else own
    return tuple(merged)


def _single_texts(texts: torch.Tensor) -> list[torch.Tensor]:
    return [texts] if len(texts) == 1 else list(texts.split(1))


def _stacked(tensors: Sequence[torch.Tensor | None], batches: Sequence[int]) -> torch.Tensor | None:
    """Stack [1 or b, C, ...] of each request into [B, C, ...]; None if there are none."""
    given = [tensor for tensor in tensors if tensor is not None]
    if not given:
        return None
    channels = max(tensor.shape[1] for tensor in given)
    return torch.cat(
        [tensor.expand(batch, channels, *tensor.shape[2:]) for tensor, batch in zip(given, batches, strict=True)]
    )


def split_request(request: DenoiseRequest, sizes: Sequence[int]) -> list[DenoiseRequest]:
    """Return requests for the first `sizes[0]` samples, the next `sizes[1]` and so on.

    The result of each sample is bit-equal to that of the whole request. `merge_requests` of the parts is equal to
    `request`. If there is one size, the request is returned as it is.

    Raises:
        RequestError: the sizes do not add up to the batch, or one is below 1.
    """
    if sum(sizes) != request.batch or any(size < 1 for size in sizes):
        raise RequestError(
            f"sizes {list(sizes)} add up to {sum(sizes)}, but the batch has {request.batch} samples: give sizes of at "
            "least 1 that add up to it"
        )
    if len(sizes) == 1:
        return [request]
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    return [_part(request, slice(end - size, end)) for end, size in zip(ends, sizes, strict=True)]


def _part(request: DenoiseRequest, samples: slice) -> DenoiseRequest:
    fields = (*TENSORS, "positive", "negative")
    parts: dict[str, Any] = {name: _of_samples(getattr(request, name), samples) for name in fields}
    negative = request.negative_tokens
    return replace(
        request,
        tokens=request.tokens.of_samples(samples),
        negative_tokens=None if negative is None else negative.of_samples(samples),
        **parts,
    )


def _of_samples(value: Texts | None, samples: slice) -> Texts | None:
    """Return the samples' part of a value, or the value if all samples share it."""
    if value is None or len(value) == 1:
        return value
    # Cloned, because a pickled view would carry the whole batch to the worker.
    return value[samples].clone() if isinstance(value, torch.Tensor) else tuple(value[samples])
