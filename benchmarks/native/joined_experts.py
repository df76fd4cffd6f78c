"""Step times and bytes for two experts in one sampler, against ComfyUI's two-sampler template.

python benchmarks/native/joined_experts.py

ComfyUI's KSampler drives a MODEL from Join Experts, and two KSampler (Advanced) the same experts.
The measurement runs in ComfyUI's Python (`COMFYUI_PATH`, `COMFYUI_PYTHON`).
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from comfyui_process import INSIDE, enter_comfyui, run_in_comfyui

LAYERS = 6
HEADS = 4
FFN = 2048
TEXT = 4096
LATENT = (1, 16, 1, 16, 16)
STEPS = 10
BOUNDARY = 0.875
ROUNDS = 7
SEED = 3


def write_experts(folder: Path) -> dict[str, Path]:
    """Write two random experts as ComfyUI's files, and return the paths."""
    from wanstream.testing import TinyShape, make_expert, save_expert_file

    shape = TinyShape(layers=LAYERS, heads=HEADS, ffn_dim=FFN, text_dim=TEXT)
    paths = {}
    for seed, name in enumerate(("high", "low")):
        paths[name] = folder / f"{name}.safetensors"
        save_expert_file(make_expert(shape, seed=seed), paths[name], dtype=torch.float32)
    return paths


class Steps:
    """Times at which the steps in one or two samplers end."""

    def __init__(self) -> None:
        self._ends: list[float] = []

    def __call__(self, *_: Any) -> None:
        self._ends.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        """Seconds per step, without the first."""
        return [end - start for start, end in pairwise(self._ends)]


def measure(paths: dict[str, Path]) -> dict[str, Any]:
    """Return step times and moved bytes."""
    import comfy.sample
    import comfy.samplers

    from wanstream.host import ModelStreaming, current_host
    from wanstream.host.comfy.native.load import load_native
    from wanstream.schema import OffloadPolicy

    limits = {"smallest_block": 1, "smallest_model": 1}
    streaming = ModelStreaming(policy=OffloadPolicy.layerwise(1))

    def load(name: str) -> Any:
        return load_native(paths[name], "default", streaming, current_host(), limits)

    joined = current_host().native.join_experts(load("high"), load("low"), BOUNDARY)
    apart = load("high"), load("low")
    sampling = joined.get_model_object("model_sampling")
    sigmas = comfy.samplers.calculate_sigmas(sampling, "simple", STEPS).tolist()
    # No step starts at the final sigma.
    switch = sum(sigma >= BOUNDARY for sigma in sigmas[:-1])
    latent = torch.zeros(LATENT)
    noise = torch.randn(LATENT, generator=torch.Generator().manual_seed(SEED))
    text = [[torch.randn(1, 16, TEXT, generator=torch.Generator().manual_seed(SEED)), {}]]

    def sample(model: Any, noise: Any, latent: Any, callback: Any, **part: Any) -> Any:
        common = {"callback": callback, "disable_pbar": True, "seed": SEED, **part}
        arguments = STEPS, 1.0, "euler", "simple", text, text, latent
        return comfy.sample.sample(model, noise, *arguments, **common)

    def one(steps: Steps) -> list[int]:
        sample(joined, noise, latent, steps)
        return moved(joined)

    def two(steps: Steps) -> list[int]:
        half = sample(apart[0], noise, latent, steps, last_step=switch)
        # These are the settings of a second KSampler (Advanced), which adds no noise.
        part = {"start_step": switch, "disable_noise": True, "force_full_denoise": True}
        sample(apart[1], torch.zeros(LATENT), half, steps, **part)
        return moved(apart[0]) + moved(apart[1])

    def moved(model: Any) -> list[int]:
        # `last` is replaced by the next run, so it is read before that.
        return [step.bytes_moved for step in model.model.runs.last.shown.timeline.steps]

    figures: dict[str, Any] = {"steps": STEPS, "switch_step": switch}
    ways: dict[str, Callable[[Steps], list[int]]] = {"one sampler": one, "two samplers": two}
    seconds: dict[str, list[list[float]]] = {name: [] for name in ways}
    for number in range(ROUNDS + 1):  # by turns, as the machine's load changes
        for name, run in ways.items():
            steps = Steps()
            found = run(steps)
            if number:  # the first run opens files
                seconds[name].append(steps.seconds)
                figures[name] = {"bytes_of_steps": found, "bytes": sum(found)}
    for name, rounds in seconds.items():
        # `seconds` has no first step, so indexes are one lower.
        ratios = [times[switch - 1] / statistics.median(times) for times in rounds]
        figures[name] |= {
            "median_step_s": round(statistics.median(map(statistics.median, rounds)), 4),
            "switch_step_of_median": round(statistics.median(ratios), 3),
            "switch_step_of_median_by_round": [round(ratio, 3) for ratio in ratios],
        }
    figures["one sampler"]["buffers_bytes"] = joined.weights.loaded_engine.loaded_bytes
    figures["two samplers"]["buffers_bytes"] = sum(
        each.weights.loaded_engine.loaded_bytes for each in apart
    )
    return figures


def in_comfyui(folder: Path) -> None:
    """Measure in this process, and print the figures and versions."""
    versions = enter_comfyui()
    torch.set_num_threads(1)
    paths = {name: folder / f"{name}.safetensors" for name in ("high", "low")}
    with torch.inference_mode():
        figures = measure(paths)
    print(json.dumps({"figures": figures, "versions": versions}))


def main() -> None:
    from wanstream.bench.results import versions
    from wanstream.benchmarks.record import record

    with tempfile.TemporaryDirectory() as folder:
        write_experts(Path(folder))
        measured = run_in_comfyui(__file__, folder)
    method = (
        f"two Wan experts with random fp32 weights, {LAYERS} blocks of width {128 * HEADS}, latent "
        f"{'x'.join(map(str, LATENT))}, euler, {STEPS} steps, cfg 1, layerwise with one block "
        "ahead from files in the page cache, one thread: a MODEL of Join Experts in one sampler, "
        f"and two MODELs in two samplers; {ROUNDS} rounds by turns after one that is not counted. "
        "The time of a step ends with the callback of the sampler, and that of the switch step "
        "includes what lies between two samplers"
    )
    found = {**versions(libraries=()), **measured["versions"]}
    path = record("joined-experts", method=method, figures=measured["figures"], versions=found)
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    in_comfyui(Path(sys.argv[-1])) if INSIDE in sys.argv else main()
