"""Ray placement groups for the workers, one per worker group.

A placement group has a bundle with a GPU or a CPU slot per worker.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from ..plan.machines import RankPart, order_groups, plan_machines
from .connection import CONNECTION, CPU_SLOT
from .environment import RaySetupError

CREATED = "CREATED"
"""Ray's state for a placement group when all machines in it respond."""


class Placement:
    """Placement of `count` workers, reserved until `close`.

    A worker group is on one machine where it fits, and workers on one machine have consecutive
    ranks. After the loss of a machine Ray searches for another one with room for the same part.

    Args:
        sizes: how many consecutive ranks should be on one machine, largest number first; see
            `nested_sizes`.
        on_gpus: True for one GPU per worker; None: if the cluster has GPUs.

    Raises:
        RaySetupError: the cluster has too few GPUs or CPU slots, or they are not free within
            `timeout_s`. Nothing is reserved then.
    """

    def __init__(
        self,
        ray: Any,
        count: int,
        timeout_s: float,
        *,
        sizes: Sequence[int],
        on_gpus: bool | None = None,
    ) -> None:
        self._ray = ray
        if on_gpus is None:
            on_gpus = ray.cluster_resources().get("GPU", 0) >= 1
        _check_capacity(ray, count, on_gpus=on_gpus)
        self._bundle: dict[str, float] = {"CPU": CPU_SLOT}
        if on_gpus:
            self._bundle = {"GPU": 1}
        self._groups: list[Any] = []
        self._slots: dict[int, _Slot] = {}
        """Place of each rank."""
        free = _format_counts(ray)
        machines = _slots_of_machines(ray, count, on_gpus=on_gpus)
        until = time.monotonic() + timeout_s
        try:
            # Level by level: a part without a machine could take the room for one with a machine.
            parts = plan_machines(list(machines.values()), count, sizes)
            for _, level in groupby(
                parts, key=lambda part: (part.machine is None, len(part.ranks))
            ):
                self._reserve(list(level), list(machines), until)
        except TimeoutError as err:
            self.close()
            raise RaySetupError(
                f"Ray found no free slots for {count} workers within {timeout_s:g} s: at first "
                f"{free}. Close other workers, or other users of this cluster"
            ) from err
        except BaseException:
            # Also after Ctrl-C: the cluster would keep the slots reserved.
            self.close()
            raise
        nodes = [self._slots[rank].node for rank in range(count)]
        self._slots = {
            rank: self._slots[planned] for rank, planned in enumerate(order_groups(nodes, sizes[0]))
        }

    def _reserve(self, parts: Sequence[RankPart], machines: Sequence[str], until: float) -> None:
        """Reserve these parts at the same time.

        Raises TimeoutError if they are not free at `until`.
        """
        created = []
        for part in parts:
            strategy = {"strategy": "PACK"}
            if part.machine is not None:
                # Soft: after the loss of this machine, Ray takes another one.
                strategy = {
                    "strategy": "STRICT_PACK",
                    "_soft_target_node_id": machines[part.machine],
                }
            bundles = [self._bundle] * len(part.ranks)
            created.append(self._ray.util.placement_group(bundles, **strategy))
        # Before the waits, so that `close` also releases groups that never became ready.
        self._groups += created
        for part, group in zip(parts, created, strict=True):
            if not group.wait(max(0.0, until - time.monotonic())):
                raise TimeoutError
            nodes = self._ray.util.placement_group_table(group)["bundles_to_node_id"]
            known = [slot.node for slot in self._slots.values()]
            order = list(dict.fromkeys([*known, *nodes.values()]))
            # Consecutive ranks on one machine, in the order of the machines so far.
            places = sorted(nodes, key=lambda bundle: (order.index(nodes[bundle]), bundle))
            for rank, bundle in zip(part.ranks, places, strict=True):
                self._slots[rank] = _Slot(group, bundle, nodes[bundle])

    def node_of(self, rank: int) -> str | None:
        """Return Ray's machine id for this rank; None while Ray searches for another machine."""
        slot = self._slots[rank]
        table = self._ray.util.placement_group_table(slot.group)
        if table["state"] != CREATED:
            return None
        return str(table["bundles_to_node_id"][slot.bundle])

    def workers_on_machine_of(self, rank: int) -> int:
        """Return the number of workers on this rank's machine, including itself."""
        return sum(slot.node == self._slots[rank].node for slot in self._slots.values())

    def options(self, rank: int) -> dict[str, Any]:
        """Return Ray's options for this rank's actor."""
        strategies = self._ray.util.scheduling_strategies
        slot = self._slots[rank]
        strategy = strategies.PlacementGroupSchedulingStrategy(
            placement_group=slot.group, placement_group_bundle_index=slot.bundle
        )
        return {
            "num_cpus": self._bundle.get("CPU", 0),
            "num_gpus": self._bundle.get("GPU", 0),
            "scheduling_strategy": strategy,
        }

    def describe_delay(self, rank: int) -> str:
        """Describe why the worker with this rank does not start, and the remedy."""
        if self.node_of(rank) is not None:
            return "see whether its machine is busy"
        part = sum(slot.group is self._slots[rank].group for slot in self._slots.values())
        room = "a free slot"
        if part > 1:
            room = f"free slots for the {part} workers that were there together"
        return (
            f"its machine is gone from the cluster, and no other one has {room} "
            f"({_format_counts(self._ray)}): bring it back, or add another"
        )

    def close(self) -> None:
        """Release the placement groups, unless Ray is gone. Closing twice is allowed."""
        groups = self._groups
        self._groups = []
        if CONNECTION.is_alive():
            for group in groups:
                self._ray.util.remove_placement_group(group)


