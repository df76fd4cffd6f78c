"""Row-wise function sets: choice, refusals, errors against the exact set, and costs per visit."""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wanstream.block_kernels import EXACT, BlockMath, Codes, Fp8Linear
from wanstream.block_kernels import math_choice as choice
from wanstream.block_kernels.attention import KernelsError
from wanstream.block_kernels.block_math import TorchMath
from wanstream.block_kernels.multiplication import Multiplications
from wanstream.offload.formats import one_pass
from wanstream.tests.support.wan.blocks import block_inputs, diffusers_block
from wanstream.wan.measurement.meter import _set_codes
from wanstream.wan.transformer.block import BlockSettings, WanBlock

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
WIDTH = 256


@pytest.fixture(autouse=True)
def _new_choice() -> Iterator[None]:
    choice.choose_math.cache_clear()
    with torch.no_grad():
        yield
    choice.choose_math.cache_clear()


@pytest.fixture(params=["torch", "comfy-kitchen", "triton"])
def math(request: pytest.FixtureRequest) -> BlockMath:
    if request.param == "triton":
        made: BlockMath = request.getfixturevalue("triton_math").TritonMath()
        return made
    if request.param == "comfy-kitchen":
        pytest.importorskip("comfy_kitchen")
    return choice.choose_math(request.param, CPU, torch.float32, WIDTH)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, about an exponential
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_set_is_within_its_error_of_the_exact_one(math, dtype):
    """Codes of the tokens and of their GELU too."""
    assert choice.math_fault(math, CPU, dtype, WIDTH) is None
    assert math.quantises == (math.name == "triton")


@pytest.mark.parametrize("broken", ["NaN", "another eps", "an error"])
def test_a_wrong_set_is_not_used_and_the_next_one_is(broken, monkeypatch, caplog):
    class Broken(TorchMath):
        name = "triton"

        def _norm(self, tokens: torch.Tensor, norm: Any, out: Any) -> torch.Tensor:
            if broken == "an error":
                raise NotImplementedError("no compiler\nmore")
            result = super()._norm(tokens, norm._replace(eps=100.0), out)
            return result * torch.nan if broken == "NaN" else result

    monkeypatch.setattr(choice, "_triton_math", lambda device: Broken())
    monkeypatch.setattr(choice, "math_fault", lambda math, device, *rest: FAULT(math, CPU, *rest))
    caplog.set_level(logging.INFO, logger="wanstream.kernels")
    for _ in range(2):
        chosen = choice.choose_math("auto", GPU, torch.bfloat16, WIDTH)
    assert chosen.name == "torch"
    fails = "fails (NotImplementedError: no compiler)"
    reason = fails if broken == "an error" else "its norm is wrong (error "
    assert f"(triton: {reason}" in caplog.text
    assert caplog.text.count("blocks compute with torch functions (triton: ") == 1, "said once"
    words = r"with triton functions on cuda:0: .*; install triton .*, or choose 'auto'"
    with pytest.raises(KernelsError, match=words):
        choice.choose_math("triton", GPU, torch.bfloat16, WIDTH)


FAULT = choice.math_fault


@pytest.mark.parametrize(
    ("name", "reason"), [("triton", "Triton is not installed"), ("comfy-kitchen", "not installed")]
)
def test_a_package_that_is_missing_is_refused_with_a_remedy(name, reason, monkeypatch):
    found = importlib.util.find_spec

    def find(wanted: str) -> object:
        return None if wanted == name.replace("-", "_") else found(wanted)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    one_pass._unusable.cache_clear()
    with pytest.raises(KernelsError, match=f"{name} functions on cuda:0: {reason}; install {name}"):
        choice.choose_math(name, GPU, torch.bfloat16, WIDTH)
    one_pass._unusable.cache_clear()


def test_a_cpu_takes_torch_and_exact_needs_no_test(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert choice.choose_math("auto", CPU, torch.float32, WIDTH).name == "torch"
    assert choice.choose_math("exact", GPU, torch.float32, WIDTH) is EXACT
    with pytest.raises(KernelsError, match="triton functions on cpu: its kernels are for GPUs"):
        choice.choose_math("triton", CPU, torch.float32, WIDTH)


class Counted(TorchDispatchMode):
    """Counter for operations, and for token bytes read and written.

    Products and attention are not in the bytes.
    """

    HEAVY = ("linear", "addmm", "scaled_dot_product")

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least = least
        self.operations = 0
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = str(func)
        tensors = [each for each in (made, *args[:1]) if isinstance(each, torch.Tensor)]
        places = {(each.data_ptr(), each.dtype) for each in tensors}
        same = len(tensors) == 2 and len(places) == 1
        writes = func._schema.is_mutable or "gelu_" in name
        if "empty" in name or (same and not writes):
            return made  # views, conversions without change, allocations
        reads = {key: each for key, each in (kwargs or {}).items() if key != "out"}
        self.add(name, *tree_leaves((args, reads, made)))
        return made

    def add(self, name: str, *tensors: Any) -> None:
        self.operations += 1
        if not any(part in name for part in self.HEAVY):
            real = [each for each in tensors if isinstance(each, torch.Tensor)]
            self.bytes += sum(each.nbytes for each in real if each.numel() > self.least)


PAGE = (Path(__file__).parents[3] / "docs" / "kernels.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `([\w-]+)` \| .* \| (\d+) \| (\d+) \|$", PAGE, re.MULTILINE)
COSTS = {name: (int(operations), float(tensors)) for name, operations, tensors in ROWS}
COSTS |= {"triton, fp8": (27, 24.6)}
"""Operations per visit, and token tensors read and written."""


@pytest.mark.parametrize("name", COSTS)
def test_operations_and_traffic_of_a_visit(name, request, monkeypatch):
    """Count a visit in bf16.

    A Triton kernel launch is one operation on its tensors.
    """
    tokens = 192
    heads = 2
    ffn_dim = 691  # feed-forward: 2.7 times the width, as in Wan2.2
    counted = Counted(tokens * WIDTH // 2)
    if name.startswith("triton"):
        module = request.getfixturevalue("triton_math")
        made: BlockMath = module.TritonMath()

        class Launches:
            """Kernel that counts instead of computing."""

            def __getitem__(self, grid: Any) -> Any:
                return lambda *pointers, **_: counted.add("triton", *pointers)

        for kernel in ("rows", "rotated_rows"):
            monkeypatch.setattr(module, kernel, Launches())
    else:
        if name == "comfy-kitchen":
            pytest.importorskip("comfy_kitchen")
        made = choice.choose_math(name, CPU, torch.bfloat16, WIDTH)  # type: ignore[arg-type]
    block = WanBlock(diffusers_block(heads, ffn_dim, torch.bfloat16), BlockSettings(math=made))
    if name.endswith("fp8"):

        def multiply(layer: Fp8Linear, tokens: Codes) -> torch.Tensor:
            counted.operations += 1  # a CPU has no product with the scales inside
            return torch.empty(1, len(tokens.codes), layer.out_features, dtype=tokens.dtype)

        monkeypatch.setattr(Fp8Linear, "multiply", multiply)
        Multiplications(device=CPU, scales_inside=True).prepare(_set_codes(block, "fp8", 0))
    hidden, text, modulation, tables = block_inputs(tokens, heads, torch.bfloat16)
    rotation = made.rotation(*tables)
    with torch.inference_mode(), counted:
        block(hidden, text, modulation, rotation)
    operations, tensors = COSTS[name]
    assert counted.operations == operations
    assert counted.bytes / (tokens * WIDTH * 2) == pytest.approx(tensors, abs=0.5)
