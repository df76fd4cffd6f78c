"""Whole runs of Wan2.2 TI2V-5B against ComfyUI's own nodes, in one ComfyUI process.

Distances are relative L2 between latents. Both sides start from the same fp16 file and compute in
fp32, with the same noise, euler and `simple`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[3]

NATIVE = 1e-4
WIDTH, HEIGHT, FRAMES = 96, 64, 9
LATENT = (3, HEIGHT // 16, WIDTH // 16)
SHIFT, STEPS = 5.0, 6

RUNS = """
import asyncio, sys
from pathlib import Path
from types import SimpleNamespace
import torch
import comfy.sd
from comfy_extras.nodes_model_advanced import ModelSamplingSD3
from comfy_extras.nodes_wan import Wan22ImageToVideoLatent
from safetensors.torch import load_file, save_file

folder, pack, (WIDTH, HEIGHT, FRAMES), (SHIFT, STEPS) = arguments
assert asyncio.run(nodes.load_custom_node(pack))
Sampler = nodes.NODE_CLASS_MAPPINGS["WanStreamSampler"]
sampler = sys.modules[Sampler.__module__]
given, found = load_file(f"{folder}/given.safetensors"), {}


class Ours(Sampler):
    hidden = SimpleNamespace(unique_id=None)


class Encoded:
    '''Stands for the VAE: the latent of the start image is given.'''

    def encode(self, pixels):
        assert tuple(pixels.shape[1:]) == (HEIGHT, WIDTH, 3)
        return given["frames"][:, :, : 1 + (len(pixels) - 1) // 4]


path = f"{folder}/model.safetensors"
model = ModelSamplingSD3().patch(comfy.sd.load_diffusion_model(path), SHIFT)[0]


def native(latent, start=0, end=10000, *, cfg=5.0, add_noise=True, leftover=False):
    switch = {True: "enable", False: "disable"}
    return nodes.KSamplerAdvanced().sample(
        model, switch[add_noise], 7, STEPS, cfg, "euler", "simple", *texts, latent, start, end,
        switch[leftover],
    )[0]


def ours(latent, *, cfg=5.0, **settings):
    ref = sampler.ExpertsRef(high_noise=Path(path), single=True, compute_dtype="float32")
    usual = dict(
        seed=7, steps=STEPS, solver="euler", schedule="simple", flow_shift=SHIFT,
        boundary_ratio=0.9, switch_step=-1, guidance_high=cfg, guidance_low=1.0, start_step=0,
    )
    return Ours.execute(ref, *texts, latent, **{**usual, **settings}).result[0]


def both(name, one, other):
    found[name + " native"], found[name + " ours"] = one["samples"], other["samples"]
    assert other.get("noise_mask") is one.get("noise_mask")


def begun(images, batch=1):
    return Wan22ImageToVideoLatent.execute(
        Encoded(), WIDTH, HEIGHT, FRAMES, batch, images
    ).result[0]


texts = (
    [[given["positive"], {"pooled_output": None}]],
    [[given["negative"], {"pooled_output": None}]],
)
video = {"samples": given["video"]}
with torch.inference_mode():
    empty = begun(None)
    both("t2v", native(empty), ours(empty))
    for name, images, batch in (("i2v", 1, 1), ("i2v, batch of 2", 1, 2), ("i2v, 5 images", 5, 1)):
        latent = begun(given["image"].repeat(images, 1, 1, 1), batch)
        both(name, native(latent), ours(latent))
    latent = begun(given["image"])
    found["latent"] = latent["samples"]
    both("i2v without guidance", native(latent, cfg=1.0), ours(latent, cfg=1.0))
    both("video to video", native(video, 3), ours(video, start_step=3))
    left = native(latent, 0, 3, leftover=True)
    mine = ours(latent, end_step=3, leftover_noise=True)
    both("i2v in two parts", native(left, 3, add_noise=False),
         ours(mine, start_step=3, add_noise=False))
    for name, mask in given.items():
        if name.startswith("mask "):
            masked = {**video, "noise_mask": mask}
            both(name, native(masked, 1), ours(masked, start_step=1))

save_file(
    {name: value.float().contiguous().clone() for name, value in found.items()},
    f"{folder}/found.safetensors",
)
answer = None
"""

pytestmark = pytest.mark.comfy


def _random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _given() -> dict[str, torch.Tensor]:
    half = torch.zeros(HEIGHT, WIDTH)
    half[:, : WIDTH // 2] = 1
    frames = torch.zeros(1, 1, *LATENT)
    frames[:, :, 1:] = 1
    return {
        "positive": _random(1, 7, 4096, seed=1),
        "negative": _random(1, 5, 4096, seed=2),
        "frames": _random(1, 48, *LATENT, seed=3),
        "video": _random(1, 48, *LATENT, seed=4),
        "image": torch.rand(1, HEIGHT, WIDTH, 3, generator=torch.Generator().manual_seed(5)),
        "mask frames": frames,
        "mask pixels": half,
        "mask of 9 frames": half * torch.linspace(0, 1, FRAMES).view(-1, 1, 1),
        "mask of channels": torch.rand(1, 48, *LATENT, generator=torch.Generator().manual_seed(7)),
    }


@pytest.fixture(scope="module")
def found(
    in_comfyui: Callable[..., Any], tiny_expert_file: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, torch.Tensor]:
    """Results for each run on both sides."""
    folder = tmp_path_factory.mktemp("ti2v_runs")
    path = tiny_expert_file(seed=1, dtype=torch.float16, in_channels=48, layers=3)
    (folder / "model.safetensors").symlink_to(path)
    save_file(_given(), folder / "given.safetensors")
    in_comfyui(RUNS, str(folder), str(ROOT), (WIDTH, HEIGHT, FRAMES), (SHIFT, STEPS))
    return load_file(folder / "found.safetensors")


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    "name",
    [
        *(
            "t2v",
            "i2v",
            "i2v, batch of 2",
            "i2v, 5 images",
            "i2v without guidance",
            "i2v in two parts",
        ),
        *("video to video", "mask frames", "mask pixels", "mask of 9 frames", "mask of channels"),
    ],
)
def test_a_run_is_the_native_one(found: dict[str, torch.Tensor], name: str) -> None:
    assert _distance(found[name + " ours"], found[name + " native"]) <= NATIVE


def test_the_first_frame_is_the_one_that_was_given(found: dict[str, torch.Tensor]) -> None:
    assert _distance(found["i2v ours"][:, :, :1], found["latent"][:, :, :1]) <= NATIVE
    assert _distance(found["i2v ours"][:, :, 1:], found["t2v ours"][:, :, 1:]) > 1e-2
