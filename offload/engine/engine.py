"""Offload engine: blocks attached to a pool of buffers and RAM slots, and the runs that stream their weights.

A run (`run.py`) executes the visits and fetches of the device program and the reads of the RAM program. The engine
makes no decisions: it accepts verified programs only, and a run records its fetches and reads, so that tests can
compare them with the programs. The memory that runs use, and its changes between runs, are in `block_pool.py`.

    with attach_offload(model.blocks, policy=OffloadPolicy.layerwise(1), device="cuda") as engine:
        model(x)                       # each forward is one run of one pass
        with engine.passes(2):         # two forwards in one run: the second one finds its first blocks fetched
            model(x), model(y)

A caller with its own loop over blocks (lanes, two experts, many steps) names the visits instead:

    engine = attach_offload({"high": ..., "low": ...}, policy=..., device=..., follow_forward=False)
    with engine.run(visits) as run:
        for visit in visits:
            with run.visit(*visit):
                ...
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from ...devices import compute_device
from ...plan import RunPrograms, Visit, check_program, check_ram, compile_program, compile_ram, step_visits
from ...schema import OffloadPolicy, plan_residency
from ...telemetry import Recorder
from ..host_memory.shared_segment import SharedSegment
from ..sharding.group import Sharded
from ..sources.base import BlockSource
from ..sources.module import ModuleSource
from .binding import JoinPieces
from .block_pool import BUSY, BlockPool, Stacks
from .forward_hooks import ForwardHooks
from .run import EngineRun


class OffloadEngine(BlockPool, AbstractContextManager["OffloadEngine"]):
    """Streams the blocks of its pool to their device; executes one run at a time.

    Args:
        stacks: blocks by the name of their stack.
        follow_forward: stream blocks during the model's own forward, by module hooks.
        policy, device, source, shared, sharded, join: see `BlockPool`, which raises the errors of the constructor.
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
        join: JoinPieces | None = None,
    ) -> None:
        super().__init__(stacks, policy=policy, device=device, source=source, shared=shared, sharded=sharded, join=join)
        self._forward_hooks = None
        if follow_forward:
            self._forward_hooks = ForwardHooks(stacks, lambda stack, count: self.run(self.pass_visits(count, stack)))

    def programs(self, visits: Sequence[Visit]) -> RunPrograms:
        """Compile the programs for `visits`, starting from the current contents of buffers and slots.

        Raises:
            ProgramError: there are too few buffers.
            RuntimeError: the blocks were detached.
        """
        self._check_attached()
        device = compile_program(visits, self._residency, len(self.buffers), contents=self.contents())
        ram = compile_ram(device, self._ram_residency, staging=self.staging, contents=self.ram.contents())
        return RunPrograms(device=device, ram=ram)

    def run(self, visits: Sequence[Visit], recorder: Recorder | None = None) -> EngineRun:
        """Compile `visits` into a run. Entering it with `with` starts its threads, exiting always joins them.

        Inside, call `run.visit(step, expert, block)` for all visits in order.

        Raises:
            RuntimeError: another run is active (checked again on entering), or the blocks were detached.
        """
        return self.execute(self.programs(visits), recorder)

    def execute(self, programs: RunPrograms, recorder: Recorder | None = None) -> EngineRun:
        """Return a run of `programs`, as `run` does.

        Raises:
            RuntimeError: another run is active; checked again on entering.
            ValueError: a program is invalid, or needs more buffers or slots than there are; the latter is checked
                again on entering.
        """
        if self.running:
            raise RuntimeError(BUSY)
        self.check_size(programs)
        check_program(programs.device)
        check_ram(programs.device, programs.ram)
        return EngineRun(self, programs, recorder)

    @contextmanager
    def passes(self, count: int, *, stack: str | None = None) -> Iterator[None]:
        """Treat the next `count` forwards of a stack as one run, so that later ones find their first blocks fetched."""
        if self._forward_hooks is None:
            raise ValueError("passes() needs follow_forward=True; name the visits with run() instead")
        with self._forward_hooks.passes(self._only_stack(stack), count):
            yield

    def pass_visits(self, count: int, stack: str) -> tuple[Visit, ...]:
        """Return the visits of `count` passes through the blocks of one stack."""
        return step_visits([stack] * count, self.block_counts)

    def detach(self) -> None:
        """Restore every block, and release buffers, RAM and files. Detaching twice is allowed.

        Raises:
            RuntimeError: a run is active; it is not affected.
        """
        if self._forward_hooks is not None:
            self._forward_hooks.remove()
        super().detach()

    def _only_stack(self, stack: str | None) -> str:
        if stack is not None:
            return stack
        if len(self.block_counts) != 1:
            raise ValueError(f"name one of the stacks {', '.join(self.block_counts)}")
        return next(iter(self.block_counts))

    def __exit__(self, *_: object) -> None:
        self.detach()


ONLY_STACK = "blocks"
"""Name of a stack in visits if only one stack is attached."""


def attach_offload(
    blocks: Stacks | Sequence[nn.Module],
    *,
    policy: OffloadPolicy,
    device: torch.device | str,
    source: BlockSource | None = None,
    follow_forward: bool = True,
    shared: SharedSegment | None = None,
    sharded: Sharded | None = None,
    join: JoinPieces | None = None,
) -> OffloadEngine:
    """Stream the Linear weights of `blocks` to `device`; all other tensors of the blocks are moved there once.

    Args:
        blocks: one stack of similar blocks, or several by name. Weights may be on `meta` if `source` is given.
        policy: resident blocks, prefetch depth, and RAM-resident blocks.
        device: compute device.
        source: source of the stored bytes; by default the blocks' own weights, which are kept in RAM. A device with
            streams copies them from there, page-locked in place until `detach`.
        follow_forward: stream blocks during the model's own forward; False for callers that name the visits.
        shared: RAM that the ranks of one machine share, for blocks that are RAM-resident across runs.
        sharded: ranks that keep one shard of every block each and gather a block before its visit. All ranks run the
            same visits under the same policy. The source must be a `RangeSource`; file and module sources are.
        join: makes the parameters that the source stores in pieces (`piece_name`), such as quantised matrices with
            their scales, of views of a buffer.

    Returns:
        The engine; `detach()` or exiting its `with` restores every block exactly.

    Raises:
        ValueError: the device does not exist, the policy does not fit the number of blocks, the source does not fit a
            block, or weights are on `meta` without a source. The blocks are unchanged.
        SourceError: there is not enough RAM for the RAM-resident blocks. The blocks are unchanged.
    """
    stacks: Stacks = blocks if isinstance(blocks, Mapping) else {ONLY_STACK: blocks}
    plan_residency(policy, {name: len(stack) for name, stack in stacks.items()})  # refuse before reading any weights
    return OffloadEngine(
        stacks,
        policy=policy,
        device=compute_device(device),
        source=source or ModuleSource(stacks),
        follow_forward=follow_forward,
        shared=shared,
        sharded=sharded,
        join=join,
    )
