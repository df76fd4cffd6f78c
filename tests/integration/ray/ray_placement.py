"""Reserves workers in a cluster with two machines and 5 and 3 GPUs, which are only numbers.

Usage: `ray_placement.py FOLDER`. The last output line has every rank's machine in each case, as
JSON.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import ray

from wanstream.distributed.plan.machines import nested_sizes
from wanstream.distributed.ray.connection import CONNECTION, gcs_address
from wanstream.distributed.ray.environment import RaySetupError, on_loopback, temporary_environment
from wanstream.distributed.ray.placement import Placement
from wanstream.schema import Mesh

LOOPBACK = "127.0.0.1"
WAIT_S = 60.0


def free_gpus() -> float:
    return float(ray.available_resources().get("GPU", 0))


def wait_for_free(gpus: int) -> float:
    """Wait until so many GPUs are free, as Ray reports late. Return the number."""
    until = time.monotonic() + WAIT_S
    while free_gpus() != gpus and time.monotonic() < until:
        time.sleep(0.05)
    return free_gpus()


def reserve(names: dict[str, str], mesh: Mesh) -> dict[str, Any]:
    """Reserve and release a mesh's workers. Return the letters of their machines."""
    placement = Placement(ray, mesh.size, WAIT_S, sizes=nested_sizes(mesh))
    machines = "".join(names[placement.node_of(rank) or ""] for rank in range(mesh.size))
    shared = [placement.workers_on_machine_of(rank) for rank in (0, mesh.size - 1)]
    placement.close()
    placement.close()
    return {"machines": machines, "shared": shared, "free after it": wait_for_free(8)}


def place(folder: str) -> dict[str, Any]:
    from ray.cluster_utils import Cluster

    given = {"num_cpus": 1, "node_ip_address": LOOPBACK, "object_store_memory": 80 << 20}
    head = {**given, "num_gpus": 5, "temp_dir": folder, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    small = cluster.add_node(num_gpus=3, **given)
    ray.init(address=cluster.address, log_to_driver=False)
    CONNECTION._server = gcs_address(ray)
    letters = {small.node_id: "B"}
    names = {node["NodeID"]: letters.get(node["NodeID"], "A") for node in ray.nodes()}
    meshes = (Mesh(data=2, ulysses=4), Mesh(data=2, ulysses=3), Mesh(data=8))
    found: dict[str, Any] = {str(mesh): reserve(names, mesh) for mesh in meshes}
    # Another user has 4 of 8: a reservation for 6 is refused, and no part of it stays reserved.
    other = ray.util.placement_group([{"GPU": 1}] * 4, strategy="PACK")
    other.wait(WAIT_S)
    wait_for_free(4)
    try:
        Placement(ray, 6, 1.0, sizes=(3,))
    except RaySetupError as err:
        found["refused"] = {"message": str(err), "free after it": wait_for_free(4)}
    ray.shutdown()
    cluster.shutdown()
    return found


if __name__ == "__main__":
    # Ray writes the cluster's address to a folder there, which must exist.
    (Path(sys.argv[1]) / "ray").mkdir()
    settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": sys.argv[1]}
    settings["RAY_prestart_worker_first_driver"] = "0"  # nothing runs here
    with temporary_environment(settings), on_loopback():
        answer = place(sys.argv[1])
    sys.stdout.write(json.dumps(answer) + "\n")
