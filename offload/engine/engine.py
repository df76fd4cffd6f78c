"""Offload engine: blocks attached to buffers and RAM slots, and runs that stream weights.

A run (`run.py`) executes the visits and fetches in the device program and the reads in the RAM
program. The engine makes no decisions and accepts verified programs only. A run records its fetches
and reads, so tests can compare them with the programs. `block_pool.py` has the memory for runs, and
changes it between them.

    with attach_offload(model.blocks, policy=OffloadPolicy.layerwise(1), device="cuda") as engine:
        model(x)                 # each forward is one run of one pass
        with engine.passes(2):   # two forwards in one run: the second finds its blocks fetched
            model(x), model(y)

A caller with its own loop over blocks (lanes, two experts, many steps) names the visits instead:

    engine = attach_offload({"high": ..., "low": ...}, policy=..., device=..., follow_forward=False)
    with engine.run(visits) as run:
        for visit in visits:
            with run.visit(*visit):
                ...
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from ...plan.programs import (
    RunPrograms,
    Visit,
    check_program,
    check_ram,
    compile_program,
    compile_ram,
)
from ...telemetry import Recorder
from .block_pool import BUSY, BlockPool
from .run import EngineRun


class PassHooks(Protocol):
    """Hooks for streaming an engine's blocks during a model's forward."""

    def passes(self, stack: str, count: int) -> AbstractContextManager[None]:
        """Treat the next `count` forwards of `stack` as one run. It ends with the context."""

    def remove(self) -> None:
        """End a run left open by a failed forward, and remove the hooks."""


class OffloadEngine(BlockPool, AbstractContextManager["OffloadEngine"]):
    """Streams the blocks in its pool to their device, one run at a time.

    See `BlockPool` for the arguments and constructor errors.
    """

    _forward_hooks: PassHooks | None = None

    def programs(self, visits: Sequence[Visit]) -> RunPrograms:
        """Compile the programs for `visits` from the current contents of buffers and slots.

        Raises:
            ProgramError: there are too few buffers.
            RuntimeError: the blocks were detached.
        """
        self._check_attached()
        device = compile_program(
            visits,
            self._residency,
            len(self.buffers),
            sizes=self._sizes,
            contents=self.contents(),
        )
        ram = compile_ram(
            device,
            self._ram_residency,
            staging=self.route.staging,
            sizes=self.ram.sizes,
            contents=self.ram.contents(),
        )
        return RunPrograms(device=device, ram=ram)

    def run(self, visits: Sequence[Visit], recorder: Recorder | None = None) -> EngineRun:
        """Compile `visits` into a run.

        Entering it with `with` starts the threads, exiting always joins them.

        Inside, call `run.visit(step, expert, block)` for all visits in order.

        Raises:
            RuntimeError: another run is active (checked again on entering), or the blocks were
                detached.
            ValueError: a program is invalid.
        """
        programs = self.programs(visits)
        if self.running:
            raise RuntimeError(BUSY)
        check_program(programs.device)
        check_ram(programs.device, programs.ram)
        return EngineRun(self, programs, recorder)

    def follow(self, hooks: PassHooks) -> None:
        """Let `hooks` stream the blocks during the model's own forward, until `detach`."""
        self._forward_hooks = hooks

    def passes(self, count: int, *, stack: str | None = None) -> AbstractContextManager[None]:
        """Treat the next `count` forwards of a stack as one run.

        The later forwards find their first blocks fetched.
        """
        if self._forward_hooks is None:
            raise ValueError(
                "passes() needs follow_forward=True; name the visits with run() instead"
            )
        if stack is None and len(self.block_counts) != 1:
            raise ValueError(f"name one of the stacks {', '.join(self.block_counts)}")
        if stack is None:
            stack = next(iter(self.block_counts))
        return self._forward_hooks.passes(stack, count)

    def detach(self) -> None:
        """Restore every block, and release buffers, RAM and files. Detaching twice is allowed.

        Raises:
            RuntimeError: a run is active. It continues.
        """
        if self._forward_hooks is not None:
            # A session that is still open reserves the engine, and `detach` would raise.
            self._forward_hooks.remove()
        super().detach()

    def __exit__(self, *_: object) -> None:
        self.detach()
