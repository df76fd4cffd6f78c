"""Ray placement group of the workers: one bundle each, with a GPU or a CPU slot."""

from __future__ import annotations

from typing import Any

from .connection import CONNECTION, CPU_SLOT
from .environment import RaySetupError

CREATED = "CREATED"
"""Ray's state of a placement group whose bundles are all on machines that respond."""


class Placement:
    """Placement of `count` workers, reserved until `close`. The ranks of one machine are consecutive.

    Args:
        on_gpus: True for one GPU per worker; None: if the cluster has GPUs.

    Raises:
        RaySetupError: the cluster has too few GPUs or CPU slots, or they are not free within `timeout_s`.
    """

    def __init__(self, ray: Any, count: int, timeout_s: float, *, on_gpus: bool | None = None) -> None:
        self._ray = ray
        if on_gpus is None:
            on_gpus = ray.cluster_resources().get("GPU", 0) >= 1
        _check_capacity(ray, count, on_gpus=on_gpus)
        self._bundle: dict[str, float] = {"GPU": 1} if on_gpus else {"CPU": CPU_SLOT}
        self._group = ray.util.placement_group([self._bundle] * count, strategy="PACK")
        if not self._group.wait(timeout_s):
            self.close()
            raise RaySetupError(
                f"Ray found no free slots for {count} workers within {timeout_s:g} s: {_format_counts(ray)}. "
                "Close other workers, or other users of this cluster"
            )
        table = ray.util.placement_group_table(self._group)
        nodes: dict[int, str] = table["bundles_to_node_id"]
        firsts = list(dict.fromkeys(nodes[bundle] for bundle in range(count)))
        self._bundles = sorted(range(count), key=lambda bundle: (firsts.index(nodes[bundle]), bundle))
        self._nodes = [nodes[bundle] for bundle in self._bundles]

    def node_of(self, rank: int) -> str | None:
        """Return Ray's id of the machine of that rank; None while Ray searches for another one."""
        table = self._ray.util.placement_group_table(self._group)
        return str(table["bundles_to_node_id"][self._bundles[rank]]) if table["state"] == CREATED else None

    def workers_on_machine_of(self, rank: int) -> int:
        """Return the number of workers on the machine of that rank, including itself."""
        return self._nodes.count(self._nodes[rank])

    def options(self, rank: int) -> dict[str, Any]:
        """Return Ray's options for the actor of that rank."""
        strategies = self._ray.util.scheduling_strategies
        strategy = strategies.PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=self._bundles[rank]
        )
        return {
            "num_cpus": self._bundle.get("CPU", 0),
            "num_gpus": self._bundle.get("GPU", 0),
            "scheduling_strategy": strategy,
        }

    def describe_delay(self) -> str:
        """Describe why a worker does not start, and the remedy."""
        if self.node_of(0) is not None:
            return "see whether its machine is busy"
        return (
            f"its machine is gone from the cluster, and no other one has a free slot ({_format_counts(self._ray)}): "
            "bring it back, or add another"
        )

    def close(self) -> None:
        """Release the placement group, unless Ray is gone."""
        if CONNECTION.is_alive():
            self._ray.util.remove_placement_group(self._group)


def _check_capacity(ray: Any, count: int, *, on_gpus: bool) -> None:
    """Raise RaySetupError immediately if the cluster can never have as many slots, instead of waiting for them."""
    total = ray.cluster_resources()
    gpus, cpus = total.get("GPU", 0), total.get("CPU", 0)
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


def _format_counts(ray: Any) -> str:
    free, total = ray.available_resources(), ray.cluster_resources()
    counts = ", ".join(f"{free.get(name, 0):g} of {total.get(name, 0):g} {name}s" for name in ("GPU", "CPU"))
    return f"{counts} are free"
