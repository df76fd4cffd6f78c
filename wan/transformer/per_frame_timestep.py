"""Per-frame timesteps (TI2V-5B), and modulation rows for their tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import torch

from ...block_kernels import Gate, Norm, Spans

TokenSelector: TypeAlias = "Callable[[torch.Tensor], torch.Tensor]"
"""Function from all tokens [1, S, D] in a lane to this worker's part."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FrameModulation:
    """Modulation for a lane's tokens, the same in every block."""

    rows: torch.Tensor
    """[R, 6, D], one row per distinct timestep."""
    spans: Spans
    """Spans over all tokens of this worker, in order."""

    @cached_property
    def row_of_token(self) -> torch.Tensor:
        """Row index by token, [S] int64, on the device of `rows`."""
        rows, counts = zip(*((row, end - start) for start, end, row in self.spans), strict=True)
        device = self.rows.device
        # Without `output_size`, repeat_interleave sums the counts on the device and the host waits
        # for the result.
        _, tokens, _ = self.spans[-1]
        counts_tensor = torch.tensor(counts, device=device)
        return torch.tensor(rows, device=device).repeat_interleave(
            counts_tensor, output_size=tokens
        )


class Modulation(NamedTuple):
    """Shift, scale and gate for attention and the feed-forward, each for consecutive tokens."""

    values: tuple[torch.Tensor, ...]
    """Six tensors [R, 1, D], or [1, S, D] with one vector per token."""
    spans: Spans

    def part(self, at: slice) -> Modulation:
        """Return the modulation for a chunk of tokens."""
        if not self.spans or at == slice(None):
            return self
        cut = ((max(start, at.start), min(end, at.stop), row) for start, end, row in self.spans)
        return self._replace(
            spans=tuple(
                (start - at.start, end - at.start, row) for start, end, row in cut if start < end
            )
        )

    def norm(self, first: int, eps: float) -> Norm:
        """Return the norm with the shift `values[first]` and the scale behind it."""
        return Norm(self.values[first + 1], self.values[first], eps, True, self.spans)

    def gate(self, index: int) -> Gate:
        return Gate(self.values[index], self.spans)


def frame_timesteps(timestep_scale: Sequence[float], timestep: float) -> tuple[float, ...]:
    """Return the timestep by frame: scale times step timestep, in float32 as in ComfyUI."""
    values: list[float] = (torch.tensor(timestep_scale, dtype=torch.float32) * timestep).tolist()
    return tuple(values)


def row_spans(runs: Sequence[tuple[int, int]], select: TokenSelector) -> Spans:
    """Return spans for the tokens that `select` keeps.

    Args:
        runs: row and number of consecutive tokens with this row, for all tokens in the lane in
            order.
        select: selects this worker's tokens.
    """
    rows = torch.tensor([row for row, _ in runs]).repeat_interleave(
        torch.tensor([tokens for _, tokens in runs])
    )
    # As [1, S, 1], because the selector cuts dim 1 of three.
    values, counts = select(rows[None, :, None]).flatten().unique_consecutive(return_counts=True)
    spans = []
    start = 0
    for row, count in zip(values.tolist(), counts.tolist(), strict=True):
        spans.append((start, start + count, row))
        start += count
    return tuple(spans)


def rows_and_spans(modulation: torch.Tensor | FrameModulation) -> tuple[torch.Tensor, Spans]:
    """Return rows [R, 6, D] and their spans.

    A tensor [1, 6, D] has no spans: one row serves all tokens.
    """
    if isinstance(modulation, FrameModulation):
        return modulation.rows, modulation.spans
    return modulation, ()
