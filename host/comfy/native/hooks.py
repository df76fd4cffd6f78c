"""Hooks that fetch the blocks of a native model for its forward passes, and what its runs have learnt of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

import comfy.model_management
from torch import nn
from torch.utils.hooks import RemovableHandle

from ....offload import ForwardCourse, Lockstep
from ....plan import PassOrders, Visit
from ....schema import Timeline
from ...run_events import RunSettings
from .weights import STACK, NativeWeights


class FollowedRun(Protocol):
    """A run whose forward passes the hooks report."""

    course: ForwardCourse
    lockstep: Lockstep
    timeline: Timeline | None
    """Timeline of the run, after its end."""
    settings: RunSettings
    node_id: str | None
    """Id of the sampler node."""


KINDS = 32
"""Kinds of runs that are remembered."""


@dataclass(kw_only=True)
class Learnt:
    """Facts from earlier runs of one kind: the same sampler, number of steps and size."""

    course: tuple[tuple[int, ...], ...] = ()
    """Order of the blocks in each forward pass of the last run."""
    calls: int = 0
    """Model calls of the last run."""
    shares: dict[Hashable, bool] = field(default_factory=dict)
    """For each kind of model calls with a chosen automatic policy: True if their conditions share visits."""
    out_of_memory: bool = False
    """True if a call whose conditions shared visits was out of memory."""


class NativeRuns:
    """Hooks of one model, and what its runs have learnt.

    Args:
        weights: weights of the model.
    """

    def __init__(self, weights: NativeWeights) -> None:
        self.weights = weights
        self.orders = PassOrders(blocks=len(weights.blocks))
        self.current: FollowedRun | None = None
        self.last: FollowedRun | None = None
        self._learnt: OrderedDict[Hashable, Learnt] = OrderedDict()
        self._hooks: list[RemovableHandle] = []
        self._alone: ExitStack | None = None  # the visit of a block that is called outside a run

    def learnt(self, kind: Hashable) -> Learnt:
        """Return the facts of a kind of runs, which the run corrects; those of the kind unused longest are dropped."""
        found = self._learnt.setdefault(kind, Learnt())
        self._learnt.move_to_end(kind)
        while len(self._learnt) > KINDS:
            self._learnt.popitem(last=False)
        return found

    def attach(self, diffusion_model: nn.Module) -> None:
        """Install hooks on the model and its blocks, in the place of those of the last call."""
        self.detach()
        self._hooks = [
            diffusion_model.register_forward_pre_hook(lambda *_: self._begin_pass(), prepend=True),
            diffusion_model.register_forward_hook(lambda *_: self._end_pass()),
        ]
        for index, path in enumerate(self.weights.blocks):
            # By path, because another node may have put a wrapper in the place of a block.
            block = diffusion_model.get_submodule(path)
            self._hooks += [
                block.register_forward_pre_hook(lambda *_, index=index: self._enter(index), prepend=True),
                block.register_forward_hook(lambda *_: self._exit(), always_call=True),
            ]

    def detach(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _begin_pass(self) -> None:
        if self.current is not None and not self.current.lockstep.has_thread():
            self.current.course.begin_pass()

    def _end_pass(self) -> None:
        if self.current is not None and not self.current.lockstep.has_thread():
            self.current.course.end_pass()

    def _enter(self, block: int) -> None:
        if self.current is not None:
            # Newer versions of ComfyUI look in every layer, 0.3.64 only after a step.
            comfy.model_management.throw_exception_if_processing_interrupted()
            if not self.current.lockstep.enter(block):
                if not self.current.course.in_pass:  # used alone, next to the forward of the model
                    self.current.course.begin_pass()
                self.current.course.enter(block)
            return
        # Some models compute a part of the conditioning with blocks, before the sampler starts.
        visit = Visit(0, STACK, block)
        with ExitStack() as entered:
            run = entered.enter_context(self.weights.loaded_engine.run((visit,)))
            entered.enter_context(run.visit(*visit))
            self._alone = entered.pop_all()

    def _exit(self) -> None:
        if self.current is not None:
            # Called after a block that could not be entered too.
            if not self.current.lockstep.has_thread() and self.current.course.in_block:
                self.current.course.exit()
        elif self._alone is not None:
            alone, self._alone = self._alone, None
            alone.close()
