"""Nodes for Fun Control and Bernini inputs, and their loaders, on the test model."""

from pathlib import Path
from unittest import mock

import pytest
import torch

from wanstream.nodes.guidance import WanStreamGuidance
from wanstream.nodes.latents import UnsupportedImageError
from wanstream.nodes.sampler import SamplerSettings
from wanstream.nodes.variants.bernini import WanStreamBernini
from wanstream.nodes.variants.fun_control import WAN21_CONTROL, WanStreamFunControl
from wanstream.sampling import denoise
from wanstream.sampling.inputs import control
from wanstream.sampling.inputs.control import fitted_reference, whole_latent_frames
from wanstream.sampling.steps import InsufficientMemoryError
from wanstream.schema import OffloadPolicy
from wanstream.schema.refs import ExpertsRef
from wanstream.tests.support.host.given_nodes import CLIP, SETTINGS, VAE
from wanstream.wan import open_experts
from wanstream.wan.checkpoint.files import CheckpointError
from wanstream.wan.experts.open import open_single_model
from wanstream.wan.latents.space import normalise

VAE_5B = "wan2.2_vae.safetensors"
SIZE = {"width": 64, "height": 32, "frames": 9, "batch_size": 1}
PAIR = {**SETTINGS, "steps": 2, "switch_step": 1, "guidance_high": 3.0, "guidance_low": 3.0}
UNGUIDED = {**PAIR, "guidance_high": 1.0, "guidance_low": 1.0}
FUN = "wan2.2_fun_control_{}_noise_14B_fp8_scaled"
BERNINI = "wan2.2_bernini_r_{}_noise_fp8_scaled"
FUN_21 = "wan2.1_fun_control_1.3B_bf16"

pytestmark = pytest.mark.usefixtures("opened_test_model")


def _images(frames: int, height: int, width: int, *, seed: int) -> torch.Tensor:
    return torch.rand(frames, height, width, 3, generator=torch.Generator().manual_seed(seed))


CONTROL = _images(9, 40, 50, seed=1)
START = _images(1, 40, 50, seed=2)
REFERENCE = _images(1, 40, 50, seed=3)


def _made(node, **inputs):
    """Return both prompts and the latent from a node, for random texts."""
    prompts = {}
    for seed, side in enumerate(("positive", "negative"), start=1):
        text = torch.randn(1, 512, 4096, generator=torch.Generator().manual_seed(seed))
        prompts[side] = [[text, {"pooled_output": None}]]
    return node.execute(**prompts, **{"vae": VAE, **SIZE, **inputs}).args


def _fun(**inputs):
    return _made(WanStreamFunControl, **{"control_video": CONTROL, **inputs})


def _bernini(**inputs):
    return _made(WanStreamBernini, **inputs)


def request_of(positive, negative, latent, guidance=None, **widgets):
    ref = ExpertsRef(high_noise=Path("any"))
    settings = SamplerSettings.of(ref, {**widgets, "guidance": guidance})
    return settings.request(positive, negative, latent, seed=1)


class TestFunControl:
    def test_everything_is_in_both_prompts(self):
        positive, negative, latent = _fun(start_image=START, reference_image=REFERENCE)
        assert latent["samples"].shape == (1, 16, 3, 4, 8)
        for ((_, values),) in (positive, negative):
            assert values["concat_latent_image"].shape == (1, 32, 3, 4, 8)
            assert values["concat_mask"].shape == (1, 4, 3, 4, 8)
            assert values["concat_mask_index"] == 16
            assert [each.shape for each in values["reference_latents"]] == [(1, 16, 1, 4, 8)]
            assert values["pooled_output"] is None
            assert "clip_vision_output" not in values
        image = positive[0][1]["concat_latent_image"]
        assert not normalise(image[:, 16:, 1:]).abs().max() > 1e-6, "empty after the start image"

    def test_other_inputs_and_models(self):
        values = _fun()[0][0][1]
        assert (values["concat_mask"] == 1).all(), "nothing is known"
        assert normalise(values["concat_latent_image"][:, 16:]).abs().max() <= 1e-6
        assert "reference_latents" not in values
        values = _fun(start_image=START, model=WAN21_CONTROL, clip_vision=CLIP)[0][0][1]
        assert {"concat_latent_image", "clip_vision_output"} <= values.keys()
        assert not values.keys() & {"concat_mask", "concat_mask_index"}
        positive, _, latent = _fun(vae=VAE_5B, frames=5, reference_image=REFERENCE)
        assert latent["samples"].shape == (1, 48, 2, 2, 4)
        assert positive[0][1]["concat_latent_image"].shape == (1, 96, 2, 2, 4)
        assert positive[0][1]["concat_mask_index"] == 48

    def test_unsuitable_inputs_are_refused(self):
        for inputs, message in (
            ({"start_image": START}, "choose a clip_vision file"),
            ({"clip_vision": CLIP}, "connect start_image or reference_image"),
            ({"vae": VAE_5B}, "with the VAE of Wan2.2 5B"),
        ):
            with pytest.raises(UnsupportedImageError, match=message):
                _fun(**inputs, model=WAN21_CONTROL)
        with pytest.raises(ValueError, match=r"is \[9, 40, 50\]: give images"):
            _fun(control_video=CONTROL[..., 0])
        with pytest.raises(UnsupportedImageError, match="Bernini takes latents of wan_2"):
            _bernini(vae=VAE_5B)
        size = {"width": 64, "height": 32}
        for node in (WanStreamFunControl, WanStreamBernini):
            assert node.validate_inputs(**size, frames=9) is True
            with pytest.raises(ValueError, match="it must be a multiple of 4 plus 1"):
                node.validate_inputs(**size, frames=10)


