"""Parts of a run computed here: resumption in the middle, and forward passes shared with other workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from ...wan import ExpertEngine, Lane


@dataclass(frozen=True, kw_only=True, eq=False)
class RunState:
    """State of a run before step `next_step`: tensors on the CPU, numbers and lists, which travel between processes."""

    next_step: int
    """0-based in the whole schedule; equal to the number of steps after the last one."""
    latents: torch.Tensor
    """[B, 16, T, h, w] float32, normalised, at that step's noise level."""
    history: Mapping[str, Any]
    """History of the solver (`Solver.history`)."""


Compute: TypeAlias = "Callable[[Sequence[Lane]], list[torch.Tensor]]"
"""Maps lanes to the velocity of each."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """Number of workers that share a step; each of them needs working memory for its share only."""

    cfg: int = 1
    """Workers that share the lanes."""
    ring: int = 1
    """Workers that share the tokens of a lane by ring attention."""
    ulysses: int = 1
    """Workers that share the tokens of a lane by Ulysses attention."""


WHOLE_STEP = Share()


class AllReduced(NamedTuple):
    """Sums over the workers that compute a step together, bit-equal on all of them."""

    own: torch.Tensor
    """[L, 2] for the lanes that this worker computes, in their order."""
    every: torch.Tensor
    """[N, 2] for all lanes."""


class ParallelForward:
    """Forward pass of a step that several workers compute together. All of them run the same steps.

    This base class is for a step without other workers.
    """

    alone = True
    """True if there are no other workers, so that a step may be repeated under another policy."""
    share = WHOLE_STEP
    """Share of a step that this worker computes."""

    def attached(self, engine: ExpertEngine) -> AbstractContextManager[object]:
        """Attach this worker's share to the engine's models for the duration of the context."""
        return nullcontext()

    def forward(self, lanes: Sequence[Lane], compute: Compute) -> list[torch.Tensor]:
        """Return the velocity of every lane, in their order; `compute` is called with this worker's lanes."""
        return compute(lanes)

    def any_stops(self, stops: bool, block: int) -> bool:
        """Return True if a worker of the group stops before `block`; the same on all of them.

        All workers call it before every block. A group may pass a stop on before the first block of a step only.

        Args:
            stops: True if this worker was stopped.
        """
        return stops

    def local_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return this worker's part of a lane's tokens [1, S, dim]."""
        return tokens

    def all_reduce_sums(self, sums: torch.Tensor) -> AllReduced:
        """Add `sums` up over the workers that share each lane's tokens.

        Blocks until every worker has called it, which all do at the same points.

        Args:
            sums: [L, 2] float64 on the CPU, for the lanes that this worker computes.
        """
        return AllReduced(sums, sums)


LOCAL_FORWARD = ParallelForward()


@dataclass(frozen=True, kw_only=True, eq=False)
class RunSlice:
    """Part of a run that this process computes; by default all of it."""

    split: ParallelForward = LOCAL_FORWARD
    """Forward pass shared with the workers that compute the same part of the same request."""
    resume: RunState | None = None
    """State to continue from, of a run of the same request; None: the beginning."""
    until: int | None = None
    """Step of the whole schedule before which to stop, leaving its noise in; None: after the last step."""


WHOLE_RUN = RunSlice()
