"""Offload engine of both experts, with one pool of buffers so that the switch is a visit like any other."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch

from ...devices import runtime_for
from ...offload import BlockPatch, FileSource, OffloadEngine, QuantisedSource, Sharded, SharedSegment, WeightPatch
from ...plan import BlockKey
from ...schema import OffloadPolicy
from ..checkpoint.open import Expert
from ..kernels.attention import Kernels, check_usable
from ..kernels.math_choice import choose_math
from ..lora.apply import LoraFactors, LoraStack, block_patches, resident_patches, stack_identity
from .models import ExpertModels
from .storage import Precision, block_source, multiplied_layers

NO_LORAS: Hashable = ()


def shared_segment(source: FileSource | QuantisedSource) -> SharedSegment:
    """Return the memory that processes of this machine share for the blocks of `source`."""
    return SharedSegment(source.identity, {key: fmt.stored.nbytes for key, fmt in source.formats.items()})


class ExpertEngine(OffloadEngine):
    """Offload engine that streams the blocks of a pair's experts; their other parameters are resident.

    `models` maps expert names to diffusers models. They are plain modules whose block weights are bound only during a
    visit. Creating the engine starts to read the resident parameters; before that, only headers are read.
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
        # Before anything is held that only a finished engine frees: it fails where the device is broken.
        math = choose_math(Kernels().math, torch.device(device), precision.compute_dtype, self._width).math
        source = block_source(experts, precision, direct=direct)
        self.models = ExpertModels(
            experts,
            compute_dtype=precision.compute_dtype,
            device=device,
            multiplied=multiplied_layers(source.formats),
        )
        self._compute_dtype = precision.compute_dtype
        self.policy, self._kernels = policy, Kernels()
        self._configs = {name: expert.config for name, expert in experts.items()}
        self._segment = None
        if shared and sharded is None:
            self._segment = shared_segment(source)
        super().__init__(
            self.models.blocks, policy=policy, device=device, source=source, shared=self._segment, sharded=sharded
        )
        self.models.start_reading()
        self.models.settings.set(self._kernels, math, policy.chunk_tokens)
        self._read_for_next_run()
        self._loras: Hashable = NO_LORAS

    @property
    def non_block_bytes(self) -> int:
        """Bytes read so far that are not streamed: parameters outside the blocks, and the blocks' small tensors."""
        return self.models.non_block_bytes

    @property
    def graphs(self) -> int:
        """Number of block graphs that this process has compiled; a step that compiles one takes longer than others."""
        return self.models.settings.graphs

    @property
    def loaded_bytes(self) -> int:
        """Bytes of device memory of the weights now: buffers and resident parameters."""
        return super().loaded_bytes + self.models.loaded_bytes

    @property
    def host_bytes(self) -> int:
        """RAM now, in bytes: slots, patches, and the embedder read ahead for the next run."""
        return super().host_bytes + self.models.kept_bytes

    @property
    def pinned_bytes(self) -> int:
        """Page-locked RAM now, in bytes, with the embedders that were read ahead."""
        return super().pinned_bytes + self.models.pinned_bytes

    def expect(self, timesteps: Mapping[str, Sequence[float]], texts: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Set the timesteps and texts of the next run, by expert in the order of the run.

        They are then embedded together, so that the embedder weights (0.5 GB per expert) are loaded once and only for
        that time. A run may use other timesteps and texts, but then these weights are read again.
        """
        self.models.prefetch_embeddings(timesteps, texts)

    def set_loras(self, stacks: Mapping[str, Sequence[LoraStack]], factors: LoraFactors) -> None:
        """Replace the LoRAs, by expert; setting the same LoRAs again costs nothing.

        A step takes one of the stacks of its expert, numbered by `BlockKey.patch` of its visits and `select_patch`.
        `factors` reads the tensors of LoRAs that are not loaded yet. The next run fetches changed blocks that are in a
        buffer again; no other base weights are read.

        Raises:
            RuntimeError: the LoRAs differ and a run is in progress.
            CheckpointError: a factor is not finite.
            OSError: a file cannot be read, or the memory for the factors cannot be allocated.
        """
        loras = tuple((name, tuple(map(stack_identity, each))) for name, each in stacks.items() if any(each))
        if loras == self._loras:
            return
        if self.running:
            raise RuntimeError("LoRAs cannot be changed while this engine is running a program; wait for its end")
        self._loras = None  # equal to no stacks, so that a call after an error below sets all of them again
        blocks: dict[BlockKey, BlockPatch] = {}
        resident: dict[str, list[Mapping[str, WeightPatch]]] = {expert: [] for expert in stacks}
        numbered = [(expert, *each) for expert, of_expert in stacks.items() for each in enumerate(of_expert)]
        for expert, number, stack in numbered:
            # Read every file now, even if it changes only parameters that are patched later: an unreadable file must
            # raise an error here, not in the middle of a run.
            for lora, _ in stack:
                factors.load(lora)
            blocks |= block_patches(expert, self._configs[expert], stack, factors, number=number)
            resident[expert].append(resident_patches(self._configs[expert], stack, factors))
        self.set_patches(blocks)
        self.models.set_patches(resident)
        self._loras = loras

    def select_patch(self, expert: str, number: int) -> None:
        """Apply one of the expert's LoRA stacks to its parameters that do not stream, in a run or between runs.

        Changes nothing if it is applied already. The stack of a streamed block is that of its visit.
        """
        self.models.select_patch(expert, number)

    def set_kernels(self, kernels: Kernels) -> None:
        """Set the compute kernels of the next runs; nothing is read again.

        Raises:
            RuntimeError: the kernels differ and a run is in progress.
            KernelsError: the kernels are not installed or do not support this device or dtype; nothing is changed.
        """
        if kernels == self._kernels:
            return
        if self.running:
            raise RuntimeError("kernels cannot be changed while this engine is running a program; wait for its end")
        check_usable(kernels, self.device, self._compute_dtype)
        choice = choose_math(kernels.math, self.device, self._compute_dtype, self._width)
        self.models.settings.set(kernels, choice.math, self.policy.chunk_tokens)
        self._kernels = kernels

    def set_policy(self, policy: OffloadPolicy) -> None:
        """Change the policy as `OffloadEngine.set_policy`, its `chunk_tokens` included."""
        super().set_policy(policy)
        self.models.settings.chunk_tokens = policy.chunk_tokens
        self.policy = policy  # last, so that a call after an error sets it again
        self._read_for_next_run()

    def _read_for_next_run(self) -> None:
        # Only if there is RAM for blocks too, and on devices where the first step would wait for half a gigabyte.
        self.models.reads_for_next_run = self.policy.source == "pinned" and runtime_for(self.device) is not None

    def close(self) -> None:
        """Free the buffers, threads and files. Closing twice is allowed.

        Raises:
            RuntimeError: a run is in progress, and continues. Or the device has failed, and everything is freed.
        """
        try:
            self.detach()
        finally:
            if not self._attached:
                if self._segment is not None:
                    self._segment.close()
                self.models.close()
