"""Sigmas, noise and image condition against a real ComfyUI: equal to the bit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file

from wanstream.sampling.inputs.conditioning import image_condition
from wanstream.sampling.steps import seeded_noise
from wanstream.sampling.steps.schedules import simple_schedule
from wanstream.wan.latents.space import denormalise, normalise

STEPS, SHIFTS = (1, 4, 20, 27, 38, 40, 186), (1.0, 3.0, 5.0, 8.0, 12.0)
SHAPE, SEED, BATCH_INDEX = (2, 16, 3, 4, 6), 2**63 + 5, [3, 0]

ASK = f"""
from types import SimpleNamespace as Namespace
import torch
from comfy import latent_formats, model_base, model_sampling, sample, samplers
from safetensors.torch import load_file, save_file

given, found = load_file(arguments[0]), {{}}
sampling = model_sampling.ModelSamplingDiscreteFlow()
for steps in {STEPS}:
    for shift in {SHIFTS}:
        sampling.set_parameters(shift=shift)
        found[f"sigmas {{steps}} {{shift}}"] = samplers.simple_scheduler(sampling, steps)
found["noise"] = sample.prepare_noise(torch.zeros({SHAPE}), {SEED})
found["indexed noise"] = sample.prepare_noise(torch.zeros({SHAPE}), {SEED}, {BATCH_INDEX})
for name, wan in (("5b ", latent_formats.Wan22()), ("", latent_formats.Wan21())):
    image = given[name + "image"]
    found[name + "normalised"], found[name + "raw"] = wan.process_in(image), wan.process_out(image)
model = Namespace(
    diffusion_model=Namespace(patch_embedding=Namespace(weight=torch.zeros(1, 36))),
    latent_format=wan, process_latent_in=wan.process_in, image_to_video=False,
)
for name in ("1", "4", "short"):
    found["condition " + name] = model_base.WAN21.concat_cond(
        model, noise=torch.zeros({SHAPE}), device="cpu",
        concat_latent_image=given["image"].clone(), concat_mask=given["mask " + name],
    )
save_file({{name: value.contiguous() for name, value in found.items()}}, arguments[1])
answer = None
"""

pytestmark = pytest.mark.comfy


def _given() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(1, 1, 3, 4, 6)
    mask[:, :, :1] = 0
    return {
        "image": torch.randn(1, 16, 3, 4, 6, generator=generator),
        "5b image": torch.randn(1, 48, 3, 2, 3, generator=generator),
        "mask 1": mask,
        "mask 4": torch.rand(1, 4, 3, 4, 6, generator=generator),
        "mask short": torch.rand(1, 3, 2, 4, 6, generator=generator),
    }


@pytest.fixture(scope="module")
def answer(
    in_comfyui: Callable[..., None], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, torch.Tensor]:
    """ComfyUI's results for the same inputs."""
    folder = tmp_path_factory.mktemp("sampling")
    question, reply = folder / "question.safetensors", folder / "reply.safetensors"
    save_file(_given(), question)
    in_comfyui(ASK, str(question), str(reply))
    return load_file(reply)


@pytest.mark.parametrize(("steps", "shift"), list(product(STEPS, SHIFTS)))
def test_simple_sigmas(answer: dict[str, torch.Tensor], steps: int, shift: float) -> None:
    assert torch.equal(
        torch.tensor(simple_schedule(steps, shift).sigmas), answer[f"sigmas {steps} {shift}"]
    )


def test_noise(answer: dict[str, torch.Tensor]) -> None:
    assert torch.equal(seeded_noise(SHAPE, SEED), answer["noise"])
    assert torch.equal(seeded_noise(SHAPE, SEED, batch_index=BATCH_INDEX), answer["indexed noise"])


@pytest.mark.parametrize("model", ["", "5b "], ids=["A14B", "5B"])
def test_latent_spaces(answer: dict[str, torch.Tensor], model: str) -> None:
    image = _given()[f"{model}image"]
    assert torch.equal(normalise(image), answer[f"{model}normalised"])
    assert torch.equal(denormalise(image), answer[f"{model}raw"])


@pytest.mark.parametrize("mask", ["1", "4", "short"])
def test_image_condition(answer: dict[str, torch.Tensor], mask: str) -> None:
    given = _given()
    ours = image_condition(given["image"], given[f"mask {mask}"])
    # ComfyUI repeats the condition over the batch. A request gets it once.
    assert torch.equal(ours.expand(SHAPE[0], -1, -1, -1, -1), answer[f"condition {mask}"])
