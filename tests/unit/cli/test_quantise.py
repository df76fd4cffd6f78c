"""`wanstream quantise`: files against int8 ConvRot's definition, for every kind of expert."""

import shutil
from collections import namedtuple
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from wanstream import testing
from wanstream.cli import main
from wanstream.cli.arguments import FAILED
from wanstream.offload.formats import CheckpointFileError
from wanstream.testing.experts import block_linears, native_layer
from wanstream.tests.support.wan.number_formats import MixedLayout, int8_convrot
from wanstream.tests.support.wan.quantised_files import Fp8Layout, matrices
from wanstream.wan.checkpoint import native_transformer_name, open_expert, write_int8

SHAPE = testing.TinyShape(layers=1)
FP8 = partial(testing.save_expert_file, dtype=torch.float16, quantised=Fp8Layout())
FORMS = {
    "bf16": ("a.safetensors", partial(testing.save_expert_file, dtype=torch.bfloat16)),
    "fp16": ("a.safetensors", partial(testing.save_expert_file, dtype=torch.float16)),
    "fp8": ("a.safetensors", FP8),
    "GGUF": ("a.gguf", partial(testing.save_expert_gguf, types=matrices("Q8_0"))),
    "folder": ("transformer", partial(testing.save_expert_folder, dtype=torch.float32)),
}
LOSS = {"fp8": 0.05, "GGUF": 0.02}
"""Rounding of weights by the source format, beside 0.5 %."""
MARKER = b'{"format": "int8_tensorwise", "convrot": true, "convrot_groupsize": 256}'


@pytest.fixture(scope="module")
def model():
    return testing.make_expert(SHAPE, seed=1)


@pytest.mark.parametrize("form", FORMS)
def test_file_is_the_quantised_model(form, model, tmp_path):
    name, write = FORMS[form]
    source = tmp_path / name
    write(model, source)
    assert main(["quantise", str(source), "--out", str(tmp_path / "new")]) == 0
    [written] = (tmp_path / "new").iterdir()
    stored = load_file(written)
    layers = {native_layer(name): linear for name, linear in block_linears(model).items()}
    for layer, linear in layers.items():
        codes = stored[f"{layer}.weight"]
        scale = stored[f"{layer}.weight_scale"]
        expected = int8_convrot(linear.weight).tensors
        error = codes.float() * scale - expected["weight"].float() * expected["weight_scale"]
        # Rotations differ in the last bits between fp32 and float64.
        assert error.norm() < (LOSS.get(form, 0.005) + 0.002) * linear.weight.norm()
        assert scale.shape == (linear.out_features, 1)
        assert bytes(stored[f"{layer}.comfy_quant"].tolist()) == MARKER
        if form == "folder":
            assert (codes != expected["weight"]).float().mean() < 1e-3
            assert torch.allclose(scale, expected["weight_scale"], rtol=1e-5)
    for name, value in model.state_dict().items():
        key = native_transformer_name(name)
        if key.removesuffix(".weight") not in layers:
            assert torch.allclose(stored[key].float(), value, rtol=0.01, atol=0.02), key
    assert open_expert(written).config == open_expert(source).config


def test_two_experts_are_written_next_to_them_or_to_their_link(model, tmp_path, refusal):
    blob, high, low = (tmp_path / name for name in ("0a1b", "high.safetensors", "low.safetensors"))
    for path in (blob, low):
        testing.save_expert_file(model, path, dtype=torch.bfloat16)
    high.symlink_to(blob)
    command = ["quantise", str(high), str(low), "--to", "int8_convrot"]
    assert main(command) == 0
    names = [f"{name}{end}" for name in ("high", "low") for end in ("", "_int8_convrot")]
    assert sorted(path.stem for path in tmp_path.glob("*.safetensors")) == names
    assert "high_int8_convrot.safetensors exists already" in refusal(*command)


def test_folders_give_their_whole_names_to_the_files(model, tmp_path, refusal):
    folders = [tmp_path / "Wan2.2-T2V" / name for name in ("high.noise", "transformer")]
    for folder in folders:
        testing.save_expert_folder(model, folder, dtype=torch.bfloat16)
    new = tmp_path / "new"
    other = tmp_path / "other"
    assert main(["quantise", *map(str, folders), "--out", str(new)]) == 0
    names = [f"Wan2.2-T2V_{folder.name}_int8_convrot.safetensors" for folder in folders]
    assert sorted(path.name for path in new.iterdir()) == names
    said = refusal("quantise", str(folders[0]), str(folders[0]), "--out", str(other))
    assert f"another expert would be written to {other}" in said


def test_full_disk_is_refused_with_figures(model, tmp_path, monkeypatch):
    testing.save_expert_file(model, tmp_path / "a.safetensors", dtype=torch.bfloat16)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 9, 1))
    with pytest.raises(CheckpointFileError, match=r"needs 0\.0 GB, and 0\.0 GB are free there"):
        write_int8(open_expert(tmp_path / "a.safetensors"), tmp_path / "b.safetensors")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("NaN", "NaN or an infinity"),
        ("int8", "is in int8 already"),
        ("a text", "is not a safetensors file"),
    ],
)
def test_unusable_files_leave_no_file(fault, words, model, tmp_path, refusal):
    source = tmp_path / "a.safetensors"
    layout = MixedLayout(format_of=lambda _: "int8 rows") if fault == "int8" else None
    testing.save_expert_file(model, source, dtype=torch.bfloat16, quantised=layout)
    if fault == "NaN":
        tensors = load_file(source)
        tensors["blocks.0.ffn.0.weight"][3, 4] = float("nan")
        save_file(tensors, source)
    if fault == "a text":
        source.write_text("a text")
    assert words in refusal("quantise", str(source), code=FAILED)
    assert [path.name for path in tmp_path.iterdir()] == [source.name]
