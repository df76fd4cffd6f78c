"""Plan of the machines of workers: which ranks are reserved together on one machine. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...schema import Mesh


@dataclass(frozen=True, kw_only=True)
class RankPart:
    """Consecutive ranks that are reserved together."""

    ranks: range
    machine: int | None
    """Machine with room for all of them, by its place in the list of machines; None if no machine has."""


def nested_sizes(mesh: Mesh) -> tuple[int, ...]:
    """Return the numbers of consecutive ranks that should be on one machine, the largest first.

    A worker group, else at least the workers that share tokens, which exchange activations in every block, else those
    of one Ulysses group. Between the two prompts (cfg) only one velocity passes in a step.
    """
    nested = (mesh.cell_size, mesh.ring * mesh.ulysses, mesh.ulysses)
    return tuple(dict.fromkeys(size for size in nested if size > 1 or mesh.cell_size == 1))


def plan_machines(free: Sequence[int], count: int, sizes: Sequence[int]) -> tuple[RankPart, ...]:
    """Return the parts in which `count` workers are reserved; as many as possible have one machine.

    Each size is a level: ranks that do not fit on a machine in parts of that size are tried in those of the next one.
    The parts of one level are consecutive in the result. Those of the last level that do not fit have no machine.

    Args:
        free: free slots of every machine; their sum is at least `count`, or the rest has no machine.
        sizes: see `nested_sizes`; each divides the one before.
    """
    left, parts, waiting = list(free), list[RankPart](), [range(count)]
    # The largest machines first, and each is filled before the next, so that other layouts find workers close together.
    order = sorted(range(len(left)), key=lambda machine: -left[machine])
    for size in sizes:
        units = [ranks[first : first + size] for ranks in waiting for first in range(0, len(ranks), size)]
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
    """Return an order of the ranks in which groups that have a machine in common are next to each other.

    Args:
        machines: machine of each rank, in the order in which they are filled.
        size: number of consecutive ranks of a group; they stay together, and in their order.
    """
    places = {machine: place for place, machine in enumerate(dict.fromkeys(machines))}
    groups = [range(first, min(first + size, len(machines))) for first in range(0, len(machines), size)]

    def key(ranks: range) -> tuple[bool, int, int]:
        used = [places[machines[rank]] for rank in ranks]
        return len(ranks) < size, min(used), max(used)

    return [rank for ranks in sorted(groups, key=key) for rank in ranks]
