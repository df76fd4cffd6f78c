"""LoRAs in the registry: they change the open pair and never open another one."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from wanstream.schema import OffloadPolicy
from wanstream.schema.refs.experts import ExpertsRef, LoraRef
from wanstream.tests.support.wan.opened_experts import streamed
from wanstream.wan import ExpertsRegistry, Lane, open_pair

LIGHTNING = "loras/wan2.2_t2v_lightx2v_4steps_lora_v1.1_{}_noise.safetensors"
EXPERT = "diffusion_models/wan2.2_t2v_{}_noise_14B_fp16.safetensors"
PINNED = OffloadPolicy.layerwise(1, source="pinned")


@pytest.fixture
def ref(sample_models: Path, tmp_path: Path) -> ExpertsRef:
    """The test model's T2V experts, copied with their LoRAs for tests to change."""
    for folder in ("diffusion_models", "loras"):
        (tmp_path / folder).mkdir()
        for file in (sample_models / folder).glob("wan2.2_t2v*"):
            shutil.copy(file, tmp_path / folder)
    high, low = (tmp_path / EXPERT.format(name) for name in ("high", "low"))
    return ExpertsRef(high_noise=high, low_noise=low)


@pytest.fixture
def lora(ref: ExpertsRef, tmp_path: Path) -> LoraRef:
    high, low = (tmp_path / LIGHTNING.format(name) for name in ("high", "low"))
    return LoraRef(high_noise=high, low_noise=low)


@pytest.fixture
def opened() -> Mock:
    """The registry's function that opens pairs."""
    return Mock(wraps=open_pair)


@pytest.fixture
def registry(opened: Mock) -> Iterator[ExpertsRegistry]:
    registry = ExpertsRegistry(opened)
    yield registry
    registry.free()


@pytest.fixture
def run(registry: ExpertsRegistry, lane: Lane) -> Callable[..., torch.Tensor]:
    """`run(ref, *loras)` returns both experts' velocities for one step."""

    def run(ref: ExpertsRef, *loras: LoraRef) -> torch.Tensor:
        pair = registry.get(replace(ref, loras=loras))
        return torch.cat(streamed(pair, PINNED, lane, steps=("high", "low")))

    return run


def replace_file(path: Path, other: Path) -> None:
    shutil.copy(other, path.with_suffix(".copy"))
    path.with_suffix(".copy").replace(path)


def test_other_loras_open_no_other_pair(run, opened, ref, lora):
    plain = run(ref)
    weaker = replace(lora, strength_high=0.5)
    only_low = replace(lora, high_noise=None)
    stacks = ((lora,), (weaker,), (only_low,), (lora, weaker))
    results = [plain, *(run(ref, *each) for each in stacks)]
    for one, other in combinations(results, 2):
        assert not torch.equal(one, other)
    assert torch.equal(results[3][0], plain[0]), "the high-noise expert has no LoRA"
    assert torch.equal(run(ref), plain)
    opened.assert_called_once_with(ref)


def test_reopened_pair_and_replaced_lora_are_current(run, registry, opened, ref, lora):
    first = run(ref, lora)
    registry.free()
    assert torch.equal(run(ref, lora), first)
    replace_file(ref.high_noise, ref.high_noise)
    assert torch.equal(run(ref, lora), first)
    assert opened.call_count == 3
    expected = run(ref, replace(lora, high_noise=lora.low_noise))
    run(ref, lora)
    replace_file(lora.high_noise, lora.low_noise)
    assert torch.equal(run(ref, lora), expected)
    assert opened.call_count == 3


def test_unusable_lora_leaves_the_pair_as_it_was(run, opened, ref, lora):
    before = run(ref, lora)
    bad = lora.low_noise.with_name("bad.safetensors")
    bad.write_text("no LoRA")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"bad.safetensors: is not a safetensors file"):
            run(ref, lora, LoraRef(low_noise=bad))
    assert torch.equal(run(ref, lora), before)
    lora.low_noise.unlink()
    with pytest.raises(ValueError, match="cannot be read"):
        run(ref, lora)
    assert opened.call_count == 1
