"""Arithmetic "auto": multiplied as stored only where a measured block is then faster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from wanstream.plan import BlockTimes
from wanstream.schema import ExpertsRef, LoraRef
from wanstream.testing import make_lora, save_expert_file, save_lora
from wanstream.testing.number_formats import MixedLayout
from wanstream.tests.support.accelerator import Accelerator
from wanstream.wan import measured_arithmetic, with_resolved_precision
from wanstream.wan.measurement import arithmetic as module
from wanstream.wan.measurement import meter

CPU, FP32 = torch.device("cpu"), torch.float32
INT8_ROWS = MixedLayout(format_of=lambda _: "int8 rows")


@pytest.fixture
def int8_ref(make_tiny_expert: Callable[..., Any], tmp_path: Path) -> ExpertsRef:
    save_expert_file(make_tiny_expert(seed=0), tmp_path / "int8.safetensors", dtype=FP32, fp8=INT8_ROWS)
    return ExpertsRef(high_noise=tmp_path / "int8.safetensors", single=True, compute_dtype="float32", arithmetic="auto")


def measures(monkeypatch: pytest.MonkeyPatch, **visits: float) -> None:
    """Treat the CPU as a device on which a visit takes 1 s, and one in 8 bits as many seconds as given."""
    times: Mapping[str, BlockTimes] = {
        name: BlockTimes(visit_s=visit_s, products_s=0.1, attention_s=0.1, parts={}, decode_s=0.2)
        for name, visit_s in {"": 1.0, **visits}.items()
    }
    monkeypatch.setattr(module, "runtime_for", lambda device: object())
    monkeypatch.setattr(module, "_block_times", lambda *_: times)


@pytest.mark.parametrize(
    ("visit_s", "arithmetic"), [(0.5, "int8"), (0.94, "int8"), (0.97, "decoded"), (2.2, "decoded")]
)
def test_the_faster_arithmetic_is_taken(
    visit_s: float, arithmetic: str, int8_ref: ExpertsRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    measures(monkeypatch, int8=visit_s)
    assert with_resolved_precision(int8_ref, CPU) == replace(int8_ref, arithmetic=arithmetic)
    assert (
        f"{1000 * visit_s:.2f} ms in int8, 1000.00 ms in the compute dtype" in measured_arithmetic(int8_ref, CPU).words
    )


def test_a_cpu_decodes_and_so_does_a_model_without_codes(
    int8_ref: ExpertsRef, make_tiny_expert: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measured_arithmetic(int8_ref, CPU).words == "8-bit matrices are decoded on a CPU"
    save_expert_file(make_tiny_expert(seed=0), tmp_path / "plain.safetensors", dtype=FP32)
    measures(monkeypatch, int8=0.1)
    choice = measured_arithmetic(replace(int8_ref, high_noise=tmp_path / "plain.safetensors"), CPU)
    assert (choice.multiplied, "no matrix of these files" in choice.words) == ((), True)
    assert with_resolved_precision(replace(int8_ref, storage="int8 ConvRot"), CPU).arithmetic == "int8"


def test_a_lora_that_needs_the_values_decodes_them(
    int8_ref: ExpertsRef, make_tiny_expert: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measures(monkeypatch, int8=0.5)
    expert = make_tiny_expert(seed=0)
    changes = {
        "product": make_lora(expert, seed=1),
        "sum": {"diffusion_model.blocks.0.self_attn.q.diff": torch.ones(expert.blocks[0].attn1.to_q.weight.shape)},
    }
    for (name, tensors), multiplied in zip(changes.items(), (("int8",), ()), strict=True):
        save_lora(tensors, tmp_path / name, dtype=FP32)
        choice = measured_arithmetic(replace(int8_ref, loras=(LoraRef(high_noise=tmp_path / name),)), CPU)
        assert choice.multiplied == multiplied
    assert choice.words == "8-bit matrices are decoded, because sum cannot be computed beside them"


@pytest.mark.parametrize(
    "error", [ValueError("it is too slow"), torch.OutOfMemoryError("out of memory"), KeyError("x")]
)
def test_what_cannot_be_measured_is_decoded(
    error: Exception, int8_ref: ExpertsRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    measures(monkeypatch)

    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(module, "_block_times", fails)
    if isinstance(error, KeyError):
        with pytest.raises(KeyError):
            measured_arithmetic(int8_ref, CPU)
        return
    choice = measured_arithmetic(int8_ref, CPU)
    assert (choice.multiplied, choice.words) == ((), f"8-bit matrices are decoded, because {error}")


def test_a_device_is_measured_once(gpu: Accelerator, int8_ref: ExpertsRef, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter, "METERED_TOKENS", meter.MIN_TOKENS)
    monkeypatch.setattr(meter, "MOST_VISIT_S", 60.0)  # the checked device is slow
    module._block_times.cache_clear()
    first = measured_arithmetic(int8_ref, gpu.device)
    assert " ms in int8, " in first.words
    monkeypatch.setattr(module, "measure_block", None)
    assert measured_arithmetic(int8_ref, gpu.device) == first
    module._block_times.cache_clear()
