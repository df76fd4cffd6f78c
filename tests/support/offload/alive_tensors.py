"""Bytes of simultaneously live tensors."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):
    """Mode that counts the bytes of live results. `besides` are not counted."""

    def __init__(self, besides: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self._besides = {tensor.untyped_storage()._cdata for tensor in besides}
        self._sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        self.peak = max(self.peak, sum(self._sizes.values()))
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes and key not in self._besides:
            self._sizes[key] = storage.nbytes()
            weakref.finalize(storage, self._sizes.pop, key)
