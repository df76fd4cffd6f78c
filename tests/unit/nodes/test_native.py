"""Nodes for native models: inputs as in ComfyUI's loader, the file on disk, no embedded host."""

from pathlib import Path
from unittest import mock

import pytest

from wanstream.host.embedded import EmbeddedHost, Folders
from wanstream.host.embedded.run import InvalidWorkflowError
from wanstream.host.folders import ModelNotFoundError, OutsideFolderError
from wanstream.host.models import NeedsComfyUIError
from wanstream.host.native_models import Checkpoint, EncoderFiles, ModelStreaming, ShareVisits
from wanstream.nodes.native import clip
from wanstream.nodes.native.checkpoints import WanStreamLoadCheckpoint
from wanstream.nodes.native.experts import WanStreamJoinExperts, WanStreamSplitExperts
from wanstream.nodes.native.models import WanStreamLoadDiffusionModel, WanStreamStreamModel
from wanstream.plan import AutoOffload
from wanstream.schema import OffloadPolicy
from wanstream.tests.support.host.embedded import run_workflow
from wanstream.tests.support.host.given_nodes import NODES
from wanstream.tests.support.host.shipped import node

FILE = "flux1-dev.safetensors"
POLICIES = [None, AutoOffload(), OffloadPolicy.layerwise(prefetch_blocks=2)]
RETURNED = ("load_model", "stream_model", "join_experts", "load_clip", "stream_clip")


@pytest.fixture
def models(tmp_path: Path) -> Path:
    for name in (FILE, "sub/other.safetensors", "quantised.gguf"):
        for folder in ("diffusion_models", "checkpoints", "text_encoders"):
            (tmp_path / folder / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / name).write_bytes(b"old")
    return tmp_path


@pytest.fixture
def host(models, monkeypatch):
    """A host whose loaders return their arguments."""
    host = EmbeddedHost()
    for name in RETURNED:
        monkeypatch.setattr(host.native, name, lambda *arguments: arguments)
    with host.opened(Folders(models=models, output=models, input=models)):
        yield host


@pytest.mark.usefixtures("host")
def test_files_are_listed_as_in_comfyui_with_gguf_models():
    name, dtype, *_ = WanStreamLoadDiffusionModel.define_schema().inputs
    assert name.as_dict()["options"] == [FILE, "quantised.gguf", "sub/other.safetensors"]
    assert dtype.as_dict()["options"] == ["default", "fp8_e4m3fn", "fp8_e4m3fn_fast", "fp8_e5m2"]
    encoder, *_ = clip.WanStreamLoadCLIP.define_schema().inputs
    assert encoder.as_dict()["options"] == [FILE, "sub/other.safetensors"]


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("policy", POLICIES)
def test_host_loads_and_streams_models_with_the_settings(models, policy):
    given = {} if policy is None else {"policy": policy}
    used = policy or AutoOffload()
    path = models / "diffusion_models" / FILE
    output = WanStreamLoadDiffusionModel.execute(unet_name=FILE, weight_dtype="fp8_e4m3fn", **given)
    assert output.args == ((path, "fp8_e4m3fn", ModelStreaming(policy=used)),)
    output = WanStreamStreamModel.execute(model="a model", **given, share_visits="on")
    assert output.args == (("a model", ModelStreaming(policy=used, share_visits=ShareVisits.ON)),)


def test_host_joins_splits_and_opens_checkpoints(host, models, monkeypatch):
    joined = WanStreamJoinExperts.execute("high", "low", boundary_ratio=0.9)
    assert joined.args == (("high", "low", 0.9),)
    monkeypatch.setattr(host.native, "split_experts", lambda model: (f"{model} high", "low"))
    assert WanStreamSplitExperts.execute("a").args == ("a high", "low")
    load = mock.Mock(return_value=Checkpoint(model="a model", clip=None, vae="a vae"))
    monkeypatch.setattr(host.native, "load_checkpoint", load)
    output = WanStreamLoadCheckpoint.execute(ckpt_name=FILE, share_visits="on")
    assert output.args == ("a model", None, "a vae")
    settings = ModelStreaming(policy=AutoOffload(), share_visits=ShareVisits.ON)
    load.assert_called_once_with(models / "checkpoints" / FILE, settings)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("policy", POLICIES)
