"""Kernels chosen on the loaders: kept in the reference; missing packages are reported."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from wanstream.block_kernels import INDUCTOR, Kernels
from wanstream.block_kernels.attention import KernelsError
from wanstream.devices import compute_dtype
from wanstream.host import current_host, io
from wanstream.nodes.loaders import WanStreamExperts, WanStreamOneExpert
from wanstream.nodes.runs.benchmark import _describe_experts
from wanstream.schema.refs.experts import ExpertsRef
from wanstream.testing.model import T2V_FILE

PAIR = {
    "high_noise": "wan2.2_t2v_high_noise_14B_fp16.safetensors",
    "low_noise": "wan2.2_t2v_low_noise_14B_fp16.safetensors",
}
LOADERS = [(WanStreamExperts, PAIR), (WanStreamOneExpert, {"file": Path(T2V_FILE).name})]


pytestmark = pytest.mark.usefixtures("opened_test_model")


def loaded(loader: type[io.ComfyNode], files: dict[str, str], **kernels: object) -> ExpertsRef:
    output = loader.execute(**files, compute_dtype="fp32", **kernels)  # type: ignore[attr-defined]
    found: ExpertsRef = output.args[0]
    return found


@pytest.mark.parametrize(("loader", "files"), LOADERS, ids=["pair", "one"])
def test_the_choice_travels_by_value_and_reopens_nothing(
    loader: type[io.ComfyNode], files: dict[str, str]
) -> None:
    before = loaded(loader, files)
    pair = current_host().models.experts(before)
    chosen = loaded(loader, files, attention="sdpa", compile=True)
    assert chosen == replace(before, attention="sdpa", compile=True) != before
    assert current_host().models.experts(chosen) is pair
    assert pair.kernels == Kernels(attention="sdpa", compiler=INDUCTOR)
    assert current_host().models.experts(before).kernels == Kernels()


@pytest.mark.parametrize(("loader", "files"), LOADERS, ids=["pair", "one"])
@pytest.mark.skipif(
    importlib.util.find_spec("sageattention") is not None, reason="sageattention is installed"
)
def test_a_package_that_is_missing_is_said_by_the_loader(
    loader: type[io.ComfyNode], files: dict[str, str]
) -> None:
    with pytest.raises(
        KernelsError,
        match=r"attention 'sage' needs sageattention 2\.1\.1 or later, which cannot be",
    ):
        loaded(loader, files, attention="sage")
    assert loaded(loader, files, attention="sdpa").attention == "sdpa"


def test_a_report_names_what_was_chosen() -> None:
    plain = ExpertsRef(high_noise=Path("high"), low_noise=Path("low"))
    words = _describe_experts(
        replace(plain, attention="sage", compile=True, arithmetic="as stored")
    )
    changed = {"Attention": "sage", "Blocks": "compiled", "Multiplied in": "as stored"}
    assert words == {**_describe_experts(plain), **changed}


@pytest.mark.parametrize(("loader", "files"), LOADERS, ids=["pair", "one"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_auto_is_resolved_where_it_is_used_and_stays_auto_for_workers(
    dtype: torch.dtype,
    loader: type[io.ComfyNode],
    files: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A driver without a GPU must not choose the dtype for workers with GPUs."""
    monkeypatch.setattr(compute_dtype, "auto_dtype", {torch.device("cpu"): dtype}.__getitem__)
    with caplog.at_level(logging.INFO):
        ref = loader.execute(**files, compute_dtype="auto").args[0]  # type: ignore[attr-defined]
    name = str(dtype).removeprefix("torch.")
    assert ref.compute_dtype == "auto"
    pair = current_host().models.experts(ref)
    assert pair.compute_dtype == dtype
    assert current_host().models.experts(replace(ref, compute_dtype=name)) is pair, (
        "the same dtype chosen is the same pair"
    )
    assert f"compute_dtype auto: the blocks compute in {name} on cpu" in caplog.text
    assert loader.execute(**files, compute_dtype="fp16").args[0].compute_dtype == "float16"  # type: ignore[attr-defined]
    (choice,) = (each for each in loader.define_schema().inputs if each.id == "compute_dtype")
    assert choice.as_dict()["default"] == "auto"