class TestBernini:
    def test_order_of_the_sources(self):
        video = _images(6, 20, 100, seed=4)
        images = _images(2, 30, 60, seed=5)
        references = {"reference_image": images, "reference_image_3": REFERENCE}
        given = {"source_video": CONTROL, "reference_video": video, **references}
        positive, negative, latent = _bernini(**given, longest_side=80)
        shapes = [(1, 16, 3, 4, 8), (1, 16, 2, 2, 10), *[(1, 16, 1, 4, 8)] * 2, (1, 16, 1, 4, 6)]
        for ((_, values),) in (positive, negative):
            assert [each.shape for each in values["context_latents"]] == shapes
        assert latent["samples"].shape == (1, 16, 3, 4, 8)
        positive, negative, _ = _bernini()
        assert "context_latents" not in positive[0][1].keys() | negative[0][1].keys()

    def test_each_prompt_keeps_its_own_sources(self):
        positive, _, latent = _bernini(source_video=CONTROL, reference_image=REFERENCE)
        _, negative, _ = _bernini(reference_image=REFERENCE)
        request = request_of(positive, negative, latent, **PAIR)
        sides = (request.inputs.tokens_of_sides, (positive, negative), (2, 1))
        for side, given, count in zip(*sides, strict=True):
            wanted = [normalise(each) for each in given[0][1]["context_latents"]]
            assert len(side.context) == len(wanted) == count
            assert all(map(torch.equal, side.context, wanted))
        for second, settings in ((positive, PAIR), (negative, UNGUIDED)):
            request = request_of(positive, second, latent, **settings)
            assert request.inputs.negative_tokens is None, "equal, or not read"

    def test_wan_guidance_scales_the_sources(self):
        given = _bernini(source_video=CONTROL)
        values = {"guidance_steps": "", "nag_scale": 1.0, "nag_tau": 2.5, "nag_alpha": 0.25}
        (guidance,) = WanStreamGuidance.execute(**values, context_guidance=1.5).args
        request = request_of(*given, guidance=guidance, **PAIR)
        assert (request.guidance_settings.context, request.lanes_at(0)) == (1.5, 3)
        (off,) = WanStreamGuidance.execute(**values).args
        assert request_of(*given, guidance=off, **PAIR).lanes_at(0) == 2

    @pytest.mark.parametrize(
        ("inputs", "name", "values"),
        [
            ({"source_video": torch.zeros(1025, 8, 8, 3)}, "source", 1025 * 4096 * 4096 * 3),
            ({"source_video": torch.zeros(7, 8, 8, 3)}, "source", 5 * 4096 * 4096 * 3),
            ({"reference_video": torch.zeros(9, 400, 600, 3)}, "reference", 9 * 320 * 480 * 3),
        ],
    )
    def test_too_little_ram_is_refused_before_scaling(
        self, monkeypatch, asked_ram, inputs, name, values
    ):
        scaled = mock.Mock(side_effect=AssertionError("the video was scaled"))
        for scale in ("fitted", "fitted_reference"):
            monkeypatch.setattr(control, scale, scaled)
        message = rf"the {name} video takes .* of RAM, and 2\.00 GB are free"
        size = {"width": 4096, "height": 4096, "frames": 1025, "longest_side": 480}
        with pytest.raises(InsufficientMemoryError, match=message):
            _bernini(**inputs, **size)
        assert asked_ram == [values * 4]


def file(models: Path, name: str, expert: str = "high") -> Path:
    return models / "diffusion_models" / f"{name.format(expert)}.safetensors"


@pytest.mark.parametrize(
    ("name", "node", "inputs"),
    [
        (FUN, WanStreamFunControl, {"control_video": CONTROL, "reference_image": REFERENCE}),
        (BERNINI, WanStreamBernini, {"source_video": CONTROL}),
    ],
)
def test_pair_runs_on_the_test_model(sample_models, name, node, inputs):
    files = (file(sample_models, name, expert) for expert in ("high", "low"))
    run = {"policy": OffloadPolicy.layerwise(1), "device": "cpu"}
    with open_experts(*files, compute_dtype=torch.float32) as pair:
        result = denoise(pair, request_of(*_made(node, **inputs), **PAIR), **run)
    assert result.latents.std() > 0.1


def test_wrong_loader_is_refused(sample_models):
    message = r"an expert of Fun Control of Wan2.2 A14B \(52 channels\).* as a pair"
    with pytest.raises(CheckpointError, match=message):
        open_single_model(file(sample_models, FUN))
    single = file(sample_models, FUN_21)
    message = r"is Fun Control of Wan2.1 \(48 channels\), which is a single model"
    with pytest.raises(CheckpointError, match=message):
        open_experts(single, single)


def test_frames_and_sides_of_references():
    for count, whole in ((1, 1), (4, 1), (5, 5), (8, 5), (9, 9), (30, 9)):
        assert len(whole_latent_frames(_images(count, 4, 4, seed=1), 9)) == whole
    assert fitted_reference(_images(1, 100, 1000, seed=1), 1, 848).shape == (1, 80, 848, 3)
    assert fitted_reference(_images(1, 5, 7, seed=1), 1, 848).shape == (1, 16, 16, 3)
