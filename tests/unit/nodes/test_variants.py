"""Nodes for Fun Control and Bernini inputs, and their loaders, on the test model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from wanstream.host.embedded.files import Folders
from wanstream.nodes.guidance import WanStreamGuidance
from wanstream.nodes.latents import UnsupportedImageError
from wanstream.nodes.sampler import SamplerSettings
from wanstream.nodes.variants.bernini import WanStreamBernini
from wanstream.nodes.variants.fun_control import WAN21_CONTROL, WanStreamFunControl
from wanstream.sampling import denoise
from wanstream.sampling.inputs import DenoiseRequest, control
from wanstream.sampling.inputs.control import fitted_reference, whole_latent_frames
from wanstream.sampling.inputs.first_frame import start_end_mask
from wanstream.sampling.steps import InsufficientMemoryError, RequestError, errors
from wanstream.schema import OffloadPolicy
from wanstream.schema.refs import ExpertsRef
from wanstream.shapes import VideoShape
from wanstream.tests.support.embedded import embedded_host
from wanstream.wan import open_experts
from wanstream.wan.checkpoint.files import CheckpointError
from wanstream.wan.experts.open import open_single_model
from wanstream.wan.latents import WAN21
from wanstream.wan.latents.space import normalise

VAE, VAE_5B, CLIP = "wan_2.1_vae.safetensors", "wan2.2_vae.safetensors", "clip_vision_h.safetensors"
SIZE = {"width": 64, "height": 32, "frames": 9, "batch_size": 1}
SETTINGS: dict[str, Any] = {
    "steps": 2,
    "solver": "unipc",
    "schedule": "wan",
    "flow_shift": 12.0,
    "boundary_ratio": 0.875,
    "switch_step": 1,
    "start_step": 0,
    "guidance_high": 3.0,
    "guidance_low": 3.0,
}
ONE = {**SETTINGS, "switch_step": -1, "boundary_ratio": 0.0}
FUN, BERNINI = "wan2.2_fun_control_{}_noise_14B_fp8_scaled", "wan2.2_bernini_r_{}_noise_fp8_scaled"
FUN_21, BERNINI_SMALL = "wan2.1_fun_control_1.3B_bf16", "wan2.1_bernini_1.3B_fp16"

Prompt = list[list[Any]]


def _images(frames: int, height: int, width: int, *, seed: int) -> torch.Tensor:
    return torch.rand(frames, height, width, 3, generator=torch.Generator().manual_seed(seed))


CONTROL, START, REFERENCE = (
    _images(frames, 40, 50, seed=seed) for seed, frames in enumerate((9, 1, 1), start=1)
)


def _prompts() -> dict[str, Prompt]:
    texts = {"positive": 1, "negative": 2}
    return {
        side: [
            [
                torch.randn(1, 512, 4096, generator=torch.Generator().manual_seed(seed)),
                {"pooled_output": None},
            ]
        ]
        for side, seed in texts.items()
    }


@pytest.fixture(autouse=True)
def _opened(sample_models: Path, tmp_path: Path) -> Iterator[None]:
    """Open a host with the test model."""
    folders = Folders(models=sample_models, output=tmp_path, input=tmp_path)
    with embedded_host.opened(folders, device=torch.device("cpu")):
        yield


def _file(models: Path, name: str, expert: str = "high") -> Path:
    return models / "diffusion_models" / f"{name.format(expert)}.safetensors"


def _fun(**inputs: Any) -> tuple[Prompt, Prompt, dict[str, torch.Tensor]]:
    given = {"vae": VAE, "control_video": CONTROL, **SIZE, **inputs}
    positive, negative, latent = WanStreamFunControl.execute(**_prompts(), **given).args
    return positive, negative, latent


def _bernini(**inputs: Any) -> tuple[Prompt, Prompt, dict[str, torch.Tensor]]:
    positive, negative, latent = WanStreamBernini.execute(
        **_prompts(), **{"vae": VAE, **SIZE, **inputs}
    ).args
    return positive, negative, latent


def request_of(
    positive: Prompt, negative: Prompt, latent: Any, guidance: Any = None, **widgets: Any
) -> DenoiseRequest:
    settings = SamplerSettings.of(
        ExpertsRef(high_noise=Path("any")), {**widgets, "guidance": guidance}
    )
    return settings.request(positive, negative, latent, seed=1)


class TestFunControl:
    def test_everything_is_in_both_prompts(self) -> None:
        positive, negative, latent = _fun(start_image=START, reference_image=REFERENCE)
        assert latent["samples"].shape == (1, 16, 3, 4, 8)
        for side in (positive, negative):
            values = side[0][1]
            assert values["concat_latent_image"].shape == (1, 32, 3, 4, 8)
            assert values["concat_mask"].shape == (1, 4, 3, 4, 8)
            assert values["concat_mask_index"] == 16
            assert [each.shape for each in values["reference_latents"]] == [(1, 16, 1, 4, 8)]
            assert values["pooled_output"] is None
            assert "clip_vision_output" not in values
        image = positive[0][1]["concat_latent_image"]
        assert not normalise(image[:, 16:, 1:]).abs().max() > 1e-6, "empty after the start image"

    def test_without_a_start_image_nothing_is_known(self) -> None:
        positive, _, _ = _fun()
        values = positive[0][1]
        assert (values["concat_mask"] == 1).all()
        assert normalise(values["concat_latent_image"][:, 16:]).abs().max() <= 1e-6
        assert "reference_latents" not in values

    def test_of_wan21(self) -> None:
        positive, _, _ = _fun(start_image=START, model=WAN21_CONTROL, clip_vision=CLIP)
        values = positive[0][1]
        assert {"concat_latent_image", "clip_vision_output"} <= values.keys()
        assert not values.keys() & {"concat_mask", "concat_mask_index"}

    def test_of_5b(self) -> None:
        positive, _, latent = _fun(vae=VAE_5B, frames=5, reference_image=REFERENCE)
        values = positive[0][1]
        assert latent["samples"].shape == (1, 48, 2, 2, 4)
        assert values["concat_latent_image"].shape == (1, 96, 2, 2, 4)
        assert values["concat_mask_index"] == 48

    @pytest.mark.parametrize(
        ("inputs", "message"),
        [
            ({"model": WAN21_CONTROL, "start_image": START}, "choose a clip_vision file"),
            (
                {"model": WAN21_CONTROL, "clip_vision": CLIP},
                "connect start_image or reference_image",
            ),
            ({"model": WAN21_CONTROL, "vae": VAE_5B}, "with the VAE of Wan2.2 5B"),
        ],
    )
    def test_unsuitable_inputs_are_refused(self, inputs: dict[str, Any], message: str) -> None:
        with pytest.raises(UnsupportedImageError, match=message):
            _fun(**inputs)

    def test_no_images_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"is \[9, 40, 50\]: give images"):
            _fun(control_video=CONTROL[..., 0])

    def test_a_size_is_refused_before_anything_runs(self) -> None:
        for node in (WanStreamFunControl, WanStreamBernini):
            assert node.validate_inputs(width=64, height=32, frames=9) is True
            with pytest.raises(ValueError, match="it must be a multiple of 4 plus 1"):
                node.validate_inputs(width=64, height=32, frames=10)


class TestBernini:
    def test_the_order_of_the_sources(self) -> None:
        source, video, images = CONTROL, _images(6, 20, 100, seed=4), _images(2, 30, 60, seed=5)
        positive, negative, latent = _bernini(
            source_video=source,
            reference_video=video,
            reference_image=images,
            reference_image_3=REFERENCE,
            longest_side=80,
        )
        shapes = [(1, 16, 3, 4, 8), (1, 16, 2, 2, 10), *[(1, 16, 1, 4, 8)] * 2, (1, 16, 1, 4, 6)]
        for side in (positive, negative):
            assert [each.shape for each in side[0][1]["context_latents"]] == shapes
        assert latent["samples"].shape == (1, 16, 3, 4, 8)

    def test_each_prompt_keeps_its_own_sources(self) -> None:
        positive, _, latent = _bernini(source_video=CONTROL, reference_image=REFERENCE)
        _, negative, _ = _bernini(reference_image=REFERENCE)
        request = request_of(positive, negative, latent, **SETTINGS)
        for side, given in zip(request.inputs.tokens_of_sides, (positive, negative), strict=True):
            wanted = [normalise(each) for each in given[0][1]["context_latents"]]
            assert [each.shape for each in side.context] == [each.shape for each in wanted]
            assert all(map(torch.equal, side.context, wanted))
        assert [len(side.context) for side in request.inputs.tokens_of_sides] == [2, 1]
        assert request_of(positive, positive, latent, **SETTINGS).inputs.negative_tokens is None, (
            "equal on both sides"
        )
        unguided = {**SETTINGS, "guidance_high": 1.0, "guidance_low": 1.0}
        assert request_of(positive, negative, latent, **unguided).inputs.negative_tokens is None, (
            "not read"
        )

    def test_wan_guidance_scales_the_sources(self) -> None:
        positive, negative, latent = _bernini(source_video=CONTROL)
        values = {"guidance_steps": "", "nag_scale": 1.0, "nag_tau": 2.5, "nag_alpha": 0.25}
        (guidance,) = WanStreamGuidance.execute(**values, context_guidance=1.5).args
        request = request_of(positive, negative, latent, guidance=guidance, **SETTINGS)
        assert (request.guidance_settings.context, request.lanes_at(0)) == (1.5, 3)
        (off,) = WanStreamGuidance.execute(**values).args
        assert request_of(positive, negative, latent, guidance=off, **SETTINGS).lanes_at(0) == 2
        unguided = {**SETTINGS, "guidance_high": 1.0, "guidance_low": 1.0}
        with pytest.raises(RequestError, match="acts in steps whose guidance is not 1"):
            request_of(positive, negative, latent, guidance=guidance, **unguided)

    def test_nothing_is_text_to_video(self) -> None:
        positive, negative, _ = _bernini()
        assert "context_latents" not in positive[0][1].keys() | negative[0][1].keys()

    def test_another_vae_is_refused(self) -> None:
        with pytest.raises(UnsupportedImageError, match="Bernini takes latents of wan_2"):
            _bernini(vae=VAE_5B)

    @pytest.mark.parametrize(
        ("inputs", "name", "nbytes"),
        [
            ({"source_video": torch.zeros(1025, 8, 8, 3)}, "source", 1025 * 4096 * 4096 * 3 * 4),
            ({"source_video": torch.zeros(7, 8, 8, 3)}, "source", 5 * 4096 * 4096 * 3 * 4),
            (
                {"reference_video": torch.zeros(9, 400, 600, 3), "longest_side": 480},
                "reference",
                9 * 320 * 480 * 3 * 4,
            ),
        ],
    )
    def test_a_video_for_which_there_is_too_little_ram_is_not_scaled(
        self, monkeypatch: pytest.MonkeyPatch, inputs: dict[str, Any], name: str, nbytes: int
    ) -> None:
        asked: list[int] = []

        def lacking(wanted: int) -> int:
            asked.append(wanted)
            return 2_000_000_000

        def scaled(*_: object, **__: object) -> torch.Tensor:
            raise AssertionError("the video was scaled")

        monkeypatch.setattr(errors, "insufficient_ram", lacking)
        monkeypatch.setattr(control, "fitted", scaled)
        monkeypatch.setattr(control, "fitted_reference", scaled)
        with pytest.raises(
            InsufficientMemoryError,
            match=rf"the {name} video takes .* of RAM, and 2\.00 GB are free",
        ):
            _bernini(**inputs, width=4096, height=4096, frames=1025)
        assert asked == [nbytes]


@pytest.mark.parametrize(
    ("name", "made"),
    [
        (FUN, lambda: _fun(reference_image=REFERENCE)),
        (BERNINI, lambda: _bernini(source_video=CONTROL)),
    ],
    ids=["Fun Control", "Bernini"],
)
def test_a_pair_runs_on_the_test_model(sample_models: Path, name: str, made: Any) -> None:
    files = (_file(sample_models, name, expert) for expert in ("high", "low"))
    with open_experts(*files, compute_dtype=torch.float32) as pair:
        result = denoise(
            pair, request_of(*made(), **SETTINGS), policy=OffloadPolicy.layerwise(1), device="cpu"
        )
    assert result.latents.isfinite().all()
    assert result.latents.std() > 0.1


@pytest.mark.slow  # runs whole workflows
@pytest.mark.parametrize(
    ("name", "made"),
    [
        (FUN_21, lambda: _fun(start_image=START, model=WAN21_CONTROL, clip_vision=CLIP)),
        (BERNINI_SMALL, lambda: _bernini(reference_image=REFERENCE)),
    ],
    ids=["Fun Control 2.1", "Bernini 1.3B"],
)
def test_a_single_model_runs_on_the_test_model(sample_models: Path, name: str, made: Any) -> None:
    with open_single_model(_file(sample_models, name), compute_dtype=torch.float32) as model:
        result = denoise(
            model, request_of(*made(), **ONE), policy=OffloadPolicy.layerwise(1), device="cpu"
        )
    assert result.latents.isfinite().all()
    assert result.latents.std() > 0.1


def test_the_wrong_loader_is_refused(sample_models: Path) -> None:
    with pytest.raises(
        CheckpointError,
        match=r"an expert of Fun Control of Wan2.2 A14B \(52 channels\).* as a pair",
    ):
        open_single_model(_file(sample_models, FUN))
    single = _file(sample_models, FUN_21)
    with pytest.raises(
        CheckpointError, match=r"is Fun Control of Wan2.1 \(48 channels\), which is a single model"
    ):
        open_experts(single, single)
    with pytest.raises(CheckpointError, match="is T2V, but the high-noise expert"):
        open_experts(_file(sample_models, FUN), _file(sample_models, BERNINI, "low"))


def test_frames_and_sides_of_references() -> None:
    assert [
        len(whole_latent_frames(_images(count, 4, 4, seed=1), 9)) for count in (1, 4, 5, 8, 9, 30)
    ] == [*(1, 1, 5, 5, 9, 9)]
    assert fitted_reference(_images(1, 100, 1000, seed=1), 1, 848).shape == (1, 80, 848, 3)
    assert fitted_reference(_images(1, 5, 7, seed=1), 1, 848).shape == (1, 16, 16, 3)


def test_the_mask_has_an_entry_for_each_start_frame() -> None:
    shape = VideoShape(width=32, height=16, frames=9, per_latent=WAN21.pixels)
    assert start_end_mask(2, 0, shape)[0, :, :, 0, 0].T.flatten().tolist() == [0] * 5 + [1] * 7
