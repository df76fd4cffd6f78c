"""Rotation in int8 ConvRot: a regular Hadamard matrix.

It spreads an outlier in a row over a group of columns. The matrix H for 4**k columns is the k-th
Kronecker power of the one below, divided by sqrt(4**k). It is symmetric and its own inverse, so one
function rotates weights, activations and LoRA `down` factors, and turns weights back.

    1  1  1 -1
    1  1 -1  1
    1 -1  1  1
   -1  1  1  1
"""

from __future__ import annotations

import functools
import math

import torch

LARGEST_GROUP = 1024
"""Largest group with sums of int8 values that are exact in fp32, with room to spare."""


def is_rotation(size: int) -> bool:
    """Return True if `size` columns have a rotation: a power of 4 from 4 to `LARGEST_GROUP`."""
    return size in (4, 16, 64, 256, LARGEST_GROUP)


def rotation_group(columns: int) -> int:
    """Return the largest group, up to 256, that divides `columns`. 0 if none does."""
    return next((group for group in (256, 64, 16, 4) if columns % group == 0), 0)


@functools.cache
def signs(group: int) -> torch.Tensor:
    """Return the matrix signs, int8 [group, group] on the CPU. Do not write into it."""
    assert is_rotation(group), f"no rotation of {group} columns"
    with torch.inference_mode(False):  # used in later runs too
        one = torch.ones(4, 4, dtype=torch.int8) - 2 * torch.eye(4, dtype=torch.int8).flip(0)
        matrix = one
        while len(matrix) < group:
            matrix = torch.kron(matrix, one)
        return matrix.contiguous()


def kronecker_factors(group: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return fp32 matrices on `device` with Kronecker product `signs`: one, or two on a CPU.

    Two take a quarter of the time on a CPU. A device multiplies faster than it passes over the
    values twice.
    """
    if device.type == "cpu" and group > 16:
        return signs(group // 16).float(), signs(16).float()
    # Pageable memory on purpose: the host blocks only until the driver has copied the 64 KB to its
    # staging area.
    return (signs(group).to(device, non_blocking=True).float(),)


def rotated_sums(values: torch.Tensor, factors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return `values` @ `signs`, group by group: the rotation without its factor 1 / sqrt(group).

    Args:
        values: fp32 [rows, columns]. Sums of integers up to 128 are exact in any order, and also in
            TF32.
        factors: from `kronecker_factors`.
    """
    *outer, inner = factors
    summed = values.reshape(-1, len(inner)) @ inner
    if outer:
        summed = outer[0] @ summed.view(-1, len(outer[0]), len(inner))
    return summed.view(values.shape)


def rotation_factor(group: int) -> float:
    """Return 1 / sqrt(group), a power of two."""
    return 1 / math.sqrt(group)
