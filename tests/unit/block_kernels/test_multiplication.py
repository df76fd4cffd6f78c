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

from wanstream.block_kernels import Int8Linear, choose_multiplication
from wanstream.block_kernels import multiplication as module
from wanstream.block_kernels.attention import KernelsError
from wanstream.block_kernels.choice import backend_refusal, kitchen_refusal
from wanstream.block_kernels.fp8_linear import Fp8Linear
from wanstream.host.embedded.files import Folders
from wanstream.nodes import WARNINGS, loaders
from wanstream.nodes.loaders import WanStreamLora, WanStreamOneExpert
from wanstream.sampling import denoise
from wanstream.schema import OffloadPolicy
from wanstream.schema.refs import ExpertsRef
from wanstream.shapes import FEWEST_INT8_TOKENS, ArithmeticChoice
from wanstream.testing.experts import make_lora, save_expert_file, save_lora
from wanstream.testing.model import T2V_FILE
from wanstream.tests.support.host.embedded import embedded_host
from wanstream.tests.support.wan.int8_attention import ACTIVE
from wanstream.tests.support.wan.number_formats import MixedLayout
from wanstream.wan import open_experts
from wanstream.wan.measurement import with_resolved_precision

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
FP32 = torch.float32


@pytest.fixture
def nothing_multiplies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make torch's products wrong in this process."""
    right = Int8Linear.compute
    choose_multiplication.cache_clear()
    monkeypatch.setattr(Int8Linear, "compute", lambda self, tokens: right(self, tokens) * 2)
    monkeypatch.setattr(Fp8Linear, "compute", lambda *_: torch.zeros(2).view(3))
    yield
    choose_multiplication.cache_clear()


