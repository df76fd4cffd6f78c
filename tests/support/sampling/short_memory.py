"""A pair that runs out of memory once."""

from __future__ import annotations

from typing import Any

import torch

from wanstream.schema import OffloadPolicy
from wanstream.wan import ExpertPair


class ShortOnce:
    """Wrapper around a pair that runs out of memory once.

    The out-of-memory error is raised at one block use, or after the blocks.
    """

    def __init__(self, pair: ExpertPair, use: int, *, behind: bool = False) -> None:
        self._pair, self._left, self._behind = pair, use, behind
        self._hooked = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pair, name)

    def engine(self, policy: OffloadPolicy, device: torch.device) -> Any:
        engine = self._pair.engine(policy, device)
        if not self._hooked:
            self._hooked = True
            for model in engine.models.bare.values():
                for module in [model.proj_out] if self._behind else model.blocks:
                    module.register_forward_pre_hook(self._use)
        return engine

    def _use(self, *given: object) -> None:
        self._left -= 1
        if self._left == -1:
            raise torch.OutOfMemoryError("out of memory")
