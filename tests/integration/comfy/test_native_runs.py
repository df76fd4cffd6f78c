"""Whole runs against ComfyUI's own nodes, samplers and experts, in one ComfyUI process.

Distances are relative L2 between latents. Both sides start from the same fp16 files and compute in
fp32, with the same noise, euler and `simple`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import UniPCMultistepScheduler, WanImageToVideoPipeline
from safetensors.torch import load_file, save_file

from wanstream.sampling import denoise
from wanstream.sampling.inputs import DenoiseRequest, native_inputs
from wanstream.schema import OffloadPolicy
from wanstream.testing.components import save_vae_file
from wanstream.testing.weights import make_vae
from wanstream.tests.support.quantised_files import in_dtype
from wanstream.wan.experts.open import open_experts
from wanstream.wan.vae.vae import open_vae

ROOT = Path(__file__).parents[3]

NATIVE = 1e-4
PIPELINE = 1e-5
WIDTH, HEIGHT, FRAMES = 48, 32, 9
LATENT = (3, HEIGHT // 8, WIDTH // 8)
SHIFT, STEPS, SWITCH = 5.0, 6, 3
EXPERTS = {
    "high": (1, 16),
    "low": (2, 16),
    "high_lora": (3, 16),
    "i2v_high": (4, 36),
    "i2v_low": (5, 36),
}
"""Seed and input channels per file."""

RUNS = """
import asyncio, sys
from pathlib import Path
from types import SimpleNamespace
import torch
import comfy.samplers, comfy.sd, comfy.utils
from comfy_extras.nodes_custom_sampler import SamplerCustom
from comfy_extras.nodes_model_advanced import ModelSamplingSD3
from comfy_extras.nodes_wan import WanFirstLastFrameToVideo, WanImageToVideo
from safetensors.torch import load_file, save_file

folder, pack, (WIDTH, HEIGHT, FRAMES), (SHIFT, STEPS, SWITCH) = arguments
assert asyncio.run(nodes.load_custom_node(pack))
Sampler = nodes.NODE_CLASS_MAPPINGS["WanStreamSampler"]
sampler = sys.modules[Sampler.__module__]
given, found = load_file(f"{folder}/given.safetensors"), {}
loaded = {}


class Ours(Sampler):
    hidden = SimpleNamespace(unique_id=None)


def file(name):
    return f"{folder}/{name}.safetensors"


def refer(high, low):
    return sampler.ExpertsRef(
        high_noise=Path(file(high)), low_noise=Path(file(low)), compute_dtype="float32"
    )


def native_model(name):
    if name not in loaded:
        loaded[name] = ModelSamplingSD3().patch(comfy.sd.load_diffusion_model(file(name)), SHIFT)[0]
    return loaded[name]


def native(model, latent, start=0, end=10000, *, sides, cfg=4.0, add_noise=True, leftover=False):
    switch = {True: "enable", False: "disable"}
    return nodes.KSamplerAdvanced().sample(
        native_model(model), switch[add_noise], 7, STEPS, cfg, "euler", "simple", *sides, latent,
        start, end, switch[leftover],
    )[0]


def ours(high, low, latent, *, sides, cfg=(4.0, 3.0), switch=SWITCH, **settings):
    given = dict(
        seed=7, steps=STEPS, solver="euler", schedule="simple", flow_shift=SHIFT,
        boundary_ratio=0.9, switch_step=switch, guidance_high=cfg[0], guidance_low=cfg[1],
        start_step=0,
    )
    return Ours.execute(refer(high, low), *sides, latent, **{**given, **settings}).result[0]


def custom(*inputs):
    if hasattr(SamplerCustom, "execute"):
        return SamplerCustom.execute(*inputs).result[0]
    return SamplerCustom().sample(*inputs)[0]  # in 0.3.64


def both(name, native_latent, our_latent):
    found[name + " native"], found[name + " ours"] = native_latent["samples"], our_latent["samples"]


def native_pair(latent, sides, high="high", low="low"):
    left = native(high, latent, 0, SWITCH, sides=sides, leftover=True)
    return native(low, left, SWITCH, sides=sides, cfg=3.0, add_noise=False)


def text(name):
    return [[given[name], {"pooled_output": None}]]


