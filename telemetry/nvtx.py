"""Named ranges for NVIDIA's profilers; off by default."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch


class Ranges(Protocol):
    """Named time ranges for a profiler. Any thread may call, and ranges may overlap."""

    def start(self, name: str) -> int:
        """Start a range and return its number."""

    def end(self, number: int) -> None:
        """End the range of that number."""


class NvtxRanges:
    """Ranges that Nsight Systems shows.

    Raises:
        ValueError: torch has no CUDA.
    """

    def __init__(self) -> None:
        if torch.version.cuda is None:
            raise ValueError(
                f"NVTX ranges are requested (WANSTREAM_NVTX), and torch {torch.__version__} has no CUDA: unset it"
            )

    def start(self, name: str) -> int:
        return int(torch.cuda.nvtx.range_start(name))

    def end(self, number: int) -> None:
        torch.cuda.nvtx.range_end(number)


@contextmanager
def ranged(ranges: Ranges | None, name: str) -> Iterator[None]:
    """Put the `with` body into one range; do nothing if `ranges` is None."""
    if ranges is None:
        yield
        return
    number = ranges.start(name)
    try:
        yield
    finally:
        ranges.end(number)
