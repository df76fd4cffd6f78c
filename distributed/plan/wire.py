"""Traffic of a worker group between machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from ...schema import Mesh, largest_share
from ...schema.text import format_seconds, format_size
from ...shapes import PATCH, RunShape


@dataclass(frozen=True, kw_only=True)
class WireTraffic:
    """Traffic of one worker group between machines, in a step with the most lanes."""

    bytes_by_axis: Mapping[str, int]
    """Bytes sent or received, by axis, for the machine and direction with the most."""
    exchanges: int
    """Number of waits for workers on another machine, including the stop vote."""

    @property
    def bytes(self) -> int:
        return sum(self.bytes_by_axis.values())


def wire_traffic(layout: Mesh, machines: Sequence[object], run: RunShape) -> WireTraffic | None:
    """Return a worker group's traffic between machines; None if all workers are on one.

    In every block and lane, each worker sends every other worker in the Ulysses group a share of q,
    k, v and the attention result, and every other worker in the ring all keys and values. Workers
    for the two prompts (cfg) exchange one velocity per lane and step. Weight shards are not
    counted.

    Args:
        layout: mesh for this group alone.
        machines: each worker's machine, by group rank.
        run: the lanes in the group, with all tokens.
    """
    assert len(machines) == layout.size == layout.cell_size, (
        f"{len(machines)} machines for {layout}"
    )
    if len(set(machines)) == 1:
        return None
    lanes = max(
        (largest_share(run.lane_tokens(expert), layout.cfg) for expert in run.experts_of_steps),
        key=sum,
    )
    visits = len(lanes) * run.expert.blocks
    tokens = sum(lanes) * run.expert.blocks / (layout.ring * layout.ulysses)
    # Bytes of one worker's tokens, summed over lanes and blocks.
    hidden = tokens * run.expert.width * run.value_bytes
    # A velocity is not patched: a token stands for prod(PATCH) latent values per channel.
    velocity = run.video_tokens * prod(PATCH) * run.expert.out_channels * run.value_bytes
    sent = {
        "ulysses": 4 * hidden / layout.ulysses,
        "ring": 2 * hidden,
        "cfg": len(lanes) * velocity,
    }
    waits = {"ulysses": 4 * visits, "ring": visits, "cfg": 1}
    totals: dict[tuple[object, str], Counter[str]] = {}
    for axis, rank in product(sent, range(layout.size)):
        for other in layout.group(axis, rank):
            if machines[other] != machines[rank]:
                for end in ((machines[rank], "sends"), (machines[other], "receives")):
                    totals.setdefault(end, Counter())[axis] += round(sent[axis])
    most = max(totals.values(), key=Counter.total, default=Counter())
    crossed = {axis for total in totals.values() for axis in total}
    # 1 for the vote on a stop, in which all workers take part.
    return WireTraffic(bytes_by_axis=dict(most), exchanges=1 + sum(waits[axis] for axis in crossed))


ASSUMED_LINK = 125_000_000
"""Bytes per second for a network card without a reported speed: 1 Gb/s."""


def describe_wire(traffic: WireTraffic, link_bytes_per_s: int) -> str:
    """Describe the cost of a group on several machines.

    `link_bytes_per_s` is 0 for a card without a reported speed.
    """
    rate = link_bytes_per_s or ASSUMED_LINK
    source = "the link speed of the network card"
    if not link_bytes_per_s:
        source = "assumed: the network card reports none"
    axes = ", ".join(
        f"{axis} {format_size(nbytes)}" for axis, nbytes in traffic.bytes_by_axis.items()
    )
    remedy = "; only data or cfg between the machines costs less"
    if traffic.bytes_by_axis.keys() <= {"cfg"}:
        remedy = ""
    return (
        f"each step moves {format_size(traffic.bytes)} between the machines ({axes}) in "
        f"{traffic.exchanges} exchanges, at least {format_seconds(traffic.bytes / rate)} s at "
        f"{8 * rate / 1e9:g} Gb/s ({source}){remedy}"
    )