texts = text("positive"), text("negative")
empty = {"samples": torch.zeros(1, 16, 3, HEIGHT // 8, WIDTH // 8), "downscale_ratio_spacial": 8}
two = {"samples": empty["samples"].repeat(2, 1, 1, 1, 1)}
video = {"samples": given["video"]}

with torch.inference_mode():
    vae = comfy.sd.VAE(sd=comfy.utils.load_torch_file(f"{folder}/vae.safetensors"))
    decoded = ours("high", "low", empty, sides=texts)
    both("t2v", native_pair(empty, texts), decoded)
    found["decoded native"] = vae.decode(decoded["samples"])
    both("batch of 2", native_pair(two, texts), ours("high", "low", two, sides=texts))
    pairs = [[given["pair"], {}]], text("negative")
    both("a text for each", native_pair(two, pairs), ours("high", "low", two, sides=pairs))
    picture = {"samples": torch.zeros(1, 4, HEIGHT // 8, WIDTH // 8), "downscale_ratio_spacial": 8}
    both("an image latent", native_pair(picture, texts), ours("high", "low", picture, sides=texts))
    both("video to video", native("low", video, 3, sides=texts),
         ours("high", "low", video, sides=texts, switch=0, start_step=3, cfg=(4.0, 4.0)))
    both("cut", native("high", empty, 0, 3, sides=texts),
         ours("high", "low", empty, sides=texts, end_step=3))

    stages = ("high", 0, 2, 4.0), ("high_lora", 2, 4, 4.0), ("low", 4, 10000, 3.0)
    def chain(kinds, latent):
        for (name, start, end, cfg), kind in zip(stages, kinds):
            if kind == "n":
                latent = native(name, latent, start, end, sides=texts, cfg=cfg,
                                add_noise=start == 0, leftover=True)
            else:
                high = "high" if name == "low" else name
                latent = ours(high, "low", latent, sides=texts, switch=4, start_step=start,
                              end_step=end, add_noise=start == 0, leftover_noise=True)
            assert start == 0 or "wanstream_leftover" in latent or "o" not in kinds
        return latent
    expected = chain("nnn", empty)
    for kinds in ("ooo", "ono", "non", "oon", "noo"):
        both("chain " + kinds, expected, chain(kinds, empty))

    # SIGMAS: SplitSigmas' high part, then its low part.
    sigmas = comfy.samplers.calculate_sigmas(
        native_model("high").get_model_object("model_sampling"), "beta", 7
    )
    euler, split = comfy.samplers.sampler_object("euler"), int((sigmas >= 0.9).sum())
    high = native_model("high")
    part = custom(high, True, 7, 4.0, *texts, euler, sigmas[: split + 1], empty)
    mine = ours("high", "low", empty, sides=texts, switch=-1, sigmas=sigmas[: split + 1])
    both("high sigmas", part, mine)
    rest = custom(native_model("low"), False, 7, 3.0, *texts, euler, sigmas[split:], part)
    both("low sigmas", rest, ours("high", "low", mine, sides=texts, switch=-1,
         sigmas=sigmas[split:], add_noise=False))
    both("all sigmas", rest, ours("high", "low", empty, sides=texts, switch=-1, sigmas=sigmas))

    for name, mask in given.items():
        if name.startswith("mask "):
            for kind, latent in (("video", video), ("empty", empty)):
                masked = {**latent, "noise_mask": mask}
                run = dict(sides=texts, switch=STEPS, start_step=1)
                both(f"{kind}, {name}", native("high", masked, 1, sides=texts),
                     ours("high", "low", masked, **run))
    masked = {**video, "noise_mask": given["mask frames"]}
    left = ours("high", "low", masked, sides=texts, end_step=SWITCH, leftover_noise=True)
    both("masked chain", native_pair(masked, texts),
         ours("high", "low", left, sides=texts, start_step=SWITCH, add_noise=False))
    both_videos = {
        "samples": given["video"].repeat(2, 1, 1, 1, 1), "noise_mask": given["masks for 2"]
    }
    both("a mask for each", native("low", both_videos, sides=texts, cfg=1.0),
         ours("high", "low", both_videos, sides=texts, switch=0, cfg=(1.0, 1.0)))

    start, end = given["start"], given["end"]
    size = (WIDTH, HEIGHT, FRAMES)
    made = {
        "i2v": WanImageToVideo.execute(*texts, vae, *size, 1, start).result,
        "i2v, batch of 2": WanImageToVideo.execute(*texts, vae, *size, 2, start).result,
        "i2v, 5 frames": WanImageToVideo.execute(
            *texts, vae, *size, 1, start.repeat(5, 1, 1, 1)
        ).result,
        "flf": WanFirstLastFrameToVideo.execute(*texts, vae, *size, 1, start, end).result,
        "last frame": WanFirstLastFrameToVideo.execute(*texts, vae, *size, 1, None, end).result,
    }
    for name, (positive, negative, latent) in made.items():
        sides = positive, negative
        both(name, native_pair(latent, sides, "i2v_high", "i2v_low"),
             ours("i2v_high", "i2v_low", latent, sides=sides))
        found[name + " image"] = positive[0][1]["concat_latent_image"]
        found[name + " mask"] = positive[0][1]["concat_mask"]
    bare = [
        [side[0][0], {"concat_latent_image": side[0][1]["concat_latent_image"]}]
        for side in made["i2v"][:2]
    ]
    for name, latent in (
        ("no mask", empty),
        ("noise mask", {**video, "noise_mask": given["mask frames"]}),
    ):
        sides = [bare[0]], [bare[1]]
        both("i2v, " + name, native("i2v_low", latent, sides=sides),
             ours("i2v_high", "i2v_low", latent, sides=sides, switch=0, cfg=(4.0, 4.0)))

    refusals = {}
    left = ours("high", "low", empty, sides=texts, end_step=2, leftover_noise=True)
    for name, latent, settings in (
        ("other step", left, {"start_step": 3}),
        ("other shift", left, {"start_step": 2, "flow_shift": 8.0}),
        ("other steps", left, {"start_step": 2, "steps": 8}),
        ("finished", decoded, {"start_step": 2}),
    ):
        try:
            ours("high", "low", latent, sides=texts, add_noise=False, **settings)
        except ValueError as err:
            refusals[name] = str(err)

save_file(
    {name: value.float().contiguous().clone() for name, value in found.items()},
    f"{folder}/found.safetensors",
)
answer = refusals
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
        "pair": _random(2, 6, 4096, seed=3),
        "video": _random(1, 16, *LATENT, seed=4),
        "start": torch.rand(1, HEIGHT, WIDTH, 3, generator=torch.Generator().manual_seed(5)),
        "end": torch.rand(1, HEIGHT, WIDTH, 3, generator=torch.Generator().manual_seed(6)),
        "mask frames": frames,
        "mask pixels": half,
        "mask of 9 frames": half * torch.linspace(0, 1, FRAMES).view(-1, 1, 1),
        "mask of 2 images": torch.stack([half, 1 - half])[:, None],
        "mask of channels": torch.rand(1, 16, *LATENT, generator=torch.Generator().manual_seed(7)),
        "masks for 2": torch.stack([frames[0], 1 - frames[0]]),
    }


class Runs:
    """Results for each run on both sides."""

    def __init__(
        self, found: dict[str, torch.Tensor], refusals: dict[str, str], folder: Path
    ) -> None:
        self.found, self.refusals, self.folder = found, refusals, folder

    def distance(self, name: str) -> float:
        return _distance(self.found[name + " ours"], self.found[name + " native"])


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape
    return float((found - expected).norm() / expected.norm())


@pytest.fixture(scope="module")
def runs(
    in_comfyui: Callable[..., Any],
    vae_width: int,
    tiny_expert_file: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Runs:
    folder = tmp_path_factory.mktemp("native_runs")
    for name, (seed, channels) in EXPERTS.items():
        path = tiny_expert_file(seed=seed, dtype=torch.float16, in_channels=channels, layers=3)
        (folder / f"{name}.safetensors").symlink_to(path)
    save_vae_file(make_vae(seed=3, base_dim=vae_width), folder / "vae.safetensors")
    save_file(_given(), folder / "given.safetensors")
    refusals = in_comfyui(
        RUNS, str(folder), str(ROOT), (WIDTH, HEIGHT, FRAMES), (SHIFT, STEPS, SWITCH)
    )
    return Runs(load_file(folder / "found.safetensors"), refusals, folder)


@pytest.mark.parametrize(
    "name",
    [
        *("t2v", "batch of 2", "a text for each", "an image latent", "video to video", "cut"),
        *(
            "i2v",
            "i2v, batch of 2",
            "i2v, 5 frames",
            "flf",
            "last frame",
            "i2v, no mask",
            "i2v, noise mask",
        ),
    ],
)
def test_a_run_of_both_experts_is_the_native_graph(runs: Runs, name: str) -> None:
    assert runs.distance(name) <= NATIVE


@pytest.mark.parametrize("kinds", ["ooo", "ono", "non", "oon", "noo"])
def test_three_samplers_of_either_kind_are_three_native_ones(runs: Runs, kinds: str) -> None:
    """The high expert, the high expert with other weights, the low expert.

    In the kinds, o is ours and n is KSampler (Advanced).
    """
    assert runs.distance("chain " + kinds) <= NATIVE


@pytest.mark.parametrize("part", ["high", "low", "all"])
def test_sigmas_of_another_node_in_parts(runs: Runs, part: str) -> None:
    assert runs.distance(part + " sigmas") <= NATIVE


@pytest.mark.parametrize("mask", ["frames", "pixels", "of 9 frames", "of 2 images", "of channels"])
@pytest.mark.parametrize("latent", ["video", "empty"])
def test_a_noise_mask_is_that_of_a_native_sampler(runs: Runs, latent: str, mask: str) -> None:
    assert runs.distance(f"{latent}, mask {mask}") <= NATIVE


@pytest.mark.parametrize("name", ["masked chain", "a mask for each"])
def test_masks_in_a_chain_and_in_a_batch(runs: Runs, name: str) -> None:
    assert runs.distance(name) <= NATIVE


def test_our_latent_in_the_native_decoder_is_our_own_decode(runs: Runs) -> None:
    with open_vae(runs.folder / "vae.safetensors") as vae:
        ours = vae.decode(runs.found["t2v ours"], device=torch.device("cpu")).flatten(0, 1)
    assert _distance(ours, runs.found["decoded native"].flatten(0, -4)) <= NATIVE


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("other step", "left at sigma 0.90921, and step 3 starts at sigma 0.83333"),
        ("other shift", "left at sigma 0.90921, and step 2 starts at sigma 0.94126"),
        ("other steps", "left at sigma 0.90921, and step 2 starts at sigma 0.93750"),
        ("finished", "left at sigma 0.00000, and step 2 .* turn leftover_noise on"),
    ],
)
def test_samplers_that_do_not_fit_together_are_refused(runs: Runs, name: str, numbers: str) -> None:
    with pytest.raises(ValueError, match=numbers):
        raise ValueError(runs.refusals[name])


def _pipeline(
    request: DenoiseRequest, vae_width: int, make_tiny_expert: Any, **images: torch.Tensor
) -> torch.Tensor:
    """Latents from diffusers' pipeline.

    `images` are `image` and, for a last frame, `last_image`.
    """
    experts = [
        in_dtype(make_tiny_expert(seed=seed, in_channels=36, layers=3), torch.float16).float()
        for seed in (4, 5)
    ]
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=SHIFT
    )
    pipeline = WanImageToVideoPipeline(
        tokenizer=None,
        text_encoder=None,
        transformer=experts[0],
        transformer_2=experts[1],
        vae=make_vae(seed=3, base_dim=vae_width),
        scheduler=scheduler,
        boundary_ratio=request.boundary_ratio,
    )
    pipeline.set_progress_bar_config(disable=True)
    latents: torch.Tensor = pipeline(
        **{name: image.movedim(-1, 1) for name, image in images.items()},
        height=HEIGHT,
        width=WIDTH,
        num_frames=FRAMES,
        num_inference_steps=STEPS,
        guidance_scale=request.guidance[0],
        guidance_scale_2=request.guidance[1],
        prompt_embeds=request.positive,
        negative_prompt_embeds=request.negative,
        latents=request.noise,
        output_type="latent",
    ).frames
    return latents


@pytest.mark.parametrize(
    ("name", "images"),
    [("i2v", {"image": "start"}), ("flf", {"image": "start", "last_image": "end"})],
)
def test_native_conditioning_is_the_diffusers_pipeline(
    runs: Runs, name: str, images: dict[str, str], vae_width: int, make_tiny_expert: Any
) -> None:
    given = _given()
    image = {
        "concat_latent_image": runs.found[name + " image"],
        "concat_mask": runs.found[name + " mask"],
    }
    sides = [[[given[side], image]] for side in ("positive", "negative")]
    inputs = native_inputs(sides[0], sides[1], {"samples": torch.zeros(1, 16, *LATENT)}, seed=7)
    request = DenoiseRequest(
        inputs.noise,
        inputs.positive,
        inputs.negative,
        inputs.image_condition,
        steps=STEPS,
        flow_shift=SHIFT,
        boundary_ratio=0.9,
        guidance=(4.0, 3.0),
    )
    assert set(request.step_plan.experts) == {"high", "low"}
    files = [runs.folder / f"i2v_{expert}.safetensors" for expert in ("high", "low")]
    with open_experts(*files, compute_dtype=torch.float32) as pair:
        ours = denoise(pair, request, policy=OffloadPolicy.layerwise(), device="cpu").latents
    expected = _pipeline(
        request, vae_width, make_tiny_expert, **{name: given[key] for name, key in images.items()}
    )
    assert _distance(ours, expected) <= PIPELINE
