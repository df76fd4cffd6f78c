"""ComfyUI linear layers without own memory, and the inner tensors in quantised weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .....offload.sources import StoredTensor
from ... import versions


def refer_to_tensors(network: nn.Module, linear: tuple[type, ...]) -> None:
    """Make the layers in a built network refer to the tensors they load, with `assign`.

    A token table still in the file reads only the rows for the given tokens.
    """
    referring: dict[type, type] = {}
    for layer in network.modules():
        kind = type(layer)
        if isinstance(layer, nn.Embedding):
            layer.__class__ = referring.setdefault(kind, _rows(kind))
        elif isinstance(layer, linear) and not isinstance(layer, nn.Linear):
            layer.__class__ = referring.setdefault(kind, _mixed(kind))
            versions.load_on_any_device(layer)


def streamed_operations(operations: type) -> type:
    """Return ComfyUI's `operations` with a Linear that only refers to the tensors it loads.

    A plain Linear does so when loaded with `assign`. A mixed-precision one always does.
    """
    base: Any = operations.Linear  # type: ignore[attr-defined]
    subclass = _mixed
    if issubclass(base, nn.Linear):
        subclass = _plain
    return type("StreamedOperations", (operations,), {"Linear": subclass(base)})


def _rows(base: Any) -> type:
    class Embedding(base):  # type: ignore[misc]
        def forward(self, input: torch.Tensor, *args: Any, **settings: Any) -> torch.Tensor:
            table = self._parameters["weight"]
            if not is_in_file(table):
                return super().forward(input, *args, **settings)  # type: ignore[no-any-return]
            # Only the rows in use: the table of a large encoder has gigabytes.
            used, places = input.unique(return_inverse=True)
            self._parameters["weight"] = _rows_of(table, used.tolist(), input.device)
            try:
                return super().forward(places, *args, **settings)  # type: ignore[no-any-return]
            finally:
                # Otherwise the next text would find only the rows of this one.
                self._parameters["weight"] = table

    return Embedding


def _rows_of(table: Any, rows: list[int], device: torch.device) -> torch.Tensor:
    """Return a parameter with these rows of a table in its file."""
    if not is_joined(table):
        return nn.Parameter(table.read_rows(rows).to(device), requires_grad=False)
    inner = inner_tensors(table)
    for name, tensor in inner.items():
        if tensor.shape[:1] == table.shape[:1]:  # codes, or a scale for each row
            taken = tensor.read_rows(rows) if isinstance(tensor, StoredTensor) else tensor[rows]
            inner[name] = taken
        inner[name] = inner[name].to(device)
    return joined(table, inner)


def _plain(base: Any) -> type:
    class Linear(base):  # type: ignore[misc]
        def __init__(
            self,
            in_features: int,
            out_features: int,
            bias: bool = True,
            device: Any = None,
            dtype: Any = None,
        ) -> None:
            # On `meta`: the file's tensors replace the weights in any case.
            super().__init__(in_features, out_features, bias, device="meta", dtype=dtype)
            scales = self._parameters.keys() - {"weight", "bias"}
            if scales:  # a file may lack them, and on `meta` they would have no values
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
        """Quantised weight in the file, for a streamed layer."""

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
            """Load the layer with `meta` tensors for the matrices.

            ComfyUI would convert or copy them. It only refers to a bias, of which a bank of
            experts has a matrix.
            """
            matrices = {
                key: each for key, each in state_dict.items() if each.dim() > 1 and each.numel() > 1
            }
            matrices = {
                key: each
                for key, each in matrices.items()
                if key.rpartition(".")[0] == prefix[:-1] and key != f"{prefix}bias"
            }
            state_dict |= {
                key: torch.empty_like(each, device="meta") for key, each in matrices.items()
            }
            more = local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            super()._load_from_state_dict(state_dict, prefix, *more)
            weight = self._parameters.get("weight")
            if weight is None:  # missing in the file, which ComfyUI has logged
                return
            self.loaded_dtype = weight.dtype
            self._parameters["weight"] = _refer(weight, prefix, matrices, error_msgs)

        def state_dict(self, *args: Any, **settings: Any) -> Any:
            """Return the file's tensors. The weight is absent unless the block is on the device."""
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


def _refer(
    weight: Any, prefix: str, matrices: Mapping[str, torch.Tensor], error_msgs: list[str]
) -> torch.Tensor:
    """Return a weight loaded on `meta`, filled with the file's tensors."""
    key = f"{prefix}weight"
    if not is_joined(weight):
        return nn.Parameter(matrices[key], requires_grad=False)
    keys = versions.stored_names(weight, key)
    inner = {}
    for name, tensor in inner_tensors(weight).items():
        stored = matrices.get(keys.get(id(tensor), ""))
        if stored is None:
            continue
        if stored.shape != tensor.shape or (
            stored.dtype != tensor.dtype and keys[id(tensor)] == key
        ):
            found = (
                f"{list(stored.shape)} in {stored.dtype}, not {list(tensor.shape)} in "
                f"{tensor.dtype}"
            )
            error_msgs.append(f"{keys[id(tensor)]} is {found}")
            continue
        # ComfyUI views some scales as another 8-bit dtype, such as e8m0 in mxfp8.
        inner[name] = stored.view(tensor.dtype)
    return joined(weight, inner)


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor to hand out. A file tensor keeps the values once their address is read."""
    return tensor.detach() if isinstance(tensor, StoredTensor) else tensor


def is_in_memory(tensor: torch.Tensor) -> bool:
    """Return False for a tensor that streams or reads the values from a file on use."""
    return not tensor.is_meta and not is_in_file(tensor)


def is_in_file(tensor: torch.Tensor) -> bool:
    """Return True for a tensor that reads the values from a file on use."""
    tensors = inner_tensors(tensor).values() if is_joined(tensor) else (tensor,)
    return any(isinstance(each, StoredTensor) for each in tensors)


def is_joined(tensor: torch.Tensor) -> bool:
    """Return True for a quantised weight. It consists of several tensors."""
    return hasattr(type(tensor), "__tensor_flatten__")


def inner_tensors(weight: Any) -> dict[str, torch.Tensor]:
    """Return the tensors inside a quantised weight, by name."""
    names, _ = weight.__tensor_flatten__()
    return {name: getattr(weight, name) for name in names}


def joined(weight: Any, inner: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a copy of the quantised `weight` with some or all inner tensors replaced."""
    _, context = weight.__tensor_flatten__()
    tensors = {**inner_tensors(weight), **inner}
    made: torch.Tensor = type(weight).__tensor_unflatten__(
        tensors, context, weight.size(), weight.stride()
    )
    # `nn.Parameter(made)` would copy the scales into memory outside the buffer, where no later
    # fetch writes.
    made._is_param = True
    return made
