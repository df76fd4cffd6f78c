"""Both experts attached to one offload engine: one pool of buffers, so that the switch is a visit like any other."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from ..metrics import Recorder
from ..offload.attach import attach_offload
from ..offload.attached_run import OffloadRun
from ..offload.gather import Sharded
from ..offload.patches import BlockPatch, WeightPatch
from ..plan import BlockKey, OffloadPolicy, RunPrograms, Storage, Visit
from .block_storage import block_source, segment_of
from .checkpoint import Expert
from .expert_models import ExpertModels
from .kernels import Kernels, check_usable
from .lora_factors import LoraFactors, LoraStack
from .lora_patches import block_patches, stack_identity, staying_patches

NO_LORAS: Hashable = ()


class ExpertEngine:
    """Runs the blocks of the experts of one pair on one device under one policy.

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
        self.device = device
        self.models = ExpertModels(experts, compute_dtype=compute_dtype, device=device)
        self._compute_dtype = compute_dtype
        self._kernels, self._chunk_tokens = Kernels(), policy.chunk_tokens
        self.models.kernels.set(self._kernels, self._chunk_tokens)
        self._configs = {name: expert.config for name, expert in experts.items()}
        self.block_counts = {name: config.num_layers for name, config in self._configs.items()}
        source = block_source(experts, compute_dtype=compute_dtype, storage=storage, direct=direct)
        self._shared = segment_of(source) if shared and sharded is None else None
        self._handle = attach_offload(
            self.models.blocks,
            policy=policy,
            device=device,
            source=source,
            follow_forward=False,
            shared=self._shared,
            sharded=sharded,
        )
        self.models.start_reading()
        self._loras: Hashable = NO_LORAS
        self._closed = False

    @property
    def outer_bytes(self) -> int:
        """Bytes read so far that do not stream: what is outside the blocks, and the blocks' small tensors."""
        return self.models.outer_bytes

    @property
    def graphs(self) -> int:
        """Graphs that this process has compiled for blocks so far; while a step makes one, its time says nothing."""
        return self.models.kernels.graphs

    @property
    def running(self) -> bool:
        """Whether a run is going on: nothing can be given back now."""
        return self._handle.running

    @property
    def loaded_bytes(self) -> int:
        """Bytes of device memory that the weights take now: buffers, and everything there that does not stream."""
        return self._handle.loaded_bytes + self.models.loaded_bytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes of host memory that are page-locked now."""
        return self._handle.pinned_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that blocks in RAM, staging and LoRA factors of blocks take now, locked or not."""
        return self._handle.host_bytes

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
        self._handle.set_patches(blocks)
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

    def give_back(self, nbytes: int) -> int:
        """Free buffers until `nbytes` of device memory are free or none is left; returns the bytes freed.

        Raises:
            RuntimeError: a run is going on; nothing was touched.
        """
        return self._handle.give_back(nbytes)

    def run(self, visits: Sequence[Visit], recorder: Recorder | None = None) -> AbstractContextManager[OffloadRun]:
        """Compile `visits` into transfer programs and start them.

        Inside the context, `run.visit(step, expert, block)` gives the visits in their order.
        """
        self._check_open()
        return self._handle.run(visits, recorder=recorder)

    def programs(self, visits: Sequence[Visit]) -> RunPrograms:
        """What `run` would execute now; `simulate` predicts it."""
        self._check_open()
        return self._handle.programs(visits)

    def meet(self, sharded: Sharded) -> None:
        """Gather with the ranks of another meeting, in which this one has the same shards.

        Raises:
            RuntimeError: a run is going on; nothing was touched.
        """
        self._check_open()
        self._handle.meet(sharded)

    def take_buffers(self) -> None:
        """Allocate all buffers now; otherwise each comes with the first run that fetches into it.

        Raises:
            RuntimeError: a run is going on; nothing was touched. Or the device has no memory left.
        """
        self._check_open()
        self._handle.take_buffers()

    def set_policy(self, policy: OffloadPolicy) -> None:
        """Change between runs what stays on the device and in RAM; blocks that both policies keep are not read again.

        Raises:
            RuntimeError: a run is going on.
            ValueError: the policy does not fit the number of blocks; the former one stays.
            OSError: there is not enough RAM for the blocks that would have a home there; the former one stays.
        """
        self._check_open()
        self._handle.set_policy(policy)
        self._chunk_tokens = policy.chunk_tokens
        self.models.kernels.set(self._kernels, self._chunk_tokens)

    def close(self) -> None:
        """Free the buffers, threads and files. Closing twice is allowed.

        Raises:
            RuntimeError: a run is going on; it goes on undisturbed.
        """
        self._handle.detach()
        if self._shared is not None:
            self._shared.close()
        self._closed = True
        self.models.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this engine was closed; ask its pair for another one")
