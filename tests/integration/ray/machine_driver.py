"""Drives a cluster's workers by commands on stdin: `machine_driver.py MODELS ADDRESS TOKEN_FILE`.

It runs on one machine in the cluster. An input line has the arguments of `run` as JSON. The output
has the places of the workers, and for each input progress lines and `{"answer": ...}`, with an
"error" if that is one for a user.
"""

import json
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from wanstream.distributed import Driver, RayPool
from wanstream.sampling import DenoiseRequest, denoise
from wanstream.schema import Mesh, OffloadPolicy
from wanstream.schema.refs import ExpertsRef, WorkersRef, path_maps
from wanstream.tests.support.rounding import distance
from wanstream.tests.support.sampling.runs import normal
from wanstream.wan.experts.open import ExpertsRegistry

models = Path(sys.argv[1])
experts = ExpertsRef(high_noise=models / "high", low_noise=models / "low", compute_dtype="float32")
policy = OffloadPolicy.layerwise(1)
place = {"address": sys.argv[2], "token_file": sys.argv[3]}
REF = WorkersRef(count=4, threads=1, timeout_s=60.0, beyond_loopback=True, **place)


def send(**message):
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


@cache
def request(videos):
    texts = {"positive": normal(1, 7, 4096, seed=11), "negative": normal(1, 5, 4096, seed=12)}
    given = {"steps": 8, "switch_step": 4, "flow_shift": 5.0, "solver": "unipc"}
    noise = normal(videos, 16, 2, 8, 8, seed=10)
    return DenoiseRequest(noise=noise, guidance=(4.0, 3.0), **texts, **given)


@cache
def alone(videos):
    """Return the latents from one process without workers."""
    registry = ExpertsRegistry()
    latents = denoise(registry.get(experts), request(videos), policy=policy, device="cpu").latents
    registry.free()
    return latents


def nodes(pool):
    """Return each worker's machine."""
    return [worker.started.facts.node for worker in pool.workers]


def run(pool, mesh, videos, path_map):
    """Compute with the workers, report every step, and compare with the result from `alone`."""
    wanted = alone(videos)
    driver = Driver(pool, replace(REF, paths=path_maps(path_map)), Mesh(**mesh))
    ran = driver.denoise(experts, request(videos), policy, lambda step: send(step=step.done))
    machines = [(ranks, {each.machine for each in facts}) for ranks, facts in driver.workers]
    return {
        "difference": distance(ran.latents, wanted),
        "nodes": nodes(pool),
        "apart": [list(ranks) for ranks, names in machines if len(names) > 1],
        "ranks": sorted(ran.timelines),
        "gathered_bytes": ran.gathered_bytes,
        "restarts": ran.restarts,
        "changes": list(ran.timeline.changes),
    }


def main():
    torch.set_num_threads(1)
    with RayPool(replace(REF, mesh=Mesh(data=2, cfg=2)), store_bytes=128 << 20) as pool:
        addresses = [worker.started.facts.address for worker in pool.workers]
        send(answer={"nodes": nodes(pool), "addresses": addresses})
        for line in sys.stdin:
            try:
                send(answer=run(pool, **json.loads(line)))
            except (ValueError, OSError, RuntimeError) as err:
                send(answer={"error": f"{type(err).__name__}: {err}"})


if __name__ == "__main__":
    main()
