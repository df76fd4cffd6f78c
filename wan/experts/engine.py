"""The offload engine of both experts: one pool of buffers, so that the switch is a visit like any other."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch

from ...devices import compute_device
from ...offload import BlockPatch, OffloadEngine, Sharded, WeightPatch
from ...plan import BlockKey
from ...schema import OffloadPolicy, Storage
from ..checkpoint.open import Expert
from ..lora.apply import LoraFactors, LoraStack, block_patches, stack_identity, staying_patches
from ..transformer.kernels import Kernels, check_usable
from .models import ExpertModels
from .storage import block_source, segment_of

NO_LORAS: Hashable = ()


class ExpertEngine(OffloadEngine):
    """Streams the blocks of the experts of one pair, and keeps everything else of them.

    `models` holds the diffusers models by expert name; they are plain modules whose block weights are there during a
    visit only. Nothing is read before the engine exists but the files' headers.
    """

    def __init__(
        self,
        experts: Mapping[str, Expert],
        *,
        compute_dtype: torch.dtype,
        policy: OffloadPolicy,
        device: torch.device,
        storage: Storage = "as stored",
        direct: bool | None = None,
        shared: bool = False,
        sharded: Sharded | None = None,
    ) -> None:
        device = compute_device(device)
        self.models = ExpertModels(experts, compute_dtype=compute_dtype, device=device)
        self._compute_dtype = compute_dtype
        self._kernels, self._chunk_tokens = Kernels(), policy.chunk_tokens
        self.models.kernels.set(self._kernels, self._chunk_tokens)
        self._configs = {name: expert.config for name, expert in experts.items()}
        source = block_source(experts, compute_dtype=compute_dtype, storage=storage, direct=direct)
        self._segment = segment_of(source) if shared and sharded is None else None
        super().__init__(
            self.models.blocks, policy=policy, device=device, source=source, shared=self._segment, sharded=sharded
        )
        self.models.start_reading()
        self._loras: Hashable = NO_LORAS

    @property
    def non_block_bytes(self) -> int:
        """Bytes read so far that do not stream: what is outside the blocks, and the blocks' small tensors."""
        return self.models.non_block_bytes

    @property
    def graphs(self) -> int:
        """Graphs that this process has compiled for blocks so far; while a step makes one, its time says nothing."""
        return self.models.kernels.graphs

    @property
    def loaded_bytes(self) -> int:
        """Bytes of device memory that the weights take now: buffers, and everything there that does not stream."""
        return super().loaded_bytes + self.models.loaded_bytes

    def expect(self, timesteps: Mapping[str, Sequence[float]], texts: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Say which timesteps and texts the coming run will bring to each of its experts, which it names in order.

        They are then embedded together, and the weights for it, 0.5 GB per expert, are there for that moment only. A
        run that brings others is served too, and reads these weights again.
        """
        self.models.expect(timesteps, texts)

    def set_loras(self, stacks: Mapping[str, LoraStack], factors: LoraFactors) -> None:
        """Add these LoRAs, by expert, and no others to the weights; those that are set already cost nothing.

        `factors` gives what they hold, which is read now if it is not there yet. Of the base weights, those of blocks
        that lie in a buffer and change are fetched once more by the next run; nothing else is read.

        Raises:
            RuntimeError: a run is going on, and the LoRAs are others.
            CheckpointError: a factor is not finite.
            OSError: a file cannot be read, or the system does not give the memory for the factors.
        """
        loras = tuple((expert, stack_identity(stack)) for expert, stack in stacks.items() if stack)
        if loras == self._loras:
            return
        if self.running:
            raise RuntimeError("other LoRAs are asked for while this engine is running a program; wait for it to end")
        self._loras = None  # neither the former nor the new ones, until all of it is done
        blocks: dict[BlockKey, BlockPatch] = {}
        staying: dict[str, Mapping[str, WeightPatch]] = {}
        for expert, stack in stacks.items():
            # Also what only changes parameters that are looked up later: a run must not fail half-way for its file.
            for lora, _ in stack:
                factors.of(lora)
            blocks |= block_patches(expert, self._configs[expert], stack, factors)
            staying[expert] = staying_patches(self._configs[expert], stack, factors)
        self.set_patches(blocks)
        self.models.set_patches(staying)
        self._loras = loras

    def set_kernels(self, kernels: Kernels) -> None:
        """Compute with other kernels from the next run on; those that are set already cost nothing, and none a byte.

        Raises:
            RuntimeError: a run is going on, and the kernels are others.
            KernelsError: they are not installed, or do not serve this device or dtype; the former ones stay.
        """
        if kernels == self._kernels:
            return
        if self.running:
            raise RuntimeError("other kernels are asked for while this engine is running a program; wait for its end")
        check_usable(kernels, self.device, self._compute_dtype)
        self.models.kernels.set(kernels, self._chunk_tokens)
        self._kernels = kernels

    def set_policy(self, policy: OffloadPolicy) -> None:
        """As `OffloadEngine.set_policy`; the tokens computed at once are those of the policy too."""
        super().set_policy(policy)
        self._chunk_tokens = policy.chunk_tokens
        self.models.kernels.set(self._kernels, self._chunk_tokens)

    def close(self) -> None:
        """Free the buffers, threads and files. Closing twice is allowed.

        Raises:
            RuntimeError: a run is going on; it goes on undisturbed.
        """
        self.detach()
        if self._segment is not None:
            self._segment.close()
        self.models.close()
