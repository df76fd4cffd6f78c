"""What a run asks of a machine: the planner's input, from a pair of experts and the steps that they are to take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ..plan import ExpertShape, OffloadJob, OffloadPolicy
from ..plan.memory_needs import RAW_SLOTS
from ..plan.shapes import HEAD_DIM
from ..wan import ExpertPair
from .cache_settings import CacheSettings, FirstBlockCache
from .request import DenoiseRequest
from .working_bytes import tokens_of


def request_job(pair: ExpertPair, request: DenoiseRequest, device: torch.device) -> OffloadJob:
    """The job of `request`, computed on `device`."""
    course = request.course()
    experts = [course.experts[step] for step in course.steps]
    guided = {expert: _guided(request, expert) for expert in ("high", "low")}
    job = offload_job(pair, request.computed_shape, device, experts_of_steps=experts, guided=guided)
    lanes = tuple(request.batch * request.lanes_at(step) for step in course.steps)
    if any(job.lanes[expert] != count for expert, count in zip(experts, lanes, strict=True)):
        job = replace(job, lanes_of_steps=lanes)
    return cached_job(job, pair, request.cache)


def cached_job(job: OffloadJob, pair: ExpertPair, cache: CacheSettings | None) -> OffloadJob:
    """The job with what a cache keeps on the device."""
    if cache is None:
        return job
    # The block that is asked in every step stays; where others stay too, this is one buffer too many.
    first = pair.computed_bytes if isinstance(cache, FirstBlockCache) else 0
    return replace(job, kept_states=cache.kept_states, staying_bytes=job.staying_bytes + first)


def _guided(request: DenoiseRequest, expert: str) -> bool:
    """Whether a step of this expert may have negative lanes."""
    if request.guidance_steps is None:
        return request.guidance_of(expert) != 1
    course = request.course()
    return any(course.guidance[step] != 1 for step in course.steps if course.experts[step] == expert)


def offload_job(
    pair: ExpertPair,
    shape: Sequence[int],
    device: torch.device,
    *,
    experts_of_steps: Sequence[str],
    guided: Mapping[str, bool],
) -> OffloadJob:
    """The job of steps on latents of `shape` [B, C, T, h, w]; `guided` says which experts have negative lanes.

    Reads nothing. Raises ValueError for a run without steps.
    """
    config = pair.high.config
    return OffloadJob(
        expert=ExpertShape(
            width=config.num_attention_heads * HEAD_DIM,
            ffn_width=config.ffn_dim,
            blocks=config.num_layers,
            in_channels=config.in_channels,
            out_channels=config.out_channels,
            image_width=config.image_dim,
        ),
        tokens=tokens_of(shape),
        lanes={expert: shape[0] * (2 if guided[expert] else 1) for expert in pair.block_counts},
        experts_of_steps=tuple(experts_of_steps),
        stored_bytes=pair.stored_bytes,
        file_bytes=pair.file_bytes,
        computed_bytes=pair.computed_bytes,
        staying_bytes=_staying_bytes(pair, device),
        value_bytes=pair.compute_dtype.itemsize,
        host_staying_bytes=pair.host_staying_bytes,
        converts=pair.decodes,
    )


def _staying_bytes(pair: ExpertPair, device: torch.device) -> int:
    """Device bytes beside the buffers and beside the stored forms of blocks that are being decoded."""
    one, two = (pair.device_bytes(OffloadPolicy.layerwise(ahead), device=device) for ahead in (0, 1))
    decoding = RAW_SLOTS * pair.stored_bytes if device.type == "cuda" and pair.decodes else 0
    return 2 * one - two - decoding
