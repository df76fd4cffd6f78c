"""Where the workers of a cell keep their weights: what a meeting says becomes what their experts are told."""

from __future__ import annotations

from ..offload.gather import Sharded
from ..plan.workers_ref import ON_DEVICE, WHOLE_WEIGHTS
from .group_gather import GroupGather
from .groups import Groups


def sharded_of(groups: Groups) -> Sharded | None:
    """The shards that the workers of this cell keep, as their meeting says; None for whole weights.

    Ask once in a meeting: another answer is another meeting to the experts.
    """
    home = groups.meeting.weights
    assert home != "auto", "the driver decides before a meeting"
    if home == WHOLE_WEIGHTS or groups.size == 1:
        return None
    return Sharded(gather=GroupGather(groups), on_device=home == ON_DEVICE)