def test_text_encoders_keep_nothing_unless_a_policy_says_so(models, policy):
    path = models / "text_encoders" / FILE
    used = policy if isinstance(policy, OffloadPolicy) else OffloadPolicy.layerwise()
    files = EncoderFiles(paths=(path,), kind="wan", on_cpu=True)
    one = clip.WanStreamLoadCLIP.execute(clip_name=FILE, type="wan", device="cpu", policy=policy)
    assert one.args == ((files, used),)
    two = clip.WanStreamDualCLIP.execute(
        clip_name1=FILE, clip_name2=FILE, type="flux", policy=policy
    )
    assert two.args == ((EncoderFiles(paths=(path, path), kind="flux"), used),)
    for several, count in ((clip.WanStreamTripleCLIP, 3), (clip.WanStreamQuadrupleCLIP, 4)):
        output = several.execute(policy=policy, **dict.fromkeys(several.FILES, FILE))
        assert output.args == ((EncoderFiles(paths=(path,) * count), used),)
    assert clip.WanStreamStreamCLIP.execute("a clip", policy=policy).args == (("a clip", used),)


@pytest.mark.usefixtures("host")
def test_name_is_not_followed_out_of_its_folder():
    for name, error in (("none.safetensors", ModelNotFoundError), ("../a", OutsideFolderError)):
        with pytest.raises(error):
            WanStreamLoadDiffusionModel.execute(unet_name=name, weight_dtype="default")


def test_file_is_checked_and_fingerprinted(host, models, monkeypatch):
    loader = WanStreamLoadDiffusionModel
    path = models / "diffusion_models" / FILE
    check = mock.Mock()
    monkeypatch.setattr(host.native, "check_model", check)
    for dtype in ({}, {"weight_dtype": None}, *[{"weight_dtype": "fp8_e5m2"}] * 2):
        assert loader.validate_inputs(unet_name=FILE, **dtype)
    assert loader.validate_inputs(unet_name=None)
    assert check.call_args_list == [mock.call(path, "default"), mock.call(path, "fp8_e5m2")]
    with pytest.raises(ValueError, match="weight_dtype is 'int3': choose default or"):
        loader.validate_inputs(unet_name=FILE, weight_dtype="int3")

    before = loader.fingerprint_inputs(unet_name=FILE, weight_dtype="default", policy=None)
    assert loader.fingerprint_inputs(unet_name=FILE) == before
    path.write_bytes(b"newer")
    assert loader.fingerprint_inputs(unet_name=FILE) != before
    assert loader.fingerprint_inputs(unet_name=None) != before


MODEL = ["checkpoint", 0]
BOUNDARY = {"boundary_ratio": 0.9}
LOADED = node("WanStreamLoadDiffusionModel", unet_name=FILE, weight_dtype="default")
NEEDS_COMFYUI = {
    "Load Diffusion Model (streamed)": LOADED,
    "Stream Model": node("WanStreamStreamModel", model=MODEL),
    "Join Experts": node("WanStreamJoinExperts", high_noise=MODEL, low_noise=MODEL, **BOUNDARY),
    "Split Experts": node("WanStreamSplitExperts", model=MODEL),
    "Stream CLIP": node("WanStreamStreamCLIP", clip=["checkpoint", 1]),
}


@pytest.mark.parametrize("name", NEEDS_COMFYUI)
def test_embedded_host_refuses_native_models_first(name, models):
    """The refusal comes before one about missing nodes around the model."""
    prompt = {
        "checkpoint": node("CheckpointLoaderSimple", ckpt_name="ltx.safetensors"),
        "sampler": node("KSampler", model=["model", 0]),
        "model": NEEDS_COMFYUI[name],
    }
    with pytest.raises(InvalidWorkflowError) as refused:
        run_workflow(prompt, nodes=NODES, models=models, output=models, input_dir=models)
    (line,) = refused.value.verdict.lines()
    assert line.startswith(f"{name} needs ComfyUI")
    assert "Wan Experts (streamed) or Wan Model (single)" in line
    error = refused.value.verdict.error
    assert (error["type"], error["extra_info"]["node_id"]) == ("needs_comfyui", "model")


@pytest.mark.parametrize(
    ("method", "arguments", "name"),
    [
        ("load_model", (Path(FILE), "default", None), "Load Diffusion Model .*"),
        ("stream_model", ("a model", None), "Stream Model"),
        ("join_experts", ("high", "low", 0.9), "Join Experts"),
        ("split_experts", ("a model",), "Split Experts"),
        ("model_run", ("a model",), "Run of Streamed Model"),
    ],
)
def test_embedded_host_makes_no_model(method, arguments, name):
    with pytest.raises(NeedsComfyUIError, match=rf"{name} needs ComfyUI.* use Wan Experts"):
        getattr(EmbeddedHost().native, method)(*arguments)
