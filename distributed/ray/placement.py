"""Where Ray puts the workers: one bundle each, a GPU or a slot of a CPU."""

from __future__ import annotations

from collections import Counter
from typing import Any

from .connection import CONNECTION, CPU_SLOT
from .errors import RaySetupError

CREATED = "CREATED"
"""Ray's word for places of which each is on a machine that answers."""


class Placement:
    """Places for `count` workers, held until `close`; ranks of one machine follow each other.

    Args:
        on_gpus: whether each takes a GPU; None: where Ray knows any.

    Raises RaySetupError if there are not as many, at once or within `timeout_s`.
    """

    def __init__(self, ray: Any, count: int, timeout_s: float, *, on_gpus: bool | None = None) -> None:
        self._ray = ray
        self.on_gpus = ray.cluster_resources().get("GPU", 0) >= 1 if on_gpus is None else on_gpus
        _check_room(ray, count, on_gpus=self.on_gpus)
        self._group = ray.util.placement_group([self._bundle] * count, strategy="PACK")
        if not self._group.wait(timeout_s):
            self.close()
            raise RaySetupError(f"Ray found no places for {count} workers within {timeout_s:g} s: {_free_words(ray)}")
        table = ray.util.placement_group_table(self._group)
        nodes: dict[int, str] = table["bundles_to_node_id"]
        firsts = list(dict.fromkeys(nodes[bundle] for bundle in range(count)))
        self._bundles = sorted(range(count), key=lambda bundle: (firsts.index(nodes[bundle]), bundle))
        self._nodes = [nodes[bundle] for bundle in self._bundles]

    def node_of(self, rank: int) -> str | None:
        """The machine that has that place now, by Ray's name for it; None while Ray looks for another one."""
        table = self._ray.util.placement_group_table(self._group)
        return str(table["bundles_to_node_id"][self._bundles[rank]]) if table["state"] == CREATED else None

    def workers_beside(self, rank: int) -> int:
        """How many of the workers the machine of that one has, itself among them."""
        return Counter(self._nodes)[self._nodes[rank]]

    def options(self, rank: int) -> dict[str, Any]:
        """Options of an actor that takes that place."""
        strategies = self._ray.util.scheduling_strategies
        strategy = strategies.PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=self._bundles[rank]
        )
        return {
            "num_cpus": self._bundle.get("CPU", 0),
            "num_gpus": self._bundle.get("GPU", 0),
            "scheduling_strategy": strategy,
        }

    def late_words(self) -> str:
        """What keeps a worker from starting, and what to do about it."""
        if self.node_of(0) is not None:
            return "see whether its machine is busy"
        return (
            f"its machine is gone from the cluster, and no other one has a place for it ({_counts(self._ray)}): bring "
            "it back, or add another"
        )

    def close(self) -> None:
        """Give the places back; with a Ray that is gone they are gone."""
        if CONNECTION.is_there():
            self._ray.util.remove_placement_group(self._group)

    @property
    def _bundle(self) -> dict[str, float]:
        return {"GPU": 1} if self.on_gpus else {"CPU": CPU_SLOT}


def _check_room(ray: Any, count: int, *, on_gpus: bool) -> None:
    """Refuse at once what can never be, instead of waiting for it."""
    every = ray.cluster_resources()
    gpus, cpus = every.get("GPU", 0), every.get("CPU", 0)
    if on_gpus and count > gpus:
        raise RaySetupError(
            f"{count} workers, but Ray has {gpus:g} GPU{'s' * (gpus != 1)}, and each takes one: lower count, or add "
            "machines to the cluster. If there are more, CUDA_VISIBLE_DEVICES hides them"
        )
    slots = int(cpus / CPU_SLOT)
    if not on_gpus and count > slots:
        raise RaySetupError(
            f"{count} workers on CPUs, but Ray has slots for {slots} ({cpus:g} CPUs, {CPU_SLOT:g} for each): lower "
            "count, or start Ray with more (ray start --num-cpus)"
        )


def _free_words(ray: Any) -> str:
    return f"{_counts(ray)}. Close other workers, or end what else uses this cluster"


def _counts(ray: Any) -> str:
    free, every = ray.available_resources(), ray.cluster_resources()
    counts = ", ".join(f"{free.get(name, 0):g} of {every.get(name, 0):g} {name}s" for name in ("GPU", "CPU"))
    return f"{counts} are free"
