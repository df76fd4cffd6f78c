"""Memory of a run: activation bytes estimated in advance, and the check that several videos fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch

from ..devices import available_bytes, free_bytes, surely_lacks
from ..plan import CHUNKS, fit_policy
from ..schema import FP32_BYTES, HEAD_DIM, PATCH, ExpertShape, OffloadPolicy
from ..wan import ExpertPair
from .cache.settings import CacheSettings
from .errors import NoRoomError
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
    kept_states: int = 0,
) -> int:
    """Memory beside the weights for steps on latents of `shape` [B, 16, T, h, w]; see `ExpertShape.working_bytes`.

    `guided` counts a negative lane beside each positive one; `chunk_tokens` is the policy's, `share` the split's. What
    a cache keeps from step to step is among it, and so are `kept_states` more tensors of the size of each lane's hidden
    state.
    """
    expert = _shape_of(pair)
    lanes = shape[0] * (2 if guided else 1)
    return expert.working_bytes(
        tokens_of(shape),
        lanes=-(-lanes // share.cfg),
        value_bytes=pair.compute_dtype.itemsize,
        chunk_tokens=chunk_tokens,
        ring=share.ring,
        ulysses=share.ulysses,
        kept_states=kept_states + (0 if cache is None else cache.kept_states),
    )


def visit_flops(pair: ExpertPair, shape: Sequence[int], *, guided: bool) -> int:
    """Floating point operations of a block for all lanes of latents of `shape` [B, C, T, h, w]."""
    return shape[0] * (2 if guided else 1) * _shape_of(pair).block_flops(tokens_of(shape))


def _shape_of(pair: ExpertPair) -> ExpertShape:
    config = pair.high.config
    return ExpertShape(
        width=config.num_attention_heads * HEAD_DIM, ffn_width=config.ffn_dim, image_width=config.image_dim
    )


def tokens_of(shape: Sequence[int]) -> int:
    """Tokens of one lane of latents [B, 16, T, h, w]."""
    _, _, frames, height, width = shape
    return (frames // PATCH[0]) * (height // PATCH[1]) * (width // PATCH[2])


LATENT_COPIES = 8
"""Of the latents in fp32: noise, state, estimate, velocities of both sides, and what a solver remembers."""


def check_room(
    pair: ExpertPair,
    request: DenoiseRequest,
    policy: OffloadPolicy,
    device: torch.device,
    *,
    free: int | None = None,
) -> None:
    """Refuse a request of several samples that finds too little memory even under the smallest policy.

    A single sample is let through: its run tries smaller policies as long as there are any.

    Args:
        free: bytes that weights and what is computed in may take together; None: what is free on `device` now, with
            what the pair holds there already.

    Raises NoRoomError, with the number of samples that fit.
    """
    if request.batch == 1:
        return
    smallest, chunk = _smallest(pair, policy, tokens_of(request.computed_shape), device)
    weights = pair.device_bytes(smallest, device=device)

    def needed(samples: int) -> int:
        lanes, *size = request.computed_shape
        shape = (samples * lanes // request.batch, *size)
        return working_bytes(pair, shape, guided=request.guided, chunk_tokens=chunk, cache=request.cache)

    room = (_free(pair, device) if free is None else free) - weights
    fitting = next(count for count in range(request.batch, -1, -1) if count == 0 or needed(count) <= room)
    if fitting == request.batch:
        return
    remedy = (
        f"{fitting} of them would fit: use {fitting} lanes (or a batch of {fitting})"
        if fitting
        else "Not even one of them would fit: make the video smaller or shorter"
    )
    raise NoRoomError(
        f"{request.batch} videos at once need {_gb(needed(request.batch))} to compute in, beside {_gb(weights)} of "
        f"weights in the fewest buffers; {_gb(room + weights)} are free for both. {remedy}, or close what else uses "
        "the device"
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
    """Refuse a run on a CPU that is estimated to take more RAM than there is: the system would end the process.

    A GPU raises an error instead, after which a smaller policy is tried. `available` None is what there is now.

    Args:
        shape: of the lanes of one side [B, C, T, h, w].

    Raises NoRoomError, with the estimate and a remedy.
    """
    if device.type != "cpu":
        return

    def needs(policy: OffloadPolicy) -> tuple[int, int]:
        """Of the weights that are not there yet, and of what is computed."""
        working = working_bytes(pair, shape, guided=guided, chunk_tokens=policy.chunk_tokens, share=share, cache=cache)
        latents = LATENT_COPIES * prod(shape) * FP32_BYTES
        return max(0, pair.device_bytes(policy, device=device) - pair.loaded_bytes), working + latents

    weights, working = needs(policy)
    lacking = surely_lacks(weights + working, available=available)
    if lacking is None:
        return
    smallest, _ = _smallest(pair, policy, tokens_of(shape), device)
    fits = surely_lacks(sum(needs(smallest)), available=lacking) is None
    remedy = (
        "Choose Wan Auto Offload, which computes fewer tokens at once (a smaller policy, with chunk_tokens, in Python)"
        if fits
        else "Make the video smaller or shorter, or use context windows"
    )
    raise NoRoomError(
        f"a step needs about {_gb(working)} of RAM to compute in, next to {_gb(weights)} for weights, and "
        f"{_gb(lacking)} are free (swap included): the system would end this process. {remedy}, or close what else "
        "takes memory"
    )


def _smallest(
    pair: ExpertPair, policy: OffloadPolicy, tokens: int, device: torch.device
) -> tuple[OffloadPolicy, int | None]:
    """The smallest policy that a run would try in place of `policy`, and how many tokens it takes at once."""
    smallest = fit_policy(
        policy, pair.block_counts, budget=0, device_bytes=lambda each: pair.device_bytes(each, device=device)
    )
    fewest = min(chunk for chunk in CHUNKS if chunk is not None)
    at_once = tokens if policy.chunk_tokens is None else policy.chunk_tokens
    chunk = fewest if fewest < at_once else policy.chunk_tokens
    return replace(smallest, chunk_tokens=chunk), chunk


def _free(pair: ExpertPair, device: torch.device) -> int:
    """Bytes of `device` that this pair may take in all; on a CPU they are RAM."""
    free = free_bytes(device)
    return (available_bytes() if free is None else free) + pair.loaded_bytes


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e7 else f"{nbytes / 1e6:.2f} MB"
