"""Nodes for native models: the inputs of ComfyUI's own loader, the file on disk, and no embedded host."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from wanstream.host.api import ModelStreaming, NeedsComfyUIError, ShareVisits
from wanstream.host.embedded.adapter import EmbeddedHost, Folders
from wanstream.host.embedded.run import InvalidWorkflowError
from wanstream.host.folders import ModelNotFoundError, OutsideFolderError
from wanstream.nodes import WanStreamExtension
from wanstream.nodes.loaders import WanStreamLoadDiffusionModel, WanStreamStreamModel
from wanstream.plan import AutoOffload, OffloadPolicy
from wanstream.tests.support.embedded import run_workflow

NODES = asyncio.run(WanStreamExtension().get_node_list())
FILE = "flux1-dev.safetensors"


class NativeHost(EmbeddedHost):
    """A host that returns the arguments of `load_model` or of `stream_model` as its MODEL."""

    def load_model(self, *arguments: object, **_: object) -> object:
        return arguments

    stream_model = load_model


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "diffusion_models"
    (folder / "sub").mkdir(parents=True)
    for name in (FILE, "sub/other.safetensors", "quantised.gguf"):
        (folder / name).write_bytes(b"old")
    return tmp_path


@pytest.fixture
def host(models: Path) -> Iterator[NativeHost]:
    host = NativeHost()
    with host.opened(Folders(models=models, output=models, input=models)):
        yield host


def test_a_file_is_chosen_as_in_comfyuis_own_loader_and_gguf_files_too(host: NativeHost) -> None:
    name, dtype, *_ = WanStreamLoadDiffusionModel.define_schema().inputs
    assert name.as_dict()["options"] == [FILE, "quantised.gguf", "sub/other.safetensors"]
    assert dtype.as_dict()["options"] == ["default", "fp8_e4m3fn", "fp8_e4m3fn_fast", "fp8_e5m2"]


POLICIES = [None, AutoOffload(), OffloadPolicy.layerwise(prefetch_blocks=2)]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_host_loads_the_file_and_streams_a_model_with_the_settings(
    host: NativeHost, models: Path, policy: Any
) -> None:
    given = {} if policy is None else {"policy": policy}
    output = WanStreamLoadDiffusionModel.execute(unet_name=FILE, weight_dtype="fp8_e4m3fn", **given)
    default = ModelStreaming(policy=policy or AutoOffload())
    assert output.args == ((models / "diffusion_models" / FILE, "fp8_e4m3fn", default),)
    settings: dict[str, Any] = {"share_visits": "on", "lora_on_arrival": True}
    changed = ModelStreaming(policy=policy or AutoOffload(), share_visits=ShareVisits.ON, lora_on_arrival=True)
    assert WanStreamStreamModel.execute(model="a model", **given, **settings).args == (("a model", changed),)


@pytest.mark.parametrize(("name", "error"), [("none.safetensors", ModelNotFoundError), ("../a", OutsideFolderError)])
def test_a_name_is_not_followed_out_of_its_folder(host: NativeHost, name: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        WanStreamLoadDiffusionModel.execute(unet_name=name, weight_dtype="default")


def test_a_file_is_checked_by_its_header_before_anything_runs(
    host: NativeHost, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[tuple[object, ...]] = []
    monkeypatch.setattr(host, "check_model", lambda *given: checked.append(given))
    for unset in ({}, {"weight_dtype": None}, {"weight_dtype": "fp8_e5m2"}, {"weight_dtype": "fp8_e5m2"}):
        assert WanStreamLoadDiffusionModel.validate_inputs(unet_name=FILE, **unset)
    assert WanStreamLoadDiffusionModel.validate_inputs(unet_name=None)
    path = models / "diffusion_models" / FILE
    assert checked == [(path, "default"), (path, "fp8_e5m2")]
    with pytest.raises(ValueError, match="weight_dtype is 'int3': choose default or"):
        WanStreamLoadDiffusionModel.validate_inputs(unet_name=FILE, weight_dtype="int3")


def test_a_file_that_was_replaced_is_loaded_again(host: NativeHost, models: Path) -> None:
    path = models / "diffusion_models" / FILE
    before = WanStreamLoadDiffusionModel.fingerprint_inputs(unet_name=FILE, weight_dtype="default", policy=None)
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
}


@pytest.mark.parametrize("name", NODE_INPUTS)
def test_the_embedded_host_refuses_a_model_before_it_misses_the_nodes_around_it(name: str, models: Path) -> None:
    class_type, inputs = NODE_INPUTS[name]
    prompt = {
        "checkpoint": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "ltx.safetensors"}},
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
    with pytest.raises(NeedsComfyUIError, match=r"Load Diffusion Model .* needs ComfyUI.* use Wan Experts"):
        EmbeddedHost().load_model(models / "diffusion_models" / FILE, "default", None)
    with pytest.raises(NeedsComfyUIError, match=r"Stream Model needs ComfyUI.* use Wan Experts"):
        EmbeddedHost().stream_model("a model", None)
    with pytest.raises(NeedsComfyUIError, match=r"Run of Streamed Model needs ComfyUI.* use Wan Experts"):
        EmbeddedHost().model_run("a model")
