"""Ray placement groups of the workers: one for each worker group, with a bundle of a GPU or a CPU slot per worker."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from ...plan import RankPart, order_groups, plan_machines
from .connection import CONNECTION, CPU_SLOT
from .environment import RaySetupError

CREATED = "CREATED"
"""Ray's state of a placement group whose bundles are all on machines that respond."""


class Placement:
    """Placement of `count` workers, reserved until `close`.

    A worker group is on one machine where it fits, and the ranks of its workers on a machine are consecutive. After the
    loss of a machine Ray searches for another one with room for the same part.

    Args:
        sizes: numbers of consecutive ranks that should be on one machine, the largest first; see `nested_sizes`.
        on_gpus: True for one GPU per worker; None: if the cluster has GPUs.

    Raises:
        RaySetupError: the cluster has too few GPUs or CPU slots, or they are not free within `timeout_s`. Nothing is
            reserved then.
    """

    def __init__(
        self, ray: Any, count: int, timeout_s: float, *, sizes: Sequence[int] = (), on_gpus: bool | None = None
    ) -> None:
        self._ray = ray
        if on_gpus is None:
            on_gpus = ray.cluster_resources().get("GPU", 0) >= 1
        _check_capacity(ray, count, on_gpus=on_gpus)
        self._bundle: dict[str, float] = {"GPU": 1} if on_gpus else {"CPU": CPU_SLOT}
        self._groups: list[Any] = []
        self._slots: dict[int, _Slot] = {}
        """Place of each rank."""
        sizes, free = sizes or (count,), _format_counts(ray)
        machines = _slots_of_machines(ray, count, on_gpus=on_gpus)
        until = time.monotonic() + timeout_s
        try:
            # Level by level, so that a part which may be anywhere does not take the room of one that needs a machine.
            parts = plan_machines(list(machines.values()), count, sizes)
            for _, level in groupby(parts, key=lambda part: (part.machine is None, len(part.ranks))):
                self._reserve(list(level), list(machines), until)
        except TimeoutError as err:
            self.close()
            raise RaySetupError(
                f"Ray found no free slots for {count} workers within {timeout_s:g} s: at first {free}. "
                "Close other workers, or other users of this cluster"
            ) from err
        except BaseException:
            self.close()
            raise
        nodes = [self._slots[rank].node for rank in range(count)]
        self._slots = {rank: self._slots[planned] for rank, planned in enumerate(order_groups(nodes, sizes[0]))}

    def _reserve(self, parts: Sequence[RankPart], machines: Sequence[str], until: float) -> None:
        """Reserve these parts at the same time. Raises TimeoutError if they are not free at `until`."""
        strategies = [
            {"strategy": "PACK"}
            if part.machine is None
            # Soft: after the loss of that machine, Ray takes another one.
            else {"strategy": "STRICT_PACK", "_soft_target_node_id": machines[part.machine]}
            for part in parts
        ]
        created = [
            self._ray.util.placement_group([self._bundle] * len(part.ranks), **strategy)
            for part, strategy in zip(parts, strategies, strict=True)
        ]
        self._groups += created
        for part, group in zip(parts, created, strict=True):
            if not group.wait(max(0.0, until - time.monotonic())):
                raise TimeoutError
            nodes = self._ray.util.placement_group_table(group)["bundles_to_node_id"]
            order = list(dict.fromkeys([*(slot.node for slot in self._slots.values()), *nodes.values()]))
            bundles = sorted(nodes, key=lambda bundle: (order.index(nodes[bundle]), bundle))
            for rank, bundle in zip(part.ranks, bundles, strict=True):
                self._slots[rank] = _Slot(group, bundle, nodes[bundle])

    def node_of(self, rank: int) -> str | None:
        """Return Ray's id of the machine of that rank; None while Ray searches for another one."""
        slot = self._slots[rank]
        table = self._ray.util.placement_group_table(slot.group)
        return str(table["bundles_to_node_id"][slot.bundle]) if table["state"] == CREATED else None

    def workers_on_machine_of(self, rank: int) -> int:
        """Return the number of workers on the machine of that rank, including itself."""
        return sum(slot.node == self._slots[rank].node for slot in self._slots.values())

    def options(self, rank: int) -> dict[str, Any]:
        """Return Ray's options for the actor of that rank."""
        strategies, slot = self._ray.util.scheduling_strategies, self._slots[rank]
        strategy = strategies.PlacementGroupSchedulingStrategy(
            placement_group=slot.group, placement_group_bundle_index=slot.bundle
        )
        return {
            "num_cpus": self._bundle.get("CPU", 0),
            "num_gpus": self._bundle.get("GPU", 0),
            "scheduling_strategy": strategy,
        }

    def describe_delay(self, rank: int) -> str:
        """Describe why the worker of that rank does not start, and the remedy."""
        if self.node_of(rank) is not None:
            return "see whether its machine is busy"
        part = sum(slot.group is self._slots[rank].group for slot in self._slots.values())
        room = "a free slot" if part == 1 else f"free slots for the {part} workers that were there together"
        return (
            f"its machine is gone from the cluster, and no other one has {room} ({_format_counts(self._ray)}): "
            "bring it back, or add another"
        )

    def close(self) -> None:
        """Release the placement groups, unless Ray is gone. Closing twice is allowed."""
        groups, self._groups = self._groups, []
        if CONNECTION.is_alive():
            for group in groups:
                self._ray.util.remove_placement_group(group)


class _Slot(NamedTuple):
    """Place of one rank."""

    group: Any
    """Placement group."""
    bundle: int
    node: str
    """Ray's id of the machine at the start."""


def _slots_of_machines(ray: Any, count: int, *, on_gpus: bool) -> dict[str, int]:
    """Return the free slots of every machine by its id; all slots if the free ones are too few, and Ray has to wait."""

    def slots(resources: Mapping[str, float]) -> int:
        return int(resources.get("GPU", 0)) if on_gpus else int(resources.get("CPU", 0) / CPU_SLOT)

    # An API for developers of Ray; the public one has the free resources of the whole cluster only.
    free = {name: slots(each) for name, each in ray._private.state.available_resources_per_node().items()}
    if sum(free.values()) >= count:
        return free
    return {node["NodeID"]: slots(node["Resources"]) for node in ray.nodes() if node["Alive"]}


def _check_capacity(ray: Any, count: int, *, on_gpus: bool) -> None:
    """Raise RaySetupError immediately if the cluster can never have as many slots, instead of waiting for them."""
    total = ray.cluster_resources()
    gpus, cpus = total.get("GPU", 0), total.get("CPU", 0)
    if on_gpus and count > gpus:
        raise RaySetupError(
            f"{count} workers, but Ray has {gpus:g} GPU{'s' * (gpus != 1)}, and each takes one: lower their number "
            "(count, or --workers), or add machines to the cluster. If there are more, CUDA_VISIBLE_DEVICES hides them"
        )
    slots = int(cpus / CPU_SLOT)
    if not on_gpus and count > slots:
        raise RaySetupError(
            f"{count} workers on CPUs, but Ray has slots for {slots} ({cpus:g} CPUs, {CPU_SLOT:g} for each): lower "
            "their number (count, or --workers), or start Ray with more (ray start --num-cpus)"
        )


def _format_counts(ray: Any) -> str:
    free, total = ray.available_resources(), ray.cluster_resources()
    counts = ", ".join(f"{free.get(name, 0):g} of {total.get(name, 0):g} {name}s" for name in ("GPU", "CPU"))
    return f"{counts} were free"
