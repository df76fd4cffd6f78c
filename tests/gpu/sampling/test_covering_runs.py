"""Whole runs on the checked device, equal to a CPU to the bit.

Every pair of options is in some run, each run in five orders. The slow test makes a random sample
of all combinations.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from wanstream.block_kernels import multiplication
from wanstream.offload.formats.rotation import signs
from wanstream.sampling import denoise
from wanstream.sampling.cache.settings import EasyCache, FirstBlockCache
from wanstream.sampling.inputs import DenoiseRequest
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
from wanstream.tests.support.number_formats import MixedLayout, mixture
from wanstream.tests.support.quantised_files import Fp8Layout
from wanstream.tests.support.sampling_fixtures import changed_request
from wanstream.wan import Nag, open_experts
from wanstream.wan.lora.file import open_lora

pytestmark = pytest.mark.checked

LAYERS = 2
SWAP = OffloadPolicy.block_swap(1, source="pinned")
OPTIONS: dict[str, dict[str, Any]] = {
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
ORDERS = 5


def covering(options: dict[str, Sequence[str]]) -> list[Run]:
    """Return few runs that together have every pair of values from different options."""
    choose = random.Random(0)
    wanted = {
        frozenset(pair)
        for first, second in itertools.combinations(options, 2)
        for pair in itertools.product(
            ((first, value) for value in options[first]), ((second, v) for v in options[second])
        )
    }
    runs: list[Run] = []
    while wanted:
        tried = []
        for _ in range(50):
            run = {name: choose.choice(values) for name, values in options.items()}
            run.update(choose.choice(sorted(map(sorted, wanted))))
            tried.append(run)
        best = max(tried, key=lambda run: len(wanted & _pairs(run)))
        wanted -= _pairs(best)
        runs.append(best)
    return runs


def _pairs(run: Run) -> set[frozenset[tuple[str, str]]]:
    return {frozenset(pair) for pair in itertools.combinations(run.items(), 2)}


RUNS = covering({name: list(values) for name, values in OPTIONS.items()})


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    for place, seed in (("high", 1), ("low", 2)):
        model = make_expert(TinyShape(layers=LAYERS, ffn_dim=256), seed=seed)
        save_expert_file(model, folder / f"{place} raw", dtype=torch.float32)
        save_expert_file(model, folder / f"{place} fp8", dtype=torch.float32, quantised=Fp8Layout())
        save_expert_file(
            model,
            folder / f"{place} mixed",
            dtype=torch.float32,
            quantised=MixedLayout(format_of=mixture),
        )
        layout = MixedLayout(format_of=lambda _: "int8 ConvRot")
        save_expert_file(model, folder / f"{place} int8", dtype=torch.float32, quantised=layout)
        save_expert_gguf(model, folder / f"{place} GGUF.gguf", types=q4_k_m)
        save_lora(make_lora(model, seed=seed + 2), folder / f"{place} LoRA", dtype=torch.float32)
    return folder


def latents(run: Run, files: Path, request: DenoiseRequest, device: torch.device) -> torch.Tensor:
    """Return one run's latents."""
    value = {name: OPTIONS[name][chosen] for name, chosen in run.items()}
    endings = {
        "fp8 in RAM": "raw",
        "int8 in RAM": "raw",
        "GGUF": "GGUF.gguf",
        "mixed in int8": "mixed",
    }
    ending = {**endings, "fp8 in fp8": "fp8"}.get(run["weights"], run["weights"])
    request = changed_request(
        request,
        solver=value["solver"],
        cache=value["cache"],
        windows=value["windows"],
        **value["guidance"],
    )
    paths = (files / f"{place} {ending}" for place in ("high", "low"))
    with open_experts(*paths, compute_dtype=torch.float32, **value["weights"]) as pair:
        if value["LoRA"] is not None:
            high, low = value["LoRA"]
            pair.set_loras(
                [(open_lora(files / "high LoRA"), high)], [(open_lora(files / "low LoRA"), low)]
            )
        return denoise(pair, request, policy=value["policy"], device=device).latents


def check(run: Run, files: Path, request: DenoiseRequest, seeds: Iterator[int] | range) -> None:
    expected = latents(run, files, request, torch.device("cpu"))
    assert expected.isfinite().all()
    for seed in seeds:
        with checked_accelerator(seed) as gpu:
            assert torch.equal(latents(run, files, request, gpu.device), expected), f"seed {seed}"


@pytest.fixture(autouse=True)
def _one_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotate tokens by one matrix, as a device does: a CPU's two matrices sum in another order."""

    def one_matrix(group: int, device: torch.device) -> tuple[torch.Tensor]:
        return (signs(group).to(device, non_blocking=True).float(),)

    monkeypatch.setattr(multiplication, "kronecker_factors", one_matrix)


@pytest.mark.parametrize("policy", OPTIONS["policy"])
def test_steps_are_skipped_before_their_first_block(
    policy: str, files: Path, make_request: Callable[..., DenoiseRequest]
) -> None:
    """A run is left while a step's first blocks are fetched, and the next one finds them."""
    with open_experts(files / "high fp8", files / "low fp8", compute_dtype=torch.float32) as pair:
        request = make_request(steps=8, switch_step=4, cache=EasyCache(threshold=1e9))
        chosen = OPTIONS["policy"][policy]
        expected = denoise(pair, request, policy=chosen, device=torch.device("cpu"))
        assert [step.index for step in expected.timeline.steps if step.skipped_visits] == [2, 3, 6]
        for seed in range(ORDERS):
            with checked_accelerator(seed) as gpu:
                found = denoise(pair, request, policy=chosen, device=gpu.device)
                pair.close()
            assert torch.equal(found.latents, expected.latents), f"seed {seed}"


def test_torch_finds_no_race_in_a_whole_run(files: Path, small: DenoiseRequest) -> None:
    trace: list[TraceEntry] = []
    with checked_accelerator(1) as gpu:
        assert gpu.machine is not None
        gpu.machine.trace = trace
        latents(RUNS[0] | {"weights": "GGUF", "LoRA": "LoRA"}, files, small, gpu.device)
    assert len(trace) > 1000
    assert not races(trace)


@pytest.fixture
def small(make_request: Callable[..., DenoiseRequest]) -> DenoiseRequest:
    noise = torch.randn(1, 16, 3, 4, 6, generator=torch.Generator().manual_seed(3))
    return make_request(noise=noise, steps=3, switch_step=1)


def test_every_pair_of_options_is_in_some_run() -> None:
    met = set().union(*map(_pairs, RUNS))
    for first, second in itertools.combinations(OPTIONS, 2):
        for pair in itertools.product(OPTIONS[first], OPTIONS[second]):
            assert frozenset(((first, pair[0]), (second, pair[1]))) in met


@pytest.mark.parametrize("number", range(len(RUNS)))
def test_runs_have_the_bits_of_a_cpu(number: int, files: Path, small: DenoiseRequest) -> None:
    check(RUNS[number], files, small, range(number, number + ORDERS))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_a_sample_of_all_combinations(number: int, files: Path, small: DenoiseRequest) -> None:
    choose = random.Random(number)
    run = {name: choose.choice([*values]) for name, values in OPTIONS.items()}
    check(run, files, small, range(number, number + 1))