def in_16_bits(codes: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`torch._int_mm` on a CPU without VNNI, which adds two products of unsigned codes at once."""
    products = (codes.int() + 128)[:, :, None] * weight.int()
    pairs = products.unflatten(1, (-1, 2)).sum(2).clamp(-(2**15), 2**15 - 1)
    return (pairs.sum(1) - 128 * weight.int().sum(0)).int()


def exact(codes: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (codes.double() @ weight.double()).int()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("multiply", "name"), [(exact, "torch"), (in_16_bits, "torch, in halves")])
def test_torch_multiplies_on_a_cpu(dtype, multiply, name, monkeypatch):
    monkeypatch.setattr(torch, "_int_mm", multiply)
    choice = choose_multiplication.__wrapped__("int8", CPU, dtype)
    assert choice.name == name
    kitchen = "comfy-kitchen: its kernels are for NVIDIA GPUs"
    assert choice.words.startswith(f"int8 matrices are multiplied by {name} on cpu ({kitchen}")
    assert ("its product is wrong" in choice.words) == (multiply is in_16_bits)


def test_halves_on_a_device_with_sums_in_16_bits(gpu, monkeypatch):
    gpu.need_fake("a GPU adds in 32 bits")

    def multiply(codes: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        assert len(codes) >= FEWEST_INT8_TOKENS, "refused by CUDA"
        return in_16_bits(codes, weight)

    monkeypatch.setattr(torch, "_int_mm", multiply)
    assert choose_multiplication.__wrapped__("int8", gpu.device, FP32).name == "torch, in halves"
    layer = Int8Linear(torch.nn.Linear(8, 2, device="meta"))
    layer.halves = True
    codes = torch.full((3, 8), 127, dtype=torch.int8, device=gpu.device)
    layer.weight = torch.nn.Parameter(codes[:2], requires_grad=False)
    assert layer.code_sums(codes).cpu().tolist() == [[8 * 127**2] * 2] * 3


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"available": False, "unavailable_reason": "no driver"}, "is not available (no driver)"),
        ({"disabled": True}, "is disabled in this process"),
        ({"capabilities": ["adaln"]}, "has no int8_linear: update it"),
        ({}, None),
    ],
    ids=["unavailable", "disabled", "old", "active"],
)
def test_each_state_of_the_registry_has_a_reason(changes, reason):
    active = {**ACTIVE, "capabilities": ["int8_linear"]}
    registry = SimpleNamespace(list_backends=lambda: {"cuda": active | changes})
    found = backend_refusal(registry, "int8_linear")
    assert found == (None if reason is None else f"its CUDA backend {reason}")
    absent = backend_refusal(SimpleNamespace(list_backends=dict), "int8_linear")
    assert absent == "has no CUDA backend: update it"


CURRENT = "int convrot_groupsize=256, str? input_act=None"


REASONS = [("int convrot_groupsize=256", "cuda", "its int8_linear takes no activation: update it")]
REASONS += [(CURRENT, "eager", "its registry chooses eager"), (CURRENT, "cuda", None)]


@pytest.mark.parametrize(("arguments", "backend", "reason"), REASONS)
def test_an_old_operation_is_refused(arguments, backend, reason, monkeypatch):
    schema = torch._C.parse_schema(f"int8_linear(Tensor x, {arguments}) -> Tensor")
    operation = SimpleNamespace(default=SimpleNamespace(_schema=schema))
    registry = SimpleNamespace(get_capable_backend=lambda *_: backend)
    monkeypatch.setitem(sys.modules, "comfy_kitchen", SimpleNamespace(registry=registry))
    monkeypatch.setattr(torch.ops, "comfy_kitchen", SimpleNamespace(int8_linear=operation))
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
def test_a_missing_requirement_is_named(monkeypatch, cuda, installed, reason):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert kitchen_refusal(GPU, "int8_linear") == reason


def test_a_package_that_cannot_be_imported_is_refused(monkeypatch, tmp_path):
    (tmp_path / "comfy_kitchen.py").write_text("raise ImportError('libcudart.so.13 is missing')")
    monkeypatch.delitem(sys.modules, "comfy_kitchen", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    reason = "cannot be imported (ImportError: libcudart.so.13 is missing)"
    assert kitchen_refusal(GPU, "int8_linear") == reason


def test_wrong_products_and_errors_are_found(monkeypatch):
    right = Int8Linear.compute
    by_torch = module.multiplications(module.CODE_FORMATS.values(), CPU, FP32)

    def unrotated(layer: Int8Linear, tokens: torch.Tensor) -> torch.Tensor:
        layer.group = 0
        layer.rotation = []
        return right(layer, tokens)

    def raising(error: Exception) -> Callable[..., torch.Tensor]:
        def compute(*_: object) -> torch.Tensor:
            raise error

        return compute

    for codes in ("int8", "fp8"):
        assert module.product_fault(codes, by_torch, FP32) is None
    image = NotImplementedError("no kernel image\nmore")
    for compute, fault in (
        (raising(image), "fails (NotImplementedError: no kernel image)"),
        (unrotated, "its product is wrong (error 1"),
        (lambda *each: right(*each) * torch.nan, "its product is wrong (error nan"),
        (lambda *each: right(*each) * torch.inf, "its product is wrong (error "),
    ):
        monkeypatch.setattr(Int8Linear, "compute", compute)
        assert str(module.product_fault("int8", by_torch, FP32)).startswith(fault)
    monkeypatch.setattr(Int8Linear, "compute", raising(torch.OutOfMemoryError("out of memory")))
    with pytest.raises(torch.OutOfMemoryError):  # not the code's fault
        module.product_fault("int8", by_torch, FP32)


@pytest.fixture
def save_int8(make_tiny_expert):
    """Save an expert in int8."""

    def save(path: Path, seed: int = 0) -> Path:
        path.parent.mkdir(exist_ok=True)
        layout = MixedLayout(format_of=lambda _: "int8 rows")
        save_expert_file(make_tiny_expert(seed=seed), path, dtype=FP32, quantised=layout)
        return path

    return save


@pytest.mark.usefixtures("nothing_multiplies")
def test_without_code_matrices_are_decoded(save_int8, make_request, tmp_path, caplog):
    caplog.set_level(logging.INFO, "wanstream.kernels")
    choice = choose_multiplication("int8", CPU, FP32)
    assert choice.name is None
    assert choice.words in caplog.text
    words = "int8 matrices are decoded, because nothing can multiply them on cpu (comfy-kitchen:"
    assert choice.words.startswith(words)
    assert "torch: its product is wrong" in choice.words
    ref = ExpertsRef(high_noise=tmp_path, compute_dtype="float32", arithmetic="as stored")
    assert with_resolved_precision(ref, CPU).arithmetic == "decoded"
    files = [save_int8(tmp_path / f"{seed}.safetensors", seed) for seed in range(2)]
    with open_experts(*files, compute_dtype=FP32, arithmetic="as stored") as pair:
        with pytest.raises(KernelsError, match='open the model with arithmetic "decoded"'):
            denoise(pair, make_request(), policy=OffloadPolicy.layerwise(1), device="cpu")


@pytest.fixture
def int8_file(save_int8, tmp_path) -> Iterator[str]:
    """Name of an int8 model listed by the embedded host."""
    path = save_int8(tmp_path / "diffusion_models" / "a.safetensors")
    folders = Folders(models=tmp_path, output=tmp_path, input=tmp_path)
    with embedded_host.opened(folders, device=CPU):
        yield path.name
        embedded_host.free_experts()


def load(file: str, arithmetic: str) -> Any:
    return WanStreamOneExpert.execute(file=file, compute_dtype="fp32", arithmetic=arithmetic)


def test_the_loader_shows_the_choice(int8_file):
    assert load(int8_file, "decoded").ui is None
    ui = load(int8_file, "as stored").ui
    assert ui["text"] == [choose_multiplication("int8", CPU, FP32).words]
    assert WARNINGS not in ui
    ui = load(int8_file, "auto").ui
    assert (ui["text"], WARNINGS in ui) == (["8-bit matrices are decoded on a CPU"], False)


@pytest.mark.usefixtures("nothing_multiplies")
def test_the_loader_warns_of_the_fallback(int8_file):
    words = choose_multiplication("int8", CPU, FP32).words
    ui = load(int8_file, "as stored").ui
    assert (ui["text"], ui[WARNINGS]) == ([f"Warning: {words}"], [words])


def test_the_loader_warns_of_a_file_without_codes(opened_test_model):
    ui = load(Path(T2V_FILE).name, "as stored").ui
    assert 'arithmetic "as stored" changes nothing' in ui[WARNINGS][0]


def test_a_lora_shows_the_new_choice(int8_file, make_tiny_expert, tmp_path, monkeypatch):
    (tmp_path / "loras").mkdir()
    lora = make_lora(make_tiny_expert(seed=0), seed=1)
    save_lora(lora, tmp_path / "loras" / "b.safetensors", dtype=FP32)
    words = ["int8 pays", "int8 does not pay beside a LoRA"]

    def measured(ref: ExpertsRef, device: torch.device) -> ArithmeticChoice:
        return ArithmeticChoice(multiplied=(), words=words[len(ref.loras)])

    monkeypatch.setattr(loaders, "measured_arithmetic", measured)
    loaded = load(int8_file, "auto")
    added = WanStreamLora.execute(loaded.args[0], "b.safetensors", "none", 1.0, 1.0)
    assert [loaded.ui["text"], added.ui["text"]] == [words[:1], words[1:]]
