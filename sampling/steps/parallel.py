"""Run parts computed here: resumption in the middle, and passes shared with other workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...schema import Mesh
from ...wan import Lane

if TYPE_CHECKING:
    from diffusers import WanTransformer3DModel


@dataclass(frozen=True, kw_only=True, eq=False)
class RunState:
    """State of a run before step `next_step`, to pass between processes.

    It contains tensors on the CPU, numbers and lists.
    """

    next_step: int
    """0-based in the whole schedule. Equal to the number of steps after the last one."""
    latents: torch.Tensor
    """[B, 16, T, h, w] float32, normalised, at that step's noise level."""
    history: Mapping[str, Any]
    """Solver history (`Solver.history`)."""


WHOLE_STEP = Mesh()
"""Layout of a step without other workers."""


class AllReduced(NamedTuple):
    """Sums over the workers that compute a step together, bit-equal on all of them."""

    own: torch.Tensor
    """[L, 2] for this worker's lanes, in order."""
    every: torch.Tensor
    """[N, 2] for all lanes."""


class ParallelForward:
    """Forward pass of a step that several workers compute together. All of them run the same steps.

    This base class is for a step without other workers.
    """

    alone = True
    """True without other workers, so that a step may be repeated under another policy."""
    share = WHOLE_STEP
    """Layout of the workers that share a step. Each needs working memory for its share only."""

    def attached(self, models: Iterable[WanTransformer3DModel]) -> AbstractContextManager[object]:
        """Attach this worker's share to the experts' models until the end of the context."""
        return nullcontext()

    def computing(self, lanes: Sequence[Lane]) -> AbstractContextManager[Sequence[Lane]]:
        """Return a context in which the workers compute `lanes` and gather the velocities.

        It gives this worker's lanes.
        """
        return nullcontext(lanes)

    def gather(self, velocities: list[torch.Tensor], lanes: int) -> list[torch.Tensor]:
        """Return the velocities for all `lanes`, in order, from this worker's velocities."""
        return velocities

    def any_stops(self, stops: bool, block: int) -> bool:
        """Return True, on all workers, if a worker in the group stops before `block`.

        All workers call it before every block. A group may pass a stop on only before the first
        block in a step.

        Args:
            stops: True if this worker was stopped.
        """
        return stops

    def local_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return this worker's part of a lane's tokens [1, S, dim]."""
        return tokens

    def all_reduce_sums(self, sums: torch.Tensor) -> AllReduced:
        """Add `sums` up over the workers that share each lane's tokens.

        Blocks until every worker has called it. All workers do so at the same points.

        Args:
            sums: [L, 2] float64 on the CPU, for this worker's lanes.
        """
        return AllReduced(sums, sums)


LOCAL_FORWARD = ParallelForward()


@dataclass(frozen=True, kw_only=True, eq=False)
class RunSlice:
    """Part of a run to compute in this process, by default all of it."""

    split: ParallelForward = LOCAL_FORWARD
    """Forward pass shared with the workers on the same part of the same request."""
    resume: RunState | None = None
    """State to continue from, from a run of the same request. None: the beginning."""
    until: int | None = None
    """Step of the whole schedule before which to stop, leaving the noise in. None: after the last
    step."""


WHOLE_RUN = RunSlice()
