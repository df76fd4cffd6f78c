"""Graph files refused by their headers when the graph starts."""

import os
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from wanstream.host.embedded import Folders, NodeFailedError
from wanstream.host.embedded.workflow.validate import InvalidWorkflowError
from wanstream.nodes.loaders import WanStreamExperts, WanStreamOneExpert
from wanstream.nodes.runs import file_checks
from wanstream.nodes.runs.file_checks import SAME_FOLDER
from wanstream.tests.support.host import given_nodes as given
from wanstream.tests.support.host.embedded import embedded_host, run_workflow, validate_workflow
from wanstream.wan.checkpoint import open as checkpoint_open

FILE = "x.safetensors"
VAE = {"vae": "vae.safetensors"}
DECODED = {**VAE, "latent": given.LATENT}
ENCODED = {**VAE, **given.PROMPTS, "width": 32, "height": 32, "frames": 5, "batch_size": 1}
USES = {
    "WanStreamVAEDecode": DECODED,
    "WanStreamDecodeVideo": {**DECODED, "fps": 16.0, "filename_prefix": "x", "crf": 18},
    "WanStreamImageToVideo": {**ENCODED, "image": given.VIDEO},
    "WanStreamFunControl": {**ENCODED, "control_video": given.VIDEO},
    "WanStreamBernini": {**ENCODED, "reference_image": given.VIDEO},
}
"""Nodes with a VAE, with their inputs."""


@pytest.fixture
def models(tmp_path: Path, sample_models: Path) -> Path:
    """A folder with copies of the small files only, for tests to damage."""
    for kind in ("diffusion_models", "text_encoders", "loras", "vae", "clip_vision", "vae_approx"):
        (tmp_path / kind).mkdir()
    for path in ("vae/wan_2.1_vae", "clip_vision/clip_vision_h", "vae_approx/taew2_1"):
        kind = path.split("/")[0]
        place = tmp_path / kind / f"{kind}.safetensors"
        shutil.copyfile(sample_models / f"{path}.safetensors", place)
    given.Given.ran.clear()
    return tmp_path


def run(models, class_type, *, strict=False, **inputs):
    places = {"models": models, "output": models / "output", "input_dir": models}
    graph = given.graph_around(class_type, inputs, frames=1)
    return run_workflow(graph, nodes=given.NODES, **places, strict=strict)


def validate(models, class_type, **inputs):
    graph = given.graph_around(class_type, inputs, frames=1)
    return validate_workflow(
        graph, given.NODES, models=models, input_dir=models, output=models
    ).lines()


def damaged(path, edit):
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def without_encoder(tensors):
    for key in [key for key in tensors if key.startswith(("encoder.", "conv1."))]:
        del tensors[key]


def integer_bias(tensors):
    tensors["conv2.bias"] = tensors["conv2.bias"].to(torch.int8)


@pytest.mark.parametrize("class_type", USES)
def test_unusable_vae_is_refused_before_anything_runs(models, class_type):
    damaged(models / "vae" / "vae.safetensors", integer_bias)
    message = rf"node \({class_type}\): .*vae.safetensors.*is torch.int8"
    with pytest.raises(InvalidWorkflowError, match=message):
        run(models, class_type, **USES[class_type])
    assert given.Given.ran == []


@pytest.mark.parametrize("class_type", USES)
def test_decoder_alone_is_refused_where_a_node_encodes(models, class_type):
    damaged(models / "vae" / "vae.safetensors", without_encoder)
    lines = validate(models, class_type, **USES[class_type])
    assert ("Decode" in class_type) == (not lines)
    assert all("has no encoder, so it only decodes" in line for line in lines)


TEXT = {"text_encoder": FILE, "positive": "", "negative": ""}
LORA = {"experts": given.LATENT}
VISION = {"clip_vision": FILE}
OTHER_FILES = [
    ("TextEncode", "text_encoders", TEXT, "not a UMT5"),
    ("ImageToVideo", "clip_vision", {**USES["WanStreamImageToVideo"], **VISION}, "CLIP vision"),
    ("FunControl", "clip_vision", {**USES["WanStreamFunControl"], **VISION}, "CLIP vision"),
    ("Preview", "vae_approx", {"vae": FILE}, "is not a tiny VAE"),
    ("Lora", "loras", {**LORA, "high_noise": FILE}, "none of its 1 keys"),
    ("Lora", "loras", {**LORA, "low_noise": FILE}, "none of its 1 keys"),
]


@pytest.mark.parametrize(("class_type", "kind", "inputs", "reason"), OTHER_FILES)
def test_other_unusable_files_are_refused(models, class_type, kind, inputs, reason):
    save_file({"some.weight": torch.zeros(2, 2)}, models / kind / FILE)
    lines = validate(models, f"WanStream{class_type}", **inputs)
    (line,) = (line for line in lines if FILE in line)
    assert reason in line


