"""The pair of experts that Wan2.2 A14B is made of, or one expert in its place, and the engine that streams them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property

import torch

from ...offload import Sharded
from ...schema import OffloadPolicy, Storage
from ..checkpoint.open import Expert
from ..lora.apply import LoraFactors, LoraStack, bytes_in_both_forms, stack_identity
from ..lora.file import LoraFile
from ..lora.fit import fitted_stack
from ..transformer.kernels import Kernels
from .embedder_cache import part_of
from .engine import ExpertEngine
from .storage import BlockBytes, block_bytes, device_bytes, row_scale_bytes, shards_bytes


class ExpertPair:
    """Two experts that belong together, and the engine that streams them; or one, which runs every step.

    One expert has the place "high"; `low` is then that same expert, and no step is its own.

    The engine is made when it is first asked for and survives the runs that use it; `close()` or `with` frees it. A
    closed pair may be used again.
    """

    def __init__(
        self,
        *,
        high: Expert,
        low: Expert,
        compute_dtype: torch.dtype,
        storage: Storage = "as stored",
        direct: bool | None = None,
        shared: bool = False,
    ) -> None:
        self.high = high
        self.low = low
        self.compute_dtype = compute_dtype
        self.storage = storage
        # Read past the page cache, every rank would read the whole files.
        self._direct = False if direct is None and shared else direct
        self._shared = shared
        self.kernels = Kernels()
        """What computes the blocks, from the next time on that the engine is asked for."""
        self._sharded: Sharded | None = None
        self._engine: ExpertEngine | None = None
        self._engine_for: tuple[OffloadPolicy, torch.device] | None = None
        self._engine_sharded: Sharded | None = None
        self._loras: Mapping[str, LoraStack] = {"high": (), "low": ()}
        self._factors = LoraFactors()

    @property
    def is_single(self) -> bool:
        """Whether one expert runs every step."""
        return self.low is self.high

    @property
    def experts(self) -> dict[str, Expert]:
        """The experts by their place: "high" and "low", or "high" alone."""
        return {"high": self.high} if self.is_single else {"high": self.high, "low": self.low}

    @property
    def block_counts(self) -> dict[str, int]:
        """How many blocks the expert of each place has."""
        return {name: expert.config.num_layers for name, expert in self.experts.items()}

    @property
    def in_channels(self) -> int:
        """Channels of the model's input: 16 (T2V), 36 (I2V: latents, mask, condition), or 48 (TI2V-5B)."""
        return self.high.config.in_channels

    @property
    def identity(self) -> Hashable:
        """What names this pair on a graph edge: equal for the same files, dtype, storage, kernels, LoRAs, strengths."""
        loras = tuple(stack_identity(stack) for stack in self._active_loras().values())
        paths = (self.high.path.resolve(), self.low.path.resolve())
        return (*paths, self.compute_dtype, self.storage, self.kernels, loras)

    def is_current(self) -> bool:
        """Whether the files on disk are still those that were opened; open the pair again where they are not."""
        return self.high.is_current() and self.low.is_current()

    def loras_are_current(self) -> bool:
        """Whether the LoRA files on disk are still those that were opened."""
        return all(lora.is_current() for stack in self._loras.values() for lora, _ in stack)

    def set_loras(self, high: Sequence[tuple[LoraFile, float]], low: Sequence[tuple[LoraFile, float]]) -> None:
        """Add these LoRAs, with their strengths, to the weights of each expert, and no others.

        Takes effect when the engine is asked for the next time; then a file that is new is read, and its factors are
        kept in RAM as they are stored (0.6 GB for rank 64 in bf16), so that another strength reads nothing. A LoRA of
        strength 0 is not there.

        Raises:
            CheckpointError: a LoRA does not fit its expert. The former LoRAs stay.
            ValueError: a strength is no finite number, or one expert is given LoRAs for late steps. The former LoRAs
                stay.
        """
        if self.is_single and low:
            raise ValueError(
                f"{self.high.path} is one expert, which runs every step: give {low[0][0].path} as the LoRA of the "
                "high-noise expert, and none for the low-noise expert"
            )
        self._loras = {
            "high": fitted_stack(high, self.high.config),
            "low": fitted_stack(low, self.low.config),
        }

    def shard(self, sharded: Sharded | None) -> None:
        """Keep a shard of every block and gather it with these ranks, which run the same; None: keep whole blocks.

        Takes effect when the engine is asked for the next time. Shards that were read stay where only the meeting is
        another one.
        """
        self._sharded = sharded

    def engine(self, policy: OffloadPolicy, device: torch.device | str) -> ExpertEngine:
        """Return the engine for `policy` on `device`, with the LoRAs set.

        One for another policy takes on this one, and keeps every block that both keep; one on another device is freed.

        Raises:
            ValueError: the policy does not fit the number of blocks, a factor of a LoRA is not finite, or the kernels
                are not installed or do not serve this device or dtype.
            OSError: a LoRA cannot be read, or its factors or the blocks to be kept in RAM do not fit there.
            RuntimeError: the engine runs, and another one, other kernels or other LoRAs are asked for.
        """
        place = torch.device(device)
        self._meet()
        if self._engine is None or self._engine_for is None or self._engine_for[1] != place:
            self._close_engine()
            # The engine outlives the run that asks for it, so none of its tensors may be an inference tensor.
            with torch.inference_mode(False):
                self._engine = ExpertEngine(
                    self.experts,
                    compute_dtype=self.compute_dtype,
                    policy=policy,
                    device=place,
                    storage=self.storage,
                    direct=self._direct,
                    shared=self._shared,
                    sharded=self._sharded,
                )
            self._engine_sharded = self._sharded
            self._engine_for = (policy, place)
        elif self._engine_for[0] != policy:
            self._engine.set_policy(policy)
            self._engine_for = (policy, place)
        assert self._engine is not None
        self._engine.set_kernels(self.kernels)
        self._factors.keep_only([lora for stack in self._loras.values() for lora, _ in stack])
        self._engine.set_loras(self._active_loras(), self._factors)
        return self._engine

    def present_engine(self, policy: OffloadPolicy, device: torch.device) -> ExpertEngine | None:
        """The engine as it is, if it is there for that policy on that device; makes none and changes none."""
        return self._engine if self._engine_for == (policy, device) else None

    def device_bytes(self, policy: OffloadPolicy, *, device: torch.device | str = "cuda") -> int:
        """Device memory that the weights take under `policy`; LoRAs come on top (30 MB for rank 64 in bf16).

        Of shards that are gathered, those that are on their way to the device or stay there are among it.

        Raises:
            ValueError: the policy does not fit the number of blocks.
        """
        on_gpu = torch.device(device).type != "cpu"
        decoding = self._decoding_bytes if on_gpu else 0
        blocks = sum(self.block_counts.values())
        return (
            decoding
            + shards_bytes(self._sharded, blocks=blocks, stored_bytes=self.stored_bytes, on_gpu=on_gpu)
            + device_bytes(self.high.config, compute_dtype=self.compute_dtype, policy=policy, experts=self.experts)
        )

    @property
    def file_bytes(self) -> int:
        """Bytes that are read for one block, the largest one of the pair."""
        return self._block_bytes.file

    @property
    def stored_bytes(self) -> int:
        """Bytes of one block in RAM and on the bus, the largest one of the pair."""
        return self._block_bytes.stored

    @property
    def computed_bytes(self) -> int:
        """Bytes of one block in its buffer."""
        return self._block_bytes.computed

    @property
    def decodes(self) -> bool:
        """Whether a block of the pair arrives in another form than it is computed with."""
        return self._block_bytes.decoded > 0

    @cached_property
    def _block_bytes(self) -> BlockBytes:
        return block_bytes(self.experts.values(), self.compute_dtype, self.storage)

    @cached_property
    def _decoding_bytes(self) -> int:
        """What a GPU keeps for decoding: the stored form of blocks that arrive, and the scales of every row."""
        return self._block_bytes.decoded + row_scale_bytes(self.experts.values(), self.storage)

    @property
    def running(self) -> bool:
        """Whether a run is going on: nothing can be given back now."""
        return self._engine is not None and self._engine.running

    @property
    def loaded_bytes(self) -> int:
        """Bytes of device memory that the weights of this pair take now."""
        return 0 if self._engine is None else self._engine.loaded_bytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes of host memory that are page-locked for this pair now."""
        return 0 if self._engine is None else self._engine.pinned_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that blocks in RAM, staging and LoRA factors of blocks take for this pair now."""
        return 0 if self._engine is None else self._engine.host_bytes

    @property
    def host_resident_bytes(self) -> int:
        """Host memory of a run beside its slots, about: LoRAs in their two forms, and an embedder that waits."""
        embedders = [
            sum(tensor.nbytes for name, tensor in expert.weights.items() if part_of(name) is not None)
            for expert in self.experts.values()
        ]
        loras = [lora for stack in self._active_loras().values() for lora, _ in stack]
        return max(embedders) + bytes_in_both_forms(loras, self.compute_dtype)

    def give_back(self, nbytes: int) -> int:
        """Free buffers until `nbytes` of device memory are free or none is left; returns the bytes freed.

        The next run allocates and fetches what it misses; `close` frees the rest as well.

        Raises:
            RuntimeError: a run is going on; nothing was touched.
        """
        return 0 if self._engine is None else self._engine.give_back(nbytes)

    def close(self) -> None:
        """Free the engine, with its buffers, threads and open files, and what was read of LoRAs.

        The LoRAs stay set, and are read again by the next engine. Closing twice is allowed.
        """
        self._close_engine()
        self._factors.keep_only([])

    def _meet(self) -> None:
        """Let the engine that is there gather with the ranks that were set, or free it."""
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

    def _active_loras(self) -> dict[str, LoraStack]:
        return {name: [(lora, by) for lora, by in self._loras[name] if by != 0] for name in self.experts}

    def __enter__(self) -> ExpertPair:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