class _Slot(NamedTuple):
    """Place of one rank."""

    group: Any
    """Placement group."""
    bundle: int
    node: str
    """Ray's machine id at the start."""


def _slots_of_machines(ray: Any, count: int, *, on_gpus: bool) -> dict[str, int]:
    """Return the free slots by machine id.

    All slots if the free ones are too few, and Ray has to wait.
    """

    def slots(resources: Mapping[str, float]) -> int:
        if on_gpus:
            return int(resources.get("GPU", 0))
        return int(resources.get("CPU", 0) / CPU_SLOT)

    # Ray's API for Ray developers. The public one only has the free resources in the whole cluster.
    available = ray._private.state.available_resources_per_node()
    free = {name: slots(each) for name, each in available.items()}
    if sum(free.values()) >= count:
        return free
    return {node["NodeID"]: slots(node["Resources"]) for node in ray.nodes() if node["Alive"]}


def _check_capacity(ray: Any, count: int, *, on_gpus: bool) -> None:
    """Raise RaySetupError at once if the cluster can never have the slots."""
    total = ray.cluster_resources()
    gpus = total.get("GPU", 0)
    cpus = total.get("CPU", 0)
    if on_gpus and count > gpus:
        raise RaySetupError(
            f"{count} workers, but Ray has {gpus:g} GPU{'s' * (gpus != 1)}, and each takes one: "
            "lower their number (count, or --workers), or add machines to the cluster. If there "
            "are more, CUDA_VISIBLE_DEVICES hides them"
        )
    slots = int(cpus / CPU_SLOT)
    if not on_gpus and count > slots:
        raise RaySetupError(
            f"{count} workers on CPUs, but Ray has slots for {slots} ({cpus:g} CPUs, {CPU_SLOT:g} "
            "for each): lower their number (count, or --workers), or start Ray with more (ray "
            "start --num-cpus)"
        )


def _format_counts(ray: Any) -> str:
    free = ray.available_resources()
    total = ray.cluster_resources()
    counts = ", ".join(
        f"{free.get(name, 0):g} of {total.get(name, 0):g} {name}s" for name in ("GPU", "CPU")
    )
    return f"{counts} were free"