def of_pair(family):
    file = f"wan2.2_{family}_%s_noise_14B_fp8_scaled.safetensors"
    return {"high_noise": file % "high", "low_noise": file % "low", "compute_dtype": "fp32"}


SINGLE = {"file": "wan2.1_t2v_1.3B_fp16.safetensors", "compute_dtype": "fp32"}
T2V = of_pair("t2v")
I2V = of_pair("i2v")
HIGH = T2V["high_noise"]
LOW = T2V["low_noise"]
IMAGE = I2V["low_noise"]
PART = {"blocks.0.attn.q.weight": torch.zeros(2, 2)}
EXPERTS = [
    ({**T2V, "low_noise": IMAGE}, Path.exists, IMAGE, "is I2V, but"),
    ({**T2V, "low_noise": SAME_FOLDER}, Path.exists, HIGH, "is one expert"),
    ({**T2V, "high_noise": given.ANYTHING}, lambda path: os.truncate(path, 9), LOW, "truncated"),
    (SINGLE, lambda path: save_file(PART, path), SINGLE["file"], "is a part of a Wan"),
]


@pytest.mark.parametrize(("inputs", "edit", "file", "reason"), EXPERTS)
def test_unusable_experts_are_refused_on_their_node(
    inputs, edit, file, reason, models, sample_models
):
    for name in {value for value in inputs.values() if str(value).endswith(".safetensors")}:
        shutil.copy(sample_models / "diffusion_models" / name, models / "diffusion_models")
    edit(models / "diffusion_models" / file)
    class_type = "WanStreamOneExpert" if "file" in inputs else "WanStreamExperts"
    lines = validate(models, class_type, **inputs)
    line = next(line for line in lines if line.startswith(f"node node ({class_type})"))
    assert file in line
    assert reason in line


def test_file_is_read_once_for_checks_and_runs(models, sample_models, monkeypatch):
    file = models / "diffusion_models" / str(SINGLE["file"])
    shutil.copyfile(sample_models / "diffusion_models" / file.name, file)
    reads = mock.Mock(wraps=checkpoint_open.read_checkpoint)
    monkeypatch.setattr(checkpoint_open, "read_checkpoint", reads)
    for _ in range(2):
        run(models, "WanStreamOneExpert", **SINGLE)
    assert reads.call_args_list == [mock.call(file)]
    with embedded_host.opened(Folders(models=models, output=models, input=models)):
        pair = {"high_noise": file.name, "low_noise": SAME_FOLDER}
        before = WanStreamOneExpert.fingerprint_inputs(**SINGLE)
        before_pair = WanStreamExperts.fingerprint_inputs(**pair)
        os.utime(file, (1, 1))
        assert WanStreamOneExpert.fingerprint_inputs(**SINGLE) != before
        assert WanStreamExperts.fingerprint_inputs(**pair) != before_pair
    run(models, "WanStreamOneExpert", **SINGLE)
    assert reads.call_args_list == [mock.call(file)] * 2


def test_header_is_read_once_until_the_file_changes(models, monkeypatch):
    opens = mock.Mock(wraps=file_checks.open_vae)
    monkeypatch.setattr(file_checks, "open_vae", opens)
    file = models / "vae" / "vae.safetensors"
    assert [validate(models, "WanStreamVAEDecode", **DECODED) for _ in range(3)] == [[]] * 3
    assert [call.args[0] for call in opens.call_args_list] == [file]
    os.utime(file, (1, 1))
    assert validate(models, "WanStreamVAEDecode", **DECODED) == []
    assert [call.args[0] for call in opens.call_args_list] == [file] * 2


def to_fp8(tensors):
    tensors |= {key: tensor.to(torch.float8_e4m3fn) for key, tensor in tensors.items()}
    tensors["epoch"] = torch.zeros(1)


@pytest.mark.parametrize("class_type", ["WanStreamVAEDecode", "WanStreamImageToVideo"])
def test_loss_of_precision_is_a_warning_and_strictly_an_error(models, class_type):
    damaged(models / "vae" / "vae.safetensors", to_fp8)
    message = r"float8_e4m3fn, which are converted.*strict"
    with pytest.raises((InvalidWorkflowError, NodeFailedError), match=message):
        run(models, class_type, strict=True, **USES[class_type])
    assert given.Given.ran == []
    shown = run(models, class_type, **USES[class_type]).outputs["node"]
    assert ["float8_e4m3fn" in warning for warning in shown["wanstream_warnings"]] == [True]
    assert "1 tensors that this model does not use are ignored: epoch" in shown["text"][0]
