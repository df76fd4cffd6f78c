"""Nodes for native models: inputs as in ComfyUI's loader, the file on disk, no embedded host."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from wanstream.host.embedded.adapter import EmbeddedHost
from wanstream.host.embedded.files import Folders
from wanstream.host.embedded.run import InvalidWorkflowError
from wanstream.host.folders import ModelNotFoundError, OutsideFolderError
from wanstream.host.models import NeedsComfyUIError
from wanstream.host.native_models import Checkpoint, EncoderFiles, ModelStreaming, ShareVisits
from wanstream.nodes import WanStreamExtension
from wanstream.nodes.native.checkpoints import WanStreamLoadCheckpoint
from wanstream.nodes.native.clip import (
    WanStreamDualCLIP,
    WanStreamLoadCLIP,
    WanStreamQuadrupleCLIP,
    WanStreamStreamCLIP,
    WanStreamTripleCLIP,
)
from wanstream.nodes.native.experts import WanStreamJoinExperts, WanStreamSplitExperts
from wanstream.nodes.native.models import WanStreamLoadDiffusionModel, WanStreamStreamModel
from wanstream.plan import AutoOffload
from wanstream.schema import OffloadPolicy
from wanstream.tests.support.embedded import run_workflow

NODES = asyncio.run(WanStreamExtension().get_node_list())
FILE = "flux1-dev.safetensors"


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "diffusion_models"
    (folder / "sub").mkdir(parents=True)
    for name in (FILE, "sub/other.safetensors", "quantised.gguf"):
        (folder / name).write_bytes(b"old")
    return tmp_path


@pytest.fixture
def host(models: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedHost]:
    """A host whose `load_model` and `stream_model` return their arguments."""
    host = EmbeddedHost()
    for name in ("load_model", "stream_model"):
        monkeypatch.setattr(host.native, name, lambda *arguments: arguments)
    with host.opened(Folders(models=models, output=models, input=models)):
        yield host


def test_a_file_is_chosen_as_in_comfyuis_own_loader_and_gguf_files_too(host: EmbeddedHost) -> None:
    name, dtype, *_ = WanStreamLoadDiffusionModel.define_schema().inputs
    assert name.as_dict()["options"] == [FILE, "quantised.gguf", "sub/other.safetensors"]
    assert dtype.as_dict()["options"] == ["default", "fp8_e4m3fn", "fp8_e4m3fn_fast", "fp8_e5m2"]


def test_loaders_of_text_encoders_list_no_gguf(host: EmbeddedHost, models: Path) -> None:
    (_file(models, "text_encoders").parent / "umt5.Q8_0.GGUF").write_bytes(b"packed")
    name, *_ = WanStreamLoadCLIP.define_schema().inputs
    assert name.as_dict()["options"] == [FILE]


POLICIES = [None, AutoOffload(), OffloadPolicy.layerwise(prefetch_blocks=2)]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_host_loads_the_file_and_streams_a_model_with_the_settings(
    host: EmbeddedHost, models: Path, policy: Any
) -> None:
    given = {} if policy is None else {"policy": policy}
    output = WanStreamLoadDiffusionModel.execute(unet_name=FILE, weight_dtype="fp8_e4m3fn", **given)
    default = ModelStreaming(policy=policy or AutoOffload())
    assert output.args == ((models / "diffusion_models" / FILE, "fp8_e4m3fn", default),)
    settings: dict[str, Any] = {"share_visits": "on"}
    changed = ModelStreaming(policy=policy or AutoOffload(), share_visits=ShareVisits.ON)
    assert WanStreamStreamModel.execute(model="a model", **given, **settings).args == (
        ("a model", changed),
    )


def test_experts_are_joined_and_split_by_the_host(
    host: EmbeddedHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host.native, "join_experts", lambda *arguments: arguments)
    joined = WanStreamJoinExperts.execute("high", "low", boundary_ratio=0.9)
    assert joined.args == (("high", "low", 0.9),)
    monkeypatch.setattr(host.native, "split_experts", lambda model: (f"{model} high", "low"))
    assert WanStreamSplitExperts.execute("a").args == ("a high", "low")


def test_the_host_loads_a_checkpoint_with_the_settings(
    host: EmbeddedHost, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    def load(*arguments: Any) -> Checkpoint:
        given.append(arguments)
        return Checkpoint(model="a model", clip=None, vae="a vae")

    monkeypatch.setattr(host.native, "load_checkpoint", load)
    path = _file(models, "checkpoints")
    output = WanStreamLoadCheckpoint.execute(ckpt_name=FILE, share_visits="on")
    assert output.args == ("a model", None, "a vae")
    settings = ModelStreaming(policy=AutoOffload(), share_visits=ShareVisits.ON)
    assert given == [(path, settings)]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_host_loads_text_encoders_that_keep_nothing_unless_a_policy_says_so(
    host: EmbeddedHost, models: Path, monkeypatch: pytest.MonkeyPatch, policy: Any
) -> None:
    for name in ("load_clip", "stream_clip"):
        monkeypatch.setattr(host.native, name, lambda *arguments: arguments)
    path = _file(models, "text_encoders")
    used = policy if isinstance(policy, OffloadPolicy) else OffloadPolicy.layerwise()
    files = EncoderFiles(paths=(path,), kind="wan", on_cpu=True)
    one = WanStreamLoadCLIP.execute(clip_name=FILE, type="wan", device="cpu", policy=policy)
    assert one.args == ((files, used),)
    two = WanStreamDualCLIP.execute(clip_name1=FILE, clip_name2=FILE, type="flux", policy=policy)
    assert two.args == ((EncoderFiles(paths=(path, path), kind="flux"), used),)
    for node, count in ((WanStreamTripleCLIP, 3), (WanStreamQuadrupleCLIP, 4)):
        several = node.execute(policy=policy, **dict.fromkeys(node.FILES, FILE))
        assert several.args == ((EncoderFiles(paths=(path,) * count), used),)
    assert WanStreamStreamCLIP.execute("a clip", policy=policy).args == (("a clip", used),)


def _file(models: Path, folder: str) -> Path:
    path = models / folder / FILE
    path.parent.mkdir()
    path.write_bytes(b"old")
    return path


@pytest.mark.parametrize(
    ("name", "error"), [("none.safetensors", ModelNotFoundError), ("../a", OutsideFolderError)]
)
def test_a_name_is_not_followed_out_of_its_folder(
    host: EmbeddedHost, name: str, error: type[Exception]
) -> None:
    with pytest.raises(error):
        WanStreamLoadDiffusionModel.execute(unet_name=name, weight_dtype="default")


def test_a_file_is_checked_by_its_header_before_anything_runs(
    host: EmbeddedHost, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[tuple[object, ...]] = []
    monkeypatch.setattr(host.native, "check_model", lambda *given: checked.append(given))
    for unset in (
        {},
        {"weight_dtype": None},
        {"weight_dtype": "fp8_e5m2"},
        {"weight_dtype": "fp8_e5m2"},
    ):
        assert WanStreamLoadDiffusionModel.validate_inputs(unet_name=FILE, **unset)
    assert WanStreamLoadDiffusionModel.validate_inputs(unet_name=None)
    path = models / "diffusion_models" / FILE
    assert checked == [(path, "default"), (path, "fp8_e5m2")]
    with pytest.raises(ValueError, match="weight_dtype is 'int3': choose default or"):
        WanStreamLoadDiffusionModel.validate_inputs(unet_name=FILE, weight_dtype="int3")


def test_a_file_that_was_replaced_is_loaded_again(host: EmbeddedHost, models: Path) -> None:
    path = models / "diffusion_models" / FILE
    before = WanStreamLoadDiffusionModel.fingerprint_inputs(
        unet_name=FILE, weight_dtype="default", policy=None
    )
    assert WanStreamLoadDiffusionModel.fingerprint_inputs(unet_name=FILE) == before
    path.write_bytes(b"newer")
    assert WanStreamLoadDiffusionModel.fingerprint_inputs(unet_name=FILE) != before
    assert WanStreamLoadDiffusionModel.fingerprint_inputs(unet_name=None) != before


NODE_INPUTS = {
    "Load Diffusion Model (streamed)": (
        "WanStreamLoadDiffusionModel",
        {"unet_name": FILE, "weight_dtype": "default"},
    ),
    "Stream Model": ("WanStreamStreamModel", {"model": ["checkpoint", 0]}),
    "Join Experts": (
        "WanStreamJoinExperts",
        {"high_noise": ["checkpoint", 0], "low_noise": ["checkpoint", 0], "boundary_ratio": 0.9},
    ),
    "Split Experts": ("WanStreamSplitExperts", {"model": ["checkpoint", 0]}),
    "Stream CLIP": ("WanStreamStreamCLIP", {"clip": ["checkpoint", 1]}),
}


@pytest.mark.parametrize("name", NODE_INPUTS)
def test_the_embedded_host_refuses_a_model_before_it_misses_the_nodes_around_it(
    name: str, models: Path
) -> None:
    class_type, inputs = NODE_INPUTS[name]
    prompt = {
        "checkpoint": {
            "class_type": "CheckpointLoaderSimple",
            "inputs": {"ckpt_name": "ltx.safetensors"},
        },
        "sampler": {"class_type": "KSampler", "inputs": {"model": ["model", 0]}},
        "model": {"class_type": class_type, "inputs": inputs},
    }
    with pytest.raises(InvalidWorkflowError) as refused:
        run_workflow(prompt, nodes=NODES, models=models, output=models, input_dir=models)
    (line,) = refused.value.verdict.lines()
    assert line.startswith(f"{name} needs ComfyUI")
    assert "Wan Experts (streamed) or Wan Model (single)" in line
    error = refused.value.verdict.error
    assert error is not None
    assert (error["type"], error["extra_info"]["node_id"]) == ("needs_comfyui", "model")


def test_an_embedded_host_makes_no_model(models: Path) -> None:
    with pytest.raises(
        NeedsComfyUIError, match=r"Load Diffusion Model .* needs ComfyUI.* use Wan Experts"
    ):
        EmbeddedHost().native.load_model(models / "diffusion_models" / FILE, "default", None)
    with pytest.raises(NeedsComfyUIError, match=r"Stream Model needs ComfyUI.* use Wan Experts"):
        EmbeddedHost().native.stream_model("a model", None)
    with pytest.raises(NeedsComfyUIError, match=r"Join Experts needs ComfyUI.* use Wan Experts"):
        EmbeddedHost().native.join_experts("high", "low", 0.9)
    with pytest.raises(NeedsComfyUIError, match=r"Split Experts needs ComfyUI.* use Wan Experts"):
        EmbeddedHost().native.split_experts("a model")
    with pytest.raises(
        NeedsComfyUIError, match=r"Run of Streamed Model needs ComfyUI.* use Wan Experts"
    ):
        EmbeddedHost().native.model_run("a model")
