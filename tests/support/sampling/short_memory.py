"""A pair that runs out of memory at chosen uses."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from wanstream.schema import OffloadPolicy
from wanstream.wan import ExpertPair


def once(*uses: int) -> Callable[[int, OffloadPolicy], bool]:
    return lambda use, _: use in uses


class ShortPair:
    """Pair wrapper that raises out-of-memory errors at chosen block uses.

    The uses are counted over the run. With `behind`, only the module after the blocks counts.
    """

    def __init__(
        self,
        pair: ExpertPair,
        short: Callable[[int, OffloadPolicy], bool],
        error: Exception = torch.OutOfMemoryError("out of memory"),  # noqa: B008
        *,
        behind: bool = False,
    ) -> None:
        self._pair = pair
        self._short = short
        self._error = error
        self._behind = behind
        self.policies = list[OffloadPolicy]()
        self.uses = 0
        self.left = list[Any]()
        self._hooked = set[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pair, name)

    def engine(self, policy: OffloadPolicy, device: torch.device) -> Any:
        engine = self._pair.engine(policy, device)
        self.policies.append(policy)
        for model in engine.models.bare.values():
            for module in [model.proj_out] if self._behind else model.blocks:
                if id(module) not in self._hooked:
                    self._hooked.add(id(module))
                    module.register_forward_pre_hook(self._use)
        return engine

    def _use(self, module: torch.nn.Module, given: tuple[Any, ...]) -> None:
        use = self.uses
        self.uses += 1
        assert all(left() is None for left in self.left), "tensors of the failed step are there"
        if self._short(use, self.policies[-1]):
            # A new tensor: the lanes' first tensors are views of the inputs.
            computed = given[0].clone()
            self.left += [weakref.ref(given[0]), weakref.ref(computed)]
            raise type(self._error)(f"{self._error} at use {use}: {list(computed.shape)}")
