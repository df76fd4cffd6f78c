"""Machine plan: the ranks to reserve together on one machine.

Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...schema import Mesh


@dataclass(frozen=True, kw_only=True)
class RankPart:
    """Consecutive ranks to reserve together."""

    ranks: range
    machine: int | None
    """Machine with room for all of them, by place in the list; None without one."""


def nested_sizes(mesh: Mesh) -> tuple[int, ...]:
    """Return how many consecutive ranks should be on one machine, largest number first.

    The largest is a whole worker group. The next is all workers that share tokens, because they
    exchange activations in every block. The last is one Ulysses group. Between the two prompts
    (cfg) only one velocity passes per step.
    """
    nested = (mesh.cell_size, mesh.ring * mesh.ulysses, mesh.ulysses)
    # Size 1 is a level only if the whole worker group has size 1.
    return tuple(dict.fromkeys(size for size in nested if size > 1 or mesh.cell_size == 1))


def plan_machines(free: Sequence[int], count: int, sizes: Sequence[int]) -> tuple[RankPart, ...]:
    """Return the parts for reserving `count` workers; as many as possible have one machine.

    Each size is a level. Ranks without room on a machine in parts of this size are tried in the
    next smaller parts. In the result, parts from one level are consecutive. Ranks without room at
    any level have no machine.

    Args:
        free: free slots on every machine. If their sum is less than `count`, the rest has no
            machine.
        sizes: see `nested_sizes`; each divides the one before.
    """
    left = list(free)
    parts = list[RankPart]()
    waiting = [range(count)]
    # Fill the largest machine first, and each before the next: other layouts then find workers
    # close together.
    order = sorted(range(len(left)), key=lambda machine: -left[machine])
    for size in sizes:
        units = [
            ranks[first : first + size] for ranks in waiting for first in range(0, len(ranks), size)
        ]
        waiting = []
        for ranks in units:
            machine = next((each for each in order if left[each] >= len(ranks)), None)
            if machine is None:
                waiting.append(ranks)
            else:
                left[machine] -= len(ranks)
                parts.append(RankPart(ranks=ranks, machine=machine))
    return (*parts, *(RankPart(ranks=ranks, machine=None) for ranks in waiting))


def order_groups(machines: Sequence[str], size: int) -> list[int]:
    """Return a rank order with groups on a common machine next to each other.

    Args:
        machines: each rank's machine, in the order in which they are filled.
        size: number of consecutive ranks in a group. They stay together, and in order.
    """
    places = {machine: place for place, machine in enumerate(dict.fromkeys(machines))}
    groups = [
        range(first, min(first + size, len(machines))) for first in range(0, len(machines), size)
    ]

    def key(ranks: range) -> tuple[bool, int, int]:
        used = [places[machines[rank]] for rank in ranks]
        return len(ranks) < size, min(used), max(used)

    return [rank for ranks in sorted(groups, key=key) for rank in ranks]
