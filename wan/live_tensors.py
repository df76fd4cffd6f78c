"""Counts the bytes of tensors that are alive at once; on the `meta` device too, where nothing is computed or held."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

CONVOLUTIONS = ("aten.convolution.default", "aten._convolution.default")


class LiveTensors(TorchDispatchMode):
    """Between entering and leaving, what torch makes on this thread is counted from its making to its end.

    Storages are counted, so views cost nothing. Tensors from before cost nothing either. Inference mode keeps what
    operations are made of from sight: count outside it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        """Bytes that are alive."""
        self.peak = 0
        """The most that were alive at once."""
        self.convolution_peak = 0
        """The most with what a convolution's library may hold meanwhile: input and output in an order of its own."""
        self._uses: dict[int, int] = {}
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in tree_iter((args, kwargs)) if _is_tensor(tensor)}
        for tensor in tree_iter(made):
            if _is_tensor(tensor):
                self._note(tensor, given)
        self.peak = max(self.peak, self.now)
        reordered = _bytes(args[0]) + _bytes(made) if str(func) in CONVOLUTIONS else 0
        self.convolution_peak = max(self.convolution_peak, self.now + reordered)
        return made

    def _note(self, tensor: torch.Tensor, given: set[int]) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._uses:
            if key in given:  # a view of what was there before
                return
            self._uses[key], self._sizes[key] = 0, storage.nbytes()
            self.now += storage.nbytes()
        self._uses[key] += 1
        weakref.finalize(tensor, self._drop, key)

    def _drop(self, key: int) -> None:
        self._uses[key] -= 1
        if not self._uses[key]:
            del self._uses[key]
            self.now -= self._sizes.pop(key)


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
