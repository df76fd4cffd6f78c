"""How a cell of workers shares the passes of a run: lanes between the cfg sides, tokens inside each of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from ..sampling.split import Agreed, Compute, Share
from ..sampling.working_bytes import tokens_of
from ..wan import ExpertEngine, Lane
from .context_parallel import check_tokens, shared_tokens
from .split_cfg import forward_shared
from .votes import told_by_all

if TYPE_CHECKING:
    from .groups import Groups


class CellSplit:
    """The share of one worker of a cell of two or more; see `Split`."""

    alone = False

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self.share = Share(cfg=groups.cell.cfg, ring=groups.cell.ring, ulysses=groups.cell.ulysses)

    def attached(self, engine: ExpertEngine) -> AbstractContextManager[object]:
        """See `Split.attached`.

        Raises MeshError where the mesh does not fit the experts or this device.
        """
        cell = self._groups.cell
        return nullcontext() if cell.ring * cell.ulysses == 1 else shared_tokens(self._groups, engine)

    def forward(self, lanes: Sequence[Lane], compute: Compute) -> list[torch.Tensor]:
        """See `Split.forward`.

        Raises:
            MeshError: the tokens of a lane cannot be shared out evenly.
            HungError: another worker did not come within the meeting's timeout.
            PeerLostError: another worker is gone.
        """
        for lane in lanes:
            check_tokens(tokens_of(lane.latents.shape), self._groups)
        with self._groups.watched("computed a step"):
            if self._groups.cell.cfg == 1:
                return compute(lanes)
            return forward_shared(self._groups, lanes, compute)

    def own_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """See `Split.own_tokens`: as diffusers' context parallelism cuts them in front of the first block."""
        shares = self._tokens_shared_by
        if shares == 1:
            return tokens
        return tokens.chunk(shares, dim=1)[self._groups.place % shares]

    def agreed(self, sums: torch.Tensor) -> Agreed:
        """See `Split.agreed`.

        Raises:
            HungError: not all came within the meeting's timeout.
            PeerLostError: one of them is gone.
        """
        told, shares = told_by_all(self._groups, sums), self._tokens_shared_by
        # Added up in one order, so that all come to the same.
        sides = [torch.stack(told[first : first + shares]).sum(dim=0) for first in range(0, len(told), shares)]
        return Agreed(sides[self._groups.place // shares], torch.cat(sides))

    @property
    def _tokens_shared_by(self) -> int:
        """How many workers share the tokens of a lane: neighbours in the cell."""
        return self._groups.cell.ring * self._groups.cell.ulysses
