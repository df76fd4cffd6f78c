"""Batching: merge requests into one that shares the weight stream, and split a request."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..cache.settings import CacheSettings
from ..steps.errors import RequestError
from ..steps.sides import Side
from .conditioning import video_text
from .extra_tokens import ExtraTokens
from .request import DenoiseRequest
from .run_inputs import RunInputs, Texts

TENSORS = ("noise", "image_condition", "latent", "mask", "image_embedding")
"""`RunInputs` fields with one tensor per sample, or one for all. Texts may also be sequences."""


def merge_requests(
    requests: Sequence[DenoiseRequest], *, reads_reference: bool = True
) -> DenoiseRequest:
    """Return one request for the samples in all `requests`, in order.

    A single request is returned unchanged.

    Each sample's result is bit-equal to that of a separate request. The weights are streamed once
    for all. Step settings must be equal in all requests. Noise, texts, images and latents may
    differ.

    Args:
        requests: requests with one or more samples each.
        reads_reference: the model has a `ref_conv`. Other models ignore reference images, so some
            requests may lack them.

    Raises:
        RequestError: there is no request, or one does not fit the first. The message has both
            values.
    """
    if not requests:
        raise RequestError("no lanes: give at least one")
    if len(requests) == 1:
        return requests[0]
    if not reads_reference and len({request.inputs.tokens_words for request in requests}) > 1:
        requests = [_without_reference(request) for request in requests]
    first, *others = requests
    for number, other in enumerate(others, 2):
        _check_fits(number, _traits(other), _traits(first))
    parts = [request.inputs for request in requests]
    batches = [part.batch for part in parts]
    merged: dict[str, Any] = {
        name: _stacked([getattr(part, name) for part in parts], batches) for name in TENSORS
    }
    merged["positive"] = _merged_texts([part.positive for part in parts], batches)
    merged["negative"] = merged["negative_tokens"] = None
    if first.guidance_settings.needs_negative:
        merged["negative"] = _merged_texts([part.negative for part in parts], batches)
    merged["tokens"] = _stacked_tokens([part.tokens for part in parts], batches)
    if any(part.negative_tokens is not None for part in parts):
        merged["negative_tokens"] = _stacked_tokens(
            [part.tokens_of_sides[Side.NEGATIVE] for part in parts], batches
        )
    return first.replaced(inputs=replace(first.inputs, **merged))


def _without_reference(request: DenoiseRequest) -> DenoiseRequest:
    inputs = request.inputs
    negative = inputs.negative_tokens
    if negative is not None:
        negative = negative.read_by(False)
    tokens = inputs.tokens.read_by(False)
    return request.replaced(inputs=replace(inputs, tokens=tokens, negative_tokens=negative))


def _check_fits(number: int, traits: Mapping[str, object], first: Mapping[str, object]) -> None:
    """Raise RequestError for the first trait in which lane `number` differs from lane 1."""
    for name, value in first.items():
        if traits.get(name) != value:
            raise RequestError(
                f"lane {number} does not fit lane 1: {name} {traits.get(name)}, in lane 1 {value}. "
                "Lanes of one run must have the same size, steps and settings: run it separately"
            )


def _traits(request: DenoiseRequest) -> dict[str, object]:
    """Return the values that merged requests must share, by name."""
    step_plan = request.step_plan
    inputs = request.inputs
    guidance = request.guidance_settings
    options = request.options
    given = {
        "start image": inputs.image_condition,
        "latent": inputs.latent,
        "noise mask": inputs.mask,
    }
    seen = inputs.image_embedding
    return {
        "size": video_text(request.noise.shape),
        "steps": len(step_plan.steps),
        "start step": step_plan.start_step,
        "solver": request.step_settings.solver,
        "NAG": guidance.nag,
        "context windows": options.windows,
        "cache": "none" if options.cache is None else options.cache.words,
        "every number of the cache, as a digest,": _digest(options.cache),
        "guidance": tuple(guidance.scales),
        "context guidance": guidance.context,
        "tokens next to the video": inputs.tokens_words,
        "image embedding": "none" if seen is None else f"{seen.shape[1]} x {seen.shape[2]}",
        "noise": "added" if inputs.add_noise else "not added",
        **{f"expert of step {step}": step_plan.experts[step] for step in step_plan.steps},
        **{f"guidance of step {step}": step_plan.guidance[step] for step in step_plan.steps},
        **{
            f"sigma before step {step}": sigma
            for step, sigma in enumerate(step_plan.schedule.sigmas)
        },
        **{
            f"timestep of step {step}": time
            for step, time in enumerate(step_plan.schedule.timesteps)
        },
        **{name: "none" if tensor is None else "given" for name, tensor in given.items()},
    }


def _digest(cache: CacheSettings | None) -> str:
    """Return a digest of cache settings, as two ratio tables may have the same description."""
    return hashlib.blake2b(repr(cache).encode(), digest_size=4).hexdigest()


def _merged_texts(
    texts: Sequence[Texts | None], batches: Sequence[int]
) -> tuple[torch.Tensor, ...]:
    """Return one text per sample.

    Samples with the same text get the same tensor, embedded once.
    """
    merged: list[torch.Tensor] = []
    for given, batch in zip(texts, batches, strict=True):
        assert given is not None
        if len(given) == 1:
            # One object for all samples, because the embedder hashes each object once.
            (text,) = [given] if isinstance(given, torch.Tensor) else given
            merged += [text] * batch
        elif isinstance(given, torch.Tensor):
            merged += given.split(1)
        else:
            merged += given
    return tuple(merged)


def _stacked_tokens(each: Sequence[ExtraTokens], batches: Sequence[int]) -> ExtraTokens:
    """Return the tokens of several requests with equal shapes as one request's tokens."""
    contexts = zip(*(tokens.context for tokens in each), strict=True)
    return ExtraTokens(
        foreign_reference=next(filter(None, (tokens.foreign_reference for tokens in each)), ""),
        reference=_stacked([tokens.reference for tokens in each], batches),
        context=tuple(_stacked(latents, batches) for latents in contexts),
    )


