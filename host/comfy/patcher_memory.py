"""Streamed weights in ComfyUI's memory manager.

The manager measures, loads, evicts and unloads them.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from ...offload import StreamedWeights
from ...plan import keep_near_policy, shrink_to_budget
from ...schema import OffloadPolicy, plan_residency
from ...schema.text import format_size
from . import versions

logger = logging.getLogger("wanstream.memory")

SIZE_WHILE_RUNNING = 10**40
"""Size reported during a run, in bytes.

ComfyUI may want to free as much as 1e32 bytes. It detaches any smaller model and drops it from the
list. During a run no memory can be released, and the model must stay on the list.
"""


class PolicyMemory:
    """Policy requested for streamed weights, and the loaded part that fits.

    All patchers for the same weights share it.

    Args:
        noun: name for the weights in the log, a plural.
    """

    def __init__(self, noun: str) -> None:
        self.noun = noun
        self.requested = OffloadPolicy.layerwise()
        """Policy from the last load request."""
        self.policy: OffloadPolicy | None = None
        """The loaded policy: the requested one, or a smaller one."""
        self._counted_pins = 0

    def load(
        self,
        weights: StreamedWeights,
        requested: OffloadPolicy,
        budget: float,
        device: torch.device,
    ) -> None:
        """Create the engine on `device`, with the largest part of the policy that fits.

        The weights must fit into `budget` bytes.
        """
        device_bytes = weights.device_bytes
        fitted = shrink_to_budget(
            requested, weights.block_counts, budget=budget, device_bytes=device_bytes
        )
        # Free memory changes a little between runs, and a new policy costs a new buffer pool.
        if self.policy is not None and self.requested == requested and weights.loaded_bytes:
            fitted = keep_near_policy(self.policy, fitted, budget=budget, device_bytes=device_bytes)
        if fitted != requested:
            logger.info(
                "%s are free for the %s: %s instead of %s",
                format_size(max(0.0, budget)),
                self.noun,
                _describe(weights, fitted),
                _describe(weights, requested),
            )
        _release_idle_buffers(device, of_others_than=weights)
        # Allocate now, not at the first fetch: from here on, ComfyUI counts these bytes as used.
        weights.engine(fitted, device).allocate_buffers()
        self.requested = requested
        self.policy = fitted
        self.count_pins(weights)

    def count_pins(self, weights: StreamedWeights) -> None:
        """Add the page-locked bytes to ComfyUI's total, in versions that have one."""
        pinned = weights.pinned_bytes
        versions.count_pinned_bytes(pinned - self._counted_pins)
        self._counted_pins = pinned


class StreamedPatcher(versions.StaticPatcher):
    """Streamed weights as an entry in ComfyUI's list of loaded models.

    Subclasses load everything that does not stream.
    """

    policy: OffloadPolicy | None = None
    """The policy to load, or None for the last requested one."""
    cloned: ClassVar[Sequence[str]] = ("policy",)
    """Attributes copied to clones."""

    @property
    @abstractmethod
    def weights(self) -> StreamedWeights:
        """The weights, shared by all clones."""

    @property
    def memory(self) -> PolicyMemory:
        """The loaded policy, shared by all clones."""
        memory: PolicyMemory = self.model.memory
        return memory

    def clone(self, *args: Any, **settings: Any) -> Any:
        clone = super().clone(*args, **settings)
        for name in self.cloned:
            setattr(clone, name, getattr(self, name))
        return clone

    def model_size(self) -> int:
        """Return the device bytes ComfyUI must provide: the policy's, or the loaded if more."""
        weights = self.weights
        return max(weights.device_bytes(self.policy or self.memory.requested), weights.loaded_bytes)

    def loaded_size(self) -> int:
        """Return the device bytes in use, or `SIZE_WHILE_RUNNING` during a run."""
        # Here, because ComfyUI calls this before each memory decision.
        self.memory.count_pins(self.weights)
        if self.weights.running:
            return SIZE_WHILE_RUNNING
        return self.weights.loaded_bytes

    def pinned_bytes(self) -> int:
        return self.weights.pinned_bytes

    def load_policy(self, device: torch.device, extra_memory: float) -> int:
        """Load as much of the policy as fits into `extra_memory` additional device bytes.

        Return the added bytes.
        """
        before = self.loaded_size()
        self.memory.load(
            self.weights, self.policy or self.memory.requested, before + extra_memory, device
        )
        self.model.device = device
        return self.loaded_size() - before

    def partially_unload(
        self, device_to: torch.device, memory_to_free: float = 0, force_patch_weights: bool = False
    ) -> int:
        """Free whole blocks. Return the freed bytes, or 0 if all blocks together are too few.

        During a run, when a preview may load a VAE, nothing is freed but `memory_to_free` is
        returned. ComfyUI would otherwise drop the weights from the list while they use memory. The
        other model then gets whatever is free.
        """
        weights = self.weights
        noun = self.memory.noun
        before = weights.loaded_bytes
        if weights.running:
            logger.info("the %s are running: their %s are not freed", noun, format_size(before))
            return math.ceil(memory_to_free)
        # The two policies differ by one buffer.
        one, two = (weights.device_bytes(OffloadPolicy.layerwise(ahead)) for ahead in (0, 1))
        block = two - one
        outside = one - block  # weights outside the blocks
        if memory_to_free > before - outside:
            return 0  # ComfyUI then detaches the weights
        # Rounded up: ComfyUI detaches the model if less than `memory_to_free` was freed.
        freed = weights.release_memory(math.ceil(memory_to_free))
        self.memory.count_pins(weights)
        logger.info(
            "freed %s of %s for another model: %d blocks",
            format_size(freed),
            format_size(before),
            round(freed / block),
        )
        return freed

    def release_pinned(self) -> None:
        """Release everything, device memory too: page-locked blocks cannot be released singly."""
        if self.memory.requested.source == "pinned" and self.weights.pinned_bytes:
            self.detach()

    def detach(self, unpatch_all: bool = True) -> Any:
        """Release all memory, except during a run.

        With `unpatch_all` False nothing is released: ComfyUI is about to load the weights again.
        """
        weights = self.weights
        noun = self.memory.noun
        if unpatch_all:
            if weights.running:
                # Without `super().detach`, which would remove object patches under the run.
                logger.info("the %s are running: they are not unloaded", noun)
                return self.model
            before = self.loaded_size()
            weights.close()
            self.memory.count_pins(weights)
            if before:
                logger.info("freed %s: the %s are unloaded", format_size(before), noun)
        super().detach(unpatch_all)
        return self.model


def _release_idle_buffers(device: torch.device, *, of_others_than: StreamedWeights) -> None:
    """Free other weights' idle buffers on the device, so that these can take the memory.

    Two MODELs in one graph run one after the other. With a buffer pool each, they would hold twice
    the memory.
    """
    for entry in versions.loaded_models(device):
        patcher = entry.model
        if isinstance(patcher, StreamedPatcher):
            weights = patcher.weights
            if weights is not of_others_than and not weights.running:
                weights.release_idle_buffers()


def _describe(weights: StreamedWeights, policy: OffloadPolicy) -> str:
    residency, _ = plan_residency(policy, weights.block_counts)
    resident = min(len(blocks) for blocks in residency.residents.values())
    blocks = min(weights.block_counts.values())
    nbytes = format_size(weights.device_bytes(policy))
    return f"{nbytes} with {resident} of {blocks} blocks resident"
