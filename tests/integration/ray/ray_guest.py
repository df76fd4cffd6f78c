"""A process that starts workers in the cluster at ADDRESS twice.

Usage: `ray_guest.py ADDRESS TOKEN_FILE`. Prints findings as JSON.
"""

from __future__ import annotations

import json
import os
import sys

from wanstream.distributed.ray import environment
from wanstream.distributed.ray.pool import RayPool
from wanstream.schema.refs import WorkersRef

address, token_file = sys.argv[1:]


def refusal(ref: WorkersRef) -> str:
    try:
        RayPool(ref).close()
    except environment.RaySetupError as err:
        return str(err)
    return ""


def main() -> dict[str, object]:
    cluster = WorkersRef(count=1, threads=1, address=address, token_file=token_file)
    found: dict[str, object] = {}
    with RayPool(cluster):
        found["too many"] = refusal(WorkersRef(count=3, address=address))
        found["other Ray"] = refusal(WorkersRef(count=1))
    ray = environment.import_ray()
    found["left"] = not ray.is_initialized()
    with environment.on_loopback(), environment.token_of_cluster(token_file):
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    found["foreign"] = refusal(WorkersRef(count=1))
    with RayPool(cluster) as pool:
        found["pids"] = [worker.call("facts").result(60).pid for worker in pool.workers]
    found["kept"] = ray.is_initialized()
    found["own pid"] = os.getpid()
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main()) + "\n")
