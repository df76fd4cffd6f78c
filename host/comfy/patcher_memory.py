"""Memory of streamed weights in ComfyUI's memory manager, which measures, loads, evicts and unloads them."""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

import comfy.model_management
import comfy.model_patcher
import torch

from ...offload import OffloadEngine
from ...plan import keep_near_policy, shrink_to_budget
from ...schema import OffloadPolicy, plan_residency

logger = logging.getLogger("wanstream.memory")

SIZE_WHILE_RUNNING = 10**40
"""Reported size in bytes during a run.

ComfyUI detaches a model that is smaller than the bytes it wants to free, which may be 1e32, and drops it from its list.
During a run no memory can be released, and the model must still be on the list afterwards.
"""


class StreamedWeights(Protocol):
    """Weights whose blocks stream: a pair of experts, or a native model."""

    @property
    def block_counts(self) -> Mapping[str, int]:
        """Blocks by the name of their stack."""

    @property
    def running(self) -> bool:
        """True while a run is in progress; no memory can be released then."""

    @property
    def loaded_bytes(self) -> int:
        """Bytes of device memory now."""

    @property
    def pinned_bytes(self) -> int:
        """Bytes of page-locked host memory now."""

    def device_bytes(self, policy: OffloadPolicy) -> int:
        """Return the bytes of device memory under `policy`. Raises ValueError if it does not fit the blocks."""

    def engine(self, policy: OffloadPolicy, device: torch.device) -> OffloadEngine:
        """Return the engine for `policy` on `device`; an existing one is changed."""

    def release_memory(self, nbytes: int) -> int:
        """Free buffers until `nbytes` are free or none is left; return the bytes freed."""

    def release_idle_buffers(self) -> int:
        """Free the buffers without a resident block; return the bytes freed."""

    def close(self) -> None:
        """Free the engine."""


class PolicyMemory:
    """The policy that was requested for streamed weights, and the part of it that fits and is loaded.

    All patchers of the same weights share it.

    Args:
        noun: name of the weights in the log, a plural.
    """

    def __init__(self, noun: str) -> None:
        self.noun = noun
        self.requested = OffloadPolicy.layerwise()
        """The policy of the last load request."""
        self.policy: OffloadPolicy | None = None
        """The loaded policy: the requested one, or a smaller one."""
        self._counted_pins = 0

    def load(self, weights: StreamedWeights, requested: OffloadPolicy, budget: float, device: torch.device) -> None:
        """Create the engine on `device`, with the largest part of the policy whose weights fit into `budget` bytes."""
        device_bytes = weights.device_bytes
        fitted = shrink_to_budget(requested, weights.block_counts, budget=budget, device_bytes=device_bytes)
        if self.policy is not None and self.requested == requested and weights.loaded_bytes:
            fitted = keep_near_policy(self.policy, fitted, budget=budget, device_bytes=device_bytes)
        if fitted != requested:
            logger.info(
                "%s are free for the %s: %s instead of %s",
                size(max(0.0, budget)),
                self.noun,
                _describe(weights, fitted),
                _describe(weights, requested),
            )
        _release_idle_buffers(device, of_others_than=weights)
        # Allocated now, not at the first fetch: ComfyUI counts these bytes as used from here on.
        weights.engine(fitted, device).allocate_buffers()
        self.requested, self.policy = requested, fitted
        self.count_pins(weights)

    def count_pins(self, weights: StreamedWeights) -> None:
        """Add the page-locked bytes to ComfyUI's total, in versions that have one."""
        pinned = weights.pinned_bytes
        management = comfy.model_management
        if hasattr(management, "TOTAL_PINNED_MEMORY"):
            management.TOTAL_PINNED_MEMORY = max(0, management.TOTAL_PINNED_MEMORY + pinned - self._counted_pins)
        self._counted_pins = pinned


