"""Runs of streamed text encoders: encodings and generations with blocks fetched ahead."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import comfy.model_management
import torch
from torch import nn

from .....offload import Lockstep, PassCalls, StreamSession
from .....plan.programs import BlockKey
from ...shown_run import ShownRun
from ..streamed.weights import STACK, NativeWeights
from .hooks import NativeRuns

Result = TypeVar("Result")

FOLLOWED = ("encode_token_weights", "generate")
"""Text encoder methods that ComfyUI's CLIP calls. Old versions do not generate."""


class EncoderRun:
    """One encoding or generation, followed by a session.

    A pass ends before the first block that was already visited. A generation has one pass per
    token.

    Args:
        runs: encoder runs.
        device: run device.
    """

    shown: ShownRun

    def __init__(self, runs: EncoderRuns, device: torch.device) -> None:
        self.passes = PassCalls(STACK, runs.orders[STACK], 1)
        self.passed: set[BlockKey] = set()
        self.session = StreamSession(
            self.passes,
            lambda: runs.weights.loaded_engine,
            poll_waiting=lambda _visit: (
                comfy.model_management.throw_exception_if_processing_interrupted()
            ),
        )
        self.lockstep = Lockstep(self.session, device)


class EncoderRuns(NativeRuns):
    """Hooks on text encoder blocks. The visited blocks show where passes begin.

    Args:
        weights: encoder weights.
    """

    def __init__(self, weights: NativeWeights) -> None:
        super().__init__(weights)
        self._run: EncoderRun | None = None

    def follow(self, compute: Callable[[], Result]) -> Result:
        """Return `compute()`. Afterwards only resident blocks keep device memory."""
        if self._run is not None:
            return compute()
        run = EncoderRun(self, self.weights.loaded_engine.device)
        try:
            run.session.begin()
            self._run = self.current = run
            result = compute()
        # Keep the error in no other variable: with the traceback it would form a cycle.
        except BaseException as err:
            self._close(run, err)
            raise
        # No later block ends the last pass.
        if run.passed:
            self.leave()
            run.session.end_pass()
        self._close(run, None)
        return result

    def _close(self, run: EncoderRun, error: BaseException | None) -> None:
        self._run = self.current = None
        run.session.close(error)
        self.orders = {STACK: run.passes.orders}
        self.weights.loaded_engine.release_passing_blocks()

    def begin_pass(self, stack: str) -> None:
        """Do nothing: ComfyUI never calls all encoders together in one forward pass."""

    def end_pass(self) -> None:
        """Do nothing, as in `begin_pass`."""

    def enter(self, key: BlockKey) -> None:
        """Enter a block. If this pass has already visited it, start the next pass."""
        run = self._run
        if run is not None and self.present(key.expert) != key:
            if key in run.passed and self.moves_to(key):
                run.session.end_pass()
                run.passed.clear()
            run.passed.add(key)
        super().enter(key)


def followed(base: Any) -> type[nn.Module]:
    """Return a text encoder class like `base` whose `runs` follow encodings and generations."""

    def method(name: str) -> Callable[..., Any]:
        def follow(self: Any, *args: Any, **settings: Any) -> Any:
            return self.runs.follow(partial(getattr(base, name), self, *args, **settings))

        return follow

    return type(
        base.__name__, (base,), {name: method(name) for name in FOLLOWED if hasattr(base, name)}
    )
