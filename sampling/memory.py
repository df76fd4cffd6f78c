"""Memory of a run: estimated activation bytes, and checks that a run fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch

from ..devices import available_bytes, free_bytes
from ..plan import CHUNKS, shrink_to_budget
from ..schema import KernelNeeds, OffloadPolicy, largest_share, patch_grid
from ..wan import ATTENTIONS, ExpertPair
from .cache.settings import CacheSettings
from .errors import InsufficientMemoryError
from .inputs.extra_tokens import tokens_by_side
from .inputs.request import DenoiseRequest
from .loop.parallel import WHOLE_STEP, Share


def working_bytes(
    pair: ExpertPair,
    shape: Sequence[int],
    *,
    sides: Sequence[int],
    chunk_tokens: int | None = None,
    share: Share = WHOLE_STEP,
    cache: CacheSettings | None = None,
) -> int:
    """Estimate the bytes in addition to the weights for steps on latents of `shape` [B, 16, T, h, w].

    Args:
        sides: for each CFG side, the tokens of a lane next to those of its video, as of `extra_tokens_of`.
        chunk_tokens: tokens computed at once, of the policy; None: all.
        share: this worker's share of a step.
        cache: step cache, whose tensors are included.
    """
    expert = pair.high.config.shape
    return expert.lanes_bytes(
        largest_share(lane_tokens(shape, sides), share.cfg),
        value_bytes=pair.compute_dtype.itemsize,
        chunk_tokens=chunk_tokens,
        ring=share.ring,
        ulysses=share.ulysses,
        cached_states=0 if cache is None else cache.cached_states,
        kernels=kernel_needs(pair),
    )


def kernel_needs(pair: ExpertPair) -> KernelNeeds:
    """Return what the kernels of the pair's blocks allocate; most layers of a file are in one format."""
    return KernelNeeds(
        attention_bytes=ATTENTIONS[pair.kernels.attention].working_bytes, linear_format=next(iter(pair.multiplied), "")
    )


def tokens_of(shape: Sequence[int]) -> int:
    """Return the number of tokens of one lane of latents [B, 16, T, h, w]."""
    return prod(patch_grid(shape[2:]))


def lane_tokens(shape: Sequence[int], sides: Sequence[int]) -> tuple[int, ...]:
    """Return the tokens of each lane of a step on latents [B, 16, T, h, w]; for `sides` see `working_bytes`."""
    return tuple(tokens_of(shape) + extra for extra in sides for _ in range(shape[0]))


def extra_tokens_of(pair: ExpertPair, request: DenoiseRequest, expert: str | None = None) -> tuple[int, ...]:
    """Return the tokens of a lane next to those of its video for each CFG side, in the order of the lanes.

    They are those of the step with most sides that `expert` may take; None: either expert.
    """
    frames, windows = request.noise.shape[2], request.windows
    window = frames if windows is None else windows.frames
    tokens = tokens_by_side(*request.tokens_of_sides)
    return tuple(
        tokens[side].count(reads_reference=pair.reads_reference, frames=frames, window=window)
        for side in request.sides_of(expert)
    )


def check_room(
    pair: ExpertPair,
    request: DenoiseRequest,
    policy: OffloadPolicy,
    device: torch.device,
    *,
    free: int | None = None,
) -> None:
    """Refuse a request of several samples that does not fit even under the smallest policy.

    Args:
        free: bytes for weights and activations together; None: the free bytes of `device` and those that the pair's
            weights take there now.

    Raises:
        InsufficientMemoryError: it does not fit; the message has the number of samples that do.
    """
    # A single sample has no smaller batch to propose: its run falls back to smaller policies on its own.
    if request.batch == 1:
        return
    sides = extra_tokens_of(pair, request)
    smallest = smallest_policy(pair, policy, tokens_of(request.computed_shape) + max(sides), device)
    weights = pair.device_bytes(smallest, device=device)

    def needed(samples: int) -> int:
        lanes, *size = request.computed_shape
        shape = (samples * lanes // request.batch, *size)
        chunk, cache = smallest.chunk_tokens, request.cache
        return working_bytes(pair, shape, sides=sides, chunk_tokens=chunk, cache=cache)

    if free is None:
        on_device = free_bytes(device)
        free = (available_bytes() if on_device is None else on_device) + pair.loaded_bytes
    available = free - weights
    fitting = next(count for count in range(request.batch, -1, -1) if count == 0 or needed(count) <= available)
    if fitting == request.batch:
        return
    remedy = (
        f"{fitting} of them would fit: use {fitting} lanes (or a batch of {fitting})"
        if fitting
        else "Not even one of them would fit: make the video smaller or shorter"
    )
    raise InsufficientMemoryError(
        f"{request.batch} videos at once need {bytes_text(needed(request.batch))} of working memory and "
        f"{bytes_text(weights)} for weights in the fewest buffers; {bytes_text(available + weights)} are free for "
        f"both. {remedy}, or close other programs that use the device"
    )


def smallest_policy(pair: ExpertPair, policy: OffloadPolicy, tokens: int, device: torch.device) -> OffloadPolicy:
    """Return the smallest policy that a run of `tokens` would fall back to from `policy`."""
    smallest = shrink_to_budget(
        policy, pair.block_counts, budget=0, device_bytes=lambda each: pair.device_bytes(each, device=device)
    )
    fewest = min(chunk for chunk in CHUNKS if chunk is not None)
    at_once = tokens if policy.chunk_tokens is None else policy.chunk_tokens
    return replace(smallest, chunk_tokens=fewest if fewest < at_once else policy.chunk_tokens)


def bytes_text(nbytes: float) -> str:
    """Format bytes in GB, or in MB if they are few."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e7 else f"{nbytes / 1e6:.2f} MB"
