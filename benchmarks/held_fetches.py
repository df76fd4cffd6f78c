"""Fetches that are held back while workers exchange tokens, against fetches that are not: what a step takes.

python benchmarks/held_fetches.py

Two workers behind Ray on this machine share the tokens of every lane (Ulysses), over gloo, with one thread each. Runs
of both kinds follow each other in turn on the same workers, so that what else the machine does meets both alike.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from record import record

from wanstream.cli.sample_experts import save_expert_folder
from wanstream.cli.sample_weights import ExpertShape, make_expert
from wanstream.distributed.driver import Driver
from wanstream.distributed.ray_pool import RayPool
from wanstream.plan import ExpertsRef, Mesh, OffloadPolicy, StepRecord, WorkersRef
from wanstream.sampling import DenoiseRequest, seeded_noise

STEPS, SWITCH = 7, 3
PAIRS = 6
"""Runs of each kind."""
MESH = Mesh(ulysses=2)
SHAPE = ExpertShape(heads=8, layers=4, ffn_dim=4096)
BLOCK_BYTES = 4 * (8 * 1024**2 + 2 * 1024 * 4096)
HELD = {False: "free", True: "held back"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is measured with both kinds of runs."""

    name: str
    latent: tuple[int, int, int]
    policy: OffloadPolicy


CASES = (
    Case(name="48 tokens, from files", latent=(3, 8, 8), policy=OffloadPolicy.layerwise(1)),
    Case(name="48 tokens, out of RAM", latent=(3, 8, 8), policy=OffloadPolicy.layerwise(1, source="pinned")),
    Case(name="192 tokens, out of RAM", latent=(3, 16, 16), policy=OffloadPolicy.layerwise(1, source="pinned")),
)


def make_experts(folder: Path) -> ExpertsRef:
    for seed, name in enumerate(("high", "low"), 1):
        (folder / name).mkdir()
        save_expert_folder(make_expert(SHAPE, seed=seed), folder / name, dtype=torch.float32)
    return ExpertsRef(high_noise=folder / "high", low_noise=folder / "low", compute_dtype="float32")


def request_of(latent: tuple[int, int, int]) -> DenoiseRequest:
    return DenoiseRequest(
        noise=seeded_noise((1, 16, *latent), 1),
        positive=torch.randn(1, 32, 4096, generator=torch.Generator().manual_seed(0)),
        steps=STEPS,
        switch_step=SWITCH,
        flow_shift=5.0,
        guidance=(1.0, 1.0),
    )


def steady(steps: Sequence[StepRecord]) -> list[StepRecord]:
    """Without those that open files and fill buffers, and the switch."""
    return [step for step in steps if step.index not in (0, 1, SWITCH)]


def spread(values: Sequence[float]) -> dict[str, float]:
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, 4) for name, value in found.items()}


def measure(drivers: dict[bool, Driver], experts: ExpertsRef, case: Case) -> dict[str, Any]:
    """Runs of both kinds in turn, each pair in the other order than the one before."""
    steps: dict[bool, list[StepRecord]] = {held: [] for held in drivers}
    of_runs: dict[bool, list[float]] = {held: [] for held in drivers}
    latents: dict[bool, torch.Tensor] = {}
    request = request_of(case.latent)
    for held, driver in drivers.items():
        latents[held] = driver.denoise(experts, request, case.policy).latents
    for pair in range(PAIRS):
        for held in (False, True) if pair % 2 else (True, False):
            ran = drivers[held].denoise(experts, request, case.policy)
            assert torch.equal(ran.latents, latents[held])
            steps[held] += steady(ran.timeline.steps)
            of_runs[held].append(statistics.median(step.wall_s for step in steady(ran.timeline.steps)))
    ratios = [one / other for one, other in zip(of_runs[True], of_runs[False], strict=True)]
    return {
        "case": case.name,
        "latents_equal": torch.equal(latents[True], latents[False]),
        "step_s": {word: spread([step.wall_s for step in steps[held]]) for held, word in HELD.items()},
        "stall_s": {word: spread([step.stall_s for step in steps[held]]) for held, word in HELD.items()},
        "held_to_free_of_pairs": spread(ratios),
    }


def main() -> None:
    method = (
        f"two workers behind Ray on one machine, {MESH}, gloo, one thread each; two random experts of {SHAPE.layers} "
        f"blocks of {BLOCK_BYTES / 1e6:.0f} MB, fp32, {SHAPE.heads} heads, one lane, one block ahead, files in the "
        f"page cache; {PAIRS} runs of each kind in turn on the same workers after one of each that does not count, "
        f"{STEPS} steps each, of which those that fill buffers and the switch do not count; of the slower worker. The "
        "ratio is that of the medians of two runs that followed each other. load_average tells what else the machine "
        "did, before and after"
    )
    refs = {held: WorkersRef(count=MESH.size, threads=1, timeout_s=120.0, hold_fetches=held) for held in HELD}
    with tempfile.TemporaryDirectory() as folder, RayPool(refs[False], store_bytes=256 << 20) as pool:
        experts = make_experts(Path(folder))
        drivers = {held: Driver(pool, ref, MESH) for held, ref in refs.items()}
        cases = []
        for case in CASES:
            before = os.getloadavg()[0]
            found = measure(drivers, experts, case)
            cases.append({**found, "load_average": [round(load, 1) for load in (before, os.getloadavg()[0])]})
            print(cases[-1], flush=True)
            path = record("held-fetches", method=method, figures={"cases": cases})
    print(path)


if __name__ == "__main__":
    main()
