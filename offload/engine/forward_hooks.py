"""Module hooks that stream blocks during a model's own forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn
from torch.utils.hooks import RemovableHandle

from ...plan import BlockKey, Visit
from ...schema import StateError
from .block_pool import Stacks
from .run import EngineRun, VisitContext


class ForwardHooks:
    """Hooks on every block: the first block of a stack starts a run, the last block of its last pass ends it.

    `run_of(stack, count)` returns a run of `count` passes through the blocks of a stack.
    """

    def __init__(self, stacks: Stacks, run_of: Callable[[str, int], EngineRun]) -> None:
        self._run_of = run_of
        self._run: EngineRun | None = None
        self._pending: list[Visit] = []  # visits of the run that have not started, the next one last
        self._open: VisitContext | None = None
        self._hooks = [
            hook
            for name, stack in stacks.items()
            for index, block in enumerate(stack)
            for hook in self._install(name, index, block)
        ]

    @contextmanager
    def passes(self, stack: str, count: int) -> Iterator[None]:
        """Treat the next `count` forwards of `stack` as one run, which ends with this context in any case."""
        self._close()
        self._begin(stack, count)
        try:
            yield
        finally:
            self._close()

    def remove(self) -> None:
        """End a run that a failed forward left open, and remove the hooks."""
        self._close()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _install(self, stack: str, index: int, block: nn.Module) -> list[RemovableHandle]:
        def before(module: nn.Module, args: object) -> None:
            self._enter(stack, index)

        def after(module: nn.Module, args: object, output: object) -> None:
            self._exit()

        # The first pre-hook and the last hook, so that all hooks in between see the block with its weights.
        return [
            block.register_forward_pre_hook(before, prepend=True),
            block.register_forward_hook(after),
        ]

    def _begin(self, stack: str, count: int) -> None:
        run = self._run_of(stack, count)
        run.__enter__()
        self._run, self._pending = run, list(reversed(run.program.visits))

    def _enter(self, stack: str, index: int) -> None:
        due = self._pending[-1].key if self._pending and self._open is None else None
        if index == 0 and due != BlockKey(stack, 0):
            # A forward starts that no open run expects: the first one, or one after a forward that raised.
            self._close()
            self._begin(stack, 1)
        if self._run is None or not self._pending:
            raise StateError(f"block {index} of {stack!r} was called before block 0")
        self._open = self._run.visit(self._pending[-1].step, stack, index)
        self._open.__enter__()
        self._pending.pop()

    def _exit(self) -> None:
        assert self._open is not None
        self._open.__exit__(None, None, None)
        self._open = None
        if not self._pending:
            self._close()

    def _close(self) -> None:
        run, self._run = self._run, None
        self._open = None
        self._pending = []
        if run is not None:
            run.__exit__(None, None, None)
