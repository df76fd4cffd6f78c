"""Linear layers of ComfyUI without memory of their own, and the inner tensors of their quantised weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ....offload import StoredTensor


def streamed_operations(operations: type) -> type:
    """Return ComfyUI's `operations` with a Linear that takes no memory, and refers to the tensors that it loads.

    A plain Linear does so when it is loaded with `assign`; one of mixed precision always does.
    """
    base: Any = operations.Linear  # type: ignore[attr-defined]
    linear = _plain(base) if issubclass(base, nn.Linear) else _mixed(base)
    return type("StreamedOperations", (operations,), {"Linear": linear})


def _plain(base: Any) -> type:
    class Linear(base):  # type: ignore[misc]
        def __init__(
            self, in_features: int, out_features: int, bias: bool = True, device: Any = None, dtype: Any = None
        ) -> None:
            super().__init__(in_features, out_features, bias, device="meta", dtype=dtype)
            scales = self._parameters.keys() - {"weight", "bias"}
            if scales:  # a file may lack them, and on `meta` they have no values
                for name in scales:
                    delattr(self, name)
                weight = self._parameters["weight"]
                self._parameters["weight"] = nn.Parameter(torch.empty(0))
                self.reset_parameters()
                self._parameters["weight"] = weight

    return Linear


def _mixed(base: Any) -> type:
    class Linear(base):  # type: ignore[misc]
        streamed: tuple[torch.Tensor, ...] = ()
        """The quantised weight in the file, of a layer that streams."""

        def _load_from_state_dict(
            self,
            state_dict: dict[str, torch.Tensor],
            prefix: str,
            local_metadata: object,
            strict: bool,
            missing_keys: list[str],
            unexpected_keys: list[str],
            error_msgs: list[str],
        ) -> None:
            """Load the layer with tensors on `meta` for its matrices, which ComfyUI would convert or copy."""
            matrices = {key: each for key, each in state_dict.items() if each.dim() > 1 and each.numel() > 1}
            matrices = {key: each for key, each in matrices.items() if key.rpartition(".")[0] + "." == prefix}
            state_dict |= {key: torch.empty_like(each, device="meta") for key, each in matrices.items()}
            more = local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            super()._load_from_state_dict(state_dict, prefix, *more)
            weight = self._parameters.get("weight")
            if weight is None:  # not in the file, which ComfyUI has logged
                return
            self.loaded_dtype = weight.dtype
            self._parameters["weight"] = _refer(weight, prefix, matrices, error_msgs)

        def state_dict(self, *args: Any, **settings: Any) -> Any:
            """Return what the file has, because the weight is absent while its block is not on the device."""
            bound = self._parameters.get("weight")
            for weight in self.streamed:
                inner = {name: detached(tensor) for name, tensor in inner_tensors(weight).items()}
                self._parameters["weight"] = joined(weight, inner)
            try:
                return super().state_dict(*args, **settings)
            finally:
                if self.streamed:
                    self._parameters["weight"] = bound

    return Linear


def _refer(weight: Any, prefix: str, matrices: Mapping[str, torch.Tensor], error_msgs: list[str]) -> torch.Tensor:
    """Return the weight that was loaded on `meta` with the tensors of the file in its place."""
    key = f"{prefix}weight"
    if not is_joined(weight):
        return nn.Parameter(matrices[key], requires_grad=False)
    keys = {id(tensor): name for name, tensor in weight.state_dict(key).items()}
    inner = {}
    for name, tensor in inner_tensors(weight).items():
        stored = matrices.get(keys.get(id(tensor), ""))
        if stored is None:
            continue
        if stored.shape != tensor.shape or (stored.dtype != tensor.dtype and keys[id(tensor)] == key):
            found = f"{list(stored.shape)} in {stored.dtype}, not {list(tensor.shape)} in {tensor.dtype}"
            error_msgs.append(f"{keys[id(tensor)]} is {found}")
            continue
        inner[name] = stored.view(tensor.dtype)
    return joined(weight, inner)


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor to give away: a file tensor keeps the values in memory as long as it exists."""
    return tensor.detach() if isinstance(tensor, StoredTensor) else tensor


def is_joined(tensor: torch.Tensor) -> bool:
    """Return True for a quantised weight, which consists of several tensors."""
    return hasattr(type(tensor), "__tensor_flatten__")


def inner_tensors(weight: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that a quantised weight consists of, by name."""
    names, _ = weight.__tensor_flatten__()
    return {name: getattr(weight, name) for name in names}


def joined(weight: Any, inner: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a weight like the quantised `weight` with other inner tensors, some or all."""
    _, context = weight.__tensor_flatten__()
    tensors = {**inner_tensors(weight), **inner}
    made: torch.Tensor = type(weight).__tensor_unflatten__(tensors, context, weight.size(), weight.stride())
    # `nn.Parameter(made)` would copy the scales, into memory that no buffer has and that no later fetch writes.
    made._is_param = True
    return made
