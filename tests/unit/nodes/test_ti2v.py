"""Wan2.2 TI2V-5B in a graph of our nodes: text, image, workers, refused combinations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from wanstream.nodes.latents import WanStreamEmptyLatent, WanStreamImageToVideo
from wanstream.nodes.loaders import SAME_FOLDER, WanStreamExperts, WanStreamOneExpert
from wanstream.nodes.sampler import WanStreamSampler
from wanstream.sampling.steps import RequestError
from wanstream.schema.refs import WorkersRef
from wanstream.schema.refs.workers import IN_PROCESS
from wanstream.testing.model import T2V_FILE, TI2V_FILE, TI2V_PIPELINE, WAN22_VAE_FILE
from wanstream.wan.checkpoint.files import CheckpointError

SIZE = {"width": 64, "height": 32, "frames": 9}
SETTINGS: dict[str, Any] = {
    "seed": 1,
    "steps": 3,
    "solver": "unipc",
    "schedule": "wan",
    "flow_shift": 5.0,
    "boundary_ratio": 0.875,
    "switch_step": -1,
    "guidance_high": 5.0,
    "guidance_low": 1.0,
    "start_step": 0,
}


pytestmark = pytest.mark.usefixtures("opened_test_model")


def _image(seed: int = 1) -> torch.Tensor:
    return torch.rand(1, 40, 56, 3, generator=torch.Generator().manual_seed(seed))


def _sampled(ref: Any, given: Any, **changes: Any) -> torch.Tensor:
    latent, _ = WanStreamSampler.execute(ref, *given, **{**SETTINGS, **changes}).args
    samples: torch.Tensor = latent["samples"]
    return samples


@pytest.mark.parametrize("name", [TI2V_FILE.name, TI2V_PIPELINE.name])
def test_a_video_of_a_text(name: str, text: list[list[Any]]) -> None:
    (ref,) = WanStreamOneExpert.execute(name, "fp32").args
    (latent,) = WanStreamEmptyLatent.execute(**SIZE, batch_size=1, model="Wan2.2 5B").args
    samples = _sampled(ref, (text, text, latent))
    assert samples.shape == (1, 48, 3, 2, 4)
    assert samples.isfinite().all()
    assert samples.std() > 0.1


@pytest.mark.slow  # runs whole workflows
def test_a_video_of_an_image_begins_with_it_on_workers_too(text: list[list[Any]]) -> None:
    (ref,) = WanStreamOneExpert.execute(TI2V_FILE.name, "fp32").args
    given = WanStreamImageToVideo.execute(text, text, WAN22_VAE_FILE.name, _image(), 1, **SIZE).args
    samples = _sampled(ref, given)
    first = given[2]["samples"][:, :, :1]
    assert (samples[:, :, :1] - first).norm() / first.norm() < 1e-5
    other = WanStreamImageToVideo.execute(
        text, text, WAN22_VAE_FILE.name, _image(seed=2), 1, **SIZE
    ).args
    assert (_sampled(ref, other)[:, :, 1:] - samples[:, :, 1:]).norm() / samples.norm() > 1e-3, (
        "the others follow it"
    )
    shared = _sampled(ref, given, workers=WorkersRef(count=1, address=IN_PROCESS))
    assert torch.equal(shared, samples)


def test_what_does_not_belong_together_is_told(text: list[list[Any]]) -> None:
    with pytest.raises(CheckpointError, match=r"is one expert: give the low-noise expert too"):
        WanStreamExperts.execute(TI2V_FILE.name, SAME_FOLDER, "fp32")
    with pytest.raises(
        CheckpointError, match=r"has no transformer_2: .* open this as a single model"
    ):
        WanStreamExperts.execute(TI2V_PIPELINE.name, SAME_FOLDER, "fp32")
    with pytest.raises(
        CheckpointError, match=r"is Wan2.2 TI2V-5B \(48 channels\), which is a single model"
    ):
        WanStreamExperts.execute(TI2V_FILE.name, TI2V_FILE.name, "fp32")
    (ours,), (theirs,) = (
        WanStreamOneExpert.execute(file.name, "fp32").args for file in (TI2V_FILE, T2V_FILE)
    )
    (plain,) = WanStreamEmptyLatent.execute(**SIZE, batch_size=1).args
    (wide,) = WanStreamEmptyLatent.execute(**SIZE, batch_size=1, model="Wan2.2 5B").args
    with pytest.raises(
        RequestError, match=r"the latent has 16 channels, .* takes those of Wan2.2 5B, with 48"
    ):
        _sampled(ours, (text, text, plain))
    with pytest.raises(
        RequestError, match=r"the latent has 48 channels, .* takes those of Wan2.1 .*, with 16"
    ):
        _sampled(theirs, (text, text, wide))
