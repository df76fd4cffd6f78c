"""Test model: real names, accepted by all openers for real files, folder safe to name."""

import json
import os
from itertools import product

import pytest
import torch
from diffusers import AutoencoderKLWan, DiffusionPipeline
from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers
from safetensors.torch import load_file

from wanstream.testing import components as sample_pipeline
from wanstream.testing.folder import RECORD, TinyModelError
from wanstream.testing.model import (
    A14B_PIPELINE,
    CLIP_FILE,
    I2V_FILE,
    T2V_FILE,
    T2V_PIPELINE,
    TI2V_FILE,
    TI2V_PIPELINE,
    model_names,
    write_tiny_model,
)
from wanstream.tests.support.full_disk import largest_file
from wanstream.wan import WIDTH, open_image_encoder, open_lora, open_text_encoder, open_vae
from wanstream.wan.experts.open import open_experts, open_single_model

PIPELINES = ["diffusers/Wan2.2-T2V-A14B-Diffusers", "diffusers/Wan2.2-I2V-A14B-Diffusers"]
FEW = [T2V_FILE.name, "wan_2.1_vae.safetensors"]
SINGLE_FILES = [
    f"diffusion_models/wan2.2_{family}_{{}}_noise_14B_{precision}.safetensors"
    for family, precision in product(("t2v", "i2v"), ("fp16", "fp8_scaled"))
]


