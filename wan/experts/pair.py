"""Expert pair (Wan2.2 A14B) or single model, with the streaming engine."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import torch

from ...devices import compute_device, runtime_for
from ...offload import Sharded, decode_work_bytes, patch_work_bytes
from ...schema import Arithmetic, CodeFormat, OffloadPolicy, StepRange, StepStrengths, Storage
from ..checkpoint.meta_model import embedder_part, parameter_shapes, streamed_parameters
from ..checkpoint.open import Expert
from ..kernels.attention import Kernels
from ..kernels.multiplication import CODE_FORMATS
from ..lora.apply import LoraFactors, block_factor_bytes, lora_host_bytes
from ..lora.file import LoraFile
from ..lora.fit import fit_loras, refuse_beside
from ..lora.stages import LoraStages, lora_stages
from .engine import ExpertEngine, shared_segment
from .storage import BlockBytes, Precision, block_bytes, block_source, device_bytes, multiplied_layers, shards_bytes

FixedLoras: TypeAlias = "Sequence[tuple[LoraFile, float]]"
"""LoRAs with their strengths, the same in all steps."""
Loras: TypeAlias = "Sequence[tuple[LoraFile, StepStrengths]]"
"""LoRAs with their strengths in each step."""


class ExpertPair(AbstractContextManager["ExpertPair"]):
    """Expert pair or single model, and the engine that streams them.

    A single model has the place "high" and runs every step. `low` is then the same expert.

    `engine` creates the engine. Later runs reuse it until `close()` or the end of the `with` block frees it. A closed
    pair may be used again.
    """

    def __init__(
        self,
        *,
        high: Expert,
        low: Expert,
        compute_dtype: torch.dtype,
        storage: Storage = "as stored",
        arithmetic: Arithmetic = "decoded",
        direct: bool | None = None,
        shared: bool = False,
    ) -> None:
        self.high = high
        self.low = low
        self.compute_dtype = compute_dtype
        self.storage = storage
        self.arithmetic = arithmetic
        # Ranks on one machine share the page cache. With direct reads every rank would read the whole files.
        self._direct = False if direct is None and shared else direct
        self._shared = shared
        self.kernels = Kernels()
        """Block compute kernels. A change applies at the next call of `engine`."""
        self._sharded: Sharded | None = None
        self._engine: ExpertEngine | None = None
        self._engine_sharded: Sharded | None = None
        self._loras: Mapping[str, Loras] = {"high": (), "low": ()}
        self._stages = self._make_stages()
        self._factors = LoraFactors()

    @property
    def is_single(self) -> bool:
        """True for a single model, which runs every step."""
        return self.low is self.high

    @property
    def experts(self) -> dict[str, Expert]:
        """Experts by place: "high" and "low", or only "high"."""
        return {"high": self.high} if self.is_single else {"high": self.high, "low": self.low}

    @property
    def block_counts(self) -> dict[str, int]:
        """Number of blocks by expert place."""
        return {name: expert.config.num_layers for name, expert in self.experts.items()}

    @property
    def in_channels(self) -> int:
        """Model input channels: latent channels (16, 5B: 48), and condition channels."""
        return self.high.config.in_channels

    @property
    def latent_channels(self) -> int:
        """Latent channels: 16, or 48 for Wan2.2 5B models."""
        return self.high.config.out_channels

    @property
    def reads_reference(self) -> bool:
        """True if the model puts reference image tokens in front of the video (`ref_conv` in Fun Control)."""
        return self.high.config.reference_channels is not None

    @property
    def identity(self) -> Hashable:
        """Hashable, equal for the same files, dtype, storage, kernels, LoRAs and strengths."""
        loras = tuple(
            tuple((lora.identity, strengths) for lora, strengths in self._loras[name] if any(strengths.values))
            for name in self.experts
        )
        paths = (self.high.path.resolve(), self.low.path.resolve())
        return (*paths, self.compute_dtype, self.storage, self.arithmetic, self.kernels, loras)

    def is_current(self) -> bool:
        """Return True if the expert files have not changed since opening. Otherwise open the pair again."""
        return self.high.is_current() and self.low.is_current()

    def loras_are_current(self) -> bool:
        """Return True if the LoRA files have not changed since they were opened."""
        return all(lora.is_current() for loras in self._loras.values() for lora, _ in loras)

    @property
    def strengths_vary(self) -> bool:
        """True if a LoRA strength differs between steps."""
        return any(len(stages.stacks) > 1 for stages in self._stages.values())

    @property
    def strength_ranges(self) -> tuple[tuple[str, StepRange], ...]:
        """Step ranges with their own strength, each after the LoRA file name."""
        return tuple(
            (lora.path.name, each)
            for loras in self._loras.values()
            for lora, strengths in loras
            for each in strengths.ranges
        )

    def patch_at(self, expert: str, step: int) -> int:
        """Return the `BlockKey.patch` of the expert's blocks in a step of the whole schedule."""
        return self._stages[expert].number_at(step)

    def opened_loras(self, *paths: Path | str | None) -> list[LoraFile]:
        """Return the LoRAs in these files as added to the experts."""
        wanted = {Path(path) for path in paths if path is not None}
        return [lora for loras in self._loras.values() for lora, _ in loras if lora.path in wanted]

    def set_loras(self, high: Loras | FixedLoras, low: Loras | FixedLoras) -> None:
        """Replace each expert's LoRAs by these, with one strength or the strength in each step.

        Applies at the next call of `engine`, which reads new files and keeps their factors in RAM as stored (0.6 GB for
        rank 64 in bf16), so that a strength change reads nothing. LoRAs with strength 0 are not read. If strengths
        vary, the folded factors for all combinations are kept, as much again for each.

        Raises:
            CheckpointError: a LoRA does not fit the expert or the arithmetic. The LoRAs are unchanged.
            ValueError: a strength is not a finite number, or a single model gets LoRAs for the low-noise expert. The
                LoRAs are unchanged.
        """
        if self.is_single and low:
            raise ValueError(
                f"{self.high.path} is one expert, which runs every step: give {low[0][0].path} as the LoRA of the "
                "high-noise expert, and none for the low-noise expert"
            )
        fitted: dict[str, Loras] = {
            "high": fit_loras(high, self.high.config),
            "low": fit_loras(low, self.low.config),
        }
        for name in self.experts if self.multiplied else ():
            for lora, _ in fitted[name]:
                refuse_beside(lora, self._multiplied_weights.get(name, frozenset()))
        self._loras = fitted
        self._stages = self._make_stages()

    def shard(self, sharded: Sharded | None) -> None:
        """Keep a shard of every block and gather blocks from these ranks, which run the same program. None: no shards.

        Applies at the next call of `engine`. Shards already read are reused if only the rendezvous is new.
        """
        self._sharded = sharded

    def engine(self, policy: OffloadPolicy, device: torch.device | str) -> ExpertEngine:
        """Return the engine for `policy` on `device`, with the LoRAs set.

        An engine with another policy is changed and keeps every block that both policies keep. An engine on another
        device is closed.

        Raises:
            ValueError: the policy does not fit the number of blocks, a LoRA factor is not finite, or the kernels are
                not installed or do not support this device or dtype.
            OSError: a LoRA cannot be read, or there is not enough RAM for its factors or for RAM-resident blocks.
            RuntimeError: a run is in progress, and the policy, device, kernels, LoRAs or shards have changed.
        """
        device = compute_device(device)
        self._update_sharding()
        if self._engine is None or self._engine.device != device:
            self._close_engine()
            # The engine outlives the run that creates it, and inference tensors could not be written in later runs.
            with torch.inference_mode(False):
                self._engine = ExpertEngine(
                    self.experts,
                    precision=self._precision,
                    policy=policy,
                    device=device,
                    direct=self._direct,
                    shared=self._shared,
                    sharded=self._sharded,
                )
            self._engine_sharded = self._sharded
        # Before the policy, which attaches the kernels again: they may have changed since the last run.
        self._engine.set_kernels(self.kernels)
        if self._engine.policy != policy:
            self._engine.set_policy(policy)
        self._factors.keep_only([lora for loras in self._loras.values() for lora, _ in loras])
        self._engine.set_loras({name: stages.stacks for name, stages in self._stages.items()}, self._factors)
        return self._engine

    def current_engine(self, policy: OffloadPolicy, device: torch.device) -> ExpertEngine | None:
        """Return the current engine if it has this policy and device, else None. Does not create or change one."""
        engine = self._engine
        return engine if engine is not None and (engine.policy, engine.device) == (policy, device) else None

    def device_bytes(self, policy: OffloadPolicy, *, device: torch.device | str = "cuda") -> int:
        """Return the device memory for the weights under `policy`, in bytes.

        Includes LoRAs computed beside matrices. Otherwise they take 30 MB for rank 64 in bf16. Includes gathered
        shards: only shards in transit, or all of them if they are resident on the device.

        Raises:
            ValueError: the policy does not fit the number of blocks.
        """
        device = torch.device(device)
        on_gpu, block = runtime_for(device) is not None, self._block_bytes
        work = decode_work_bytes(block.quantised_values, device) + patch_work_bytes(self._summed_values, device)
        decoding = block.decoded + work if on_gpu else 0
        blocks = sum(self.block_counts.values())
        return (
            decoding
            + shards_bytes(self._sharded, blocks=blocks, stored_bytes=self.stored_bytes, on_gpu=on_gpu)
            + device_bytes(
                self.high.config,
                compute_dtype=self.compute_dtype,
                policy=policy,
                experts=self.experts,
                buffer_bytes=block.computed + self.patch_bytes,
            )
        )

    @property
    def file_bytes(self) -> int:
        """Bytes read from files for the largest block."""
        return self._block_bytes.file

    @property
    def stored_bytes(self) -> int:
        """Largest block in RAM and on the bus, in bytes."""
        return self._block_bytes.stored

    @property
    def computed_bytes(self) -> int:
        """Largest block in a buffer, in bytes."""
        return self._block_bytes.computed

    @property
    def patch_bytes(self) -> int:
        """Buffer bytes behind the block: LoRA factors computed beside matrices."""
        if not self.multiplied:
            return 0
        stacks = [stack for stages in self._stages.values() for stack in stages.stacks]
        return max(block_factor_bytes(self.high.config, stack, self.compute_dtype) for stack in stacks)

    @property
    def _summed_values(self) -> int:
        """Values in the largest streamed matrix with LoRAs summed in fp32. 0 without such LoRAs."""
        shapes = parameter_shapes(self.high.config)
        streamed = streamed_parameters(self.high.config)
        summed = {
            name
            for loras in self._loras.values()
            for lora, _ in loras
            for name, changes in lora.changes.items()
            if name in streamed and any(change.is_summed_in_fp32 for change in changes)
        }
        return max((math.prod(shapes[name]) for name in summed), default=0)

    @property
    def quantised_to(self) -> Storage:
        """Block format after quantising between file and RAM."""
        return self.storage if self._block_bytes.quantised else "as stored"

    @property
    def code_formats(self) -> tuple[CodeFormat, ...]:
        """Block matrix formats in RAM that could be multiplied as they are: "int8", "fp8", both or none."""
        every = replace(self._precision, arithmetic="as stored")
        return _formats(block_bytes(self.experts, every).multiplied)

    @property
    def multiplied(self) -> tuple[CodeFormat, ...]:
        """Block matrix formats multiplied as they are: "int8", "fp8", both or none."""
        return _formats(self._block_bytes.multiplied)

    @property
    def decodes(self) -> bool:
        """True if a block has to be decoded on arrival."""
        return self._block_bytes.decoded > 0

    @cached_property
    def _block_bytes(self) -> BlockBytes:
        return block_bytes(self.experts, self._precision)

    @cached_property
    def _multiplied_weights(self) -> dict[str, frozenset[str]]:
        """Full names of the weights multiplied as stored, by expert."""
        layers = multiplied_layers(block_source(self.experts, self._precision, direct=False).formats)
        return {
            name: frozenset(f"blocks.{block}.{layer}.weight" for block, found in blocks.items() for layer in found)
            for name, blocks in layers.items()
        }

    @property
    def _precision(self) -> Precision:
        return Precision(compute_dtype=self.compute_dtype, storage=self.storage, arithmetic=self.arithmetic)

    @property
    def running(self) -> bool:
        """True while a run is in progress. No memory can be released then."""
        return self._engine is not None and self._engine.running

    @property
    def loaded_bytes(self) -> int:
        """Device memory for the weights now, in bytes."""
        return 0 if self._engine is None else self._engine.loaded_bytes

    @property
    def pinned_bytes(self) -> int:
        """Page-locked host memory now, in bytes."""
        return 0 if self._engine is None else self._engine.pinned_bytes

    @property
    def host_bytes(self) -> int:
        """Host memory now, in bytes: RAM-resident blocks, staging, and LoRA factors for blocks."""
        return 0 if self._engine is None else self._engine.host_bytes

    @property
    def shared_bytes(self) -> int:
        """Bytes of RAM blocks that processes on this machine share. 0 for an unshared pair."""
        if not self._shared or self._sharded is not None:
            return 0
        # Not the engine's segment, which does not exist before the first policy.
        with closing(shared_segment(block_source(self.experts, self._precision, direct=False))) as segment:
            return segment.filled_bytes

    @property
    def host_resident_bytes(self) -> int:
        """Estimated host memory for a run in addition to slots: LoRAs as stored and folded, and one embedder."""
        embedders = [
            sum(tensor.stored_bytes for name, tensor in expert.weights.items() if embedder_part(name) is not None)
            for expert in self.experts.values()
        ]
        loras = sum(lora_host_bytes(stages.stacks, self.compute_dtype) for stages in self._stages.values())
        return max(embedders) + loras

    def release_memory(self, nbytes: int) -> int:
        """Free buffers until `nbytes` of device memory are free or none is left. Return the freed bytes.

        The next run allocates and fetches missing blocks again. `close` frees all memory.

        Raises:
            RuntimeError: a run is in progress. Nothing is changed.
        """
        return 0 if self._engine is None else self._engine.release_memory(nbytes)

    def release_idle_buffers(self) -> int:
        """Free the buffers without a resident block, and return their bytes. The next run allocates them again.

        Raises:
            RuntimeError: a run is in progress; nothing is changed.
        """
        return 0 if self._engine is None else self._engine.release_idle_buffers()

    def close(self) -> None:
        """Free the engine with its buffers, threads and open files, and the loaded LoRA factors.

        The LoRAs remain set. The next engine reads them again. Closing twice is allowed.
        """
        self._close_engine()
        self._factors.keep_only([])

    def _update_sharding(self) -> None:
        """Join the engine to the new ranks if its shards are the same, else close it."""
        before, now = self._engine_sharded, self._sharded
        if self._engine is None or before is now:
            return
        if before is not None and now is not None and before.resembles(now):
            with torch.inference_mode(False):
                self._engine.meet(now)
            self._engine_sharded = now
        else:
            self._close_engine()

    def _close_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _make_stages(self) -> dict[str, LoraStages]:
        return {name: lora_stages(self._loras[name]) for name in self.experts}

    def __exit__(self, *_: object) -> None:
        self.close()


def _formats(dtypes: frozenset[torch.dtype]) -> tuple[CodeFormat, ...]:
    return tuple(fmt for dtype, fmt in CODE_FORMATS.items() if dtype in dtypes)
