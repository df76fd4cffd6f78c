"""Decoding in one pass: kernel choice, failing kernels, and bits in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import itertools
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from wanstream.offload.formats import MXFP8, NVFP4, EightBit, one_pass
from wanstream.offload.formats.decode import decode_tensor, prepare_decoding
from wanstream.offload.formats.layout import block_format
from wanstream.offload.formats.one_pass import StoredForm, unavailable
from wanstream.tests.support.offload.stored_forms import FORMS

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn


U8 = torch.uint8


@pytest.fixture(scope="module")
def interpreted() -> Iterator[ModuleType]:
    """Kernels for Triton's interpreter.

    The kernel module itself, if imported, keeps the device kernels.
    """
    pytest.importorskip("triton")
    name = "wanstream.offload.formats.interpreted_kernels"
    file = Path(one_pass.__file__).with_name("triton_kernels.py")
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        assert module.INTERPRETED
        yield module


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Count the CPU as a device with Triton."""
    monkeypatch.setattr(one_pass, "FAMILIES", ("cpu",))
    monkeypatch.setattr(one_pass, "_unusable", lambda: None)
    one_pass.refusal.cache_clear()
    yield monkeypatch
    one_pass.refusal.cache_clear()


CASES = [*zip(FORMS, itertools.cycle([torch.float32, torch.float16, torch.bfloat16]), strict=False)]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, about infinite products
@pytest.mark.parametrize(("form", "computed"), CASES, ids=str)
def test_a_kernel_has_the_bits_of_torch(interpreted, monkeypatch, form, computed):
    monkeypatch.setattr(one_pass, "_kernels", lambda: interpreted)
    stored, shape, scale = one_pass.sample(form)
    expected = torch.empty(shape, dtype=computed)
    found = torch.full(shape, 7, dtype=computed)
    decode_tensor(stored, expected, packing=form.packing, scale=scale)
    assert form.has_kernel
    one_pass.launch(stored, found, form.packing, scale, {})
    assert one_pass.same_bits(found, expected).all()


@pytest.mark.parametrize(
    ("form", "shape", "by_row", "units"),
    [
        (StoredForm(dtype=FP8), (5, 16), False, 5),
        (StoredForm(dtype=FP8), (4, 20), False, 5),
        (StoredForm(dtype=FP8), (3, 20), False, None),
        (StoredForm(dtype=FP8, scaled=True), (4, 20), True, None),
        (StoredForm(dtype=FP8, scaled=True), (4, 96), True, 6),
        (StoredForm(dtype=FP8, scaled=True), (96,), False, 6),
        (StoredForm(dtype=U8, packing=EightBit()), (4, 96), False, 6),
        (StoredForm(dtype=U8, packing=EightBit()), (4, 40), False, None),
        (StoredForm(dtype=U8, packing=EightBit(by_row=False)), (4, 40), False, 10),
        (StoredForm(dtype=U8, packing=EightBit(block=32)), (4, 96), False, 2),
        (StoredForm(dtype=U8, packing=EightBit(block=8)), (4, 96), False, None),
        (StoredForm(dtype=U8, packing=MXFP8), (3, 32), False, 6),
    ],
    ids=str,
)
def test_units_do_not_cross_a_scale(form, shape, by_row, units):
    assert form.units_per_scale(shape, by_row=by_row) == units


@pytest.mark.parametrize(
    "form",
    [
        StoredForm(dtype=U8, packing=EightBit(group=16)),
        StoredForm(dtype=U8, packing=EightBit(block=32, by_row=False)),
        StoredForm(dtype=U8, packing=NVFP4),
        StoredForm(dtype=torch.bfloat16),
        StoredForm(dtype=torch.float16, scaled=True),
    ],
    ids=str,
)
def test_other_forms_have_no_kernel(form):
    assert not form.has_kernel


def test_reasons_against_triton(monkeypatch):
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    one_pass._unusable.cache_clear()
    assert unavailable(cuda) == "Triton is not installed"
    assert unavailable(CPU) == "Triton has no kernels for cpu"
    one_pass._unusable.cache_clear()


def exact(stored: torch.Tensor, into: torch.Tensor, *form: object) -> None:
    into.copy_(stored.float())


def wrong(stored: torch.Tensor, into: torch.Tensor, *form: object) -> None:
    into.copy_(stored.float()).view(-1)[3] = -77


def fails(stored: torch.Tensor, into: torch.Tensor, *form: object) -> None:
    raise ValueError("at 1:1: here\nno assembler")  # compilers raise their own types


def sixteens() -> tuple[torch.Tensor, torch.Tensor]:
    """Return a stored matrix, and memory for its values."""
    return torch.randn(16, 16).to(FP8), torch.empty(16, 16)


REASONS = [(exact, None), (wrong, "1 of 7,104 values of the test differ")]
REASONS += [(fails, "it fails with ValueError: no assembler")]


@pytest.mark.parametrize(("kernel", "reason"), REASONS)
def test_a_kernel_is_used_if_its_test_passes(on_device, caplog, kernel, reason):
    tested = []
    stored, into = sixteens()

    def launch(*given: torch.Tensor) -> None:
        tested.append(len(given[0]))
        kernel(*given)

    on_device.setattr(one_pass, "launch", launch)
    layout = block_format({"a": ((16, 16), FP8)}, torch.float32)
    caplog.set_level(logging.WARNING, "wanstream.kernels")
    prepare_decoding([layout, layout], CPU)
    assert tested == [37]
    for _ in range(2):
        decode_tensor(stored, into)
    assert torch.equal(into, stored.float())
    assert tested == ([37, 16, 16] if reason is None else [37])
    words = f"float8_e4m3fn is decoded on cpu by torch's operations, not in one pass: {reason}"
    assert [record.getMessage() for record in caplog.records] == ([] if reason is None else [words])


def test_a_lack_of_memory_is_not_a_fault_of_a_kernel(on_device):
    def full(*given: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    stored, into = sixteens()
    with on_device.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(one_pass, "launch", full)
        decode_tensor(stored, into)
    on_device.setattr(one_pass, "launch", exact)
    decode_tensor(stored, into)
    assert torch.equal(into, stored.float())
