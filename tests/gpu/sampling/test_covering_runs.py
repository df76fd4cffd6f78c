"""Whole runs on the checked device, equal to a CPU to the bit.

Every pair of options is in some run, each run in two orders. One slow test makes a random sample
of all combinations, another one lets an allocation fail.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch

from wanstream.block_kernels import multiplication
from wanstream.offload.formats.rotation import signs
from wanstream.sampling import EasyCache, FirstBlockCache, denoise
from wanstream.sampling.steps.solvers import SOLVERS
from wanstream.schema import OffloadPolicy, StepRange, StepStrengths
from wanstream.shapes import ContextWindows
from wanstream.testing import (
    TinyShape,
    make_expert,
    make_lora,
    q4_k_m,
    save_expert_file,
    save_expert_gguf,
    save_lora,
)
from wanstream.tests.support.accelerator import checked_accelerator
from wanstream.tests.support.checked_device import TraceEntry, races
from wanstream.tests.support.sampling.runs import CPU, changed_request, normal, run, skipped
from wanstream.tests.support.wan.number_formats import MixedLayout, mixture
from wanstream.tests.support.wan.quantised_files import Fp8Layout
from wanstream.wan import ExpertPair, Nag, open_experts, open_lora

pytestmark = pytest.mark.checked

LAYERS = 2
SWAP = OffloadPolicy.block_swap(1, source="pinned")
OPTIONS = {
    "policy": {
        "resident": OffloadPolicy.resident(),
        "one buffer": OffloadPolicy.layerwise(0),
        "layerwise": OffloadPolicy.layerwise(1),
        "deep": OffloadPolicy.layerwise(3),
        "swap from RAM": SWAP,
        "swap partly from RAM": replace(SWAP, ram_blocks=2),
    },
    "weights": {
        "raw": {},
        "fp8": {},
        "fp8 in RAM": {"storage": "fp8"},
        "GGUF": {},
        "int8": {"arithmetic": "as stored"},
        "mixed in int8": {"arithmetic": "as stored"},
        "fp8 in fp8": {"arithmetic": "as stored"},
        "int8 in RAM": {"storage": "int8 ConvRot", "arithmetic": "as stored"},
    },
    "LoRA": {
        "none": None,
        "LoRA": (0.7, -0.4),
        "LoRA by steps": (0.7, StepStrengths(usual=-0.4, ranges=(StepRange(2, 2, 0.9),))),
    },
    "solver": {name: name for name in SOLVERS},
    "cache": {"none": None, "first block": FirstBlockCache(threshold=0.2)},
    "windows": {"none": None, "windows": ContextWindows(frames=2, overlap=1)},
    "guidance": {
        "both lanes": {},
        "one lane": {"guidance": (1.0, 1.0)},
        "NAG": {"guidance": (1.0, 1.0), "nag": Nag(scale=5.0)},
    },
}
Run = dict[str, str]
ORDERS = 2


def covering() -> list[Run]:
    """Return few runs that together have every pair of values from different options."""
    choose = random.Random(0)
    wanted = every_pair()
    runs: list[Run] = []
    while wanted:
        tried = []
        for _ in range(50):
            run = {name: choose.choice([*values]) for name, values in OPTIONS.items()}
            run.update(choose.choice(sorted(map(sorted, wanted))))
            tried.append(run)
        best = max(tried, key=lambda run: len(wanted & _pairs(run)))
        wanted -= _pairs(best)
        runs.append(best)
    return runs


def every_pair() -> set[frozenset[tuple[str, str]]]:
    values = [[(name, value) for value in of_name] for name, of_name in OPTIONS.items()]
    choices = itertools.combinations(values, 2)
    return {frozenset(pair) for two in choices for pair in itertools.product(*two)}


def _pairs(run: Run) -> set[frozenset[tuple[str, str]]]:
    return {frozenset(pair) for pair in itertools.combinations(run.items(), 2)}


RUNS = covering()


LAYOUTS = {
    "raw": None,
    "fp8": Fp8Layout(),
    "mixed": MixedLayout(format_of=mixture),
    "int8": MixedLayout(format_of=lambda _: "int8 ConvRot"),
}
FILES = {"fp8 in RAM": "raw", "int8 in RAM": "raw", "mixed in int8": "mixed", "fp8 in fp8": "fp8"}
"""Files of weights with another name."""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    for place, seed in (("high", 1), ("low", 2)):
        model = make_expert(TinyShape(layers=LAYERS, ffn_dim=256), seed=seed)
        for name, layout in LAYOUTS.items():
            path = folder / f"{place} {name}"
            save_expert_file(model, path, dtype=torch.float32, quantised=layout)
        save_expert_gguf(model, folder / f"{place} GGUF.gguf", types=q4_k_m)
        save_lora(make_lora(model, seed=seed + 2), folder / f"{place} LoRA", dtype=torch.float32)
    return folder


def latents(run, files, request, device):
    """Return one run's latents."""
    value = {name: OPTIONS[name][chosen] for name, chosen in run.items()}
    names = ("solver", "cache", "windows")
    changes = {**{name: value[name] for name in names}, **value["guidance"]}
    ending = FILES.get(run["weights"], run["weights"].replace("GGUF", "GGUF.gguf"))
    paths = (files / f"{place} {ending}" for place in ("high", "low"))
    with open_experts(*paths, compute_dtype=torch.float32, **value["weights"]) as pair:
        if value["LoRA"] is not None:
            high, low = value["LoRA"]
            stacks = (("high LoRA", high), ("low LoRA", low))
            pair.set_loras(*([(open_lora(files / name), strength)] for name, strength in stacks))
        chosen = changed_request(request, **changes)
        return denoise(pair, chosen, policy=value["policy"], device=device).latents


