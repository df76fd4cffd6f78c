"""Memory of a run: estimated activation bytes, and checks that a run fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch

from ..devices import available_bytes, free_bytes, insufficient_ram
from ..plan import CHUNKS, shrink_to_budget
from ..schema import FP32_BYTES, HEAD_DIM, PATCH, ExpertShape, OffloadPolicy
from ..wan import ExpertPair
from .cache.settings import CacheSettings
from .errors import InsufficientMemoryError
from .inputs.request import DenoiseRequest
from .loop.parallel import WHOLE_STEP, Share


def working_bytes(
    pair: ExpertPair,
    shape: Sequence[int],
    *,
    guided: bool,
    chunk_tokens: int | None = None,
    share: Share = WHOLE_STEP,
    cache: CacheSettings | None = None,
) -> int:
    """Estimate the bytes in addition to the weights for steps on latents of `shape` [B, 16, T, h, w].

    Args:
        guided: count a negative lane for each positive one.
        chunk_tokens: tokens computed at once, of the policy; None: all.
        share: this worker's share of a step.
        cache: step cache, whose tensors are included.
    """
    expert = expert_shape(pair)
    lanes = shape[0] * (2 if guided else 1)
    return expert.working_bytes(
        tokens_of(shape),
        lanes=-(-lanes // share.cfg),
        value_bytes=pair.compute_dtype.itemsize,
        chunk_tokens=chunk_tokens,
        ring=share.ring,
        ulysses=share.ulysses,
        cached_states=0 if cache is None else cache.cached_states,
    )


def visit_flops(pair: ExpertPair, shape: Sequence[int], *, guided: bool) -> int:
    """Return the FLOP of one block for all lanes of latents of `shape` [B, C, T, h, w]."""
    return shape[0] * (2 if guided else 1) * expert_shape(pair).block_flops(tokens_of(shape))


def expert_shape(pair: ExpertPair) -> ExpertShape:
    """Return the shape of the pair's experts."""
    config = pair.high.config
    return ExpertShape(
        width=config.num_attention_heads * HEAD_DIM,
        ffn_width=config.ffn_dim,
        blocks=config.num_layers,
        in_channels=config.in_channels,
        out_channels=config.out_channels,
        image_width=config.image_dim,
    )


def tokens_of(shape: Sequence[int]) -> int:
    """Return the number of tokens of one lane of latents [B, 16, T, h, w]."""
    _, _, frames, height, width = shape
    return (frames // PATCH[0]) * (height // PATCH[1]) * (width // PATCH[2])


LATENT_COPIES = 8
"""Copies of the latents in fp32: noise, state, estimate, velocities of both sides, and the solver's history."""


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
    smallest, chunk = _smallest(pair, policy, tokens_of(request.computed_shape), device)
    weights = pair.device_bytes(smallest, device=device)

    def needed(samples: int) -> int:
        lanes, *size = request.computed_shape
        shape = (samples * lanes // request.batch, *size)
        return working_bytes(pair, shape, guided=request.guided, chunk_tokens=chunk, cache=request.cache)

    available = (_free(pair, device) if free is None else free) - weights
    fitting = next(count for count in range(request.batch, -1, -1) if count == 0 or needed(count) <= available)
    if fitting == request.batch:
        return
    remedy = (
        f"{fitting} of them would fit: use {fitting} lanes (or a batch of {fitting})"
        if fitting
        else "Not even one of them would fit: make the video smaller or shorter"
    )
    raise InsufficientMemoryError(
        f"{request.batch} videos at once need {_gb(needed(request.batch))} of working memory and {_gb(weights)} for "
        f"weights in the fewest buffers; {_gb(available + weights)} are free for both. {remedy}, or close other "
        "programs that use the device"
    )


def check_step_ram(
    pair: ExpertPair,
    shape: Sequence[int],
    policy: OffloadPolicy,
    device: torch.device,
    *,
    guided: bool,
    share: Share = WHOLE_STEP,
    cache: CacheSettings | None = None,
    available: int | None = None,
) -> None:
    """Refuse a run on a CPU that is estimated to need more RAM than there is.

    Args:
        shape: shape of the lanes of one CFG side [B, C, T, h, w].
        available: bytes of RAM and swap; None: those available now.

    Raises:
        InsufficientMemoryError: it does not fit; the message has the estimate and a remedy.
    """
    # A GPU raises an error, after which a smaller policy is tried. On a CPU the system would end the process.
    if device.type != "cpu":
        return

    def needs(policy: OffloadPolicy) -> tuple[int, int]:
        """Return the bytes of the weights that are not loaded yet, and the working bytes."""
        working = working_bytes(pair, shape, guided=guided, chunk_tokens=policy.chunk_tokens, share=share, cache=cache)
        latents = LATENT_COPIES * prod(shape) * FP32_BYTES
        return max(0, pair.device_bytes(policy, device=device) - pair.loaded_bytes), working + latents

    weights, working = needs(policy)
    lacking = insufficient_ram(weights + working, available=available)
    if lacking is None:
        return
    smallest, _ = _smallest(pair, policy, tokens_of(shape), device)
    fits = insufficient_ram(sum(needs(smallest)), available=lacking) is None
    remedy = (
        "Choose Wan Auto Offload, which computes fewer tokens at once (a smaller policy, with chunk_tokens, in Python)"
        if fits
        else "Make the video smaller or shorter, or use context windows"
    )
    raise InsufficientMemoryError(
        f"a step needs about {_gb(working)} of RAM in addition to {_gb(weights)} for weights, and {_gb(lacking)} are "
        f"free (swap included): the system would end this process. {remedy}, or close other programs"
    )


def _smallest(
    pair: ExpertPair, policy: OffloadPolicy, tokens: int, device: torch.device
) -> tuple[OffloadPolicy, int | None]:
    """Return the smallest policy that a run would fall back to from `policy`, and its `chunk_tokens`."""
    smallest = shrink_to_budget(
        policy, pair.block_counts, budget=0, device_bytes=lambda each: pair.device_bytes(each, device=device)
    )
    fewest = min(chunk for chunk in CHUNKS if chunk is not None)
    at_once = tokens if policy.chunk_tokens is None else policy.chunk_tokens
    chunk = fewest if fewest < at_once else policy.chunk_tokens
    return replace(smallest, chunk_tokens=chunk), chunk


def _free(pair: ExpertPair, device: torch.device) -> int:
    """Return the bytes of `device` (RAM on a CPU) that are free or taken by this pair."""
    free = free_bytes(device)
    return (available_bytes() if free is None else free) + pair.loaded_bytes


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e7 else f"{nbytes / 1e6:.2f} MB"
