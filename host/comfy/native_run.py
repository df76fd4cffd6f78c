"""Runs of a native model that streams, by ComfyUI's samplers: blocks are fetched ahead of their forward."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.patcher_extension
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ...offload import ForwardCourse
from ...plan import PassOrders, Visit
from ...schema import OffloadPolicy
from .native_model import STACK, NativeWeights, open_native
from .native_patcher import NativePatcher

SAMPLER_SAMPLE = comfy.patcher_extension.WrappersMP.SAMPLER_SAMPLE

KEY = "wanstream"
"""Key of our wrappers in ComfyUI's lists of wrappers."""


class NativeRuns:
    """Runs of one model, which learn the order of its blocks and the number of its forward passes.

    Args:
        weights: weights of the model.
    """

    def __init__(self, weights: NativeWeights) -> None:
        self._weights = weights
        self._orders = PassOrders(blocks=len(weights.blocks))
        self._passes: dict[Hashable, int] = {}  # of earlier runs, by sampler and number of steps
        self._hooks: list[RemovableHandle] = []
        self._alone: ExitStack | None = None  # the visit of a block that is called outside a run
        self.course: ForwardCourse | None = None
        """The course of the current run, or of the last one."""

    def attach(self, diffusion_model: nn.Module) -> None:
        """Install hooks on the model and its blocks, in the place of those of the last call."""
        self.detach()
        self._hooks = [
            diffusion_model.register_forward_pre_hook(lambda *_: self._begin_pass(), prepend=True),
            diffusion_model.register_forward_hook(lambda *_: self._end_pass()),
        ]
        for index, path in enumerate(self._weights.blocks):
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

    @contextmanager
    def follow(self, kind: Hashable, steps: int) -> Iterator[ForwardCourse]:
        """Follow the forward passes of the `with` body; runs of one `kind` make the same number of them.

        Raises:
            RuntimeError: another run is active.
        """
        course = ForwardCourse(self._weights.loaded_engine, self._orders)
        course.begin(self._passes.get(kind, steps))
        self.course = course
        error: BaseException | None = None
        try:
            yield course
            self._passes[kind] = course.passes
        except BaseException as err:
            error = err
            raise
        finally:
            course.close(error)
            self._orders = course.orders

    def _running(self) -> ForwardCourse | None:
        return self.course if self.course is not None and self.course.is_open else None

    def _begin_pass(self) -> None:
        if course := self._running():
            course.begin_pass()

    def _end_pass(self) -> None:
        if course := self._running():
            course.end_pass()

    def _enter(self, block: int) -> None:
        if course := self._running():
            course.enter(block)
        else:
            # Some models compute a part of the conditioning with blocks, before the sampler starts.
            visit = Visit(0, STACK, block)
            with ExitStack() as entered:
                run = entered.enter_context(self._weights.loaded_engine.run((visit,)))
                entered.enter_context(run.visit(*visit))
                self._alone = entered.pop_all()

    def _exit(self) -> None:
        if course := self._running():
            course.exit()
        elif self._alone is not None:
            alone, self._alone = self._alone, None
            alone.close()


def sampler_sample(executor: Any, guider: Any, sigmas: torch.Tensor, *more: Any, **settings: Any) -> torch.Tensor:
    """Wrapper of ComfyUI around the sampler of one run, after the model was loaded."""
    patcher: NativePatcher = guider.model_patcher
    sampler = executor.class_obj
    # By name: ComfyUI makes a new function for each run of some samplers.
    function = getattr(sampler, "sampler_function", type(sampler))
    name = getattr(function, "__qualname__", type(function).__qualname__)
    steps = max(0, len(sigmas) - 1)
    with patcher.model.runs.follow((name, steps), steps):
        samples: torch.Tensor = executor(guider, sigmas, *more, **settings)
    return samples


def load_native(path: Path, weight_dtype: str, policy: OffloadPolicy, **limits: int) -> NativePatcher:
    """Return a MODEL whose blocks stream from `path` under `policy`; for the arguments and errors see `open_native`."""
    model = open_native(path, weight_dtype, **limits)
    model.runs = NativeRuns(model.weights)
    management = comfy.model_management
    patcher = NativePatcher(model, management.get_torch_device(), management.unet_offload_device())
    patcher.policy = policy
    patcher.add_wrapper_with_key(SAMPLER_SAMPLE, KEY, sampler_sample)
    return patcher
