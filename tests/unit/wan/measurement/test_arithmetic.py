"""Arithmetic "auto": multiplied as stored only where a measured block is then faster."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from wanstream.schema.refs import ExpertsRef, LoraRef
from wanstream.shapes import BlockTimes
from wanstream.testing import make_lora, save_expert_file, save_lora
from wanstream.tests.support.wan.number_formats import MixedLayout
from wanstream.wan.measurement import arithmetic as module
from wanstream.wan.measurement import measured_arithmetic, with_resolved_precision

CPU = torch.device("cpu")
FP32 = torch.float32


@pytest.fixture(autouse=True)
def _nothing_measured(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_measured", {})


@pytest.fixture
def int8_ref(make_tiny_expert, tmp_path):
    path = tmp_path / "int8.safetensors"
    rows = MixedLayout(format_of=lambda _: "int8 rows")
    save_expert_file(make_tiny_expert(seed=0), path, dtype=FP32, quantised=rows)
    return ExpertsRef(high_noise=path, single=True, compute_dtype="float32", arithmetic="auto")


def measures(monkeypatch, **visits):
    """Treat the CPU as a device whose visits take 1 s, or in 8 bits the given seconds."""
    times = {
        name: BlockTimes(visit_s=visit_s, products_s=0.1, attention_s=0.1, parts={}, decode_s=0.2)
        for name, visit_s in {"": 1.0, **visits}.items()
    }
    card = SimpleNamespace(name=lambda: "a card")
    monkeypatch.setattr(module, "runtime_for", lambda device: card)
    monkeypatch.setattr(module, "probe_block", lambda *_, **__: None)
    monkeypatch.setattr(module, "quick_case", lambda *_: (None, 7800))
    monkeypatch.setattr(module, "measure_block", lambda *_, **__: times)


@pytest.mark.parametrize(
    ("visit_s", "arithmetic"), [(0.5, "int8"), (0.94, "int8"), (0.97, "decoded"), (2.2, "decoded")]
)
def test_the_faster_arithmetic_is_taken(visit_s, arithmetic, int8_ref, monkeypatch):
    measures(monkeypatch, int8=visit_s)
    assert with_resolved_precision(int8_ref, CPU) == replace(int8_ref, arithmetic=arithmetic)
    words = f"{1000 * visit_s:.2f} ms in int8, 1000.00 ms in the compute dtype"
    assert words in measured_arithmetic(int8_ref, CPU).words


def test_cpu_and_model_without_codes_decode(int8_ref, make_tiny_expert, tmp_path, monkeypatch):
    assert measured_arithmetic(int8_ref, CPU).words == "8-bit matrices are decoded on a CPU"
    save_expert_file(make_tiny_expert(seed=0), tmp_path / "plain.safetensors", dtype=FP32)
    measures(monkeypatch, int8=0.1)
    choice = measured_arithmetic(replace(int8_ref, high_noise=tmp_path / "plain.safetensors"), CPU)
    assert (choice.multiplied, "no matrix of these files" in choice.words) == ((), True)
    rotated = replace(int8_ref, storage="int8 ConvRot")
    assert with_resolved_precision(rotated, CPU).arithmetic == "int8"


def test_lora_that_needs_the_values_decodes_them(int8_ref, make_tiny_expert, tmp_path, monkeypatch):
    measures(monkeypatch, int8=0.5)
    expert = make_tiny_expert(seed=0)
    difference = {"diffusion_model.blocks.0.self_attn.q.diff": torch.ones(256, 256)}
    product = make_lora(expert, seed=1)
    for name, tensors, multiplied in (("product", product, ("int8",)), ("sum", difference, ())):
        save_lora(tensors, tmp_path / name, dtype=FP32)
        loras = (LoraRef(high_noise=tmp_path / name),)
        choice = measured_arithmetic(replace(int8_ref, loras=loras), CPU)
        assert choice.multiplied == multiplied
    assert choice.words == "8-bit matrices are decoded, because sum cannot be computed beside them"


@pytest.mark.parametrize(
    "error", [ValueError("it is full"), torch.OutOfMemoryError("out of memory"), RuntimeError("x")]
)
def test_failed_measurement_decodes_in_this_process(error, int8_ref, monkeypatch):
    measures(monkeypatch, int8=0.5)

    def fails(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(module, "measure_block", fails)
        choice = measured_arithmetic(int8_ref, CPU)
    assert choice.words == f"8-bit matrices are decoded, because {type(error).__name__}: {error}"
    assert measured_arithmetic(int8_ref, CPU) == choice, "the same for each run of this process"


def test_broken_device_and_own_faults_are_raised(int8_ref, monkeypatch):
    measures(monkeypatch)
    monkeypatch.setattr(module, "measure_block", lambda *_, **__: {}["x"])
    with pytest.raises(KeyError):
        measured_arithmetic(int8_ref, CPU)
    monkeypatch.setattr(module, "is_broken_device", lambda error: True)
    monkeypatch.setattr(module, "probe_block", lambda *_, **__: torch.zeros(2).view(3))
    with pytest.raises(RuntimeError):
        measured_arithmetic(int8_ref, CPU)


def test_choice_is_stored_for_later_processes(int8_ref, monkeypatch, caplog):
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
    since = SimpleNamespace(name="a package installed since")
    monkeypatch.setattr(module, "choose_multiplication", lambda *_: since)
    assert choose(int8_ref) == ()
    module._file().write_text("{")
    monkeypatch.setattr(module, "_measured", {})
    assert choose(int8_ref) == ()
    assert "arithmetic.json cannot be read" in caplog.text
    assert '"visit_s": 2.0' in module._file().read_text()


@pytest.mark.parametrize("rank", [0, 64])
def test_device_is_measured(rank, gpu, int8_ref, tmp_path, make_tiny_expert):
    save_lora(make_lora(make_tiny_expert(seed=0), seed=1), tmp_path / "lora", dtype=FP32)
    loras = (LoraRef(high_noise=tmp_path / "lora"),) if rank else ()
    choice = measured_arithmetic(replace(int8_ref, loras=loras), gpu.device)
    assert " ms in int8, " in choice.words
    assert choice.words.endswith(" tokens")
    assert f"lora_rank={rank}" in module._file().read_text()
