"""Drives a cluster's workers by commands on stdin: `machine_driver.py MODELS`.

It runs on one machine in the cluster. An input line is `["run", {...}]`: a function below and its
arguments. The output has progress lines, then `{"answer": ...}`, or `{"error": ..., "message":
...}` for an error visible to a user.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from wanstream.distributed import Driver, RayPool
from wanstream.sampling import DenoiseRequest, denoise
from wanstream.sampling.steps import StepProgress
from wanstream.schema import Mesh, OffloadPolicy
from wanstream.schema.refs import ExpertsRef, WorkersRef, path_maps
from wanstream.wan.experts.open import ExpertsRegistry
from wanstream.wan.latents import tensor_digest

STORE_BYTES = 128 << 20
models = Path(sys.argv[1])
experts = ExpertsRef(high_noise=models / "high", low_noise=models / "low", compute_dtype="float32")
policy = OffloadPolicy.layerwise(1)
held: dict[str, Any] = {}


def send(**message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def request(videos: int, steps: int) -> DenoiseRequest:
    texts = {"positive": normal(1, 7, 4096, seed=11), "negative": normal(1, 5, 4096, seed=12)}
    given = {"steps": steps, "switch_step": steps // 2, "flow_shift": 5.0, "solver": "unipc"}
    noise = normal(videos, 16, 2, 8, 8, seed=10)
    return DenoiseRequest(noise=noise, guidance=(4.0, 3.0), **texts, **given)


def begin(count: int, address: str, mesh: dict[str, int], **settings: Any) -> dict[str, Any]:
    """Start workers, placed for a layout, and return their places."""
    end()
    held["ref"] = WorkersRef(count=count, address=address, threads=1, timeout_s=60.0, **settings)
    held["pool"] = RayPool(replace(held["ref"], mesh=Mesh(**mesh)), store_bytes=STORE_BYTES)
    addresses = [worker.started.facts.address for worker in held["pool"].workers]
    return {"nodes": nodes(), "addresses": addresses}


def end() -> None:
    """End the workers, if there are any."""
    if "pool" in held:
        held.pop("pool").close()


def nodes() -> list[str]:
    """Return each worker's machine."""
    return [worker.started.facts.node for worker in held["pool"].workers]


def alone(videos: int, steps: int) -> dict[str, Any]:
    """Return the result from one process without workers."""
    registry = ExpertsRegistry()
    pair = registry.get(experts)
    held["alone"] = denoise(pair, request(videos, steps), policy=policy, device="cpu").latents
    registry.free()
    return {"digest": tensor_digest(held["alone"])}


def run(mesh: dict[str, int], videos: int, steps: int, path_map: str) -> dict[str, Any]:
    """Compute with the workers, report every step, and compare with the result from `alone`."""
    ref = replace(held["ref"], paths=path_maps(path_map))

    def on_step(step: StepProgress) -> None:
        send(step=step.done)

    driver = Driver(held["pool"], ref, Mesh(**mesh))
    ran = driver.denoise(experts, request(videos, steps), policy, on_step)
    wanted = held["alone"]
    machines = [(ranks, {each.machine for each in facts}) for ranks, facts in driver.workers]
    apart = [list(ranks) for ranks, names in machines if len(names) > 1]
    found = {"digest": tensor_digest(ran.latents), "nodes": nodes(), "apart": apart}
    found["difference"] = ((ran.latents - wanted).norm() / wanted.norm()).item()
    found |= {"ranks": sorted(ran.timelines), "gathered_bytes": ran.gathered_bytes}
    return {**found, "max_restarts": ran.restarts, "changes": list(ran.timeline.changes)}


def main() -> None:
    torch.set_num_threads(1)
    jobs = {job.__name__: job for job in (begin, alone, run)}
    for line in sys.stdin:
        name, given = json.loads(line)
        try:
            send(answer=jobs[name](**given))
        except (ValueError, OSError, RuntimeError) as err:
            send(error=type(err).__name__, message=str(err))
    end()


if __name__ == "__main__":
    main()