def entries(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def experts_of(models, name):
    return [models / name.format(expert) for expert in ("high", "low")]


class TestContents:
    def test_comfyui_finds_the_folders_it_looks_in(self, sample_models):
        folders = {path.name for path in sample_models.iterdir() if path.is_dir()}
        expected = "clip_vision diffusers diffusion_models loras text_encoders vae vae_approx"
        assert folders == set(expected.split())

    @pytest.mark.parametrize("name", [*SINGLE_FILES, *PIPELINES])
    def test_pairs_of_experts_are_opened(self, sample_models, name):
        files = experts_of(sample_models, name) if "{}" in name else [sample_models / name]
        with open_experts(*files) as pair:
            assert pair.high.config.in_channels == (36 if "i2v" in name.lower() else 16)

    @pytest.mark.parametrize(
        ("name", "experts"),
        [
            ("wan2.2_t2v_lightx2v_4steps_lora_v1.1_{}_noise.safetensors", SINGLE_FILES[0]),
            ("wan2.2_i2v_lightx2v_4steps_lora_v1_{}_noise.safetensors", SINGLE_FILES[2]),
            ("SVI_v2_PRO_Wan2.2-I2V-A14B_{1}_lora_rank_128_fp16.safetensors", SINGLE_FILES[2]),
        ],
    )
    def test_loras_fit_their_experts(self, sample_models, name, experts):
        paths = (sample_models / "loras" / name.format(e, e.upper()) for e in ("high", "low"))
        high, low = map(open_lora, paths)
        with open_experts(*experts_of(sample_models, experts)) as pair:
            pair.set_loras([(high, 1.0)], [(low, 1.0)])
        for lora in (high, low):
            changes = [change for changes in lora.changes.values() for change in changes]
            assert sorted(change.is_difference for change in changes) == [False] * 40 + [True] * 10
            assert lora.unmatched == ()
        key = "diffusion_model.blocks.3.ffn.2.lora_up.weight"
        assert not torch.equal(load_file(high.path)[key], load_file(low.path)[key])

    @pytest.mark.parametrize(
        ("pipeline", "in_channels", "boundary", "flow_shift"),
        [
            (PIPELINES[0], 16, 0.875, 12.0),
            (PIPELINES[1], 36, 0.9, 5.0),
            (T2V_PIPELINE, 16, None, 3.0),
            (TI2V_PIPELINE, 48, None, 5.0),
        ],
        ids=str,
    )
    def test_pipelines_open(self, sample_models, pipeline, in_channels, boundary, flow_shift):
        opened = DiffusionPipeline.from_pretrained(sample_models / pipeline)
        assert opened.scheduler.config.flow_shift == flow_shift
        assert opened.transformer.config.in_channels == in_channels
        if boundary is None:
            assert opened.transformer_2 is None
            is_5b = pipeline == TI2V_PIPELINE
            assert opened.config.expand_timesteps == is_5b
            assert opened.vae_scale_factor_spatial == (16 if is_5b else 8)
            return
        assert opened.config.boundary_ratio == boundary
        assert opened.transformer_2.config.in_channels == in_channels
        weights = opened.transformer.state_dict(), opened.transformer_2.state_dict()
        assert not torch.equal(*(each["blocks.0.ffn.net.2.weight"] for each in weights))

    @pytest.mark.parametrize("pipeline", PIPELINES)
    def test_this_pack_opens_the_pipelines(self, sample_models, pipeline):
        folder = sample_models / pipeline
        with open_vae(folder) as vae, open_text_encoder(folder) as encoder:
            assert vae.decode(torch.zeros(1, 16, 1, 2, 2), device="cpu").shape == (1, 1, 16, 16, 3)
            assert encoder.encode(["a cat"], device="cpu")[0].shape == (1, 512, 4096)

    @pytest.mark.parametrize(
        ("name", "in_channels", "image_dim"),
        [
            (T2V_FILE, 16, None),
            (T2V_PIPELINE, 16, None),
            (I2V_FILE, 36, WIDTH),
            (TI2V_FILE, 48, None),
            (TI2V_PIPELINE, 48, None),
        ],
        ids=str,
    )
    def test_wan21_and_5b_are_one_expert(self, sample_models, name, in_channels, image_dim):
        with open_single_model(sample_models / name) as pair:
            assert pair.is_single
            config = pair.high.config
            assert (config.in_channels, config.image_dim) == (in_channels, image_dim)
            assert (config.family == "ti2v") == (in_channels == 48)

    def test_clip_is_as_wide_as_the_image_branch(self, sample_models):
        encoder = open_image_encoder(sample_models / CLIP_FILE)
        seen = encoder.encode(torch.rand(1, 32, 48, 3), device="cpu")
        assert seen.penultimate_hidden_states.shape == (1, 257, WIDTH)
        assert 0.1 < seen.penultimate_hidden_states.std() < 10

    def test_vae_files_are_those_of_the_pipelines(self, sample_models):
        own = AutoencoderKLWan.from_pretrained(sample_models / PIPELINES[0] / "vae").state_dict()
        native = load_file(sample_models / "vae/wan_2.1_vae.safetensors")
        converted = convert_wan_vae_to_diffusers(native)
        assert converted.keys() == own.keys()
        assert all(torch.equal(converted[name], tensor) for name, tensor in own.items())
        with open_vae(sample_models / "vae" / "wan2.2_vae.safetensors") as vae:
            frames = vae.decode(torch.zeros(1, 48, 1, 2, 2), device="cpu")
        assert frames.shape == (1, 1, 32, 32, 3)
        assert 0.01 < frames.std() < 1, "it shows something"

    def test_text_encoder_file_has_native_names_and_scales(self, sample_models):
        tensors = load_file(sample_models / "text_encoders/umt5_xxl_fp8_e4m3fn_scaled.safetensors")
        own = load_file(sample_models / PIPELINES[0] / "text_encoder/model.safetensors")
        extra = (".scale_weight", "scaled_fp8", "spiece_model")
        assert {name for name in tensors if not name.endswith(extra)} == own.keys()
        for name, tensor in own.items():
            scale = tensors.get(f"{name.removesuffix('.weight')}.scale_weight", torch.ones(()))
            error = tensors[name].float() * scale - tensor.float()
            assert error.norm() < 0.05 * tensor.float().norm(), name

    def test_both_pipelines_share_their_bytes(self, sample_models):
        one, other = (sample_models / pipeline for pipeline in PIPELINES)
        for component in ("vae", "text_encoder", "tokenizer"):
            for path in (one / component).iterdir():
                assert os.path.samefile(path, other / component / path.name), path

    def test_summary_has_files_and_sizes(self, tmp_path):
        model = write_tiny_model(tmp_path / "models", layers=1)
        stats = [path.stat() for path in model.folder.rglob("*.*") if path.is_file()]
        on_disk = sum({stat.st_ino: stat.st_size for stat in stats}.values())
        assert model.nbytes == on_disk - (model.folder / RECORD).stat().st_size
        assert model.nbytes < sum(model.files.values())
        lines = model.summary().splitlines()
        assert len(lines) == 48
        assert lines[-1].endswith(f"on disk, in {model.folder}")
        assert "3.72 MB  vae/wan_2.1_vae.safetensors" in model.summary()


FAST = "wan2.2_t2v_lightx2v_4steps_lora_v1.1_high_noise.safetensors"


class TestNames:
    def test_only_named_files_are_written(self, sample_models, tmp_path):
        names = {T2V_FILE.name, FAST, "taew2_2.safetensors"}
        model = write_tiny_model(tmp_path, layers=4, names=names)
        assert {path.name for path in model.files} == names
        for path in model.files:
            assert (tmp_path / path).read_bytes() == (sample_models / path).read_bytes(), path

    def test_pipeline_comes_with_the_one_that_it_links(self, tmp_path):
        model = write_tiny_model(tmp_path, layers=1, names=[T2V_PIPELINE.name])
        assert {path.parts[1] for path in model.files} == {T2V_PIPELINE.name, A14B_PIPELINE.name}
        assert {path.parts[0] for path in model.files} == {"diffusers"}
        with open_single_model(tmp_path / T2V_PIPELINE) as pair, open_vae(tmp_path / T2V_PIPELINE):
            assert pair.is_single

    def test_names_are_added_and_finished_files_left_alone(self, tmp_path):
        (tmp_path / ".partial" / "vae").mkdir(parents=True)  # of a killed run
        for file in (T2V_FILE, CLIP_FILE):
            write_tiny_model(tmp_path, layers=1, names=[file.name])
        assert not (tmp_path / ".partial").exists()
        before = {name: (tmp_path / name).stat().st_mtime_ns for name in entries(tmp_path)}
        written = []
        names = [T2V_FILE.name]
        model = write_tiny_model(tmp_path, layers=1, names=names, on_progress=written.append)
        assert ({*model.files}, written) == ({T2V_FILE, CLIP_FILE}, [])
        assert {name: (tmp_path / name).stat().st_mtime_ns for name in entries(tmp_path)} == before

    def test_unknown_name_is_refused_before_anything_is_written(self, tmp_path):
        with pytest.raises(TinyModelError, match=r"no flux1-dev\.safetensors"):
            write_tiny_model(tmp_path / "models", names=["flux1-dev.safetensors", T2V_FILE.name])
        assert entries(tmp_path) == []

    def test_names_of_a_workflow(self):
        inputs = {"high": FAST, "steps": 4, "pipeline": T2V_PIPELINE.name, "link": ["b", 0]}
        other = {"file": "mine.safetensors", "prompt": "a cat", "image": "example.png"}
        prompt = {"a": {"inputs": inputs}, "b": {"inputs": other}, "c": {"class_type": "Nothing"}}
        assert model_names(prompt) == {FAST, T2V_PIPELINE.name, "mine.safetensors"}


class TestFolder:
    @pytest.mark.slow
    def test_same_bytes_every_time(self, tmp_path):
        folders = (tmp_path / "one", tmp_path / "other")
        one, other = (write_tiny_model(folder, layers=1).folder for folder in folders)
        assert entries(one) == entries(other)
        for path in (path for path in one.rglob("*") if path.is_file()):
            assert path.read_bytes() == (other / path.relative_to(one)).read_bytes(), path

    def test_where_links_are_refused_files_are_copied(self, tmp_path, monkeypatch):
        def refuse(*_):
            raise OSError("no links here")

        monkeypatch.setattr(sample_pipeline.os, "link", refuse)
        names = [pipeline.removeprefix("diffusers/") for pipeline in PIPELINES]
        model = write_tiny_model(tmp_path, layers=1, names=names)
        assert model.nbytes == sum(model.files.values())
        first, second = (tmp_path / pipeline / "vae/config.json" for pipeline in PIPELINES)
        assert first.read_bytes() == second.read_bytes()

    @pytest.mark.slow
    def test_other_recipes_and_lost_files_are_replaced(self, tmp_path):
        write_tiny_model(tmp_path, layers=2)
        mine = [tmp_path / kind / "mine.safetensors" for kind in ("loras", "diffusion_models")]
        for path in mine:
            path.write_text("mine")
        files = write_tiny_model(tmp_path, layers=1).files
        (tmp_path / "vae" / "wan_2.1_vae.safetensors").unlink()
        assert write_tiny_model(tmp_path, layers=1).files == files
        assert json.loads((tmp_path / RECORD).read_text())["recipe"]["layers"] == 1
        assert [path.read_text() for path in mine] == ["mine", "mine"]
        assert not (tmp_path / ".partial").exists()

    def test_other_folders_and_files_are_refused_and_left_alone(self, tmp_path):
        vae = tmp_path / "vae" / "wan_2.1_vae.safetensors"
        vae.parent.mkdir()
        vae.write_text("real")
        cases = [(tmp_path, "contains vae and is not a test model")]
        cases += [(vae, "is a file"), (vae / "below", r"below: .*Not a directory")]
        for folder, message in cases:
            with pytest.raises(TinyModelError, match=message):
                write_tiny_model(folder, layers=1)
        assert entries(tmp_path) == ["vae", "vae/wan_2.1_vae.safetensors"]
        assert vae.read_text() == "real"

    def test_real_file_is_never_overwritten(self, tmp_path):
        write_tiny_model(tmp_path, layers=1, names=FEW)
        (tmp_path / "vae" / "wan_2.1_vae.safetensors").write_text("real")
        before = entries(tmp_path)

        with pytest.raises(TinyModelError, match="no longer the test model's"):
            write_tiny_model(tmp_path, layers=2, names=FEW)
        assert entries(tmp_path) == before
        assert (tmp_path / "vae" / "wan_2.1_vae.safetensors").read_text() == "real"

    def test_interrupt_and_a_full_disk_leave_nothing_behind(self, tmp_path):
        def stop(name):
            if "low" in name:
                raise KeyboardInterrupt

        names = [SINGLE_FILES[0].partition("/")[2].format(expert) for expert in ("high", "low")]
        with pytest.raises(KeyboardInterrupt):
            write_tiny_model(tmp_path, layers=1, names=names, on_progress=stop)
        assert entries(tmp_path) == []
        with largest_file(1_000_000), pytest.raises(TinyModelError, match="cannot be written"):
            write_tiny_model(tmp_path, layers=1, names=names)
        assert entries(tmp_path) == []


@pytest.mark.slow
def test_whole_model_is_as_deep_as_the_real_one_and_small(full_sample_model):
    folder = full_sample_model.folder
    assert full_sample_model.nbytes < 1.15e9
    with open_experts(folder / PIPELINES[0]) as pair:
        assert len(pair.high.weights) == len(pair.low.weights) == 1095
    for pipeline, layers in ((PIPELINES[0], 40), (T2V_PIPELINE, 30)):
        config = json.loads((folder / pipeline / "transformer/config.json").read_text())
        assert config["num_layers"] == layers
