"""`wanstream quantise`: files against int8 ConvRot's definition, for every kind of expert."""

from __future__ import annotations

import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file

from wanstream.cli import main
from wanstream.offload.formats import CheckpointFileError
from wanstream.testing import (
    TinyShape,
    make_expert,
    save_expert_file,
    save_expert_folder,
    save_expert_gguf,
)
from wanstream.testing.experts import block_linears, native_layer
from wanstream.tests.support.number_formats import MixedLayout, int8_convrot
from wanstream.tests.support.quantised_files import Fp8Layout, matrices
from wanstream.wan.checkpoint import native_transformer_name, open_expert, write_int8

Write = Callable[[WanTransformer3DModel, Path], object]
SHAPE = TinyShape(layers=1)
FORMS: dict[str, tuple[str, Write]] = {
    "bf16": (
        "a.safetensors",
        lambda model, path: save_expert_file(model, path, dtype=torch.bfloat16),
    ),
    "fp16": (
        "a.safetensors",
        lambda model, path: save_expert_file(model, path, dtype=torch.float16),
    ),
    "fp8": (
        "a.safetensors",
        lambda model, path: save_expert_file(
            model, path, dtype=torch.float16, quantised=Fp8Layout()
        ),
    ),
    "GGUF": ("a.gguf", lambda model, path: save_expert_gguf(model, path, types=matrices("Q8_0"))),
    "folder": (
        "transformer",
        lambda model, path: save_expert_folder(model, path, dtype=torch.float32),
    ),
}


@pytest.fixture(scope="module")
def model() -> WanTransformer3DModel:
    return make_expert(SHAPE, seed=1)


@pytest.mark.parametrize("form", FORMS)
def test_the_file_is_the_quantised_model(
    form: str, model: WanTransformer3DModel, tmp_path: Path
) -> None:
    name, write = FORMS[form]
    source = tmp_path / name
    write(model, source)
    assert main(["quantise", str(source), "--out", str(tmp_path / "new")]) == 0
    [written] = (tmp_path / "new").iterdir()
    stored = load_file(written)
    layers = {native_layer(name): linear for name, linear in block_linears(model).items()}
    for layer, linear in layers.items():
        expected = int8_convrot(linear.weight)
        codes, scale = stored[f"{layer}.weight"], stored[f"{layer}.weight_scale"]
        # The source format rounds the weights, and rotations differ in the last bits between fp32
        # and float64.
        loss = {"fp8": 0.05, "GGUF": 0.02}.get(form, 0.005)
        assert (
            codes.float() * scale
            - expected.tensors["weight"].float() * expected.tensors["weight_scale"]
        ).norm() < (loss + 0.002) * linear.weight.norm()
        assert scale.shape == (linear.out_features, 1)
        marker = bytes(stored[f"{layer}.comfy_quant"].tolist()).decode()
        assert marker == '{"format": "int8_tensorwise", "convrot": true, "convrot_groupsize": 256}'
        if form == "folder":
            assert (codes != expected.tensors["weight"]).float().mean() < 1e-3
            assert torch.allclose(scale, expected.tensors["weight_scale"], rtol=1e-5)
    others = {native_transformer_name(name): value for name, value in model.state_dict().items()}
    for key, value in others.items():
        if key.removesuffix(".weight") not in layers:
            assert torch.allclose(stored[key].float(), value, rtol=0.01, atol=0.02), key
    reopened = open_expert(written)
    assert reopened.config == open_expert(source).config


def test_two_experts_are_written_next_to_them(
    model: WanTransformer3DModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("high", "low"):
        save_expert_file(model, tmp_path / f"{name}.safetensors", dtype=torch.bfloat16)
    arguments = [
        "quantise",
        str(tmp_path / "high.safetensors"),
        str(tmp_path / "low.safetensors"),
        "--to",
        "int8_convrot",
    ]
    assert main(arguments) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "high.safetensors",
        "high_int8_convrot.safetensors",
        "low.safetensors",
        "low_int8_convrot.safetensors",
    ]
    assert main(arguments) == 2
    assert "high_int8_convrot.safetensors exists already" in capsys.readouterr().err


def test_folders_give_their_whole_names_to_the_files(
    model: WanTransformer3DModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [tmp_path / "Wan2.2-T2V" / name for name in ("transformer", "high.noise")]
    for folder in folders:
        save_expert_folder(model, folder, dtype=torch.bfloat16)
    out = ["--out", str(tmp_path / "new")]
    assert main(["quantise", *map(str, folders), *out]) == 0
    names = [f"Wan2.2-T2V_{folder.name}_int8_convrot.safetensors" for folder in reversed(folders)]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == names
    assert (
        main(["quantise", str(folders[0]), str(folders[0]), "--out", str(tmp_path / "other")]) == 2
    )
    assert f"another expert would be written to {tmp_path / 'other'}" in capsys.readouterr().err


def test_the_file_of_a_link_is_next_to_the_link(
    model: WanTransformer3DModel, tmp_path: Path
) -> None:
    save_expert_file(model, tmp_path / "blobs" / "0a1b", dtype=torch.bfloat16)
    (tmp_path / "high.safetensors").symlink_to(tmp_path / "blobs" / "0a1b")
    assert main(["quantise", str(tmp_path / "high.safetensors")]) == 0
    assert (tmp_path / "high_int8_convrot.safetensors").is_file()


def test_a_full_disk_is_refused_with_figures(
    model: WanTransformer3DModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_expert_file(model, tmp_path / "a.safetensors", dtype=torch.bfloat16)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 9, 1))
    with pytest.raises(CheckpointFileError, match=r"needs 0\.0 GB, and 0\.0 GB are free there"):
        write_int8(open_expert(tmp_path / "a.safetensors"), tmp_path / "b.safetensors")


@pytest.mark.parametrize("fault", ["NaN", "int8", "a text"])
def test_what_cannot_be_quantised_leaves_no_file(
    fault: str, model: WanTransformer3DModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "a.safetensors"
    layout = MixedLayout(format_of=lambda _: "int8 rows")
    save_expert_file(
        model, source, dtype=torch.bfloat16, quantised=layout if fault == "int8" else None
    )
    if fault == "NaN":
        tensors: dict[str, Any] = load_file(source)
        tensors["blocks.0.ffn.0.weight"][3, 4] = float("nan")
        save_file(tensors, source)
    if fault == "a text":
        source.write_text("a text")
    assert main(["quantise", str(source)]) == 1
    assert [path.name for path in tmp_path.iterdir()] == [source.name]
    expected = {
        "NaN": "NaN or an infinity",
        "int8": "is in int8 already",
        "a text": "is not a safetensors file",
    }
    assert expected[fault] in capsys.readouterr().err