def _stacked(tensors: Sequence[Any], batches: Sequence[int]) -> Any:
    """Stack each request's [1 or b, C, ...] into [B, C, ...]. None without tensors."""
    given = [tensor for tensor in tensors if tensor is not None]
    if not given:
        return None
    # A merged mask may have one channel in one request and all channels in another.
    channels = max(tensor.shape[1] for tensor in given)
    pairs = zip(given, batches, strict=True)
    return torch.cat([each.expand(batch, channels, *each.shape[2:]) for each, batch in pairs])


def split_request(request: DenoiseRequest, sizes: Sequence[int]) -> list[DenoiseRequest]:
    """Return requests for the first `sizes[0]` samples, the next `sizes[1]` and so on.

    Each sample's result is bit-equal to that of the whole request. `merge_requests` of the parts is
    equal to `request`. For one size, the request is returned unchanged.

    Raises:
        RequestError: the sizes do not add up to the batch, or one is below 1.
    """
    if sum(sizes) != request.batch or any(size < 1 for size in sizes):
        raise RequestError(
            f"sizes {list(sizes)} add up to {sum(sizes)}, but the batch has {request.batch} "
            "samples: give sizes of at least 1 that add up to it"
        )
    if len(sizes) == 1:
        return [request]
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    samples = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    return [request.replaced(inputs=_part(request.inputs, part)) for part in samples]


def _part(inputs: RunInputs, samples: slice) -> RunInputs:
    fields = (*TENSORS, "positive", "negative")
    parts: dict[str, Any] = {name: _of_samples(getattr(inputs, name), samples) for name in fields}
    for name in ("tokens", "negative_tokens"):
        tokens: ExtraTokens | None = getattr(inputs, name)
        if tokens is not None:
            parts[name] = tokens.mapped(lambda latents: _of_samples(latents, samples))
    return replace(inputs, **parts)


def _of_samples(value: Any, samples: slice) -> Any:
    """Return the samples' part of a tensor, texts or None. A shared value stays whole."""
    if value is None or len(value) == 1:
        return value
    if isinstance(value, torch.Tensor):
        # Cloned, because a pickled view would carry the whole batch to the worker.
        return value[samples].clone()
    return tuple(value[samples])
