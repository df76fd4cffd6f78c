"""Blocks of any model attached to an engine, and hooks on the model's own forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ...devices import compute_device
from ...plan.programs import BlockKey, PassOrders
from ...schema import OffloadPolicy, StateError, plan_residency
from ..host_memory.shared_segment import SharedSegment
from ..sharding.group import Sharded
from ..sources.base import BlockSource
from ..sources.module import ModuleSource
from .binding import JoinPieces
from .block_pool import Stacks
from .calls import PassCalls
from .engine import OffloadEngine
from .session import Engine, SessionState, StreamSession

ONLY_STACK = "blocks"
"""Stack name in visits if only one stack is attached."""


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
    """Stream the Linear weights of `blocks` to `device`.

    All other tensors in the blocks are moved there once.

    Args:
        blocks: one stack of similar blocks, or several by name. Weights may be on `meta` if
            `source` is given.
        policy: resident blocks, prefetch depth, and RAM-resident blocks.
        device: compute device.
        source: where stored bytes come from. By default the blocks' own weights, kept in RAM. A
            device with streams copies them from there, page-locked in place until `detach`.
        follow_forward: stream blocks during the model's own forward. False if the caller names the
            visits.
        shared: RAM shared by the ranks on one machine, for blocks that are RAM-resident across
            runs.
        sharded: ranks that keep one shard of every block each and gather a block before a visit.
            All ranks run the same visits under the same policy. The source must be a `RangeSource`,
            such as a file or module source.
        join: makes parameters that the source stores in pieces (`piece_name`), such as quantised
            matrices with their scales, from views of a buffer.

    Returns:
        The engine. `detach()` or exiting its `with` restores every block exactly.

    Raises:
        ValueError: the device does not exist, policy and block count do not match, the source does
            not match a block, or weights are on `meta` without a source. The blocks are unchanged.
        SourceError: there is not enough RAM for the RAM-resident blocks. The blocks are unchanged.
    """
    stacks: Stacks = blocks if isinstance(blocks, Mapping) else {ONLY_STACK: blocks}
    # Refuse before reading any weights.
    plan_residency(policy, {name: len(stack) for name, stack in stacks.items()})
    engine = OffloadEngine(
        stacks,
        policy=policy,
        device=compute_device(device),
        source=source or ModuleSource(stacks),
        shared=shared,
        sharded=sharded,
        join=join,
    )
    if follow_forward:
        engine.follow(ForwardHooks(stacks, engine))
    return engine


def hook_module(
    module: nn.Module,
    before: Callable[[], object],
    after: Callable[[], object],
    *,
    always: bool = False,
) -> list[RemovableHandle]:
    """Install hooks to call `before` and `after` around a module's forward.

    Args:
        module: a block, or the model.
        before: called before all hooks installed so far.
        after: called after all hooks.
        always: call `after` when the forward has raised, too.
    """

    # Neither hook returns a value: torch would use the value as new arguments or as the output.
    def enter(module: nn.Module, args: object) -> None:
        before()

    def leave(module: nn.Module, args: object, output: object) -> None:
        after()

    # The first pre-hook and the last hook: all hooks in between see the block with weights.
    return [
        module.register_forward_pre_hook(enter, prepend=True),
        module.register_forward_hook(leave, always_call=always),
    ]


class ForwardHooks:
    """Hooks on every block, to start and end sessions.

    A stack's first block starts a session. The last block in the last pass ends it.

    Args:
        stacks: blocks by stack name.
        engine: streams the blocks.
    """

    def __init__(self, stacks: Stacks, engine: Engine) -> None:
        self._engine = engine
        self._sizes = {stack: len(blocks) for stack, blocks in stacks.items()}
        self._stack = ""
        self._session: StreamSession | None = None
        self._hooks: list[RemovableHandle] = []
        for stack, blocks in stacks.items():
            for index, block in enumerate(blocks):
                self._hooks += hook_module(block, partial(self._enter, stack, index), self._exit)

    @contextmanager
    def passes(self, stack: str, count: int) -> Iterator[None]:
        """Treat the next `count` forwards of `stack` as one session.

        The session ends with this context in any case.
        """
        self._begin(stack, count)
        try:
            yield
        finally:
            self._close()

    def remove(self) -> None:
        """End a session left open by a failed forward, and remove the hooks."""
        self._close()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _begin(self, stack: str, count: int) -> None:
        self._close()
        calls = PassCalls(stack, PassOrders(blocks=self._sizes[stack]), count)
        session = StreamSession(calls, lambda: self._engine)
        session.begin()
        # A session that could not begin has closed itself, and is not kept.
        self._session = session
        self._stack = stack

    def _enter(self, stack: str, index: int) -> None:
        if index == 0 and not self._expects(stack):
            # No session expects this forward: it is the first one, or follows a forward that
            # raised.
            self._begin(stack, 1)
        if self._session is None or stack != self._stack:
            raise StateError(f"block {index} of {stack!r} was called before block 0")
        if index == 0:
            self._session.begin_pass()
        self._session.visit(index)

    def _expects(self, stack: str) -> bool:
        if self._session is None or self._session.state is not SessionState.PREDICTED:
            return False
        due = self._session.due
        return due is not None and due.key == BlockKey(stack, 0)

    def _exit(self) -> None:
        assert self._session is not None
        self._session.end_visit()
        due = self._session.due
        # If block 0 is due, this pass is over and another one is predicted.
        if due is None or due.block == 0:
            self._session.end_pass()
        if due is None:
            self._close()

    def _close(self) -> None:
        session = self._session
        # The field is cleared first: after an error in `close`, the next forward begins a session.
        self._session = None
        if session is not None:
            session.close()
