"""Offload policy of a run, reduced after out-of-memory errors and revised after the first step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from math import prod
from typing import TypeAlias

import torch

from ...devices import free_bytes, is_out_of_memory
from ...devices.machine import insufficient_ram
from ...plan import bytes_to_free, describe_policy, next_smaller_policy
from ...schema import OffloadPolicy
from ...schema.records import StepRecord
from ...shapes import FP32_BYTES, chunks_below
from ...wan import ExpertEngine, ExpertPair
from ..cache.settings import CacheSettings, policy_with_cache
from ..steps.errors import InsufficientMemoryError, SmallerPolicyError
from ..steps.parallel import LOCAL_FORWARD, ParallelForward
from .interruptible import LONG_VISIT_FLOPS
from .memory import bytes_text, lane_tokens, smallest_policy, tokens_of, working_bytes

Revise: TypeAlias = "Callable[[StepRecord], OffloadPolicy | None]"
"""Function from the first step's record to another policy for the rest of the run, or None."""

LATENT_COPIES = 8
"""fp32 copies of the latents: noise, state, estimate, velocities on both sides, and the solver's
history."""

logger = logging.getLogger("wanstream.sampling")


class RunPolicy:
    """Offload policy of one run, with its changes.

    Args:
        shape: latent shape [B, 16, T, h, w].
        sides: see `working_bytes`.
        split: parallel forward. A worker in a group does not repeat a step alone.
        cache: step cache settings. The cache's tensors take device memory too.
        revise: called once with the first step's record, unless memory was short in it.
    """

    def __init__(
        self,
        pair: ExpertPair,
        policy: OffloadPolicy,
        device: torch.device,
        *,
        shape: Sequence[int],
        sides: Sequence[int],
        split: ParallelForward = LOCAL_FORWARD,
        cache: CacheSettings | None = None,
        revise: Revise | None = None,
    ) -> None:
        self._cache = cache
        self._revise = revise
        self.policy = policy_with_cache(policy, cache)
        self.changes: list[str] = []
        """Policy changes so far, as text for `Timeline.changes`."""
        self.pair = pair
        self.device = device
        self._shape = shape
        self._sides = sides
        self.split = split
        self._tokens = tokens_of(shape) + max(sides)
        self._tried = [self.policy]

    def engine(self) -> ExpertEngine:
        """Return the pair's engine for the present policy. No run may be in progress."""
        # Inference mode is thread-local: the engine's fetch thread could not write buffers
        # allocated in it.
        with torch.inference_mode(False):
            return self.pair.engine(self.policy, self.device)

    @cached_property
    def stops_inside(self) -> bool:
        """True if a stop is polled within blocks too: on a CPU, if blocks take long."""
        # Not on a GPU, where the host only launches a block. Not with a compiler, which makes one
        # function of it. Not in a group, whose workers must all stop at the same block.
        if self.device.type != "cpu" or not self.split.alone or self.pair.kernels.compiler:
            return False
        flops = self.pair.high.config.shape.block_flops
        return sum(map(flops, lane_tokens(self._shape, self._sides))) >= LONG_VISIT_FLOPS

    def refuse_without_ram(self, *, available: int | None = None) -> None:
        """Refuse a run on a CPU that is estimated to need more RAM than there is.

        Args:
            available: bytes of RAM and swap. None: the bytes available now.

        Raises:
            InsufficientMemoryError: it does not fit. The message has the estimate and a remedy.
        """
        # A GPU raises an error, and a smaller policy is tried then. On a CPU the system would end
        # the process.
        if self.device.type != "cpu":
            return
        # Creating the engine first frees RAM that the previous run keeps under another policy.
        if self.pair.host_bytes:
            try:
                self.engine()
            except RuntimeError as err:
                # The first step creates it again, and falls back to a smaller policy.
                if not is_out_of_memory(err):
                    raise
        weights, working = self._ram_needs(self.policy)
        lacking = insufficient_ram(weights + working, available=available)
        if lacking is None:
            return
        smallest = smallest_policy(self.pair, self.policy, self._tokens, self.device)
        fits = insufficient_ram(sum(self._ram_needs(smallest)), available=lacking) is None
        remedy = "Make the video smaller or shorter, or use context windows"
        if fits:
            remedy = (
                "Choose Wan Auto Offload, which computes fewer tokens at once (a smaller policy, "
                "with chunk_tokens, in Python)"
            )
        raise InsufficientMemoryError(
            f"a step needs about {bytes_text(working)} of RAM in addition to {bytes_text(weights)} "
            f"for weights, and {bytes_text(lacking)} are free (swap included): the system would "
            f"end this process. {remedy}, or close other programs"
        )

    def _ram_needs(self, policy: OffloadPolicy) -> tuple[int, int]:
        """Return the bytes of weights still to load, and the working bytes."""
        weights = max(0, self._bytes(policy) - self.pair.loaded_bytes)
        latents = LATENT_COPIES * prod(self._shape) * FP32_BYTES
        return weights, self._working_bytes(policy) + latents

    def revised(self, record: StepRecord) -> OffloadPolicy | None:
        """Return another policy for the calls after `record`, or None for the present one."""
        # After an out-of-memory error the record belongs to another policy than the predicted one,
        # so nothing can be learnt from it.
        if self._revise is None or self.changes:
            return None
        revised = self._revise(record)
        if revised is None:
            return None
        policy = policy_with_cache(revised, self._cache)
        if policy == self.policy:
            return None
        return policy

    def use(self, policy: OffloadPolicy) -> None:
        """Continue under a policy from `revised`."""
        text = (
            f"after the first step: {self._describe(policy)} instead of "
            f"{self._describe(self.policy)}"
        )
        logger.info("%s", text)
        self.changes.append(text)
        self.policy = policy
        # The count starts again. Otherwise the next retry would free too many blocks.
        self._tried = [policy]

    def make_smaller(self, where: str, message: str) -> None:
        """Replace the policy by a smaller one after an out-of-memory error in `where`.

        Call it once the memory of the failed step is freed, because the size of the next policy
        depends on the free bytes.

        Raises:
            InsufficientMemoryError: no policy is smaller.
            SmallerPolicyError: a group computes the run. All workers must change to the
                policy in the error.
        """
        free = free_bytes(self.device)
        working = self._working_bytes(self.policy)
        share = self.split.share
        block = self.pair.block_bytes.computed + self.pair.patch_bytes
        smaller = next_smaller_policy(
            self.policy,
            self.pair.block_counts,
            missing=bytes_to_free(
                len(self._tried) - 1, block=block, working_bytes=working, free_bytes=free
            ),
            # This worker has only a part of the tokens between the exchanges.
            chunks=chunks_below(self._tokens // (share.ring * share.ulysses)),
            device_bytes=self._bytes,
        )
        if smaller is None:
            raise InsufficientMemoryError(self._no_room_message(where, message, working, free))
        text = (
            f"out of memory in {where}: {self._describe(smaller)} instead of "
            f"{self._describe(self.policy)}"
        )
        if not self.split.alone:
            # The policy stays as it is, because all workers change together.
            raise SmallerPolicyError(f"{text} ({message})", smaller)
        same = ""
        if smaller.chunk_tokens == self.policy.chunk_tokens:
            same = ", and the result is the same"
        logger.warning("%s; this part is computed again%s (%s)", text, same, message)
        self.changes.append(text)
        self.policy = smaller
        self._tried.append(smaller)

    def _working_bytes(self, policy: OffloadPolicy) -> int:
        return working_bytes(
            self.pair,
            self._shape,
            sides=self._sides,
            chunk_tokens=policy.chunk_tokens,
            share=self.split.share,
            cache=self._cache,
        )

    def _bytes(self, policy: OffloadPolicy) -> int:
        return self.pair.device_bytes(policy, device=self.device)

    def _describe(self, policy: OffloadPolicy) -> str:
        chunk = "" if policy.chunk_tokens is None else f", {policy.chunk_tokens} tokens at once"
        blocks = min(self.pair.block_counts.values())
        return (
            f"{bytes_text(self._bytes(policy))} of weights "
            f"({describe_policy(policy, blocks)}{chunk})"
        )

    def _no_room_message(self, where: str, message: str, working: int, free: int | None) -> str:
        freed = "" if free is None else f", {bytes_text(free)} are free in addition to the weights"
        tried = "; ".join(self._describe(policy) for policy in self._tried)
        return (
            f"out of memory in {where}, and no smaller policy is left: the step needs about "
            f"{bytes_text(working)} of working memory{freed}. Tried: {tried}. Make the video "
            "smaller or shorter, use fewer lanes (batch size 1, guidance 1), or close other "
            f"programs that use the device ({message})"
        )
