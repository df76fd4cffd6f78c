"""Graph files refused by their headers when the graph starts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from wanstream.host.embedded.files import Folders
from wanstream.host.embedded.run import NodeFailedError
from wanstream.host.embedded.workflow.validate import InvalidWorkflowError
from wanstream.nodes.loaders import WanStreamExperts, WanStreamOneExpert
from wanstream.nodes.runs import file_checks
from wanstream.nodes.runs.file_checks import SAME_FOLDER
from wanstream.tests.support.embedded import embedded_host, run_workflow, validate_workflow
from wanstream.tests.support.given_nodes import (
    ANYTHING,
    LATENT,
    NODES,
    PROMPTS,
    VIDEO,
    Given,
    graph_around,
)
from wanstream.wan.checkpoint import open as checkpoint_open
from wanstream.wan.checkpoint.files import read_checkpoint

SIZE = {"width": 32, "height": 32, "frames": 5, "batch_size": 1}

Tensors = dict[str, torch.Tensor]


USES: dict[str, dict[str, Any]] = {
    "WanStreamVAEDecode": {"vae": "vae.safetensors", "latent": LATENT},
    "WanStreamDecodeVideo": {
        "vae": "vae.safetensors",
        "latent": LATENT,
        "fps": 16.0,
        "filename_prefix": "x",
        "crf": 18,
    },
    "WanStreamImageToVideo": {"vae": "vae.safetensors", "image": VIDEO, **PROMPTS, **SIZE},
    "WanStreamFunControl": {"vae": "vae.safetensors", "control_video": VIDEO, **PROMPTS, **SIZE},
    "WanStreamBernini": {"vae": "vae.safetensors", "reference_image": VIDEO, **PROMPTS, **SIZE},
}
"""Nodes with a VAE, with their inputs."""


@pytest.fixture
def models(tmp_path: Path, sample_models: Path) -> Path:
    """A folder with copies of the small files only, for tests to damage."""
    for kind, name in (
        ("vae", "wan_2.1_vae"),
        ("clip_vision", "clip_vision_h"),
        ("vae_approx", "taew2_1"),
    ):
        (tmp_path / kind).mkdir()
        shutil.copyfile(
            sample_models / kind / f"{name}.safetensors", tmp_path / kind / f"{kind}.safetensors"
        )
    (tmp_path / "diffusion_models").mkdir()
    (tmp_path / "text_encoders").mkdir()
    (tmp_path / "loras").mkdir()
    Given.ran.clear()
    return tmp_path


def run(models: Path, class_type: str, *, strict: bool = False, **inputs: Any) -> Any:
    return run_workflow(
        graph_around(class_type, inputs, frames=1),
        nodes=NODES,
        models=models,
        output=models / "output",
        input_dir=models,
        strict=strict,
    )


def damaged(path: Path, edit: Callable[[Tensors], Any]) -> None:
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def of_another_model(tensors: Tensors) -> None:
    tensors.clear()
    tensors["blocks.0.attn.q.weight"] = torch.zeros(2, 2)


def without_encoder(tensors: Tensors) -> None:
    for key in [key for key in tensors if key.startswith(("encoder.", "conv1."))]:
        del tensors[key]


@pytest.mark.parametrize("class_type", USES)
@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (
            lambda t: t.update({"decoder.head.2.weight": torch.zeros(12, 8, 3, 3, 3)}),
            "doubles the size of the video",
        ),
        (lambda t: t.pop("decoder.head.0.gamma"), "is missing"),
        (of_another_model, "is not a VAE of Wan"),
        (lambda t: t.update({"conv2.bias": t["conv2.bias"].to(torch.int8)}), "is torch.int8"),
    ],
    ids=["a larger head", "a tensor less", "another model", "a dtype"],
)
def test_a_vae_is_refused_before_anything_runs(
    models: Path, class_type: str, edit: Callable[[Tensors], Any], reason: str
) -> None:
    damaged(models / "vae" / "vae.safetensors", edit)
    with pytest.raises(
        InvalidWorkflowError, match=rf"node \({class_type}\): .*vae.safetensors.*{reason}"
    ):
        run(models, class_type, **USES[class_type])
    assert Given.ran == []


@pytest.mark.parametrize("class_type", USES)
def test_a_decoder_alone_is_refused_where_a_node_encodes(models: Path, class_type: str) -> None:
    damaged(models / "vae" / "vae.safetensors", without_encoder)
    if "Decode" in class_type:
        assert validate(models, class_type, **USES[class_type]) == []
    else:
        with pytest.raises(InvalidWorkflowError, match="has no encoder, so it only decodes"):
            run(models, class_type, **USES[class_type])


def validate(models: Path, class_type: str, **inputs: Any) -> list[str]:
    prompt = graph_around(class_type, inputs, frames=1)
    return validate_workflow(prompt, NODES, models=models, input_dir=models, output=models).lines()


OTHER_FILES = [
    (
        "WanStreamTextEncode",
        "text_encoders",
        {"text_encoder": "x.safetensors", "positive": "", "negative": ""},
        "not a UMT5",
    ),
    (
        "WanStreamImageToVideo",
        "clip_vision",
        {**USES["WanStreamImageToVideo"], "clip_vision": "x.safetensors"},
        "CLIP vision",
    ),
    (
        "WanStreamFunControl",
        "clip_vision",
        {**USES["WanStreamFunControl"], "clip_vision": "x.safetensors"},
        "CLIP vision",
    ),
    ("WanStreamPreview", "vae_approx", {"vae": "x.safetensors"}, "is not a tiny VAE"),
    (
        "WanStreamLora",
        "loras",
        {"experts": LATENT, "high_noise": "x.safetensors"},
        "none of its 1 keys",
    ),
    (
        "WanStreamLora",
        "loras",
        {"experts": LATENT, "low_noise": "x.safetensors"},
        "none of its 1 keys",
    ),
]


@pytest.mark.parametrize(("class_type", "kind", "inputs", "reason"), OTHER_FILES)
def test_other_files_are_refused_before_anything_runs(
    models: Path, class_type: str, kind: str, inputs: dict[str, Any], reason: str
) -> None:
    save_file({"some.weight": torch.zeros(2, 2)}, models / kind / "x.safetensors")
    (line,) = [line for line in validate(models, class_type, **inputs) if "x.safetensors" in line]
    assert reason in line
    (models / kind / "x.safetensors").write_bytes(b"<html>404")
    (line,) = [line for line in validate(models, class_type, **inputs) if "x.safetensors" in line]
    assert "web page" in line


def cut(path: Path) -> None:
    os.truncate(path, 9999)


def of_pair(family: str, high: str = "high", low: str = "low") -> dict[str, Any]:
    return {
        "high_noise": f"wan2.2_{family}_{high}_noise_14B_fp8_scaled.safetensors",
        "low_noise": f"wan2.2_{family}_{low}_noise_14B_fp8_scaled.safetensors",
        "compute_dtype": "fp32",
    }


TI2V = "wan2.2_ti2v_5B_fp16.safetensors"
SINGLE = {"file": "wan2.1_t2v_1.3B_fp16.safetensors", "compute_dtype": "fp32"}
T2V, I2V = of_pair("t2v"), of_pair("i2v")
EXPERTS: list[tuple[str, dict[str, Any], Callable[[Path], Any], str, str]] = [
    (
        "WanStreamExperts",
        {**T2V, "low_noise": I2V["low_noise"]},
        Path.exists,
        I2V["low_noise"],
        "is I2V, but",
    ),
    ("WanStreamExperts", {**T2V, "low_noise": TI2V}, Path.exists, TI2V, "a single model"),
    (
        "WanStreamExperts",
        {**T2V, "low_noise": SAME_FOLDER},
        Path.exists,
        T2V["high_noise"],
        "is one expert",
    ),
    (
        "WanStreamExperts",
        T2V,
        lambda path: path.write_bytes(b"<html>404"),
        T2V["low_noise"],
        "web page",
    ),
    ("WanStreamExperts", T2V, cut, T2V["high_noise"], "truncated"),
    (
        "WanStreamExperts",
        T2V,
        lambda path: damaged(path, of_another_model),
        T2V["low_noise"],
        "is a part of a Wan",
    ),
    (
        "WanStreamExperts",
        {**T2V, "high_noise": ANYTHING},
        lambda path: os.truncate(path, 9),
        T2V["low_noise"],
        "truncated",
    ),
    (
        "WanStreamOneExpert",
        {**SINGLE, "file": I2V["low_noise"]},
        Path.exists,
        I2V["low_noise"],
        "no image branch",
    ),
    (
        "WanStreamOneExpert",
        SINGLE,
        lambda path: path.write_bytes(b"<html>404"),
        SINGLE["file"],
        "web page",
    ),
    (
        "WanStreamOneExpert",
        SINGLE,
        lambda path: damaged(path, of_another_model),
        SINGLE["file"],
        "is a part of a Wan",
    ),
]


@pytest.mark.parametrize(("class_type", "inputs", "edit", "file", "reason"), EXPERTS)
def test_experts_are_refused_on_their_node_before_anything_runs(
    class_type: str,
    inputs: dict[str, Any],
    edit: Callable[[Path], Any],
    file: str,
    reason: str,
    models: Path,
    sample_models: Path,
) -> None:
    for name in filter(lambda value: str(value).endswith(".safetensors"), inputs.values()):
        shutil.copyfile(
            sample_models / "diffusion_models" / name, models / "diffusion_models" / name
        )
    edit(models / "diffusion_models" / file)
    (line,) = [
        line for line in validate(models, class_type, **inputs) if line.startswith("node node")
    ][:1]
    assert class_type in line
    assert file in line
    assert reason in line


def test_an_expert_is_read_once_for_the_check_and_the_run(
    models: Path, sample_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = models / "diffusion_models" / str(SINGLE["file"])
    shutil.copyfile(sample_models / "diffusion_models" / file.name, file)
    read: list[Path] = []
    monkeypatch.setattr(
        checkpoint_open, "read_checkpoint", lambda path: read.append(path) or read_checkpoint(path)
    )
    run(models, "WanStreamOneExpert", **SINGLE)
    run(models, "WanStreamOneExpert", **SINGLE)
    assert read == [file]
    with embedded_host.opened(Folders(models=models, output=models, input=models)):
        before = WanStreamOneExpert.fingerprint_inputs(**SINGLE)
        pair = {"high_noise": file.name, "low_noise": SAME_FOLDER}
        before_pair = WanStreamExperts.fingerprint_inputs(**pair)
        os.utime(file, (1, 1))
        assert WanStreamOneExpert.fingerprint_inputs(**SINGLE) != before
        assert WanStreamExperts.fingerprint_inputs(**pair) != before_pair
    run(models, "WanStreamOneExpert", **SINGLE)
    assert read == [file] * 2


def test_a_header_is_read_once_until_the_file_changes(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Path] = []
    monkeypatch.setattr(
        file_checks, "open_vae", lambda path, *rest: opened.append(path) or open_vae(path, *rest)
    )
    from wanstream.wan.vae import open_vae

    inputs, file = USES["WanStreamVAEDecode"], models / "vae" / "vae.safetensors"
    assert [validate(models, "WanStreamVAEDecode", **inputs) for _ in range(3)] == [[]] * 3
    assert opened == [file]
    os.utime(file, (1, 1))
    assert validate(models, "WanStreamVAEDecode", **inputs) == []
    assert opened == [file] * 2


@pytest.mark.parametrize(
    "class_type", ["WanStreamVAEDecode", "WanStreamDecodeVideo", "WanStreamImageToVideo"]
)
def test_a_loss_of_precision_is_a_warning_on_the_node_and_an_error_in_strict_mode(
    models: Path, class_type: str
) -> None:
    damaged(
        models / "vae" / "vae.safetensors",
        lambda tensors: (
            tensors.update({k: t.to(torch.float8_e4m3fn) for k, t in tensors.items()})
            or tensors.update(epoch=torch.zeros(1))
        ),
    )
    with pytest.raises(
        (InvalidWorkflowError, NodeFailedError), match=r"float8_e4m3fn, which are converted.*strict"
    ):
        run(models, class_type, strict=True, **USES[class_type])
    assert Given.ran == []
    shown = run(models, class_type, **USES[class_type]).outputs["node"]
    assert ["float8_e4m3fn" in warning for warning in shown["wanstream_warnings"]] == [True]
    assert "1 tensors that this model does not use are ignored: epoch" in shown["text"][0]
