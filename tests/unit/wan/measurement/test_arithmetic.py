"""Arithmetic "auto": multiplied as stored only where a measured block is then faster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from wanstream.schema.refs import ExpertsRef, LoraRef
from wanstream.shapes import BlockTimes
from wanstream.testing import make_lora, save_expert_file, save_lora
from wanstream.tests.support.accelerator import Accelerator
from wanstream.tests.support.number_formats import MixedLayout
from wanstream.wan.measurement import arithmetic as module
from wanstream.wan.measurement import measured_arithmetic, with_resolved_precision

CPU, FP32 = torch.device("cpu"), torch.float32
INT8_ROWS = MixedLayout(format_of=lambda _: "int8 rows")


@pytest.fixture(autouse=True)
def _nothing_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_measured", {})


@pytest.fixture
def int8_ref(make_tiny_expert: Callable[..., Any], tmp_path: Path) -> ExpertsRef:
    save_expert_file(
        make_tiny_expert(seed=0), tmp_path / "int8.safetensors", dtype=FP32, quantised=INT8_ROWS
    )
    return ExpertsRef(
        high_noise=tmp_path / "int8.safetensors",
        single=True,
        compute_dtype="float32",
        arithmetic="auto",
    )


def measures(monkeypatch: pytest.MonkeyPatch, **visits: float) -> None:
    """Treat the CPU as a device whose visits take 1 s, or in 8 bits the given seconds."""
    times: Mapping[str, BlockTimes] = {
        name: BlockTimes(visit_s=visit_s, products_s=0.1, attention_s=0.1, parts={}, decode_s=0.2)
        for name, visit_s in {"": 1.0, **visits}.items()
    }
    monkeypatch.setattr(
        module, "runtime_for", lambda device: SimpleNamespace(name=lambda: "a card")
    )
    monkeypatch.setattr(module, "probe_block", lambda *_, **__: None)
    monkeypatch.setattr(module, "quick_case", lambda *_: (None, 7800))
    monkeypatch.setattr(module, "measure_block", lambda *_, **__: times)


@pytest.mark.parametrize(
    ("visit_s", "arithmetic"), [(0.5, "int8"), (0.94, "int8"), (0.97, "decoded"), (2.2, "decoded")]
)
def test_the_faster_arithmetic_is_taken(
    visit_s: float, arithmetic: str, int8_ref: ExpertsRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    measures(monkeypatch, int8=visit_s)
    assert with_resolved_precision(int8_ref, CPU) == replace(int8_ref, arithmetic=arithmetic)
    assert (
        f"{1000 * visit_s:.2f} ms in int8, 1000.00 ms in the compute dtype"
        in measured_arithmetic(int8_ref, CPU).words
    )


def test_a_cpu_decodes_and_so_does_a_model_without_codes(
    int8_ref: ExpertsRef,
    make_tiny_expert: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert measured_arithmetic(int8_ref, CPU).words == "8-bit matrices are decoded on a CPU"
    save_expert_file(make_tiny_expert(seed=0), tmp_path / "plain.safetensors", dtype=FP32)
    measures(monkeypatch, int8=0.1)
    choice = measured_arithmetic(replace(int8_ref, high_noise=tmp_path / "plain.safetensors"), CPU)
    assert (choice.multiplied, "no matrix of these files" in choice.words) == ((), True)
    assert (
        with_resolved_precision(replace(int8_ref, storage="int8 ConvRot"), CPU).arithmetic == "int8"
    )


def test_a_lora_that_needs_the_values_decodes_them(
    int8_ref: ExpertsRef,
    make_tiny_expert: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measures(monkeypatch, int8=0.5)
    expert = make_tiny_expert(seed=0)
    changes = {
        "product": make_lora(expert, seed=1),
        "sum": {
            "diffusion_model.blocks.0.self_attn.q.diff": torch.ones(
                expert.blocks[0].attn1.to_q.weight.shape
            )
        },
    }
    for (name, tensors), multiplied in zip(changes.items(), (("int8",), ()), strict=True):
        save_lora(tensors, tmp_path / name, dtype=FP32)
        choice = measured_arithmetic(
            replace(int8_ref, loras=(LoraRef(high_noise=tmp_path / name),)), CPU
        )
        assert choice.multiplied == multiplied
    assert choice.words == "8-bit matrices are decoded, because sum cannot be computed beside them"


@pytest.mark.parametrize(
    "error", [ValueError("it is full"), torch.OutOfMemoryError("out of memory"), RuntimeError("x")]
)
def test_what_cannot_be_measured_is_decoded_until_the_process_ends(
    error: Exception, int8_ref: ExpertsRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    measures(monkeypatch, int8=0.5)

    def fails(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(module, "measure_block", fails)
        choice = measured_arithmetic(int8_ref, CPU)
    assert choice.words == f"8-bit matrices are decoded, because {type(error).__name__}: {error}"
    assert measured_arithmetic(int8_ref, CPU) == choice, "the same for each run of this process"


def test_a_broken_device_and_faults_of_our_own_are_raised(
    int8_ref: ExpertsRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    measures(monkeypatch)
    monkeypatch.setattr(module, "measure_block", lambda *_, **__: {}["x"])
    with pytest.raises(KeyError):
        measured_arithmetic(int8_ref, CPU)
    monkeypatch.setattr(module, "is_broken_device", lambda error: True)
    monkeypatch.setattr(module, "probe_block", lambda *_, **__: torch.zeros(2).view(3))
    with pytest.raises(RuntimeError):
        measured_arithmetic(int8_ref, CPU)


def test_later_processes_choose_alike_and_other_kernels_are_measured(
    int8_ref: ExpertsRef, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rooms: list[None] = []

    def choose(ref: ExpertsRef) -> tuple[str, ...]:
        return measured_arithmetic(ref, CPU, lambda: rooms.append(None)).multiplied

    measures(monkeypatch, int8=0.5)
    assert choose(int8_ref) == ("int8",)
    measures(monkeypatch, int8=2.0)
    monkeypatch.setattr(module, "_measured", {})
    assert (choose(int8_ref), len(rooms)) == (("int8",), 1), "stored"
    assert choose(replace(int8_ref, kernels="exact")) == ()
    assert choose(replace(int8_ref, compute_dtype="bfloat16")) == ()
    assert len(rooms) == 3
    assert "compiled blocks" in measured_arithmetic(replace(int8_ref, compile=True), CPU).words
    monkeypatch.setattr(
        module,
        "choose_multiplication",
        lambda *_: SimpleNamespace(name="a package installed since"),
    )
    assert choose(int8_ref) == ()
    module._file().write_text("{")
    monkeypatch.setattr(module, "_measured", {})
    assert choose(int8_ref) == ()
    assert "arithmetic.json cannot be read" in caplog.text
    assert '"visit_s": 2.0' in module._file().read_text()


@pytest.mark.parametrize("rank", [0, 64])
def test_a_device_is_measured(
    rank: int, gpu: Accelerator, int8_ref: ExpertsRef, tmp_path: Path, make_tiny_expert: Any
) -> None:
    save_lora(make_lora(make_tiny_expert(seed=0), seed=1), tmp_path / "lora", dtype=FP32)
    loras = (LoraRef(high_noise=tmp_path / "lora"),) if rank else ()
    choice = measured_arithmetic(replace(int8_ref, loras=loras), gpu.device)
    assert " ms in int8, " in choice.words
    assert choice.words.endswith(" tokens")
    assert f"lora_rank={rank}" in module._file().read_text()
