"""Named ranges for NVIDIA's profilers, made only when somebody asks for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch


class Ranges(Protocol):
    """Marks stretches of time for a profiler; any thread may call, and ranges may overlap."""

    def start(self, name: str) -> int:
        """A range begins; returns its number."""

    def end(self, number: int) -> None:
        """The range of that number ends."""


class NvtxRanges:
    """Ranges that Nsight Systems shows. Raises ValueError where torch has no CUDA."""

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
    """Everything inside is one range; nothing happens without `ranges`."""
    if ranges is None:
        yield
        return
    number = ranges.start(name)
    try:
        yield
    finally:
        ranges.end(number)
