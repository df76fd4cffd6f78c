"""Per-frame timesteps (TI2V-5B), and the modulation rows of their tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

if TYPE_CHECKING:
    pass


OwnTokens: TypeAlias = "Callable[[torch.Tensor], torch.Tensor]"
"""All tokens [1, S, D] of a lane -> those that are computed here."""


class Run(NamedTuple):
    """Tokens side by side that share a row."""

    start: int
    end: int
    row: int


Runs: TypeAlias = "tuple[Run, ...]"


@dataclass(frozen=True, kw_only=True, eq=False)
class FrameModulation:
    """What modulates the tokens of a lane in every block."""

    rows: torch.Tensor
    """[R, 6, D], one for each timestep."""
    runs: Runs
    """All tokens that are computed here, in order."""

    @cached_property
    def row_of_token(self) -> torch.Tensor:
        """[S] int64, beside the rows."""
        rows, counts = zip(*((run.row, run.end - run.start) for run in self.runs), strict=True)
        device = self.rows.device
        tokens = self.runs[-1].end  # a device that has to be asked for the sum of the counts would hold the host up
        counted = torch.tensor(counts, device=device)
        return torch.tensor(rows, device=device).repeat_interleave(counted, output_size=tokens)


def frame_timesteps(freedom: Sequence[float], timestep: float) -> tuple[float, ...]:
    """The timestep of each frame: the step's by how free the frame is, in float32, as ComfyUI tells the model."""
    values: list[float] = (torch.tensor(freedom, dtype=torch.float32) * timestep).tolist()
    return tuple(values)


def token_runs(row_of_frame: Sequence[int], tokens_per_frame: int, own: OwnTokens) -> Runs:
    """The runs of those tokens that are computed here, from the row of each frame."""
    rows = torch.tensor(row_of_frame).repeat_interleave(tokens_per_frame)
    values, counts = own(rows[None, :, None]).flatten().unique_consecutive(return_counts=True)
    runs, start = [], 0
    for row, count in zip(values.tolist(), counts.tolist(), strict=True):
        runs.append(Run(start, start + count, row))
        start += count
    return tuple(runs)


def pieces_of(part: slice, runs: Runs) -> Iterator[tuple[slice, slice]]:
    """The pieces of `part` that have one row each: their tokens, and that row as a slice."""
    for run in runs:
        start, end = max(run.start, part.start), min(run.end, part.stop)
        if start < end:
            yield slice(start, end), slice(run.row, run.row + 1)


def rows_and_runs(modulation: torch.Tensor | FrameModulation, tokens: int) -> tuple[torch.Tensor, Runs]:
    """Rows [R, 6, D] and their runs; [1, 6, D] is one row for all of so many tokens."""
    if isinstance(modulation, FrameModulation):
        return modulation.rows, modulation.runs
    return modulation, (Run(0, tokens, 0),)
