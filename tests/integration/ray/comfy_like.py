"""A process with workers that imports the pack as ComfyUI does.

Usage: `comfy_like.py FOLDER HIGH LOW HOW`. It prints one JSON line when a worker computes. HOW
selects the end: "returns" from the main module with the pool open, or "waits" for a kill.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import signal
import sys
import threading
from pathlib import Path

import psutil


def load(folder: str) -> str:
    """Import the pack as ComfyUI does, and return the name."""
    name = folder.replace(".", "_x_")
    spec = importlib.util.spec_from_file_location(name, folder + "/__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return name


def long_task(module, high: str, low: str):
    import torch

    generator = torch.Generator().manual_seed(1)
    shapes = {"noise": (1, 16, 2, 4, 6), "positive": (1, 7, 4096), "negative": (1, 5, 4096)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    given = {"steps": 1000, "switch_step": 500, "flow_shift": 5.0, "guidance": (4.0, 3.0)}
    request = module("sampling").DenoiseRequest(**tensors, **given)
    folders = {"high_noise": Path(high), "low_noise": Path(low)}
    experts = module("schema.refs").ExpertsRef(**folders, compute_dtype="float32")
    policy = module("schema").OffloadPolicy.layerwise(1)
    return module("distributed.messages").RunTask(
        run_id="long", experts=experts, request=request, policy=policy
    )


def main(folder: str, high: str, low: str, how: str) -> None:
    name = load(folder)

    def module(path: str):
        return importlib.import_module(f"{name}.{path}")

    ref = module("schema.refs").WorkersRef(count=1, threads=1)
    pool = module("distributed.ray.pool").RayPool(ref, "cpu", store_bytes=128 << 20)
    worker = pool.workers[0]
    begun = threading.Event()
    worker.run(long_task(module, high, low), lambda step: begun.set())
    assert begun.wait(60)
    children = psutil.Process().children(recursive=True)
    said = {"worker": worker.started.facts.pid, "children": [child.pid for child in children]}
    said["folders"] = [str(Path(log).parents[2]) for log in worker.started.logs]
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()
    if how == "waits":
        signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