class StreamedPatcher(comfy.model_patcher.ModelPatcher):  # type: ignore[misc]
    """Entry of streamed weights in ComfyUI's list of loaded models. Subclasses load what does not stream."""

    policy: OffloadPolicy | None = None
    """The policy to load; None: the last requested one."""

    @property
    @abstractmethod
    def weights(self) -> StreamedWeights:
        """The weights, which all clones share."""

    @property
    def memory(self) -> PolicyMemory:
        """The loaded policy, which all clones share."""
        memory: PolicyMemory = self.model.memory
        return memory

    def clone(self, *args: Any, **settings: Any) -> Any:
        cloned = super().clone(*args, **settings)
        cloned.policy = self.policy
        return cloned

    def is_dynamic(self) -> bool:
        return False

    def model_size(self) -> int:
        """Return the device bytes that ComfyUI must provide: those of the policy, or the loaded ones if more."""
        weights = self.weights
        return max(weights.device_bytes(self.policy or self.memory.requested), weights.loaded_bytes)

    def loaded_size(self) -> int:
        """Return the device bytes in use; `SIZE_WHILE_RUNNING` during a run."""
        self.memory.count_pins(self.weights)  # here, because ComfyUI calls this before each of its memory decisions
        return SIZE_WHILE_RUNNING if self.weights.running else self.weights.loaded_bytes

    def pinned_memory_size(self) -> int:
        return self.weights.pinned_bytes

    def model_mmap_residency(self, free: bool = False) -> tuple[int, int]:
        """Return resident and required host bytes: equal, so that ComfyUI frees no other model's RAM for us."""
        pinned = self.pinned_memory_size()
        return pinned, pinned

    def load_policy(self, device: torch.device, extra_memory: float) -> int:
        """Load as much of the policy as up to `extra_memory` more device bytes allow; return the added bytes."""
        before = self.loaded_size()
        self.memory.load(self.weights, self.policy or self.memory.requested, before + extra_memory, device)
        self.model.device = device
        return self.loaded_size() - before

    def partially_unload(
        self, device_to: torch.device, memory_to_free: float = 0, force_patch_weights: bool = False
    ) -> int:
        """Free whole blocks; return the freed bytes, 0 if all blocks together are too few.

        Frees nothing during a run, when a preview may load its VAE, but returns `memory_to_free`: otherwise ComfyUI
        would drop the weights from its list while they use memory. The other model gets the memory that is free.
        """
        weights, noun = self.weights, self.memory.noun
        before = weights.loaded_bytes
        if weights.running:
            logger.info("the %s are running: their %s are not freed", noun, size(before))
            return math.ceil(memory_to_free)
        one, two = (weights.device_bytes(OffloadPolicy.layerwise(ahead)) for ahead in (0, 1))
        block = two - one
        outside = one - block  # the weights outside the blocks
        if memory_to_free > before - outside:
            return 0  # ComfyUI then detaches the weights
        freed = weights.release_memory(math.ceil(memory_to_free))
        self.memory.count_pins(weights)
        logger.info("freed %s of %s for another model: %d blocks", size(freed), size(before), round(freed / block))
        return freed

    def partially_unload_ram(self, ram_to_unload: float) -> None:
        """Release everything, on the device too, because page-locked blocks cannot be released one by one."""
        if ram_to_unload > 0 and self.memory.requested.source == "pinned" and self.weights.pinned_bytes:
            self.detach()

    def detach(self, unpatch_all: bool = True) -> Any:
        """Release all memory, except during a run.

        With `unpatch_all` False nothing is released: ComfyUI is about to load the weights again.
        """
        weights, noun = self.weights, self.memory.noun
        if unpatch_all:
            if weights.running:
                logger.info("the %s are running: they are not unloaded", noun)
                return self.model
            before = self.loaded_size()
            weights.close()
            self.memory.count_pins(weights)
            if before:
                logger.info("freed %s: the %s are unloaded", size(before), noun)
        super().detach(unpatch_all)
        return self.model


def _release_idle_buffers(device: torch.device, *, of_others_than: StreamedWeights) -> None:
    """Free idle buffers of other streamed weights on the device, from whose memory these allocate theirs.

    Two MODELs of one graph run one after the other, and with a buffer pool each they would hold twice the memory.
    """
    for entry in comfy.model_management.current_loaded_models:
        patcher = entry.model
        if not isinstance(patcher, StreamedPatcher) or entry.device != device:
            continue
        if patcher.weights is not of_others_than and not patcher.weights.running:
            patcher.weights.release_idle_buffers()


def size(nbytes: float) -> str:
    """Format bytes as GB, or as MB below 0.1 GB."""
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.1f} MB"


def _describe(weights: StreamedWeights, policy: OffloadPolicy) -> str:
    residency, _ = plan_residency(policy, weights.block_counts)
    resident = min(len(blocks) for blocks in residency.residents.values())
    blocks = min(weights.block_counts.values())
    return f"{size(weights.device_bytes(policy))} with {resident} of {blocks} blocks resident"
