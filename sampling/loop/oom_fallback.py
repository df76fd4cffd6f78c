"""The offload policy of a run, which may change on its way: when memory is short, and when another one is better."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TypeAlias

import torch

from ...devices import free_bytes, is_out_of_memory
from ...plan import bytes_to_free, describe_policy, smaller_policy
from ...schema import OffloadPolicy, StepRecord
from ...wan import ExpertEngine, ExpertPair
from ..cache.settings import CacheSettings, cached_policy
from ..errors import NoRoomError, SmallerPolicyError
from ..memory import check_step_ram, tokens_of, visit_flops, working_bytes
from .interruptible import LONG_VISIT_FLOPS
from .parallel import LOCAL_FORWARD, ParallelForward

Revise: TypeAlias = "Callable[[StepRecord], OffloadPolicy | None]"
"""How the first step went -> another policy for the rest of the run, or None."""

logger = logging.getLogger("wanstream.sampling")


class RunPolicy:
    """What the experts of one run are streamed under.

    Args:
        shape: of the latents [B, 16, T, h, w].
        guided: whether there are negative lanes.
        split: how the steps are shared; who is not alone takes no step again without asking anybody.
        cache: takes steps over; what it keeps lies on the device too.
        revise: called once with the record of the first step, unless memory was short in it.
    """

    def __init__(
        self,
        pair: ExpertPair,
        policy: OffloadPolicy,
        device: torch.device,
        *,
        shape: Sequence[int],
        guided: bool,
        split: ParallelForward = LOCAL_FORWARD,
        cache: CacheSettings | None = None,
        revise: Revise | None = None,
    ) -> None:
        self._cache, self._revise = cache, revise
        self.policy = self._own(policy)
        self.changes: list[str] = []
        """What was changed on the way, in words."""
        self._pair, self.device = pair, device
        self._shape, self._guided, self.split = shape, guided, split
        self._tried = [self.policy]

    def engine(self) -> ExpertEngine:
        """The pair's engine, under the policy as it is now. No run may be going on."""
        with torch.inference_mode(False):  # it outlives the run
            return self._pair.engine(self.policy, self.device)

    @cached_property
    def stops_inside(self) -> bool:
        """True if a stop is polled within blocks: on a CPU that computes each of them for long.

        A GPU is given a block at once. Compilers make one piece of it. Workers that share a step stop together, between
        blocks.
        """
        if self.device.type != "cpu" or not self.split.alone or self._pair.kernels.compiler is not None:
            return False
        return visit_flops(self._pair, self._shape, guided=self._guided) >= LONG_VISIT_FLOPS

    def refuse_without_ram(self) -> None:
        """Refuse a run that takes more RAM than there is; see `check_step_ram`."""
        # Making the engine releases the RAM that the run before keeps under another policy.
        if self.device.type == "cpu" and self._pair.host_bytes:
            try:
                self.engine()
            except RuntimeError as err:  # the first step asks for it again, and goes on with a smaller policy
                if not is_out_of_memory(err):
                    raise
        share, cache = self.split.share, self._cache
        check_step_ram(self._pair, self._shape, self.policy, self.device, guided=self._guided, share=share, cache=cache)

    @property
    def compute_dtype(self) -> torch.dtype:
        return self._pair.compute_dtype

    def revise(self, record: StepRecord) -> bool:
        """Take the policy that the record of the first step asks for; True if it is another one.

        Where memory was short in that step, nothing is revised: no prediction was made of that.
        """
        if self._revise is None or self.changes:
            return False
        revised = self._revise(record)
        policy = self.policy if revised is None else self._own(revised)
        if policy == self.policy:
            return False
        text = f"after the first step: {self._words(policy)} instead of {self._words(self.policy)}"
        logger.info("%s", text)
        self.changes.append(text)
        self.policy = policy
        self._tried = [policy]
        return True

    def make_smaller(self, where: str, said: str) -> None:
        """Memory was short in `where`, and what was computed there is free again: go on with a smaller policy.

        Raises NoRoomError where none is smaller, and SmallerPolicyError, with that policy, in a run that is not alone.
        """
        chunk, free = self.policy.chunk_tokens, free_bytes(self.device)
        share = self.split.share
        working = working_bytes(
            self._pair, self._shape, guided=self._guided, chunk_tokens=chunk, share=share, cache=self._cache
        )
        attempt = len(self._tried) - 1
        smaller = smaller_policy(
            self.policy,
            self._pair.block_counts,
            missing=bytes_to_free(attempt, block=self._block, working_bytes=working, free_bytes=free),
            tokens=tokens_of(self._shape) // (share.ring * share.ulysses),
            device_bytes=self._bytes,
        )
        if smaller is None:
            raise NoRoomError(self._no_room(where, said, working, free))
        text = f"out of memory in {where}: {self._words(smaller)} instead of {self._words(self.policy)}"
        if not self.split.alone:
            raise SmallerPolicyError(f"{text} ({said})", smaller)
        same = "" if smaller.chunk_tokens != chunk else ", and the result is the same"
        logger.warning("%s; this part is computed again%s (%s)", text, same, said)
        self.changes.append(text)
        self.policy = smaller
        self._tried.append(smaller)

    def _own(self, policy: OffloadPolicy) -> OffloadPolicy:
        return cached_policy(policy, self._cache)

    def _bytes(self, policy: OffloadPolicy) -> int:
        return self._pair.device_bytes(policy, device=self.device)

    @property
    def _block(self) -> int:
        return self._bytes(OffloadPolicy.layerwise(1)) - self._bytes(OffloadPolicy.layerwise(0))

    def _words(self, policy: OffloadPolicy) -> str:
        chunk = "" if policy.chunk_tokens is None else f", {policy.chunk_tokens} tokens at once"
        blocks = min(self._pair.block_counts.values())
        return f"{_size(self._bytes(policy))} of weights ({describe_policy(policy, blocks)}{chunk})"

    def _no_room(self, where: str, said: str, working: int, free: int | None) -> str:
        freed = "" if free is None else f", {_size(free)} are free beside the weights"
        tried = "; ".join(self._words(policy) for policy in self._tried)
        return (
            f"out of memory in {where}, and no smaller policy is left: the step needs about {_size(working)} to "
            f"compute in{freed}. Tried: {tried}. Make the video smaller or shorter, use fewer lanes (batch size 1, "
            f"guidance 1), or close what else uses the device ({said})"
        )


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e7 else f"{nbytes / 1e6:.2f} MB"
