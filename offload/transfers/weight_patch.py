"""Changes to one matrix (LoRA, LoKr, LoHa, DoRA, differences) and the sums with it.

Products of small factors are never formed as a whole unless one operation adds them. At most a few
rows exist at a time, in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch

from ..formats.chunk_size import CHUNK_VALUES, values_at_once

WORK_BYTES_PER_VALUE = 20
"""fp32 work memory in bytes per value, for a sum in pieces."""

T = TypeVar("T", bound="WeightPatch | Product | Kronecker | Hadamard | Rescaled")

ChangeTensor: TypeAlias = "Callable[[str, torch.Tensor], torch.Tensor]"
"""Returns the replacement for a patch part, by name."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Product:
    """`up @ down`, [rows, columns]."""

    up: torch.Tensor
    """[rows, rank]"""
    down: torch.Tensor
    """[rank, columns]"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Kronecker:
    """Kronecker product (LoKr): every value of `first` times the whole `second`."""

    first: torch.Tensor
    second: torch.Tensor | Product

    @property
    def second_shape(self) -> tuple[int, int]:
        if isinstance(self.second, Product):
            return self.second.up.shape[0], self.second.down.shape[1]
        return self.second.shape[0], self.second.shape[1]


@dataclass(frozen=True, kw_only=True, eq=False)
class Hadamard:
    """Elementwise product of two products (LoHa)."""

    one: Product
    other: Product


@dataclass(frozen=True, kw_only=True, eq=False)
class Rescaled:
    """DoRA: `strength` times the difference between the matrix and W'.

    W' is (matrix + change) * magnitude / norm. The norm is taken over the rows or columns of matrix
    + change, whichever have a magnitude.
    """

    magnitude: torch.Tensor
    """[rows, 1] or [1, columns]"""
    change: WeightPatch
    strength: float


MAGNITUDE = "magnitude"


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightPatch:
    """Change to one matrix [rows, columns]: adds `up @ down`, `full` and the others.

    All are CPU tensors with a floating dtype. The strength is already in `up`, `full`, `first` and
    `one.up`. `set_patches` copies them, rounded to the matrix compute dtype. Magnitudes are fp32.
    """

    up: torch.Tensor | None = None
    """[rows, rank]. Requires `down`."""
    down: torch.Tensor | None = None
    """[rank, columns]"""
    full: torch.Tensor | None = None
    """[rows, columns]"""
    kronecker: tuple[Kronecker, ...] = ()
    hadamard: tuple[Hadamard, ...] = ()
    rescaled: tuple[Rescaled, ...] = ()

    @property
    def is_product(self) -> bool:
        """True for nothing but `up @ down`. A layer can compute this next to its matrix."""
        return self.full is None and not self.kronecker and not self.hadamard and not self.rescaled

    @property
    def parts(self) -> dict[str, torch.Tensor]:
        """All tensors by name."""
        found: dict[str, torch.Tensor] = {}

        def collect(name: str, tensor: torch.Tensor) -> torch.Tensor:
            found[name] = tensor
            return tensor

        self.map(collect)
        return found

    @property
    def products(self) -> dict[str, Product]:
        """Products with the matrix shape, by the name prefix of their parts."""
        found: dict[str, Product] = {}
        if self.up is not None and self.down is not None:
            found[""] = Product(up=self.up, down=self.down)
        for index, each in enumerate(self.hadamard):
            found |= {f"hadamard {index} one ": each.one, f"hadamard {index} other ": each.other}
        return found

    def map(self, change: ChangeTensor) -> WeightPatch:
        """Return the patch with `change(name, tensor)` in place of every tensor."""
        return _map(self, change)


@dataclass(frozen=True, kw_only=True, eq=False)
class ComputedPatch:
    """Change to one parameter by a function, which may write all bytes of the parameter."""

    parts: Mapping[str, torch.Tensor]
    """CPU tensors for `compute`, of any shape and dtype."""
    compute: Callable[
        [Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]
    ]
    """Changes the parameter in a buffer in place, on the current stream.

    The arguments are the parameter's tensors by piece, "" for one stored whole, and the parts on
    the same device. The result has the pieces without a place in a buffer, the same for each call.
    """

    def map(self, change: ChangeTensor) -> ComputedPatch:
        """Return the patch with `change(name, tensor)` in place of every part."""
        parts = {name: change(name, tensor) for name, tensor in self.parts.items()}
        return ComputedPatch(parts=parts, compute=self.compute)


def _map(change: T, of: ChangeTensor, prefix: str = "") -> T:
    """Return a change with `of(name, tensor)` in place of every tensor."""
    mapped: dict[str, Any] = {}
    for name, part in vars(change).items():
        if isinstance(part, torch.Tensor):
            mapped[name] = of(prefix + name, part)
        elif isinstance(part, tuple) and part:
            parts = enumerate(part)
            mapped[name] = tuple(
                _map(each, of, f"{prefix}{name} {index} ") for index, each in parts
            )
        elif isinstance(part, WeightPatch):  # of a DoRA: named like a patch of its own
            mapped[name] = _map(part, of, prefix)
        elif isinstance(part, Product):
            mapped[name] = _map(part, of, f"{prefix}{name} ")
    return type(change)(**{**vars(change), **mapped})


def add_patch(matrix: torch.Tensor, patch: WeightPatch) -> None:
    """Add a patch to a matrix in place, on any device.

    The patch is on the same device, in the matrix dtype.

    A LoRA, a LoKr and a difference take one operation each, which sums in fp32 and rounds once.
    `write_sum` sums a LoHa or a DoRA in fp32, with everything added next to them.
    """
    if patch.hadamard or patch.rescaled:
        write_sum(matrix, patch, matrix)
        return
    if patch.full is not None:
        matrix.add_(patch.full)
    if patch.up is not None and patch.down is not None:
        matrix.addmm_(patch.up, patch.down)
    for each in patch.kronecker:
        second = each.second
        if isinstance(second, Product):
            second = second.up @ second.down
        rows, columns = each.first.shape
        # The shape is (first rows, second rows, first columns, second columns).
        blocks = matrix.view(rows, second.shape[0], columns, second.shape[1])
        blocks.addcmul_(each.first[:, None, :, None], second[None, :, None, :])


def write_sum(base: torch.Tensor, patch: WeightPatch, into: torch.Tensor) -> None:
    """Write `base + patch` into a parameter in the same shape, on any device.

    Both may be the same tensor.

    The sum is computed on the device of `into` in fp32 and rounded once, a few rows at a time. In
    fp32 the largest of these matrices would take 280 MB.
    """
    rows = len(base)
    source = base.reshape(rows, -1)
    target = into.view(rows, -1)
    # Differences are as large as the matrix, so they are moved a few rows at a time.
    patch = patch.map(
        lambda name, each: (
            each.reshape(target.shape) if name.endswith("full") else each.to(into.device)
        )
    )
    at_once = max(1, _values_at_once(into.device) // target.shape[1])
    pieces = [slice(start, min(start + at_once, rows)) for start in range(0, rows, at_once)]
    # Before any row is written, because both tensors may be the same.
    factors = [_factor_of_columns(source, each, pieces, into.device) for each in patch.rescaled]
    for piece in pieces:
        # A copy: the sum is in place, and in fp32 on this device it would change `base`.
        total = source[piece].to(into.device, torch.float32, copy=True)
        # Each rescaled change starts from the matrix without the other changes.
        unchanged = total.clone() if patch.rescaled else total
        _add_rows(total, patch, piece)
        for each, of_columns in zip(patch.rescaled, factors, strict=True):
            scaled = _add_rows(unchanged.clone(), each.change, piece)
            factor = of_columns
            if factor is None:
                magnitude = each.magnitude[piece].to(into.device, torch.float32)
                norms = torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
                factor = magnitude / _positive(norms)
            total.add_(scaled.mul_(factor).sub_(unchanged), alpha=each.strength)
        target[piece].copy_(total)


def patch_work_bytes(values: int, device: torch.device) -> int:
    """Return the device memory in bytes for `write_sum` on a matrix with this many values."""
    return WORK_BYTES_PER_VALUE * min(values, _values_at_once(device))


def _values_at_once(device: torch.device) -> int:
    return max(CHUNK_VALUES, values_at_once(device) // 4)


def _factor_of_columns(
    source: torch.Tensor, rescaled: Rescaled, pieces: list[slice], device: torch.device
) -> torch.Tensor | None:
    """Return a DoRA's column factors if it has a magnitude per column.

    None if it has one per row.
    """
    magnitude = rescaled.magnitude
    if magnitude.shape[0] != 1 or len(source) == magnitude.numel() == 1:
        return None
    squares = torch.zeros(1, source.shape[1], dtype=torch.float32, device=device)
    for piece in pieces:
        rows = source[piece].to(device, torch.float32, copy=True)
        summed = _add_rows(rows, rescaled.change, piece)
        squares += summed.square_().sum(0, keepdim=True)
    return magnitude.to(device, torch.float32) / _positive(squares.sqrt_())


def _positive(norms: torch.Tensor) -> torch.Tensor:
    """Return row or column norms, raised to at least the smallest normal fp32 number.

    Zeros then stay zeros with any factor.
    """
    return norms.clamp_(min=torch.finfo(torch.float32).tiny)


def _add_rows(total: torch.Tensor, patch: WeightPatch, piece: slice) -> torch.Tensor:
    """Add some rows of a patch, without `rescaled`, to fp32 rows in place."""

    def here(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(total.device, torch.float32)

    if patch.full is not None:
        total.add_(patch.full[piece].to(total.device))
    if patch.up is not None and patch.down is not None:
        total.addmm_(here(patch.up[piece]), here(patch.down))
    for kronecker in patch.kronecker:
        rows = torch.arange(piece.start, piece.stop, device=kronecker.first.device)
        high = rows // kronecker.second_shape[0]
        low = rows % kronecker.second_shape[0]
        second = kronecker.second
        if isinstance(second, Product):
            factor = here(second.up[low]) @ here(second.down)
        else:
            factor = here(second[low])
        blocks = total.view(len(rows), -1, factor.shape[1])
        blocks.addcmul_(here(kronecker.first[high])[:, :, None], factor[:, None, :])
    for hadamard in patch.hadamard:
        pair = (hadamard.one, hadamard.other)
        total.addcmul_(*(here(each.up[piece]) @ here(each.down) for each in pair))
    return total
