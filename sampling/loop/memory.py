"""Run memory: estimated activation bytes, and checks that a run fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch

from ...block_kernels import ATTENTIONS
from ...devices import free_bytes
from ...devices.machine import available_bytes
from ...plan import shrink_to_budget
from ...schema import Mesh, OffloadPolicy, largest_share
from ...shapes import CHUNKS, KernelNeeds, patch_grid
from ...wan import ExpertPair
from ..cache.settings import CacheSettings
from ..inputs.extra_tokens import tokens_by_side
from ..inputs.request import DenoiseRequest
from ..steps.errors import InsufficientMemoryError
from ..steps.parallel import WHOLE_STEP


def working_bytes(
    pair: ExpertPair,
    shape: Sequence[int],
    *,
    sides: Sequence[int],
    chunk_tokens: int | None = None,
    share: Mesh = WHOLE_STEP,
    cache: CacheSettings | None = None,
) -> int:
    """Estimate the bytes besides the weights for steps on latents with `shape` [B, 16, T, h, w].

    Args:
        sides: by CFG side, a lane's tokens next to its video, as from `extra_tokens_of`.
        chunk_tokens: the policy's tokens computed at once. None: all.
        share: layout of the workers that share a step.
        cache: step cache. All tensors in it are included.
    """
    expert = pair.high.config.shape
    return expert.working_bytes(
        largest_share(lane_tokens(shape, sides), share.cfg),
        value_bytes=pair.compute_dtype.itemsize,
        chunk_tokens=chunk_tokens,
        workers=share,
        cached_states=0 if cache is None else cache.cached_states,
        kernels=kernel_needs(pair),
    )


def request_bytes(
    pair: ExpertPair, request: DenoiseRequest, *, chunk_tokens: int | None, share: Mesh = WHOLE_STEP
) -> int:
    """Estimate the bytes in addition to the weights for the steps in `request`.

    See `working_bytes`.
    """
    return working_bytes(
        pair,
        request.computed_shape,
        sides=extra_tokens_of(pair, request),
        chunk_tokens=chunk_tokens,
        share=share,
        cache=request.options.cache,
    )


def kernel_needs(pair: ExpertPair) -> KernelNeeds:
    """Return the kernel allocations in the pair's blocks.

    Most layers in a file have one format.
    """
    return KernelNeeds(
        attention_bytes=ATTENTIONS[pair.kernels.attention].working_bytes,
        linear_format=next(iter(pair.multiplied), ""),
    )


def tokens_of(shape: Sequence[int]) -> int:
    """Return the number of tokens in one lane for latents [B, 16, T, h, w]."""
    return prod(patch_grid(shape[2:]))


def lane_tokens(shape: Sequence[int], sides: Sequence[int]) -> tuple[int, ...]:
    """Return the tokens by lane in a step on latents [B, 16, T, h, w].

    For `sides` see `working_bytes`.
    """
    return tuple(tokens_of(shape) + extra for extra in sides for _ in range(shape[0]))


def extra_tokens_of(
    pair: ExpertPair, request: DenoiseRequest, expert: str | None = None
) -> tuple[int, ...]:
    """Return a lane's tokens next to its video for each CFG side, in lane order.

    Counts the step with most sides that `expert` may take. None: either expert.
    """
    tokens = tokens_by_side(*request.inputs.tokens_of_sides)
    frames = request.noise.shape[2]
    return tuple(
        tokens[side].count(frames, request.options.windows, reads_reference=pair.reads_reference)
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
    """Refuse a request with several samples that does not fit even under the smallest policy.

    Args:
        free: bytes for weights and activations together. None: the free bytes on `device` and the
            bytes in use there for the pair's weights.

    Raises:
        InsufficientMemoryError: it does not fit. The message has the number of samples that do.
    """
    # A single sample has no smaller batch to propose. Its run falls back to smaller policies
    # itself.
    if request.batch == 1:
        return
    sides = extra_tokens_of(pair, request)
    smallest = smallest_policy(pair, policy, tokens_of(request.computed_shape) + max(sides), device)
    weights = pair.device_bytes(smallest, device=device)

    def needed(samples: int) -> int:
        lanes, *size = request.computed_shape
        # With context windows, a sample has several lanes.
        shape = (samples * lanes // request.batch, *size)
        chunk = smallest.chunk_tokens
        cache = request.options.cache
        return working_bytes(pair, shape, sides=sides, chunk_tokens=chunk, cache=cache)

    if free is None:
        free = free_bytes(device)
        if free is None:
            free = available_bytes()
        # Loaded weights count as free, because `weights` covers all of them.
        free += pair.loaded_bytes
    available = free - weights
    # The largest batch first. 0 always fits, so there is a result.
    fitting = next(
        count for count in range(request.batch, -1, -1) if count == 0 or needed(count) <= available
    )
    if fitting == request.batch:
        return
    remedy = f"{fitting} of them would fit: use {fitting} lanes (or a batch of {fitting})"
    if fitting == 0:
        remedy = "Not even one of them would fit: make the video smaller or shorter"
    raise InsufficientMemoryError(
        f"{request.batch} videos at once need {bytes_text(needed(request.batch))} of working "
        f"memory and {bytes_text(weights)} for weights in the fewest buffers; "
        f"{bytes_text(available + weights)} are free for both. {remedy}, or close other programs "
        "that use the device"
    )


def smallest_policy(
    pair: ExpertPair, policy: OffloadPolicy, tokens: int, device: torch.device
) -> OffloadPolicy:
    """Return the smallest fallback policy from `policy` for a run with `tokens` tokens."""
    # No policy fits 0 bytes, so this is the smallest one.
    smallest = shrink_to_budget(
        policy,
        pair.block_counts,
        budget=0,
        device_bytes=lambda each: pair.device_bytes(each, device=device),
    )
    if min(CHUNKS) < (policy.chunk_tokens or tokens):
        return replace(smallest, chunk_tokens=min(CHUNKS))
    return smallest


def bytes_text(nbytes: float) -> str:
    """Format bytes in GB, or in MB if they are few."""
    if nbytes < 1e7:
        return f"{nbytes / 1e6:.2f} MB"
    return f"{nbytes / 1e9:.2f} GB"