def check(run, files, request, seeds):
    expected = latents(run, files, request, CPU)
    assert expected.isfinite().all()
    for seed in seeds:
        with checked_accelerator(seed) as gpu:
            assert torch.equal(latents(run, files, request, gpu.device), expected), f"seed {seed}"


@pytest.fixture(autouse=True)
def _one_rotation(monkeypatch):
    """Rotate tokens by one matrix, as a device does: a CPU's two matrices sum in another order."""

    def one_matrix(group: int, device: torch.device) -> tuple[torch.Tensor]:
        return (signs(group).to(device, non_blocking=True).float(),)

    monkeypatch.setattr(multiplication, "kronecker_factors", one_matrix)


@pytest.mark.parametrize("policy", OPTIONS["policy"].values(), ids=OPTIONS["policy"])
def test_steps_are_skipped_before_their_first_block(policy, files, make_request):
    """A run is left while a step's first blocks are fetched, and the next one finds them."""
    request = make_request(steps=8, switch_step=4, cache=EasyCache(threshold=1e9))
    with open_experts(files / "high fp8", files / "low fp8", compute_dtype=torch.float32) as pair:
        expected = run(pair, request, policy)
        assert skipped(expected) == [2, 3, 6]
        for seed in range(ORDERS):
            with checked_accelerator(seed) as gpu:
                found = denoise(pair, request, policy=policy, device=gpu.device)
                pair.close()
            assert torch.equal(found.latents, expected.latents), f"seed {seed}"


@pytest.fixture
def small(make_request):
    return make_request(noise=normal(1, 16, 3, 4, 6, seed=3), steps=3, switch_step=1)


def test_torch_finds_no_race_in_a_whole_run(files, small):
    trace: list[TraceEntry] = []
    with checked_accelerator(1) as gpu:
        gpu.need_fake("").trace = trace
        latents(RUNS[0] | {"weights": "GGUF", "LoRA": "LoRA"}, files, small, gpu.device)
    assert len(trace) > 1000
    assert not races(trace)


@pytest.mark.parametrize("number", range(len(RUNS)))
def test_runs_have_the_bits_of_a_cpu(number, files, small):
    check(RUNS[number], files, small, range(number, number + ORDERS))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_a_sample_of_all_combinations(number, files, small):
    choose = random.Random(number)
    combination = {name: choose.choice([*values]) for name, values in OPTIONS.items()}
    check(combination, files, small, range(number, number + 1))


TRIED = 20
"""Failed allocations per test, evenly spaced."""


@pytest.mark.slow
@pytest.mark.parametrize("policy", [OffloadPolicy.resident(), OffloadPolicy.layerwise(1)])
@pytest.mark.parametrize("kind", ["raw", "GGUF with a LoRA"])
def test_any_allocation_may_fail(tmp_path, make_tiny_expert, make_request, kind, policy):
    model = make_tiny_expert()
    path = tmp_path / ("expert" if kind == "raw" else "expert.gguf")
    if kind == "raw":
        save_expert_file(model, path, dtype=torch.float32)
    else:
        save_expert_gguf(model, path, types=q4_k_m)
    save_lora(make_lora(model, seed=2), tmp_path / "lora", dtype=torch.float32)
    request = make_request(steps=2, switch_step=1)

    def opened() -> ExpertPair:
        pair = open_experts(path, path, compute_dtype=torch.float32)
        if kind != "raw":
            pair.set_loras(*([(open_lora(tmp_path / "lora"), each)] for each in (1.0, 0.5)))
        return pair

    with checked_accelerator(0) as gpu, opened() as pair:
        expected = denoise(pair, request, policy=policy, device=gpu.device).latents
        allocations = gpu.need_fake("").devices[0].allocations
    assert allocations > 10 * TRIED
    retried = 0
    for number in range(1, allocations, allocations // TRIED):
        with checked_accelerator(number) as gpu, opened() as pair:
            gpu.need_fake("").devices[0].fail_at = number
            try:
                result = denoise(pair, request, policy=policy, device=gpu.device)
            except torch.OutOfMemoryError:  # before the first step, or without a smaller policy
                result = denoise(pair, request, policy=policy, device=gpu.device)
            else:
                retried += 1
            assert torch.equal(result.latents, expected), f"allocation {number}"
            del result
    # Nearly all allocations are made in a step.
    assert retried > TRIED // 2 or policy.kind == "layerwise"
