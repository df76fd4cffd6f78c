"""Runs in ComfyUI's Python: whole runs of two experts against ComfyUI's own nodes and samplers.

Distances are relative L2 between latents. Both sides start from the same fp16 files and compute in
fp32, with the same noise, euler and `simple`.
"""

from functools import cache, partial

import torch
from comfy import latent_formats, model_sampling, samplers
from comfy_extras.nodes_custom_sampler import SamplerCustom
from comfy_extras.nodes_wan import WanFirstLastFrameToVideo, WanImageToVideo

from wanstream.sampling.steps.schedules import simple_schedule
from wanstream.schema.refs.experts import ExpertsRef
from wanstream.testing import TinyShape, make_expert, save_expert_file
from wanstream.wan.latents.space import denormalise, normalise

from ..checks import for_each, refused
from ..families import _normal
from ..patches import node_results
from ..samplers import assert_near, ksampler, ksamplers, our_sampler, shifted, texts
from .variants import Vae

WIDTH = 48
HEIGHT = 32
FRAMES = 9
LATENT = (3, HEIGHT // 8, WIDTH // 8)
SHIFT = 5.0
STEPS = 6
SWITCH = 3
EXPERTS = {
    "high": (1, 16), "low": (2, 16), "high_lora": (3, 16), "i2v_high": (4, 36), "i2v_low": (5, 36),
}  # fmt: skip
"""Seed and input channels per file."""
SIZE = {"downscale_ratio_spacial": 8}
EMPTY = {"samples": torch.zeros(1, 16, *LATENT), **SIZE}
VIDEO = {"samples": _normal(1, 16, *LATENT, seed=4)}
TEXTS = texts(7, 5)


class Pair:
    """Both experts, by ComfyUI's nodes and by ours."""

    def __init__(self, folder):
        self.folder = folder
        for name, (seed, channels) in EXPERTS.items():
            expert = make_expert(TinyShape(in_channels=channels, layers=3), seed=seed)
            save_expert_file(expert, self.file(name), dtype=torch.float16)
        self.model = cache(lambda name: shifted(self.file(name), SHIFT))

    def file(self, name):
        return self.folder / f"{name}.safetensors"

    def native(self, name, latent, start=0, end=10000, *, sides=TEXTS, cfg=4.0, **more):
        given = {"steps": STEPS, "cfg": cfg, "start": start, "end": end, **more}
        return ksampler(self.model(name), sides, latent, **given)

    def native_pair(self, latent, sides=TEXTS, high="high", low="low"):
        experts = self.model(high), self.model(low)
        settings = {"steps": STEPS, "switch": SWITCH, "cfg": (4.0, 3.0)}
        return ksamplers(*experts, sides, latent, **settings)

    def ours(
        self, latent, high="high", low="low", *, sides=TEXTS, cfg=(4.0, 3.0), switch=SWITCH, **more
    ):
        files = {"high_noise": self.file(high), "low_noise": self.file(low)}
        experts = ExpertsRef(**files, compute_dtype="float32")
        given = {"steps": STEPS, "flow_shift": SHIFT, "switch_step": switch, **more}
        return our_sampler(experts, sides, latent, cfg=cfg, **given)

    def compare(self, latent, sides=TEXTS, *experts):
        native = self.native_pair(latent, sides, *experts)
        assert_near(self.ours(latent, *experts, sides=sides), native)


setup = Pair


def check_simple_sigmas(_):
    """They are ComfyUI's to the bit."""
    sampling = model_sampling.ModelSamplingDiscreteFlow()
    for steps in (1, 4, 20, 27, 38, 40, 186):
        for shift in (1.0, 3.0, 5.0, 8.0, 12.0):
            sampling.set_parameters(shift=shift)
            ours = torch.tensor(simple_schedule(steps, shift).sigmas)
            assert torch.equal(ours, samplers.simple_scheduler(sampling, steps))


@for_each(latent_formats.Wan21, latent_formats.Wan22)
def check_latent_space(_, form):
    """The numbers are ComfyUI's, and the results are equal to the bit."""
    wan = form()
    image = _normal(1, wan.latent_channels, 3, 4, 6, seed=0)
    assert torch.equal(normalise(image), wan.process_in(image))
    assert torch.equal(denormalise(image), wan.process_out(image))


def check_text_to_video(pair):
    pair.compare(EMPTY)
    two = {"samples": EMPTY["samples"].repeat(2, 1, 1, 1, 1)}
    pair.compare(two)
    pair.compare(two, ([[_normal(2, 6, 4096, seed=3), {}]], TEXTS[1]))
    pair.compare({"samples": torch.zeros(1, 4, HEIGHT // 8, WIDTH // 8), **SIZE})


def check_parts_of_a_run(pair):
    ours = pair.ours(VIDEO, switch=0, start_step=3, cfg=(4.0, 4.0))
    assert_near(ours, pair.native("low", VIDEO, 3))
    assert_near(pair.ours(EMPTY, end_step=3), pair.native("high", EMPTY, 0, 3))


@for_each("ooo", "ono", "non", "oon", "noo")
def check_three_samplers_of_either_kind(pair, kinds):
    """The high expert, the high expert with other weights, the low expert.

    In the kinds, o is ours and n is KSampler (Advanced).
    """

    def chain(kinds):
        stages = ("high", 0, 2, 4.0), ("high_lora", 2, 4, 4.0), ("low", 4, 10000, 3.0)
        latent = EMPTY
        for (name, start, end, cfg), kind in zip(stages, kinds, strict=True):
            if kind == "n":
                settings = {"cfg": cfg, "add_noise": start == 0, "leftover": True}
                latent = pair.native(name, latent, start, end, **settings)
            else:
                high = "high" if name == "low" else name
                settings = {"start_step": start, "end_step": end, "add_noise": start == 0}
                latent = pair.ours(latent, high, switch=4, leftover_noise=True, **settings)
            assert start == 0 or "wanstream_leftover" in latent or "o" not in kinds
        return latent

    assert_near(chain(kinds), chain("nnn"))


def check_sigmas_of_another_node_in_parts(pair):
    """SplitSigmas' high part, then its low part, and both at once."""
    sampling = pair.model("high").get_model_object("model_sampling")
    sigmas = samplers.calculate_sigmas(sampling, "beta", 7)
    split = int((sigmas >= 0.9).sum())

    def custom(name, add_noise, cfg, sigmas, latent):
        given = {"model": pair.model(name), "add_noise": add_noise, "noise_seed": 7, "cfg": cfg}
        given |= {"positive": TEXTS[0], "negative": TEXTS[1], "latent_image": latent}
        sampler = samplers.sampler_object("euler")
        return node_results(SamplerCustom, **given, sampler=sampler, sigmas=sigmas)[0]

    part = custom("high", True, 4.0, sigmas[: split + 1], EMPTY)
    ours = pair.ours(EMPTY, switch=-1, sigmas=sigmas[: split + 1])
    assert_near(ours, part)
    rest = custom("low", False, 3.0, sigmas[split:], part)
    assert_near(pair.ours(ours, switch=-1, sigmas=sigmas[split:], add_noise=False), rest)
    assert_near(pair.ours(EMPTY, switch=-1, sigmas=sigmas), rest)


HALF = torch.zeros(HEIGHT, WIDTH)
HALF[:, : WIDTH // 2] = 1
LAST_FRAMES = torch.zeros(1, 1, *LATENT)
LAST_FRAMES[:, :, 1:] = 1
MASKS = {
    "frames": LAST_FRAMES,
    "pixels": HALF,
    "of 9 frames": HALF * torch.linspace(0, 1, FRAMES).view(-1, 1, 1),
    "of 2 images": torch.stack([HALF, 1 - HALF])[:, None],
    "of channels": torch.rand(1, 16, *LATENT, generator=torch.Generator().manual_seed(7)),
}


@for_each(*MASKS)
def check_a_noise_mask(pair, name):
    for latent in (VIDEO, EMPTY):
        masked = {**latent, "noise_mask": MASKS[name]}
        assert_near(pair.ours(masked, switch=STEPS, start_step=1), pair.native("high", masked, 1))


def check_masks_in_a_chain_and_in_a_batch(pair):
    masked = {**VIDEO, "noise_mask": LAST_FRAMES}
    left = pair.ours(masked, end_step=SWITCH, leftover_noise=True)
    assert_near(pair.ours(left, start_step=SWITCH, add_noise=False), pair.native_pair(masked))
    two = {
        "samples": VIDEO["samples"].repeat(2, 1, 1, 1, 1),
        "noise_mask": torch.stack([LAST_FRAMES[0], 1 - LAST_FRAMES[0]]),
    }
    assert_near(pair.ours(two, switch=0, cfg=(1.0, 1.0)), pair.native("low", two, cfg=1.0))


def _picture(seed):
    return torch.rand(1, HEIGHT, WIDTH, 3, generator=torch.Generator().manual_seed(seed))


START = _picture(5)
END = _picture(6)


def with_images(name):
    """Return conditioning and latent by ComfyUI's nodes."""
    given = (*TEXTS, Vae(16, 8), WIDTH, HEIGHT, FRAMES)
    if name in ("flf", "last frame"):
        start = START if name == "flf" else None
        return WanFirstLastFrameToVideo.execute(*given, 1, start, END).result
    frames = START.repeat(5 if name == "5 frames" else 1, 1, 1, 1)
    return WanImageToVideo.execute(*given, 2 if name == "batch of 2" else 1, frames).result


@for_each("start", "batch of 2", "5 frames", "flf", "last frame")
def check_image_to_video(pair, name):
    *sides, latent = with_images(name)
    pair.compare(latent, sides, "i2v_high", "i2v_low")


def check_an_image_without_a_mask(pair):
    name = "concat_latent_image"
    given = with_images("start")[:2]
    sides = [[[text, {name: values[name]}]] for ((text, values),) in given]
    for latent in (EMPTY, {**VIDEO, "noise_mask": LAST_FRAMES}):
        ours = pair.ours(latent, "i2v_high", "i2v_low", sides=sides, switch=0, cfg=(4.0, 4.0))
        assert_near(ours, pair.native("i2v_low", latent, sides=sides))


def check_samplers_that_do_not_fit_together_are_refused(pair):
    left = pair.ours(EMPTY, end_step=2, leftover_noise=True)
    at_step_2 = "left at sigma 0.90921, and step 2 starts at sigma"
    for latent, settings, numbers in (
        (left, {"start_step": 3}, "at sigma 0.90921, and step 3 starts at sigma 0.83333"),
        (left, {"start_step": 2, "flow_shift": 8.0}, f"{at_step_2} 0.94126"),
        (left, {"start_step": 2, "steps": 8}, f"{at_step_2} 0.93750"),
        (pair.ours(EMPTY), {"start_step": 2}, "turn leftover_noise on"),
    ):  # fmt: skip
        refused(partial(pair.ours, latent, add_noise=False, **settings), numbers)
