"""The engine: blocks attached to one pool of buffers and to slots of RAM, and the runs that stream their weights.

A run (`run.py`) goes through the visits and fetches of the device program and the reads of the RAM program. The
engine decides nothing: it accepts only checked programs, and the run records its fetches and reads, so that a test can
compare them with the programs. Between runs the engine changes patches, takes another policy, and gives device memory
back.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType

import torch
from torch import nn

from ...plan import (
    BlockKey,
    RamResidency,
    RunPrograms,
    TransferProgram,
    Visit,
    check_program,
    check_ram,
    compile_program,
    compile_ram,
    eviction_order,
    plan_ram,
    step_visits,
)
from ...schema import OffloadPolicy, Residency, plan_residency
from ...telemetry import Recorder
from ..formats.layout import allocate_flat
from ..host_memory.page_lock import CudaPageLock
from ..host_memory.shared_segment import SharedSegment
from ..patches import BlockPatch, StagedPatches
from ..sharding.group import Gathering, Sharded
from ..sources.base import BlockSource
from .binding import BlockBinding, ResidentTensors
from .buffers import BlockBuffer, BufferState
from .forward_hooks import ForwardHooks
from .route import Route
from .run import EngineRun

Stacks = Mapping[str, Sequence[nn.Module]]


class OffloadEngine:
    """Streams the blocks of some stacks from one source to one device; serves one run at a time.

    Args:
        stacks: blocks by the name of their stack; they change only when all that can fail has succeeded.
        policy: which blocks stay resident, how many buffers lie ahead, and which blocks have a home in RAM.
        device: `cpu` or `cuda`.
        source: where the stored bytes of every block come from; `detach` closes it.
        follow_forward: run the blocks' own forwards through the engine.
        shared: RAM that the ranks of one machine hold together.
        sharded: the ranks that keep one shard of every block each; the source is then a `RangeSource`.

    Raises:
        ValueError: the policy does not fit the number of blocks, or the source does not fit a block.
        SourceError: there is not enough RAM for the homes.
    """

    def __init__(
        self,
        stacks: Stacks,
        *,
        policy: OffloadPolicy,
        device: torch.device,
        source: BlockSource,
        follow_forward: bool = False,
        shared: SharedSegment | None = None,
        sharded: Sharded | None = None,
    ) -> None:
        self.device = device
        self.block_counts = {name: len(stack) for name, stack in stacks.items()}
        self._source, self._sharded = source, sharded
        self._residency, self._homes, buffers = self._places(policy)
        self.formats = {key: source.block_format(key) for key in source.keys()}
        lock = CudaPageLock(device) if device.type == "cuda" else None
        self._patches = StagedPatches(self.formats, lock=lock)
        self._route = Route(source, self.formats, self._patches, device=device, sharded=sharded)
        self.ram = self._route.ram_slots(lock, shared)
        self.ram.check_available(self._homes, self.staging)
        self.ram.resize(self._homes, self.staging)
        self.buffers = tuple(BlockBuffer(index) for index in range(buffers))
        self.streams = self._route.streams()
        self._running = threading.Lock()
        self._bindings = {
            key: BlockBinding(key, block, self.formats[key].computed)
            for name, stack in stacks.items()
            for key, block in ((BlockKey(name, index), block) for index, block in enumerate(stack))
        }
        self._staying = [ResidentTensors(block, device) for stack in stacks.values() for block in stack]
        # All that can fail is done: from here on the blocks change.
        self.unbind_all()
        for staying in self._staying:
            staying.put()
        self._follower = ForwardHooks(self, stacks) if follow_forward else None
        self._attached = True

    @property
    def staging(self) -> int:
        """Slots of RAM beside those of homes; none where bytes can be read straight into a buffer."""
        return self._route.staging

    @property
    def block_source(self) -> BlockSource:
        """Source of the bytes that this rank stores: whole blocks, or its shards of them."""
        return self._route.block_source

    @property
    def gathering(self) -> Gathering | None:
        """How far the ranks are that keep a shard of every block; None where every rank has whole blocks."""
        return self._route.gathering

    @property
    def loaded_bytes(self) -> int:
        """Bytes of device memory that the engine takes now."""
        return sum(buffer.nbytes for buffer in self.buffers) + self.streams.device_bytes + self.ram.device_bytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes of host memory that the engine keeps page-locked now."""
        return self.ram.locked_bytes + self._patches.locked_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that slots and patches take now, locked or not."""
        return self.ram.nbytes + self._patches.host_bytes

    @property
    def running(self) -> bool:
        """True while a run is going on: nothing can be given back then."""
        return self._running.locked()

    def contents(self) -> dict[int, BlockKey]:
        """What the buffers still hold from the run before; a new program may keep it."""
        return {b.index: b.key for b in self.buffers if b.state is BufferState.DONE and b.key is not None}

    def programs(self, visits: Sequence[Visit]) -> RunPrograms:
        """The programs for `visits`, starting from the present contents of buffers and slots.

        Raises:
            ProgramError: there are too few buffers.
            RuntimeError: the blocks were detached.
        """
        self._check_attached()
        device = compile_program(visits, self._residency, len(self.buffers), contents=self.contents())
        ram = compile_ram(device, self._homes, staging=self.staging, contents=self.ram.contents())
        return RunPrograms(device=device, ram=ram)

    def run(self, visits: Sequence[Visit], recorder: Recorder | None = None) -> EngineRun:
        """Compile `visits` into a run; `with` starts it, and leaving it joins its threads, whatever happened.

        Inside, `run.visit(step, expert, block)` gives the visits in their order.

        Raises:
            RuntimeError: another run is going on, which entering checks again, or the blocks were detached.
        """
        return self.execute(self.programs(visits), recorder)

    def execute(self, programs: RunPrograms, recorder: Recorder | None = None) -> EngineRun:
        """A run of `programs`, as `run` makes it.

        Raises:
            RuntimeError: another run is going on; entering checks it again.
            ValueError: a program is wrong, or made for more buffers or slots; entering checks the latter again.
        """
        if self.running:
            raise RuntimeError(_BUSY)
        self.check_size(programs)
        check_program(programs.device)
        check_ram(programs.device, programs.ram)
        return EngineRun(self, programs, recorder)

    @contextmanager
    def passes(self, count: int, *, stack: str | None = None) -> Iterator[None]:
        """The next `count` forwards of a stack are one run, so that the later ones find their first blocks there."""
        if self._follower is None:
            raise ValueError("passes() needs follow_forward=True; name the visits with run() instead")
        with self._follower.passes(self._only(stack), count):
            yield

    def pass_visits(self, count: int, stack: str) -> tuple[Visit, ...]:
        """`count` passes through the blocks of one stack."""
        return step_visits([stack] * count, self.block_counts)

    def check_size(self, programs: RunPrograms) -> None:
        """Raise ValueError for programs that need more buffers or slots than there are now."""
        for needed, there, word in (
            (programs.device.buffers, len(self.buffers), "buffers"),
            (programs.ram.program.buffers, len(self.ram), "slots of RAM"),
        ):
            if needed > there:
                raise ValueError(f"the program needs {needed} {word}, the engine has {there}: compile it again")

    def fetch_bytes(self, key: BlockKey) -> int:
        """Bytes of one fetch of a block: as it is stored, or the own shard of it, and the factors of its patch."""
        return self._route.sizes[key] + self._patches.nbytes(key)

    def set_patches(self, patches: Mapping[BlockKey, BlockPatch]) -> None:
        """Replace what is added to the blocks when they arrive (LoRA); blocks not named arrive as they are stored.

        The factors are copied to host memory. Blocks that lie in a buffer and whose patch has another identity than
        before are fetched again by the next run, all others stay.

        Raises:
            RuntimeError: a run is going on, or the blocks were detached; nothing was touched.
            ValueError: a patch does not fit its block; the patches are as they were.
            OSError: the system does not give that much memory; the patches are as they were.
        """
        self._check_attached()
        self.claim()
        try:
            prepared = self._patches.prepare(patches)
            changed = self._patches.changed(prepared)
            if changed:
                self.streams.settle()
                for index, key in self.contents().items():
                    if key in changed:
                        self.buffers[index].forget()
                self._patches.replace(prepared)
        finally:
            self.release()

    def give_back(self, nbytes: int) -> int:
        """Free whole buffers, the least useful first, until `nbytes` are free or nothing is left; returns bytes freed.

        What else lies on the device goes last. The next run allocates and fetches what it misses.

        Raises:
            RuntimeError: a run is going on; nothing was touched.
        """
        self.claim()
        try:
            self.streams.settle()
            freed = 0
            for index in eviction_order(range(len(self.buffers)), self.contents(), self._residency):
                if freed >= nbytes:
                    return freed
                freed += _let_go(self.buffers[index])
            return freed if freed >= nbytes else freed + self.streams.give_back()
        finally:
            self.release()

    def set_policy(self, policy: OffloadPolicy) -> None:
        """Change between runs what stays on the device and in RAM; blocks that both policies keep are not read again.

        New buffers take memory when a run first fetches into them.

        Raises:
            RuntimeError: a run is going on, or the blocks were detached; the former policy stays, as after all errors.
            ValueError: the policy does not fit the number of blocks.
            SourceError: there is not enough RAM for the blocks that would have a home there.
        """
        self._check_attached()
        residency, homes, buffers = self._places(policy)
        self._resize(buffers, residency, homes)
        self._residency, self._homes = residency, homes

    def _resize(self, buffers: int, residency: Residency, homes: RamResidency) -> None:
        self.claim()
        try:
            order = eviction_order(range(len(self.buffers)), self.contents(), residency)
            out = order[: max(0, len(order) - buffers)]
            freed = sum(self.buffers[index].nbytes for index in out) if self.device.type == "cpu" else 0
            self.ram.check_available(homes, self.staging, freed=freed)
            self.streams.settle()
            for index in out:
                _let_go(self.buffers[index])
            stay = [buffer for buffer in self.buffers if buffer.index not in out]
            self.buffers = (*stay, *(BlockBuffer(index) for index in range(len(stay), buffers)))
            for index, buffer in enumerate(self.buffers):
                buffer.index = index
            self.ram.resize(homes, self.staging)
        finally:
            self.release()

    def restore_buffers(self, program: TransferProgram) -> None:
        """Allocate the buffers that `program` fetches into and that were given back (computing thread, in a run)."""
        for index in sorted({fetch.buffer for fetch in program.fetches}):
            if self.buffers[index].state is BufferState.ABSENT:
                self.buffers[index].restore(allocate_flat(self._route.buffer_bytes, self.device))

    def take_buffers(self) -> None:
        """Allocate all buffers now, for callers that count their memory before a run.

        Raises:
            RuntimeError: a run is going on; nothing was touched. Or the device has no memory left.
        """
        self._check_attached()
        self.claim()
        try:
            for buffer in self.buffers:
                if buffer.state is BufferState.ABSENT:
                    buffer.restore(allocate_flat(self._route.buffer_bytes, self.device))
        finally:
            self.release()

    def meet(self, sharded: Sharded) -> None:
        """Gather with the ranks of another meeting, in which this one has the same shards: those that were read stay.

        The contents of buffers go, as a new rank has nothing there.

        Raises:
            RuntimeError: a run is going on; nothing was touched.
        """
        assert self._sharded is not None, "an engine of whole blocks meets nobody"
        assert self._sharded.resembles(sharded), "other shards need another engine"
        self._check_attached()
        self.claim()
        try:
            self.drop_buffers()
            self.streams.close()
            self._route.meet(sharded)
            self.streams = self._route.streams()
            self._sharded = sharded
        finally:
            self.release()

    def drop_buffers(self) -> None:
        """Let go of what lies in buffers and of their memory (nobody may use it, in a run or not)."""
        for buffer in self.buffers:
            _let_go(buffer)

    def detach(self) -> None:
        """Leave every block as it was, and free buffers, RAM and files. Detaching twice is allowed.

        Raises:
            RuntimeError: a run is going on; it goes on undisturbed.
        """
        if not self._attached:
            return
        if self._follower is not None:
            self._follower.remove()
        self.claim()
        try:
            self.streams.close()
            self.ram.close()
            self._patches.replace({})
            self.drop_buffers()
            self.buffers = ()
        finally:
            self.release()
        self._attached = False
        for binding in self._bindings.values():
            binding.restore()
        for staying in self._staying:
            staying.restore()
        self._source.close()

    def claim(self) -> None:
        """Nobody else may run or close the engine until `release`; raises RuntimeError if somebody does."""
        if not self._running.acquire(blocking=False):
            raise RuntimeError(_BUSY)

    def release(self) -> None:
        """The engine may run again."""
        self._running.release()

    def bind(self, key: BlockKey, buffer: BlockBuffer) -> None:
        """Put the weights of a block into its modules: a visit of it begins."""
        self._bindings[key].bind(buffer)

    def unbind(self, key: BlockKey) -> None:
        """Take the weights of a block out of its modules: its buffer goes to another block."""
        self._bindings[key].unbind()

    def unbind_all(self) -> None:
        """Take the weights of all blocks out of their modules: no visit is going on any more."""
        for binding in self._bindings.values():
            binding.unbind()

    def _places(self, policy: OffloadPolicy) -> tuple[Residency, RamResidency, int]:
        residency, buffers = plan_residency(policy, self.block_counts)
        if self._sharded is not None and self._sharded.on_device:  # every shard has a home, whatever the policy says
            policy = OffloadPolicy.layerwise(source="pinned")
        return residency, plan_ram(policy, residency, self.block_counts), buffers

    def _check_attached(self) -> None:
        if not self._attached:
            raise RuntimeError("the blocks were detached: attach them again")

    def _only(self, stack: str | None) -> str:
        if stack is not None:
            return stack
        if len(self.block_counts) != 1:
            raise ValueError(f"name one of the stacks {', '.join(self.block_counts)}")
        return next(iter(self.block_counts))

    def __enter__(self) -> OffloadEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()


_BUSY = "this engine is already running a program; wait for that run to end"


def _let_go(buffer: BlockBuffer) -> int:
    """Free the memory of one buffer, whatever it holds between runs; returns its bytes."""
    if buffer.state is BufferState.ABSENT:
        return 0
    if buffer.state is BufferState.DONE:
        buffer.forget()
    return buffer.give_back()
