"""The next policy to try where a run has run out of device memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from .candidates import CHUNKS
from .fit import fit_policy
from .residency import OffloadPolicy


def smaller_policy(
    policy: OffloadPolicy,
    block_counts: Mapping[str, int],
    *,
    missing: float,
    tokens: int,
    device_bytes: Callable[[OffloadPolicy], int],
) -> OffloadPolicy | None:
    """What is nearest to `policy` and leaves `missing` bytes more of the device free; None where nothing is smaller.

    First fewer blocks stay resident, then fewer lie ahead, down to two buffers (one, where the policy asks for no
    prefetch); where that is less than `missing`, it is taken all the same, because more may be free than is known. Then
    fewer of the `tokens` of a lane go through feed-forward and norms at once, which costs time in every block.
    """
    present = device_bytes(policy)
    fitted = fit_policy(policy, block_counts, budget=present - max(1, missing), device_bytes=device_bytes)
    if device_bytes(fitted) < present:
        return fitted
    at_once = tokens if policy.chunk_tokens is None else min(tokens, policy.chunk_tokens)
    fewer = [chunk for chunk in CHUNKS if chunk is not None and chunk < at_once]
    return replace(policy, chunk_tokens=max(fewer)) if fewer else None


def bytes_to_free(attempt: int, *, block: int, working_bytes: int, free_bytes: int | None) -> int:
    """How many bytes to free before a step is tried for the `attempt`-th time again, from 0.

    What the step is known to lack, and at least twice as many blocks as the time before: what a step really takes is
    not known to the byte, and 40 residents must not become 40 attempts. `free_bytes` None: not known.
    """
    lacking = 0 if free_bytes is None else working_bytes - free_bytes
    return max(lacking, block << attempt)
