"""VAE weights in folders and single files: equal values, native names, refused files."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from diffusers import AutoencoderKLWan
from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers
from safetensors.torch import load_file, save_file

from wanstream.offload.formats.safetensors_header import CheckpointFileError
from wanstream.testing.components import save_vae_file
from wanstream.testing.quantised import quantise
from wanstream.testing.weights import make_vae
from wanstream.tests.support.offload.edited_files import Edits, Tensors, prefixed, rewrite, zeros
from wanstream.tests.support.sampling.runs import normal
from wanstream.wan.vae.vae import VaeInputError, open_vae
from wanstream.wan.vae.weights import FAMILIES

WEIGHTS = "diffusion_pytorch_model.safetensors"
FP8 = torch.float8_e4m3fn
INT8 = torch.int8
MODEL = "model.diffusion_model.blocks.0"
CONV = "decoder.conv1.weight"
WAN21, WAN22 = FAMILIES


@pytest.fixture(scope="module")
def vae_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("vae") / "wan_2.1_vae.safetensors"
    save_vae_file(make_vae(seed=0), path)
    return path


@pytest.fixture
def changed(vae_file, tmp_path):
    """`changed(change)`: a changed copy."""
    return lambda change: rewrite(vae_file, tmp_path / "changed.safetensors", change)


def assert_same_weights(path, other):
    with open_vae(path) as found, open_vae(other) as expected:
        own, others = (vae._load(torch.device("cpu")).state_dict() for vae in (found, expected))
    assert own.keys() == others.keys()
    assert all(torch.equal(own[name], others[name]) for name in own)


@pytest.mark.parametrize("model", ["Wan2.1", "Wan2.2"])
def test_file_is_the_folder_in_use(model, vae_file, tiny_pipeline, wan22_vae):
    """Also with the names of diffusers in a single file."""
    folder = tiny_pipeline()
    file = vae_file
    if model == "Wan2.2":
        folder = wan22_vae
        file = wan22_vae / "wan2.2_vae.safetensors"
    found = []
    for path in (folder, file, folder / "vae" / WEIGHTS):
        with open_vae(path) as vae:
            latents = normal(1, vae.space.channels, 2, 2, 2, seed=0)
            video = vae.decode(latents, device="cpu")
            found.append((vae.space, video, vae.encode(normal(1, 32, 32, 3, seed=0), device="cpu")))
    for space, video, latents in found[1:]:
        assert space == found[0][0]
        assert torch.equal(video, found[0][1])
        assert torch.equal(latents, found[0][2])


@pytest.mark.parametrize("prefix", ["unknown.", "first_stage_model._orig_mod."])
def test_prefix_is_removed(changed, vae_file, prefix):
    assert_same_weights(changed(prefixed(prefix)), vae_file)


@pytest.mark.parametrize(
    ("change", "ignored"),
    [
        ({"optimizer.state.0.step": zeros(1), "global_step": zeros(1)}, "2 tensors .*global_step"),
        (lambda all: {**prefixed("vae.")(all), f"{MODEL}.bias": zeros(3)}, r"blocks\.0\.bias"),
    ],
)
def test_unused_tensors_are_ignored_with_a_note(changed, vae_file, change, ignored):
    path = changed(change)
    assert_same_weights(path, vae_file)
    [note] = open_vae(path).notes
    assert re.search(f"changed.safetensors: .*{ignored}", note)


@pytest.mark.parametrize(("which", "dtype"), [("all", FP8), ("one", torch.float64)], ids=str)
def test_other_precisions_are_converted_with_a_warning(changed, tmp_path, dtype, which):
    path = changed(lambda all: {k: all[k].to(dtype) for k in all if which == "all" or k == CONV})
    (warning,) = open_vae(path).warnings
    assert str(dtype).removeprefix("torch.") in warning
    assert "wan_2.1_vae.safetensors" in warning
    plain = tmp_path / "plain.safetensors"
    rewrite(path, plain, lambda all: {k: v.float() for k, v in all.items()})
    assert_same_weights(path, plain)


def test_half_precision_needs_no_warning(changed):
    path = changed(lambda all: {key: tensor.half() for key, tensor in all.items()})
    with open_vae(path) as vae:
        assert vae.warnings == ()
        found = vae._load(torch.device("cpu")).state_dict()["decoder.conv_in.weight"]
    assert torch.equal(found, load_file(path)[CONV].float())


def test_folder_is_named_by_its_weights(tiny_pipeline, tmp_path):
    folder = shutil.copytree(tiny_pipeline() / "vae", tmp_path / "vae")
    rewrite(
        folder / WEIGHTS,
        folder / WEIGHTS,
        lambda all: {**{key: tensor.to(FP8) for key, tensor in all.items()}, "epoch": zeros(1)},
    )
    vae = open_vae(tmp_path)
    assert [text.startswith(WEIGHTS) for text in (*vae.warnings, *vae.notes)] == [True, True]


def test_scales_are_applied(changed, vae_file, tmp_path):
    codes, factor = quantise(load_file(vae_file)[CONV])
    marker = zeros(1, dtype=codes.dtype)
    path = changed({CONV: codes, "decoder.conv1.scale_weight": factor, "scaled_fp8": marker})
    plain = rewrite(vae_file, tmp_path / "plain.safetensors", {CONV: codes.float() * factor})
    assert_same_weights(path, plain)


@pytest.mark.parametrize(
    ("names", "dropped"),
    [
        ("native", ("encoder.",)),
        ("diffusers", ("encoder.", "conv1.", "quant_conv.")),
        ("Wan2.2", ("encoder.", "conv1.", "quant_conv.")),
        ("Wan2.2 of diffusers", ("encoder.",)),
    ],
)
def test_decoder_alone_decodes_only(vae_file, tiny_pipeline, wan22_vae, tmp_path, names, dropped):
    path = {
        "native": vae_file,
        "diffusers": tiny_pipeline() / "vae" / WEIGHTS,
        "Wan2.2": wan22_vae / "wan2.2_vae.safetensors",
        "Wan2.2 of diffusers": wan22_vae / "vae" / WEIGHTS,
    }[names]
    alone = rewrite(
        path,
        tmp_path / "decoder.safetensors",
        lambda all: {key: None for key in all if key.startswith(dropped)},
    )
    with open_vae(alone) as vae, open_vae(path) as whole:
        latents = normal(1, vae.space.channels, 1, 1, 2, seed=0)
        found, expected = (each.decode(latents, device="cpu") for each in (vae, whole))
        assert torch.equal(found, expected)
        with pytest.raises(VaeInputError, match="has no encoder"):
            vae.encode(torch.zeros(1, 32, 32, 3), device="cpu")


def test_names_of_wan21_are_the_inverse_of_diffusers_converter():
    with torch.device("meta"):
        names = list(AutoencoderKLWan().state_dict())
    native = {WAN21.native_name(name): name for name in names}
    assert convert_wan_vae_to_diffusers(native) == {name: name for name in names}


@pytest.mark.parametrize(
    ("name", "native"),
    [
        ("encoder.down_blocks.1.resnets.0.conv_shortcut", "encoder.downsamples.1.{}.0.shortcut"),
        ("encoder.down_blocks.2.downsampler.time_conv", "encoder.downsamples.2.{}.2.time_conv"),
        ("decoder.up_blocks.0.resnets.2.conv2", "decoder.upsamples.0.{}.2.residual.6"),
        ("decoder.up_blocks.2.upsampler.resample.1", "decoder.upsamples.2.{}.3.resample.1"),
        ("decoder.mid_block.attentions.0.to_qkv", "decoder.middle.1.to_qkv"),
    ],
)
def test_names_of_wan22(name, native):
    inner = "downsamples" if name.startswith("encoder") else "upsamples"
    assert WAN22.native_name(f"{name}.weight") == f"{native.format(inner)}.weight"
    with torch.device("meta"):
        names = list(AutoencoderKLWan.from_config(WAN22.config).state_dict())
    assert len({WAN22.native_name(each) for each in names}) == len(names)


@pytest.mark.parametrize("name", ["decoder.up_blocks.x.resnets.0.norm1.gamma", ""])
@pytest.mark.parametrize("family", FAMILIES)
def test_name_outside_the_vae_is_refused(family, name):
    with pytest.raises(ValueError, match="not a parameter"):
        family.native_name(name)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"decoder.up.0.block.0.conv1.weight": (8, 4, 3, 3)}, r"image model \(.* \[8, 4, 3, 3\]\)"),
        ({"decoder.up_blocks.0.resnets.0.norm1.weight": (512,)}, "of an image model"),
        (
            {"blocks.0.attn.q.weight": (8, 8)},
            r"is not a VAE of Wan: it has 1 tensors \(first: blocks.* \[8, 8\]\); use "
            r"wan_2\.1_vae\.safetensors \(Wan2\.1 and Wan2\.2 A14B\), or "
            r"wan2\.2_vae\.safetensors \(Wan2\.2 5B\)",
        ),
    ],
    ids=["SD and Flux", "SD of diffusers", "no VAE"],
)
def test_other_models_are_refused(tmp_path, tensors, message):
    made = {name: zeros(*shape, dtype=torch.float8_e5m2) for name, shape in tensors.items()}
    save_file(made, tmp_path / "vae.safetensors")
    with pytest.raises(CheckpointFileError, match=message):
        open_vae(tmp_path / "vae.safetensors")


def _average(tensors: Tensors) -> Edits:
    return {f"ema.{key}": tensor.clone() for key, tensor in tensors.items()}


HEAD = "decoder.head.2.weight"
ENCODER = "encoder.conv1.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decoder.head.0.gamma": None}, r"decoder\.head\.0\.gamma \[8, 1, 1, 1\] is missing"),
        ({ENCODER: None}, r"encoder\.conv1\.weight is missing"),
        ({ENCODER: zeros(16, 3, 3, 3)}, r"\[16, 3, 3, 3\]; \[out, in, 3, 3, 3\] is expected"),
        ({"conv2.weight": zeros(48, 48, 1, 1, 1)}, r"rest of the file requires \[16, 16, 1, 1, 1"),
        ({"conv1.bias": zeros(32, dtype=INT8)}, r"conv1\.bias is torch\.int8; one of float32"),
        ({"_orig_mod.conv1.bias": zeros(32)}, r"holds conv1\.bias twice, as .*_orig_mod"),
        (_average, "2 models of one kind, under the prefixes .*'ema.'"),
        (
            {HEAD: zeros(12, 8, 3, 3, 3)},
            r"VAE that doubles the size of the video.*head\.2\.weight has 12 channels.*: use wan_",
        ),
        ({HEAD: zeros(27, 8, 3, 3, 3)}, "a VAE that enlarges the video 3 times"),
        ({HEAD: zeros(5, 8, 3, 3, 3)}, r"weight has 5 channels; 3 are expected: use wan_2\.1_vae"),
        ({"decoder.upsamples.x.residual": zeros(1)}, r"upsamples\.x\.residual does not belong"),
        ({"encoder.norm_out.gamma": zeros(1)}, r"encoder\..* means the same parameter as another"),
    ],
)
def test_wrong_tensors_are_refused(changed, change, message):
    with pytest.raises(CheckpointFileError, match=message):
        open_vae(changed(change))


TIME_CONV = "decoder.upsamples.1.upsamples.3.time_conv.bias"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({HEAD: None}, r"decoder\.head\.2\.weight is missing"),
        ({TIME_CONV: None}, r"decoder\.upsamples\.1\.\S+\.time_conv\.bias \[64\] is missing"),
        ({ENCODER: zeros(4, 3, 3, 3, 3)}, r"\[4, 3, 3, 3, 3\]; the rest .* \[4, 12, 3, 3, 3\]"),
    ],
)
def test_wrong_tensors_of_wan22_are_refused(wan22_vae, tmp_path, change, message):
    path = wan22_vae / "wan2.2_vae.safetensors"
    with pytest.raises(CheckpointFileError, match=message):
        open_vae(rewrite(path, tmp_path / "changed.safetensors", change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("", "JSON"),
        ("[]", "JSON"),
        ({"_class_name": "AutoencoderKL"}, "_class_name is 'AutoencoderKL'"),
        ({"z_dim": 32}, "z_dim is 32, 16 is expected: give the VAE of Wan2.1 .* or of Wan2.2 5B"),
        ({"z_dim": 48}, "is_residual is False, True is expected"),
        ({"base_dim": 32}, r"encoder\.conv_in\.weight is \[8, 3, 3, 3, 3\]"),
        ({"base_dim": "wide"}, "base_dim is 'wide'; a whole number"),
        ({"dim_mult": []}, r"dim_mult is \[\], \[1, 2, 4, 4\] is expected"),
        ({"attn_scales": 1}, "no model that can be built"),
        ({"is_residual": True}, "is missing"),
    ],
    ids=str,
)
def test_wrong_config_is_refused(tiny_pipeline, tmp_path, change, message):
    folder = shutil.copytree(tiny_pipeline() / "vae", tmp_path / "vae")
    config = json.loads((folder / "config.json").read_text())
    text = change if isinstance(change, str) else json.dumps(config | change)
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointFileError, match=message):
        open_vae(folder)


def test_missing_files_are_refused(tiny_pipeline, tmp_path):
    with pytest.raises(CheckpointFileError, match="neither a diffusers pipeline folder"):
        open_vae(tmp_path)
    folder = shutil.copytree(tiny_pipeline() / "vae", tmp_path / "vae")
    (folder / WEIGHTS).unlink()
    with pytest.raises(CheckpointFileError, match=f"neither {WEIGHTS} nor"):
        open_vae(folder)
