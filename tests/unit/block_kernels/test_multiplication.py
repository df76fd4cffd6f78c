"""Code chosen to multiply stored codes: reasons in words, test products, and what follows."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from wanstream.block_kernels import Fp8Linear, Int8Linear, choose_multiplication
from wanstream.block_kernels import multiplication as module
from wanstream.block_kernels.attention import KernelsError
from wanstream.block_kernels.choice import backend_refusal, kitchen_refusal
from wanstream.host.embedded.files import Folders
from wanstream.nodes import WARNINGS, loaders
from wanstream.nodes.loaders import WanStreamLora, WanStreamOneExpert
from wanstream.sampling import denoise
from wanstream.schema import OffloadPolicy
from wanstream.schema.refs import ExpertsRef
from wanstream.shapes import ArithmeticChoice
from wanstream.testing.experts import make_lora, save_expert_file, save_lora
from wanstream.testing.model import T2V_FILE
from wanstream.tests.support.embedded import embedded_host
from wanstream.tests.support.number_formats import MixedLayout
from wanstream.wan import open_experts
from wanstream.wan.measurement import with_resolved_precision

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
FP32 = torch.float32
ACTIVE = {
    "available": True,
    "disabled": False,
    "unavailable_reason": None,
    "capabilities": ["int8_linear"],
}
INT8_ROWS = MixedLayout(format_of=lambda _: "int8 rows")


@pytest.fixture
def nothing_multiplies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make torch's products wrong in this process."""
    right = Int8Linear.compute
    choose_multiplication.cache_clear()
    monkeypatch.setattr(Int8Linear, "compute", lambda self, tokens: right(self, tokens) * 2)
    monkeypatch.setattr(Fp8Linear, "compute", lambda *_: torch.zeros(2).view(3))
    yield
    choose_multiplication.cache_clear()


def registry(**changes: object) -> Any:
    return SimpleNamespace(list_backends=lambda: {"cuda": {**ACTIVE, **changes}})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_torch_multiplies_on_a_cpu(dtype: torch.dtype) -> None:
    choice = choose_multiplication("int8", CPU, dtype)
    assert choice.name == "torch"
    assert choice.words == (
        "int8 matrices are multiplied by torch on cpu (comfy-kitchen: its kernels are for NVIDIA "
        "GPUs)"
    )


@pytest.mark.parametrize(
    ("kitchen", "reason"),
    [
        (SimpleNamespace(list_backends=dict), "has no CUDA backend: update it"),
        (
            registry(available=False, unavailable_reason="no driver"),
            "its CUDA backend is not available (no driver)",
        ),
        (registry(disabled=True), "its CUDA backend is disabled in this process"),
        (registry(capabilities=["adaln"]), "its CUDA backend has no int8_linear: update it"),
        (registry(), None),
    ],
    ids=["absent", "unavailable", "disabled", "old", "active"],
)
def test_each_state_of_the_registry_has_a_reason(kitchen: Any, reason: str | None) -> None:
    assert backend_refusal(kitchen, "int8_linear") == reason


