"""Blocks attached to an engine: what their owner asks of it between and during runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType

import torch
from torch import nn

from ..metrics import Recorder
from ..plan import (
    BlockKey,
    OffloadPolicy,
    RamHomes,
    Residency,
    RunPrograms,
    TransferProgram,
    Visit,
    plan_ram,
    plan_residency,
    step_visits,
)
from .attached_run import OffloadRun
from .binding import BlockBinding
from .buffers import BlockBuffer
from .engine import StreamEngine
from .follow import ForwardFollower
from .gather import Sharded
from .patches import BlockPatch
from .programs import Places, compile_run
from .shared_segment import SharedSegment
from .source import BlockSource
from .staying import StayingTensors

Stacks = Mapping[str, Sequence[nn.Module]]


class OffloadHandle:
    """Blocks attached to an engine. See `attach_offload`."""

    def __init__(
        self,
        stacks: Stacks,
        *,
        policy: OffloadPolicy,
        device: torch.device,
        source: BlockSource,
        follow_forward: bool,
        shared: SharedSegment | None = None,
        sharded: Sharded | None = None,
    ) -> None:
        self.counts = {name: len(stack) for name, stack in stacks.items()}
        self._sharded = sharded
        self._residency, self._homes, buffers = self._places(policy)
        self._source = source
        self.engine = StreamEngine(
            source, buffers=buffers, homes=self._homes, device=device, shared=shared, sharded=sharded
        )
        self._bindings = {
            key: BlockBinding(key, block, self.engine.formats[key].computed)
            for name, stack in stacks.items()
            for key, block in ((BlockKey(name, index), block) for index, block in enumerate(stack))
        }
        self._staying = [StayingTensors(block, device) for stack in stacks.values() for block in stack]
        # All that can fail is done: from here on the blocks change.
        self.unbind_all()
        for staying in self._staying:
            staying.put()
        self._follower = ForwardFollower(self, stacks) if follow_forward else None
        self._attached = True

    def programs(self, visits: Sequence[Visit]) -> RunPrograms:
        """The programs for `visits`, starting from what buffers and slots hold now."""
        places = Places(
            residency=self._residency,
            buffers=len(self.engine.buffers),
            homes=self._homes,
            staging=self.engine.staging,
            in_buffers=self.engine.contents(),
            in_slots=self.engine.ram.contents(),
        )
        return compile_run(visits, places)

    def compile(self, visits: Sequence[Visit]) -> TransferProgram:
        """The device program for `visits`, starting from what the buffers hold now."""
        return self.programs(visits).device

    def run(self, visits: Sequence[Visit], *, recorder: Recorder | None = None) -> OffloadRun:
        """Compile `visits` and start them; use with `with`."""
        return OffloadRun(self, self.engine.run(self.programs(visits), recorder=recorder))

    def set_policy(self, policy: OffloadPolicy) -> None:
        """Change between runs what stays on the device and in RAM; blocks that both policies keep are not read again.

        Raises:
            RuntimeError: a run is going on, or the blocks were detached.
            ValueError: the policy does not fit the number of blocks; the former one stays.
            SourceError: there is not enough RAM for the blocks that would have a home there; the former one stays.
        """
        if not self._attached:
            raise RuntimeError("the blocks were detached: attach them again under another policy")
        residency, homes, buffers = self._places(policy)
        self.engine.resize(buffers, residency=residency, homes=homes)
        self._residency, self._homes = residency, homes

    @contextmanager
    def passes(self, count: int, *, stack: str | None = None) -> Iterator[None]:
        """The next `count` forwards of a stack are one run, so that the later ones find their first blocks there."""
        if self._follower is None:
            raise ValueError("passes() needs follow_forward=True; name the visits with run() instead")
        with self._follower.passes(self._only(stack), count):
            yield

    def pass_visits(self, count: int, stack: str) -> tuple[Visit, ...]:
        """`count` passes through the blocks of one stack."""
        return step_visits([stack] * count, self.counts)

    def set_patches(self, patches: Mapping[BlockKey, BlockPatch]) -> None:
        """Replace what is added to the blocks when they arrive (LoRA); blocks not named arrive as they are stored.

        The factors are copied to host memory, so nothing has to be kept. Blocks that lie in a buffer and whose patch
        has another identity than before are fetched again by the next run, all others stay.

        Raises:
            RuntimeError: a run is going on, or the blocks were detached.
            ValueError: a patch does not fit its block; the patches are then as they were.
            OSError: the system does not give that much memory; the patches are then as they were.
        """
        if not self._attached:
            raise RuntimeError("the blocks were detached: attach them again to patch them")
        self.engine.set_patches(patches)

    def give_back(self, nbytes: int) -> int:
        """Free buffers until `nbytes` of device memory are free or none is left; returns the bytes freed.

        Those that hold nothing go first, then streamed blocks, then residents. The next run allocates and fetches what
        it misses.

        Raises:
            RuntimeError: a run is going on; nothing was touched.
        """
        return self.engine.give_back(nbytes, residency=self._residency)

    def meet(self, sharded: Sharded) -> None:
        """Gather with the ranks of another meeting, in which this one has the same shards.

        Raises:
            RuntimeError: a run is going on; nothing was touched.
        """
        assert self._sharded is not None, "an engine of whole blocks meets nobody"
        assert self._sharded.resembles(sharded), "other shards need another engine"
        self.engine.meet(sharded)
        self._sharded = sharded

    def take_buffers(self) -> None:
        """Allocate all buffers now; otherwise each comes with the first run that fetches into it.

        Raises:
            RuntimeError: a run is going on; nothing was touched. Or the device has no memory left.
        """
        self.engine.take_buffers()

    @property
    def running(self) -> bool:
        """Whether a run is going on: nothing can be given back now."""
        return self.engine.running

    @property
    def loaded_bytes(self) -> int:
        """Bytes of device memory that streamed weights take now, empty buffers included."""
        return self.engine.loaded_bytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes of host memory that are page-locked now: blocks in RAM, staging, factors of patches."""
        return self.engine.pinned_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that blocks in RAM, staging and factors of patches take now, locked or not."""
        return self.engine.host_bytes

    def detach(self) -> None:
        """Leave every block as it was and free the buffers. Detaching twice is allowed.

        Raises:
            RuntimeError: a run is going on; it goes on undisturbed.
        """
        if not self._attached:
            return
        if self._follower is not None:
            self._follower.remove()
        self.engine.close()
        self._attached = False
        for binding in self._bindings.values():
            binding.restore()
        for staying in self._staying:
            staying.restore()
        self._source.close()

    def bind(self, key: BlockKey, buffer: BlockBuffer) -> None:
        """The block of a visit is there."""
        self._bindings[key].bind(buffer)

    def unbind(self, key: BlockKey) -> None:
        """The tenancy of a block is over."""
        self._bindings[key].unbind()

    def unbind_all(self) -> None:
        """No visit is going on any more."""
        for binding in self._bindings.values():
            binding.unbind()

    def _places(self, policy: OffloadPolicy) -> tuple[Residency, RamHomes, int]:
        residency, buffers = plan_residency(policy, self.counts)
        if self._sharded is not None and self._sharded.on_device:  # every shard has a home, whatever the policy says
            policy = OffloadPolicy.layerwise(source="pinned")
        return residency, plan_ram(policy, residency, self.counts), buffers

    def _only(self, stack: str | None) -> str:
        if stack is not None:
            return stack
        if len(self.counts) != 1:
            raise ValueError(f"name one of the stacks {', '.join(self.counts)}")
        return next(iter(self.counts))

    def __enter__(self) -> OffloadHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()
