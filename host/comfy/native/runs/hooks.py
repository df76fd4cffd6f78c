"""Hooks that fetch a native model's blocks for forward passes, and facts from earlier runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import NamedTuple, Protocol

import comfy.model_management
from torch import nn
from torch.utils.hooks import RemovableHandle

from .....offload import Lockstep, SessionState, StackPass, StreamSession, hook_module
from .....offload.formats import pieces_by_parameter
from .....plan.programs import BlockKey, PassOrders, Visit
from ...shown_run import ShownRun
from ..streamed.weights import NativeWeights


class FollowedRun(Protocol):
    """A run whose forward passes are reported by the hooks."""

    session: StreamSession
    lockstep: Lockstep
    shown: ShownRun


KINDS = 32
"""Number of run kinds to remember. The least recently used is dropped."""


@dataclass(kw_only=True)
class Learnt:
    """Facts from earlier runs of one kind: same sampler, number of steps and size."""

    course: tuple[StackPass, ...] = ()
    """Forward passes in the last run."""
    calls: tuple[str, ...] = ()
    """Stack for each model call in the last run."""
    shares: dict[Hashable, bool] = field(default_factory=dict)
    """True if conditions share visits, for each kind of model call whose automatic policy was
    chosen."""
    out_of_memory: bool = False
    """True if a call with shared visits ran out of memory."""
    chunk_tokens: int | None = None
    """Tokens per chunk after a call with all tokens at once ran out of memory."""


class _Alone(NamedTuple):
    """Visit to a block used outside a run."""

    key: BlockKey
    visit: ExitStack


class NativeRuns:
    """Hooks on one model, and facts learnt from earlier runs.

    A block is entered when it is called, or when an inner module with streamed weights is called.
    It is left when the block's call ends, at the next block, or at the end of the pass. Modules in
    a block have hooks only until the block itself is called. Most models call it.

    Args:
        weights: model weights.
    """

    def __init__(self, weights: NativeWeights) -> None:
        self.weights = weights
        lists = [path.rpartition(".")[0] for path in weights.blocks]
        starts = tuple(at for at, each in enumerate(lists) if each not in lists[:at])
        self.orders = {
            stack: PassOrders(blocks=blocks, lists=starts)
            for stack, blocks in weights.block_counts.items()
        }
        self.current: FollowedRun | None = None
        self.last: FollowedRun | None = None
        # An `lru_cache` as a dictionary with default values and a limited size.
        self.learnt: Callable[[Hashable], Learnt] = lru_cache(KINDS)(lambda _: Learnt())
        """Returns the facts for a kind of run. The run corrects them."""
        self._blocks = {stack: tuple(blocks.values()) for stack, blocks in weights.stacks.items()}
        self._hooks: list[RemovableHandle] = []
        self._hooks_inside: dict[BlockKey, list[RemovableHandle]] = {}
        """Hooks on modules inside each block."""
        self._used_inside: set[BlockKey] = set()
        """Blocks entered from inner modules. These modules keep the hooks."""
        self._uses_inside = False
        """True if the current run has entered a block from an inner module."""
        self._used_before_runs: set[BlockKey] = set()
        """Blocks entered from their modules outside a run, where no call is repeated."""
        self._alone: _Alone | None = None
        self._next_to_pass = False
        """True if the session is in a pass that began with a block outside the forward pass."""
        self._module: nn.Module | None = None
        """Module that entered a block outside a forward pass. It also leaves the block."""
        self._hook_after: RemovableHandle | None = None
        """Hook on the last such module."""

    def attach(self, diffusion_models: Mapping[str, nn.Module]) -> None:
        """Install hooks on each stack's model and blocks, replacing earlier ones."""
        self.detach()
        for stack, network in diffusion_models.items():
            self._hooks += hook_module(network, partial(self.begin_pass, stack), self.end_pass)
            for index, path in enumerate(self.weights.blocks):
                # By path: another node may have replaced a block with a wrapper.
                block = network.get_submodule(path)
                key = BlockKey(stack, index)
                # `always`: leave is called even if the block could not be entered.
                self._hooks += hook_module(block, partial(self.enter, key), self.leave, always=True)
                self._watch_inside(key)
                if key not in self._used_inside:
                    self._hooks.append(self._unwatch_when_called(key, block))

    def detach(self) -> None:
        """Remove all hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for key in list(self._hooks_inside):
            self._unwatch_inside(key)
        self._remove_hook_after()

    def watch_all(self) -> bool:
        """Keep hooks on modules in all blocks from now on. Return False if this is nothing new."""
        before = len(self._used_inside)
        for key in self.weights.formats:
            self._keep_inside(key)
        return len(self._used_inside) > before

    def begin_run(self) -> None:
        """Start watching for blocks that a run enters from their modules."""
        self._uses_inside = False

    def end_run(self) -> None:
        """Remove hooks inside blocks after a run without the node that needed them."""
        if self._uses_inside:
            return
        for key in self._used_inside - self._used_before_runs:
            self._used_inside.remove(key)
            self._unwatch_inside(key)

    def close_alone(self) -> None:
        """End a visit outside a run that an interrupt has left open.

        In later versions, an interrupt is not an `Exception`, and torch skips hooks after it.
        """
        if self.current is None:
            self.leave()

    def leave(self) -> None:
        """End the open visit in this thread, if any."""
        self._module = None
        if self.current is None:
            alone = self._alone
            self._alone = None
            if alone is not None:
                alone.visit.close()
            return
        lane = self.current.lockstep.lane
        if lane is not None:
            lane.block = None  # the lockstep ends the visit
        elif self.current.session.state is SessionState.VISITING:
            self.current.session.end_visit()

    def begin_pass(self, stack: str) -> None:
        """Begin a forward pass through a stack's network (network hook)."""
        if self.current is not None and self.current.lockstep.lane is None:
            self.leave()
            self._next_to_pass = False
            self.current.session.begin_pass(stack)

    def end_pass(self) -> None:
        """End the forward pass through the network (network hook)."""
        if self.current is not None and self.current.lockstep.lane is None:
            self.leave()
            self.current.session.end_pass()

    def enter(self, key: BlockKey) -> None:
        """Visit a block (hook on the block and on inner modules)."""
        run = self.current
        if run is None:
            if self.moves_to(key):
                self._enter_alone(key)
            return
        # Not every ComfyUI version checks for interrupts in each layer.
        comfy.model_management.throw_exception_if_processing_interrupted()
        lane = run.lockstep.lane
        if lane is not None:
            if self.moves_to(key):
                lane.await_block(key.block)
            return
        session = run.session
        if session.state is not SessionState.FOLLOWING:
            if not self.moves_to(key):
                return
            # Used alone, outside the model's forward pass.
            if session.state is SessionState.PREDICTED:
                self._next_to_pass = True
                session.begin_pass(key.expert)
        session.visit(key.block)

    def moves_to(self, key: BlockKey) -> bool:
        """Leave the open block if it is a different one. Return False if it is the same."""
        present = self.present(key.expert)
        if present is not None:
            # Both may be inside the open block's call, whose next modules enter it again.
            self._keep_inside(present)
            self._uses_inside = True
            if present == key:
                return False
            self.leave()
        return True

    def present(self, stack: str) -> BlockKey | None:
        """Return the block open in this thread. All lanes are in the call's `stack`."""
        if self.current is None:
            return None if self._alone is None else self._alone.key
        lane = self.current.lockstep.lane
        if lane is not None:
            return None if lane.block is None else BlockKey(stack, lane.block)
        session = self.current.session
        if session.state is not SessionState.VISITING:
            return None
        assert session.due is not None, "a visit is open"
        return session.due.key

    def _enter_alone(self, key: BlockKey) -> None:
        """Visit a block outside a run: some models compute conditioning partly with blocks."""
        visit = Visit(0, *key)
        with ExitStack() as entered:
            run = entered.enter_context(self.weights.loaded_engine.run((visit,)))
            entered.enter_context(run.visit(*visit))
            # `pop_all` keeps the visit open after this `with`, unless an error comes first.
            self._alone = _Alone(key, entered.pop_all())

    # Modules inside a block.

    def _watch_inside(self, key: BlockKey) -> None:
        """Install hooks on modules with streamed weights in a block."""
        use = partial(self._use, key)
        self._hooks_inside[key] = [
            # First, so that other nodes' hooks on the module see the weights.
            module.register_forward_pre_hook(use, prepend=True)
            for module in self._modules_inside(key)
        ]

    def _unwatch_inside(self, key: BlockKey) -> None:
        for hook in self._hooks_inside.pop(key, ()):
            hook.remove()

    def _keep_inside(self, key: BlockKey) -> None:
        self._used_inside.add(key)
        if key not in self._hooks_inside:
            self._watch_inside(key)

    def _unwatch_when_called(self, key: BlockKey, block: nn.Module) -> RemovableHandle:
        """Remove hooks inside a block at its first call, unless it was entered from them."""

        def called(_module: nn.Module, _inputs: object) -> None:
            handle.remove()
            if key not in self._used_inside:
                self._unwatch_inside(key)

        handle = block.register_forward_pre_hook(called, prepend=True)
        return handle

    def _modules_inside(self, key: BlockKey) -> Iterator[nn.Module]:
        """Yield modules with streamed weights below a block."""
        paths = set[str]()
        tensors = self.weights.formats[key].computed.tensors
        for name in pieces_by_parameter(tensor.name for tensor in tensors):
            path = name.rpartition(".")[0]
            while path and path not in paths:
                paths.add(path)
                path = path.rpartition(".")[0]
        # Another node may have replaced a module with one without these weights.
        for path, module in self._blocks[key.expert][key.block].named_modules():
            if path in paths:
                yield module

    def _use(self, key: BlockKey, module: nn.Module, _inputs: object) -> None:
        if self.present(key.expert) == key:
            return
        self._used_inside.add(key)
        self._uses_inside = True
        if self.current is None:
            self._used_before_runs.add(key)
        self.enter(key)
        run = self.current
        if run is not None and (run.lockstep.lane is not None or not self._next_to_pass):
            return  # the next block, or the end of the pass, ends the visit
        self._module = module
        self._remove_hook_after()
        self._hook_after = module.register_forward_hook(self._used, always_call=True)

    def _remove_hook_after(self) -> None:
        # Not in the hook itself: torch iterates over a failed module's hooks.
        if self._hook_after is not None:
            self._hook_after.remove()
            self._hook_after = None

    def _used(self, module: nn.Module, _inputs: object, _output: object) -> None:
        if module is self._module:
            self.leave()
