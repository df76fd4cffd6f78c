"""Linear layers of ComfyUI without memory of their own: loading makes them refer to the mapped file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def streamed_operations(operations: type) -> type:
    """Return ComfyUI's `operations` with a Linear that takes no memory and refers to its tensors in the file.

    Linear layers that are not `nn.Linear`, those of mixed precision, refer to the file already.
    """
    base: Any = operations.Linear  # type: ignore[attr-defined]
    if not issubclass(base, nn.Linear):
        return operations

    class Linear(base):  # type: ignore[misc]
        def __init__(
            self, in_features: int, out_features: int, bias: bool = True, device: Any = None, dtype: Any = None
        ) -> None:
            super().__init__(in_features, out_features, bias, device="meta", dtype=dtype)
            self.declared = {name: tensor.dtype for name, tensor in self.named_parameters(recurse=False)}

        def _load_from_state_dict(
            self,
            state_dict: Mapping[str, torch.Tensor],
            prefix: str,
            local_metadata: object,
            strict: bool,
            missing_keys: list[str],
            unexpected_keys: list[str],
            error_msgs: list[str],
        ) -> None:
            for name, parameter in self.named_parameters(recurse=False):
                stored = state_dict.get(prefix + name)
                if stored is None:
                    missing_keys.append(prefix + name)
                elif stored.shape != parameter.shape:
                    error_msgs.append(f"{prefix}{name} is {list(stored.shape)}, not {list(parameter.shape)}")
                else:
                    self._parameters[name] = nn.Parameter(stored, requires_grad=False)

    return type("StreamedOperations", (operations,), {"Linear": Linear})


def declared_dtype(module: nn.Module, name: str, tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype in which ComfyUI keeps parameter `name` of `module`; `tensor` is the loaded one."""
    declared: Mapping[str, torch.dtype] = getattr(module, "declared", {})
    return declared.get(name, tensor.dtype)
