"""How the passes of a run are shared with other workers. Alone, every lane is computed here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import torch

from ...wan import ExpertEngine, Lane
from .resume import RunState

Compute: TypeAlias = "Callable[[Sequence[Lane]], list[torch.Tensor]]"
"""Lanes -> the velocity of each."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """Among how many workers the computing of a step is shared out, each of which needs memory for its share only."""

    cfg: int = 1
    """The lanes."""
    ring: int = 1
    ulysses: int = 1
    """The tokens of every lane, in one way and in the other."""


WHOLE_STEP = Share()


class AllReduced(NamedTuple):
    """Sums of all workers that compute a step together, the same to the bit for each of them."""

    own: torch.Tensor
    """[L, 2] of the lanes that are computed here, in their order."""
    every: torch.Tensor
    """[N, 2] of the lanes that are computed anywhere."""


class ParallelForward(Protocol):
    """What a run asks of those who compute it together. Every one of them runs the same steps."""

    @property
    def alone(self) -> bool:
        """Whether nobody else computes, so that a step may be tried again under another policy."""

    @property
    def share(self) -> Share:
        """What of a step is computed here."""

    def attached(self, engine: ExpertEngine) -> AbstractContextManager[object]:
        """While this lasts, the engine's models compute their share; afterwards they are as they were."""

    def forward(self, lanes: Sequence[Lane], compute: Compute) -> list[torch.Tensor]:
        """The velocity of every lane, in their order, of which `compute` gives those that it is called with."""

    def own_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """Of a lane's tokens [1, S, dim], those that are computed here."""

    def agreed(self, sums: torch.Tensor) -> AllReduced:
        """`sums` [L, 2], float64 on the CPU, of the lanes in `compute`, each added up over those who share its tokens.

        Blocks until all have been asked; all ask at the same points.
        """


class LocalForward:
    """No other worker: a run as it always was."""

    alone = True
    share = WHOLE_STEP

    def attached(self, engine: ExpertEngine) -> AbstractContextManager[object]:
        """See `ParallelForward.attached`."""
        return nullcontext()

    def forward(self, lanes: Sequence[Lane], compute: Compute) -> list[torch.Tensor]:
        """See `ParallelForward.forward`."""
        return compute(lanes)

    def own_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """See `ParallelForward.own_tokens`."""
        return tokens

    def agreed(self, sums: torch.Tensor) -> AllReduced:
        """See `ParallelForward.agreed`."""
        return AllReduced(sums, sums)


LOCAL_FORWARD = LocalForward()


@dataclass(frozen=True, kw_only=True, eq=False)
class RunSlice:
    """Which part of a run is computed here: all of it, unless said otherwise."""

    split: ParallelForward = LOCAL_FORWARD
    """How the passes are shared with other workers, which compute the same part of the same request."""
    resume: RunState | None = None
    """Where to go on, from a run of the same request; None: at its beginning."""
    until: int | None = None
    """The step of the whole schedule before which to stop, with the noise that is left then; None: after the last."""


WHOLE_RUN = RunSlice()
