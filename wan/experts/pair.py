"""Expert pair (Wan2.2 A14B) or single model, with the streaming engine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import torch

from ...block_kernels import CODE_FORMATS, Kernels
from ...devices import compute_device, runtime_for
from ...offload import Sharded, StreamedWeights, patch_work_bytes, shard_bytes
from ...offload.formats import decode_work_bytes
from ...plan.programs import RAW_SLOTS, plan_buffers
from ...schema import OffloadPolicy, StepRange, StepStrengths
from ...schema.refs import CodeFormat
from ..checkpoint.meta_model import embedder_part, parameter_shapes, streamed_parameters
from ..checkpoint.open import Expert
from ..lora.apply import LoraFactors, block_factor_bytes, lora_host_bytes, lora_stages
from ..lora.file import LoraFile
from ..lora.fit import fit_loras, refuse_beside
from .engine import ExpertEngine, shared_segment
from .storage import (
    BlockBytes,
    Precision,
    block_bytes,
    block_source,
    multiplied_layers,
    resident_bytes,
)

Loras: TypeAlias = "Sequence[tuple[LoraFile, float | StepStrengths]]"
"""LoRAs with their strengths in all steps, or in each step."""


class ExpertPair(StreamedWeights, AbstractContextManager["ExpertPair"]):
    """Expert pair or single model, and the engine that streams them.

    A single model has the place "high" and runs every step. `low` is then the same expert.

    `engine` creates the engine. Later runs reuse it until `close()` or the end of the `with` block
    frees it. A closed pair may be used again.
    """

    def __init__(
        self, *, high: Expert, low: Expert, precision: Precision, direct: bool | None, shared: bool
    ) -> None:
        self.high = high
        self.low = low
        self.compute_dtype = precision.compute_dtype
        self._precision = precision
        # Ranks on one machine share the page cache. With direct reads every rank would read the
        # whole files.
        self._direct = direct
        if direct is None and shared:
            self._direct = False
        self._shared = shared
        self.kernels = Kernels()
        """Block compute kernels. A change applies at the next call of `engine`."""
        self._sharded: Sharded | None = None
        self._engine: ExpertEngine | None = None
        self._engine_sharded: Sharded | None = None
        self._loras: Mapping[str, Sequence[tuple[LoraFile, StepStrengths]]] = {
            "high": (),
            "low": (),
        }
        self._stages = {name: lora_stages(()) for name in self.experts}
        self._factors = LoraFactors()

    @property
    def is_single(self) -> bool:
        """True for a single model, which runs every step."""
        return self.low is self.high

    @property
    def experts(self) -> dict[str, Expert]:
        """Experts by place: "high" and "low", or only "high"."""
        if self.is_single:
            return {"high": self.high}
        return {"high": self.high, "low": self.low}

    @property
    def block_counts(self) -> dict[str, int]:
        """Number of blocks by expert place."""
        return {name: expert.config.num_layers for name, expert in self.experts.items()}

    @property
    def reads_reference(self) -> bool:
        """True if reference image tokens precede the video (`ref_conv` in Fun Control)."""
        return self.high.config.reference_channels is not None

    def is_current(self) -> bool:
        """Return True if the expert files have not changed since opening.

        Otherwise open the pair again.
        """
        return self.high.is_current() and self.low.is_current()

    def loras_are_current(self) -> bool:
        """Return True if the LoRA files have not changed since opening."""
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
        """Return the expert's `BlockKey.patch` in a step of the whole schedule."""
        return self._stages[expert].number_at(step)

    def opened_loras(self, *paths: Path | str | None) -> list[LoraFile]:
        """Return the LoRAs in these files as added to the experts."""
        wanted = {Path(path) for path in paths if path is not None}
        return [lora for loras in self._loras.values() for lora, _ in loras if lora.path in wanted]

    def set_loras(self, high: Loras, low: Loras) -> None:
        """Replace each expert's LoRAs by these, with one strength or the strength in each step.

        Applies at the next call of `engine`. It reads new files and keeps their factors in RAM as
        stored (0.6 GB for rank 64 in bf16), so that a strength change reads nothing. LoRAs with
        strength 0 are not read. If strengths vary, the folded factors for all combinations are
        kept, as much again for each.

        Raises:
            CheckpointError: a LoRA does not fit the expert or the arithmetic. The LoRAs are
                unchanged.
            ValueError: a strength is not a finite number, or a single model gets LoRAs for the
                low-noise expert. The LoRAs are unchanged.
        """
        if self.is_single and low:
            raise ValueError(
                f"{self.high.path} is one expert, which runs every step: give {low[0][0].path} as "
                "the LoRA of the high-noise expert, and none for the low-noise expert"
            )
        fitted = {"high": fit_loras(high, self.high.config), "low": fit_loras(low, self.low.config)}
        if self.multiplied:
            for name, weights in self._multiplied_weights.items():
                for lora, _ in fitted[name]:
                    refuse_beside(lora, weights)
        self._loras = fitted
        self._stages = {name: lora_stages(fitted[name]) for name in self.experts}

    def shard(self, sharded: Sharded | None) -> None:
        """Keep a shard of every block and gather blocks from these ranks (None: no shards).

        The ranks run the same program. Applies at the next call of `engine`. Shards already read
        are reused if only the rendezvous is new.
        """
        self._sharded = sharded

    def engine(self, policy: OffloadPolicy, device: torch.device | str) -> ExpertEngine:
        """Return the engine for `policy` on `device`, with the LoRAs set.

        An engine with another policy is changed and keeps every block in both policies. An engine
        on another device is closed.

        Raises:
            ValueError: the policy does not fit the block count, a LoRA factor is not finite, or the
                kernels are not installed or do not support this device or dtype.
            OSError: a LoRA cannot be read, or there is not enough RAM for its factors or for
                RAM-resident blocks.
            RuntimeError: a run is in progress, and the policy, device, kernels, LoRAs or shards
                have changed.
        """
        device = compute_device(device)
        self._update_sharding()
        if self._engine is None or self._engine.device != device:
            self._close_engine()
            # The engine outlives the run that creates it, and later runs could not write inference
            # tensors.
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
        # Before the policy, which attaches the kernels again: they may have changed since the last
        # run.
        self._engine.set_kernels(self.kernels)
        if self._engine.policy != policy:
            self._engine.set_policy(policy)
        # Before new files are read: RAM then holds no factors of removed LoRAs.
        self._factors.keep_only([lora for loras in self._loras.values() for lora, _ in loras])
        self._engine.set_loras(
            {name: stages.stacks for name, stages in self._stages.items()}, self._factors
        )
        return self._engine

    def current_engine(self, policy: OffloadPolicy, device: torch.device) -> ExpertEngine | None:
        """Return the current engine if it has this policy and device, else None.

        Does not create or change one.
        """
        engine = self._engine
        if engine is None or engine.policy != policy or engine.device != device:
            return None
        return engine

    def device_bytes(self, policy: OffloadPolicy, *, device: torch.device | str = "cuda") -> int:
        """Return the device memory for the weights under `policy`, in bytes.

        Includes LoRA factors computed next to matrices. Other LoRAs take 30 MB for rank 64 in bf16.
        Includes gathered shards: only shards in transit, or all of them if they are resident on the
        device.

        Raises:
            ValueError: the policy does not fit the block count.
        """
        device = torch.device(device)
        on_gpu = runtime_for(device) is not None
        block = self.block_bytes
        computed = [size.computed for size in block.sizes]
        counts = self.block_counts
        _, buffers = plan_buffers(policy, {name: computed[: counts[name]] for name in counts})
        total = buffers.nbytes + len(buffers.capacities) * self.patch_bytes
        total += self._shards_bytes(on_gpu)
        total += len(self.experts) * resident_bytes(self.high.config, self.compute_dtype)
        if on_gpu:
            total += block.decoded + decode_work_bytes(block.quantised_values, device)
            total += patch_work_bytes(self._summed_values, device)
        return total

    def _shards_bytes(self, on_gpu: bool) -> int:
        """Return the size of gathered shards in bytes: all if resident, else those in transit."""
        if self._sharded is None:
            return 0
        shard = shard_bytes(self.block_bytes.stored, self._sharded.gather.size)
        if self._sharded.on_device:
            return shard * sum(self.block_counts.values())
        return RAW_SLOTS * shard * on_gpu

    @property
    def patch_bytes(self) -> int:
        """Buffer bytes behind the block: LoRA factors computed next to matrices."""
        if not self.multiplied:
            return 0
        stacks = [stack for stages in self._stages.values() for stack in stages.stacks]
        return max(
            block_factor_bytes(self.high.config, stack, self.compute_dtype) for stack in stacks
        )

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
    def code_formats(self) -> tuple[CodeFormat, ...]:
        """Block matrix formats in RAM suited to multiplication: "int8", "fp8", both or none."""
        every = replace(self._precision, arithmetic="as stored")
        return _formats(block_bytes(self.experts, every).multiplied)

    @property
    def multiplied(self) -> tuple[CodeFormat, ...]:
        """Block matrix formats multiplied as they are: "int8", "fp8", both or none."""
        return _formats(self.block_bytes.multiplied)

    @cached_property
    def block_bytes(self) -> BlockBytes:
        """Bytes of the largest block."""
        return block_bytes(self.experts, self._precision)

    @cached_property
    def _multiplied_weights(self) -> dict[str, frozenset[str]]:
        """Full names of the weights multiplied as stored, by expert."""
        source = block_source(self.experts, self._precision, direct=False)
        return {
            name: frozenset(f"blocks.{layer}.weight" for layer in layers)
            for name, layers in multiplied_layers(source.formats).items()
        }

    @property
    def shared_bytes(self) -> int:
        """RAM blocks shared by processes on this machine, in bytes. 0 for an unshared pair."""
        if not self._shared or self._sharded is not None:
            return 0
        # Not the engine's segment, which does not exist before the first policy.
        with closing(
            shared_segment(block_source(self.experts, self._precision, direct=False))
        ) as segment:
            return segment.filled_bytes

    @property
    def host_resident_bytes(self) -> int:
        """Estimated host memory for a run besides slots: stored and folded LoRAs, one embedder."""
        embedders = [
            sum(
                tensor.stored_bytes
                for name, tensor in expert.weights.items()
                if embedder_part(name) is not None
            )
            for expert in self.experts.values()
        ]
        loras = sum(
            lora_host_bytes(stages.stacks, self.compute_dtype) for stages in self._stages.values()
        )
        return max(embedders) + loras

    def close(self) -> None:
        """Free the engine with its buffers, threads and open files, and the loaded LoRA factors.

        The LoRAs remain set. The next engine reads them again. Closing twice is allowed.
        """
        self._close_engine()
        self._factors.keep_only([])

    def _update_sharding(self) -> None:
        """Join the engine to the new ranks if its shards are the same, else close it."""
        before = self._engine_sharded
        now = self._sharded
        if self._engine is None or before is now:
            return
        if before is not None and now is not None and before.resembles(now):
            # As in `engine`: new tensors outlive this run.
            with torch.inference_mode(False):
                self._engine.meet(now)
            self._engine_sharded = now
        else:
            self._close_engine()

    def _close_engine(self) -> None:
        if self._engine is not None:
            # In this order: closing raises an error during a run, and the engine is then kept.
            self._engine.close()
            self._engine = None

    def __exit__(self, *_: object) -> None:
        self.close()


def _formats(dtypes: frozenset[torch.dtype]) -> tuple[CodeFormat, ...]:
    return tuple(fmt for dtype, fmt in CODE_FORMATS.items() if dtype in dtypes)
