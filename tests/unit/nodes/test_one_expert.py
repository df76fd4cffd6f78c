"""Single models in a graph: loading, settings, and the image for CLIP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from wanstream.nodes.latents import WanStreamImageToVideo
from wanstream.nodes.loaders import WanStreamOneExpert
from wanstream.nodes.sampler import SamplerSettings, WanStreamSampler
from wanstream.sampling.steps import RequestError
from wanstream.schema.refs import ExpertsRef, WorkersRef
from wanstream.schema.refs.workers import IN_PROCESS
from wanstream.testing.model import CLIP_FILE, I2V_FILE, T2V_FILE, T2V_PIPELINE
from wanstream.tests.support.embedded import embedded_host
from wanstream.wan.checkpoint.files import CheckpointError
from wanstream.wan.image_encoder import open_image_encoder

VAE = "wan_2.1_vae.safetensors"
SIZE = {"width": 32, "height": 32, "frames": 5}
PAIR = ExpertsRef(high_noise=Path("high"), low_noise=Path("low"))
ONE = ExpertsRef(high_noise=Path("one"), single=True)

SETTINGS: dict[str, Any] = {
    "seed": 1,
    "steps": 3,
    "solver": "unipc",
    "schedule": "wan",
    "flow_shift": 3.0,
    "boundary_ratio": 0.875,
    "switch_step": -1,
    "guidance_high": 5.0,
    "guidance_low": 1.0,
    "start_step": 0,
}


pytestmark = pytest.mark.usefixtures("opened_test_model")


def _latent() -> dict[str, torch.Tensor]:
    return {"samples": torch.zeros(1, 16, 2, 4, 4)}


def test_files_and_folders_of_one_expert_are_opened(sample_models: Path) -> None:
    for name in (T2V_FILE.name, I2V_FILE.name, T2V_PIPELINE.name):
        (ref,) = WanStreamOneExpert.execute(name, "fp32").args
        assert ref.single
        assert ref.low_noise is None
        assert embedded_host.models.experts(ref).is_single
    with pytest.raises(CheckpointError, match="has no image branch"):
        WanStreamOneExpert.execute("wan2.2_i2v_high_noise_14B_fp16.safetensors", "bf16")
    with pytest.raises(CheckpointError, match="holds two transformers"):
        WanStreamOneExpert.execute("Wan2.2-T2V-A14B-Diffusers", "bf16")


def _settings(experts: ExpertsRef, **changes: Any) -> tuple[float, int | None, tuple[float, float]]:
    settings = SamplerSettings.of(experts, {**SETTINGS, **changes})
    return settings.steps.boundary_ratio, settings.steps.switch_step, settings.guidance.scales


def test_settings_of_a_pair_stay_what_they_are() -> None:
    assert _settings(PAIR) == (0.875, None, (5.0, 1.0))
    assert _settings(PAIR, switch_step=2)[1] == 2


def test_one_expert_takes_every_step_under_the_first_guidance() -> None:
    assert _settings(ONE) == (0.0, None, (5.0, 5.0))
    with pytest.raises(RequestError, match="switch_step is 0, but a single model runs every step"):
        _settings(ONE, switch_step=0)


@pytest.mark.slow  # runs whole workflows
def test_the_sampler_runs_one_expert(text: list[list[Any]]) -> None:
    """The settings for two experts have no effect, and workers are bit-equal."""
    (ref,) = WanStreamOneExpert.execute(T2V_FILE.name, "fp32").args
    negative = [[text[0][0].flip(2), {}]]

    def run(workers: WorkersRef | None = None, **changes: Any) -> Any:
        return WanStreamSampler.execute(
            ref, text, negative, _latent(), workers=workers, **{**SETTINGS, **changes}
        ).args

    latent, ran = run()
    assert [step.expert for step in ran.timeline.steps] == ["high"] * 3
    assert ran.block_counts == {"high": 4}
    assert latent["samples"].std() > 0.1
    assert torch.equal(run(boundary_ratio=0.1, guidance_low=9.0)[0]["samples"], latent["samples"])
    assert not torch.equal(run(guidance_high=2.0)[0]["samples"], latent["samples"])
    shared, _ = run(WorkersRef(count=1, address=IN_PROCESS))
    assert torch.equal(shared["samples"], latent["samples"])


@pytest.mark.slow  # runs whole workflows
def test_what_clip_sees_reaches_the_sampler(sample_models: Path, text: list[list[Any]]) -> None:
    (ref,) = WanStreamOneExpert.execute(I2V_FILE.name, "fp32").args
    image = torch.rand(2, 40, 56, 3, generator=torch.Generator().manual_seed(1))

    def sampled(**clip: str) -> torch.Tensor:
        given = WanStreamImageToVideo.execute(text, text, VAE, image, 1, **clip, **SIZE).args
        (latent, _) = WanStreamSampler.execute(ref, *given, **SETTINGS).args
        samples: torch.Tensor = latent["samples"]
        return samples

    whole, middle = (
        sampled(clip_vision=CLIP_FILE.name, clip_crop=crop) for crop in ("none", "center")
    )
    assert not torch.equal(whole, middle)
    with pytest.raises(
        RequestError, match=r"has an image branch .* a clip_vision file in WanStream Image to Video"
    ):
        sampled()
    positive, negative, _ = WanStreamImageToVideo.execute(
        text, text, VAE, image, 1, clip_vision=CLIP_FILE.name, **SIZE
    ).args
    seen = open_image_encoder(sample_models / CLIP_FILE).encode(image[:1], device="cpu")
    for side in (positive, negative):
        assert torch.equal(
            side[0][1]["clip_vision_output"].penultimate_hidden_states,
            seen.penultimate_hidden_states,
        )
    assert "clip_vision_output" not in text[0][1], "ComfyUI may hold the original in a cache"
