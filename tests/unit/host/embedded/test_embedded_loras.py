"""LoRAs in the registry: they change the open pair and never open another one."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from wanstream.plan.programs import step_visits
from wanstream.schema import OffloadPolicy
from wanstream.schema.refs.experts import ExpertsRef, LoraRef
from wanstream.wan import ExpertPair, Lane, forward_lanes
from wanstream.wan.checkpoint.files import CheckpointError
from wanstream.wan.experts.open import ExpertsRegistry, open_pair

LIGHTNING = "wan2.2_t2v_lightx2v_4steps_lora_v1.1_{}_noise.safetensors"
PINNED = OffloadPolicy.layerwise(1, source="pinned")


@pytest.fixture
def models(sample_models: Path, tmp_path: Path) -> Path:
    """A copy of the test model's T2V experts and LoRAs, for tests to change."""
    for folder in ("diffusion_models", "loras"):
        (tmp_path / folder).mkdir()
        for file in (sample_models / folder).glob("wan2.2_t2v*"):
            shutil.copy(file, tmp_path / folder)
    return tmp_path


@pytest.fixture
def ref(models: Path) -> ExpertsRef:
    high, low = (
        models / f"diffusion_models/wan2.2_t2v_{name}_noise_14B_fp16.safetensors"
        for name in ("high", "low")
    )
    return ExpertsRef(high_noise=high, low_noise=low)


@pytest.fixture
def lora(models: Path) -> LoraRef:
    high, low = (models / "loras" / LIGHTNING.format(name) for name in ("high", "low"))
    return LoraRef(high_noise=high, low_noise=low)


@pytest.fixture
def opened() -> list[ExpertsRef]:
    """Pairs opened by the registry, in order."""
    return []


@pytest.fixture
def registry(opened: list[ExpertsRef]) -> ExpertsRegistry:
    def counting(ref: ExpertsRef) -> ExpertPair:
        opened.append(ref)
        return open_pair(ref)

    registry = ExpertsRegistry(counting)
    yield registry
    registry.free()


def run(pair: ExpertPair) -> torch.Tensor:
    """Return both experts' velocities for one step."""
    generator = torch.Generator().manual_seed(0)
    lane = Lane(
        latents=torch.randn(1, 16, 1, 2, 2, generator=generator),
        text=torch.randn(1, 3, 4096, generator=generator),
    )
    engine = pair.engine(PINNED, "cpu")
    found = []
    with (
        torch.inference_mode(),
        engine.run(step_visits(["high", "low"], engine.block_counts)) as going,
    ):
        for step, expert in enumerate(("high", "low")):
            visit = lambda block, at=(step, expert): going.visit(*at, block)  # noqa: E731
            found += forward_lanes(engine.models[expert], [lane], torch.tensor([990.0]), visit)
    return torch.cat(found)


def bytes_read() -> int:
    """Return the bytes read by this process so far."""
    with open("/proc/self/io", encoding="ascii") as counters:
        return int(counters.readline().removeprefix("rchar: "))


def test_references_are_values(ref: ExpertsRef, lora: LoraRef) -> None:
    one, other = (replace(ref, loras=(replace(lora),)) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    others = {
        ref,
        one,
        replace(ref, loras=(lora, lora)),
        replace(ref, loras=(replace(lora, strength_low=0.5),)),
    }
    assert len(others) == 4


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts bytes in /proc")
def test_other_loras_and_strengths_open_no_pair_and_read_no_base_weight(
    registry: ExpertsRegistry, opened: list[ExpertsRef], ref: ExpertsRef, lora: LoraRef
) -> None:
    pair = registry.get(ref)
    before = bytes_read()
    plain = run(pair)
    whole = bytes_read() - before
    sizes = [path.stat().st_size for path in (lora.high_noise, lora.low_noise)]
    assert whole > 10 * sum(sizes)

    weaker, only_low = replace(lora, strength_high=0.5), replace(lora, high_noise=None)
    results = [plain]
    for loras in ((lora,), (weaker,), (only_low,), (lora, weaker), ()):
        before = bytes_read()
        assert registry.get(replace(ref, loras=loras)) is pair
        results.append(run(pair))
        # At most, each file is read once, and each header once per mention.
        assert bytes_read() - before < 4 * sum(sizes)
    assert opened == [ref]
    assert torch.equal(results[-1], plain)
    for i, one in enumerate(results[:-1]):
        assert not any(torch.equal(one, other) for other in results[i + 1 : -1])


def test_one_expert_may_have_none(
    registry: ExpertsRegistry, ref: ExpertsRef, lora: LoraRef
) -> None:
    plain = run(registry.get(ref))
    high, low = run(registry.get(replace(ref, loras=(replace(lora, high_noise=None),))))
    assert torch.equal(high, plain[0])
    assert not torch.equal(low, plain[1])


def test_a_pair_that_is_opened_again_gets_its_loras(
    registry: ExpertsRegistry, ref: ExpertsRef, lora: LoraRef
) -> None:
    patched = replace(ref, loras=(lora,))
    first = run(registry.get(patched))
    registry.free()
    assert torch.equal(run(registry.get(patched)), first)
    shutil.copy(ref.high_noise, ref.high_noise.with_suffix(".copy"))
    ref.high_noise.with_suffix(".copy").replace(ref.high_noise)
    assert torch.equal(run(registry.get(patched)), first)


def test_a_lora_file_that_was_replaced_is_read_again(
    registry: ExpertsRegistry, opened: list[ExpertsRef], ref: ExpertsRef, lora: LoraRef
) -> None:
    patched = replace(ref, loras=(lora,))
    run(registry.get(patched))
    swapped = replace(ref, loras=(replace(lora, high_noise=lora.low_noise),))
    expected = run(registry.get(swapped))
    registry.get(patched)
    shutil.copy(lora.low_noise, lora.high_noise.with_suffix(".copy"))
    lora.high_noise.with_suffix(".copy").replace(lora.high_noise)
    assert torch.equal(run(registry.get(patched)), expected)
    assert len(opened) == 1


def test_a_bad_lora_leaves_the_pair_as_it_was(
    registry: ExpertsRegistry,
    opened: list[ExpertsRef],
    models: Path,
    ref: ExpertsRef,
    lora: LoraRef,
) -> None:
    patched = replace(ref, loras=(lora,))
    before = run(registry.get(patched))
    bad = models / "loras" / "bad.safetensors"
    bad.write_text("no LoRA")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"bad.safetensors: is not a safetensors file"):
            registry.get(replace(ref, loras=(lora, LoraRef(low_noise=bad))))
    assert torch.equal(run(registry.get(patched)), before)
    lora.low_noise.unlink()
    with pytest.raises(ValueError, match="cannot be read"):
        registry.get(patched)
    assert len(opened) == 1


def test_an_expert_is_no_lora(registry: ExpertsRegistry, ref: ExpertsRef) -> None:
    with pytest.raises(CheckpointError, match="choose it as an expert"):
        registry.get(replace(ref, loras=(LoraRef(high_noise=ref.low_noise),)))