@pytest.mark.parametrize(
    ("arguments", "backend", "reason"),
    [
        (
            "Tensor x, int convrot_groupsize=256",
            "cuda",
            "its int8_linear takes no activation: update it",
        ),
        (
            "Tensor x, int convrot_groupsize=256, str? input_act=None",
            "eager",
            "its registry chooses eager",
        ),
        ("Tensor x, int convrot_groupsize=256, str? input_act=None", "cuda", None),
    ],
)
def test_an_old_operation_is_refused(
    arguments: str, backend: str, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = torch._C.parse_schema(f"int8_linear({arguments}) -> Tensor")
    operations = SimpleNamespace(
        int8_linear=SimpleNamespace(default=SimpleNamespace(_schema=schema))
    )
    kitchen = SimpleNamespace(registry=SimpleNamespace(get_capable_backend=lambda *_: backend))
    monkeypatch.setitem(sys.modules, "comfy_kitchen", kitchen)
    monkeypatch.setattr(torch.ops, "comfy_kitchen", operations)
    monkeypatch.setattr(module, "kitchen_refusal", lambda device, *capabilities: None)
    assert module.kitchen_int8_refusal(CPU, FP32) == reason


@pytest.mark.parametrize(
    ("cuda", "installed", "reason"),
    [
        ("13.0", False, "not installed"),
        ("12.8", True, "needs torch for CUDA 13 or later, and this one is for 12.8"),
        (None, True, "needs torch for CUDA 13 or later, and this one is for no CUDA"),
    ],
)
def test_a_missing_requirement_is_named(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, installed: bool, reason: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert kitchen_refusal(GPU, "int8_linear") == reason


def test_a_package_that_cannot_be_imported_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "comfy_kitchen.py").write_text("raise ImportError('libcudart.so.13 is missing')")
    monkeypatch.delitem(sys.modules, "comfy_kitchen", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    reason = "cannot be imported (ImportError: libcudart.so.13 is missing)"
    assert kitchen_refusal(GPU, "int8_linear") == reason


def test_wrong_products_and_errors_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right, by_torch = Int8Linear.compute, module.Multiplications(device=CPU)

    def unrotated(layer: Int8Linear, tokens: torch.Tensor) -> torch.Tensor:
        layer.group, layer.rotation = 0, []
        return right(layer, tokens)

    def raising(*_: object) -> torch.Tensor:
        raise NotImplementedError("no kernel image\nmore")

    def full(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    assert module.product_fault("int8", by_torch, FP32) is None
    assert module.product_fault("fp8", by_torch, FP32) is None
    for compute, fault in (
        (raising, "fails (NotImplementedError: no kernel image)"),
        (unrotated, "its product is wrong (error 1"),
        (lambda *each: right(*each) * torch.nan, "its product is wrong (error nan"),
        (lambda *each: right(*each) * torch.inf, "its product is wrong (error "),
    ):
        monkeypatch.setattr(Int8Linear, "compute", compute)
        assert str(module.product_fault("int8", by_torch, FP32)).startswith(fault)
    monkeypatch.setattr(Int8Linear, "compute", full)
    with pytest.raises(torch.OutOfMemoryError):  # not the code's fault
        module.product_fault("int8", by_torch, FP32)


@pytest.mark.usefixtures("nothing_multiplies")
def test_without_code_matrices_are_decoded(
    make_tiny_expert: Callable[..., Any],
    make_request: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "wanstream.kernels"):
        choice = choose_multiplication("int8", CPU, FP32)
    assert choice.name is None
    assert choice.words in caplog.text
    assert choice.words.startswith(
        "int8 matrices are decoded, because nothing can multiply them on cpu (comfy-kitchen:"
    )
    assert "torch: its product is wrong" in choice.words
    ref = ExpertsRef(high_noise=tmp_path, compute_dtype="float32", arithmetic="as stored")
    assert with_resolved_precision(ref, CPU).arithmetic == "decoded"
    files = [tmp_path / f"{name}.safetensors" for name in ("high", "low")]
    for seed, file in enumerate(files):
        save_expert_file(make_tiny_expert(seed=seed), file, dtype=FP32, quantised=INT8_ROWS)
    with open_experts(*files, compute_dtype=FP32, arithmetic="as stored") as pair:
        with pytest.raises(KernelsError, match='open the model with arithmetic "decoded"'):
            denoise(pair, make_request(), policy=OffloadPolicy.layerwise(1), device="cpu")


@pytest.fixture
def int8_file(make_tiny_expert: Callable[..., Any], tmp_path: Path) -> Iterator[str]:
    """Name of an int8 model listed by the embedded host."""
    folder = tmp_path / "diffusion_models"
    folder.mkdir()
    save_expert_file(
        make_tiny_expert(seed=0), folder / "a.safetensors", dtype=FP32, quantised=INT8_ROWS
    )
    with embedded_host.opened(
        Folders(models=tmp_path, output=tmp_path, input=tmp_path), device=CPU
    ):
        yield "a.safetensors"
        embedded_host.free_experts()


def shown(file: str, arithmetic: str) -> dict[str, Any] | None:
    ui: dict[str, Any] | None = WanStreamOneExpert.execute(
        file=file, compute_dtype="fp32", arithmetic=arithmetic
    ).ui
    return ui


def test_the_loader_shows_the_choice(int8_file: str) -> None:
    assert shown(int8_file, "decoded") is None
    ui = shown(int8_file, "as stored")
    assert ui is not None
    assert ui["text"] == [choose_multiplication("int8", CPU, FP32).words]
    assert WARNINGS not in ui


@pytest.mark.usefixtures("nothing_multiplies")
def test_the_loader_warns_of_the_fallback(int8_file: str) -> None:
    words = choose_multiplication("int8", CPU, FP32).words
    ui = shown(int8_file, "as stored")
    assert ui is not None
    assert (ui["text"], ui[WARNINGS]) == ([f"Warning: {words}"], [words])


def test_the_loader_warns_of_a_file_without_codes(opened_test_model: None) -> None:
    ui = shown(Path(T2V_FILE).name, "as stored")
    assert ui is not None
    assert 'arithmetic "as stored" changes nothing' in ui[WARNINGS][0]


def test_the_loader_and_a_lora_show_what_auto_chose(
    int8_file: str,
    make_tiny_expert: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ui = shown(int8_file, "auto")
    assert ui is not None
    assert (ui["text"], WARNINGS in ui) == (["8-bit matrices are decoded on a CPU"], False)
    (tmp_path / "loras").mkdir()
    save_lora(
        make_lora(make_tiny_expert(seed=0), seed=1),
        tmp_path / "loras" / "b.safetensors",
        dtype=FP32,
    )
    words = ["int8 pays", "int8 does not pay beside a LoRA"]
    monkeypatch.setattr(
        loaders,
        "measured_arithmetic",
        lambda ref, device: ArithmeticChoice(multiplied=(), words=words[len(ref.loras)]),
    )
    loaded = WanStreamOneExpert.execute(file=int8_file, compute_dtype="fp32", arithmetic="auto")
    added = WanStreamLora.execute(loaded.args[0], "b.safetensors", "none", 1.0, 1.0)
    assert [loaded.ui["text"], added.ui["text"]] == [words[:1], words[1:]]
