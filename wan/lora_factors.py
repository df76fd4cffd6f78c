"""The factors of LoRA files in host RAM, and what several LoRAs together add to one parameter.

Held are the tensors of each file as it stores them, without alpha and strength: 0.6 GB for a LoRA of rank 64 in bf16.
So another strength reads no file. The engine holds what it adds to arriving blocks apart from that, in its own form.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeAlias

import torch

from ..offload.decode import CHUNK_VALUES
from ..offload.file_source import read_tensors
from ..offload.patches import WeightPatch
from .lora import LoraFile
from .stored import CheckpointError

LoraStack: TypeAlias = "Sequence[tuple[LoraFile, float]]"
"""What is added to one expert: files and their strengths."""

Tensors = Mapping[str, torch.Tensor]


class LoraFactors:
    """Reads each file once, when it is first asked for."""

    def __init__(self) -> None:
        self._held: dict[Hashable, Tensors] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(tensor.nbytes for tensors in self._held.values() for tensor in tensors.values())

    def of(self, lora: LoraFile) -> Tensors:
        """The tensors of `lora` by key, on the CPU, as they are stored.

        Raises:
            CheckpointError: one of them has a number that is not finite; names the key.
            SourceError: the file cannot be read, or is no longer the one that was opened.
        """
        if lora.identity not in self._held:
            tensors = read_tensors(lora.tensors)
            for key, tensor in tensors.items():
                _check_finite(lora, key, tensor)
            self._held[lora.identity] = tensors
        return self._held[lora.identity]

    def keep_only(self, loras: Iterable[LoraFile]) -> None:
        """Let go of all other files."""
        wanted = {lora.identity for lora in loras}
        self._held = {identity: tensors for identity, tensors in self._held.items() if identity in wanted}


def bytes_in_both_forms(loras: Iterable[LoraFile], dtype: torch.dtype) -> int:
    """Host memory of these LoRAs as they are stored, and once more as the engine holds them."""
    factors = [tensor for lora in loras for tensor in lora.tensors.values()]
    folded = sum(math.prod(tensor.shape) for tensor in factors) * dtype.itemsize
    return sum(tensor.nbytes for tensor in factors) + folded


def combined(parameter: str, stack: LoraStack, factors: LoraFactors) -> WeightPatch:
    """What the LoRAs of `stack`, at least one of which changes `parameter`, add to it together.

    Low-rank products are put side by side along their rank, with strength and scale in `up`; differences are summed.
    `up` [rows, rank] and `full`, in the shape of the parameter, are fp32; `down` [rank, columns] is as it is stored.
    """
    ups: list[torch.Tensor] = []
    downs: list[torch.Tensor] = []
    full: torch.Tensor | None = None
    for lora, strength in stack:
        low, difference = lora.low_rank.get(parameter), lora.differences.get(parameter)
        tensors = factors.of(lora) if low or difference else {}
        if low is not None:
            ups.append(_times(tensors[low.up].flatten(1), low.scale * strength))
            downs.append(tensors[low.down].flatten(1))
        if difference is not None:
            part = _times(tensors[difference.key], difference.scale * strength)
            full = part if full is None else full.add_(part)
    return WeightPatch(up=_joined(ups, dim=1), down=_joined(downs, dim=0), full=full)


def _times(stored: torch.Tensor, factor: float) -> torch.Tensor:
    return stored.to(torch.float32, copy=True).mul_(factor)


def _joined(parts: Sequence[torch.Tensor], *, dim: int) -> torch.Tensor | None:
    """The parts as one tensor: of one, itself; of several, fp32."""
    if len(parts) < 2:
        return parts[0] if parts else None
    return torch.cat([part.float() for part in parts], dim=dim)


def put_patched(base: torch.Tensor, patch: WeightPatch, into: torch.Tensor) -> None:
    """Write `base` (on the CPU) with `patch` added into a parameter of its shape and dtype, on any device.

    Computed on that device in fp32 and rounded once, a few rows at a time: the largest of these matrices would take
    630 MB in fp32.
    """
    rows = len(base)
    source, target = base.reshape(rows, -1), into.view(rows, -1)
    full = None if patch.full is None else patch.full.reshape(target.shape)
    down = None if patch.down is None else patch.down.to(into.device, torch.float32)
    rows_at_once = max(1, CHUNK_VALUES // target.shape[1])
    for start in range(0, rows, rows_at_once):
        part = slice(start, start + rows_at_once)
        total = source[part].to(into.device, torch.float32, copy=True)
        if full is not None:
            total.add_(full[part].to(into.device))
        if patch.up is not None and down is not None:
            total.addmm_(patch.up[part].to(into.device), down)
        target[part].copy_(total)


def _check_finite(lora: LoraFile, key: str, tensor: torch.Tensor) -> None:
    # If any number is NaN, so are the extremes, which take a tenth of the time; torch has none of fp8.
    extremes = torch.aminmax(tensor.float() if tensor.itemsize == 1 else tensor)
    if all(math.isfinite(extreme) for extreme in extremes):
        return
    wrong = tensor.numel() - int(torch.isfinite(tensor.float()).sum())
    raise CheckpointError(
        lora.path,
        f"{key} {list(tensor.shape)} holds {wrong} of {tensor.numel()} numbers that are not finite: the file is "
        "damaged or its training failed",
    )
