"""Offload engine for both experts with one buffer pool. The switch is a visit like others."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch

from ...block_kernels import Kernels, check_usable, choose_math
from ...devices import runtime_for
from ...offload import BlockPatch, OffloadEngine, Sharded, SharedSegment, WeightPatch
from ...offload.sources import FileSource, QuantisedSource
from ...plan.programs import BlockKey
from ...schema import OffloadPolicy
from ..checkpoint.open import Expert
from ..lora.apply import LoraFactors, LoraStack, block_patches, resident_patches, stack_identity
from .models import ExpertModels
from .storage import Precision, block_source, multiplied_layers


def shared_segment(source: FileSource | QuantisedSource) -> SharedSegment:
    """Return the memory for the blocks of `source` that processes on this machine share."""
    return SharedSegment(
        source.identity, {key: fmt.stored.nbytes for key, fmt in source.formats.items()}
    )


class ExpertEngine(OffloadEngine):
    """Offload engine that streams a pair's expert blocks.

    Other parameters are resident.

    `models` maps expert names to diffusers models. They are plain modules whose block weights are
    bound only during a visit. Creating the engine starts reading the resident parameters. Before
    that, only headers are read.
    """

    def __init__(
        self,
        experts: Mapping[str, Expert],
        *,
        precision: Precision,
        policy: OffloadPolicy,
        device: torch.device,
        direct: bool | None = None,
        shared: bool = False,
        sharded: Sharded | None = None,
    ) -> None:
        self._width = next(iter(experts.values())).config.width
        # Before anything is held that only a finished engine frees: it fails if the device is
        # broken.
        math = choose_math(
            Kernels().math, torch.device(device), precision.compute_dtype, self._width
        )
        source = block_source(experts, precision, direct=direct)
        self.models = ExpertModels(
            experts,
            compute_dtype=precision.compute_dtype,
            device=device,
            multiplied=multiplied_layers(source.formats),
        )
        self._compute_dtype = precision.compute_dtype
        self.policy = policy
        self._kernels = Kernels()
        self._configs = {name: expert.config for name, expert in experts.items()}
        self._segment = None
        # With shards, each rank keeps a different part of a block, so there is nothing to share.
        if shared and sharded is None:
            self._segment = shared_segment(source)
        super().__init__(
            self.models.blocks,
            policy=policy,
            device=device,
            source=source,
            shared=self._segment,
            sharded=sharded,
        )
        # After `super().__init__`, which may raise an error: no read is in progress then.
        self.models.start_reading()
        self.models.settings.set(self._kernels, math, policy.chunk_tokens)
        self._read_for_next_run()
        self._loras: Hashable = ()

    @property
    def loaded_bytes(self) -> int:
        """Device memory in use for weights, in bytes: buffers and resident parameters."""
        return super().loaded_bytes + self.models.loaded_bytes

    @property
    def host_bytes(self) -> int:
        """RAM now, in bytes: slots, patches, and the embedder read ahead for the next run."""
        return super().host_bytes + self.models.kept_bytes

    @property
    def pinned_bytes(self) -> int:
        """Page-locked RAM now, in bytes, including embedders read ahead."""
        return super().pinned_bytes + self.models.pinned_bytes

    def set_loras(self, stacks: Mapping[str, Sequence[LoraStack]], factors: LoraFactors) -> None:
        """Replace the LoRAs, by expert. Setting the same LoRAs again costs nothing.

        A step takes one of its expert's stacks, numbered by `BlockKey.patch` in its visits and by
        `ExpertModels.select_patch`. `factors` reads LoRA tensors that are not loaded yet. The next
        run fetches changed blocks again if they are in a buffer. No other base weights are read.

        Raises:
            RuntimeError: the LoRAs differ and a run is in progress.
            CheckpointError: a factor is not finite.
            OSError: a file cannot be read, or memory for the factors cannot be allocated.
        """
        loras = tuple(
            (name, tuple(map(stack_identity, each))) for name, each in stacks.items() if any(each)
        )
        if loras == self._loras:
            return
        if self.running:
            raise RuntimeError(
                "LoRAs cannot be changed while this engine is running a program; wait for its end"
            )
        self._loras = (
            None  # equal to no stacks, so that a call after an error below sets all stacks again
        )
        blocks: dict[BlockKey, BlockPatch] = {}
        resident: dict[str, list[Mapping[str, WeightPatch]]] = {expert: [] for expert in stacks}
        numbered = [
            (expert, *each) for expert, of_expert in stacks.items() for each in enumerate(of_expert)
        ]
        for expert, number, stack in numbered:
            # Read every file now, even if it changes only parameters that are patched later: an
            # unreadable file must raise an error here, not in the middle of a run.
            for lora, _ in stack:
                factors.load(lora)
            blocks |= block_patches(expert, self._configs[expert], stack, factors, number=number)
            resident[expert].append(resident_patches(self._configs[expert], stack, factors))
        self.set_patches(blocks)
        self.models.set_patches(resident)
        self._loras = loras

    def set_kernels(self, kernels: Kernels) -> None:
        """Set the compute kernels for the next runs. Nothing is read again.

        Raises:
            RuntimeError: the kernels differ and a run is in progress.
            KernelsError: the kernels are not installed or do not support this device or dtype.
                Nothing is changed.
        """
        if kernels == self._kernels:
            return
        if self.running:
            raise RuntimeError(
                "kernels cannot be changed while this engine is running a program; wait for its end"
            )
        # Both calls may raise an error, so nothing is changed before them.
        check_usable(kernels, self.device, self._compute_dtype)
        math = choose_math(kernels.math, self.device, self._compute_dtype, self._width)
        self.models.settings.set(kernels, math, self.policy.chunk_tokens)
        self._kernels = kernels

    def set_policy(self, policy: OffloadPolicy) -> None:
        """Change the policy as `OffloadEngine.set_policy` does, including `chunk_tokens`."""
        super().set_policy(policy)
        self.models.settings.chunk_tokens = policy.chunk_tokens
        self.policy = policy  # last, so that a call after an error sets it again
        self._read_for_next_run()

    def _read_for_next_run(self) -> None:
        # Only if there is RAM for blocks too, and on devices where the first step would wait for
        # half a gigabyte.
        self.models.reads_for_next_run = (
            self.policy.source == "pinned" and runtime_for(self.device) is not None
        )

    def close(self) -> None:
        """Free the buffers, threads and files. Closing twice is allowed.

        Raises:
            RuntimeError: a run is in progress, and continues. Or the device has failed, and
                everything is freed.
        """
        try:
            self.detach()
        finally:
            # Still attached if a run is in progress, which needs all of these.
            if not self._attached:
                if self._segment is not None:
                    self._segment.close()
                self.models.close()
