"""Runs in ComfyUI's own Python: one expert (Wan2.1, TI2V-5B), against ComfyUI's sampler.

Our sampler and guider take the conditioning and the latents of ComfyUI's own nodes.
"""

from functools import cache

import torch
from comfy_extras.nodes_wan import Wan22ImageToVideoLatent

from wanstream.nodes.guider import WanStreamGuider
from wanstream.schema.refs.experts import ExpertsRef
from wanstream.testing import TinyShape, make_expert, save_expert_file

from .. import samplers
from ..checks import for_each
from ..families import _difference, _normal
from .variants import Vae

SHIFT = 5.0
STEPS = 6
GUIDANCE = 5.0
HEIGHT = 4
WIDTH = 6
FRAMES = 9
"""Latent height and width, and frames."""
SIZE = (3, HEIGHT, WIDTH)
EMPTY = {"samples": torch.zeros(1, 16, *SIZE)}
TEXTS = samplers.texts(12, 9)


class One:
    """One expert in ComfyUI's sampler, in ours and in our guider."""

    def __init__(self, folder, seed, dtype, **shape):
        file = folder / f"{seed}.safetensors"
        save_expert_file(make_expert(TinyShape(**shape), seed=seed), file, dtype=dtype)
        self.ref = ExpertsRef(high_noise=file, single=True, compute_dtype="float32")
        self.model = samplers.shifted(file, SHIFT)

    def native(self, latent, cfg=GUIDANCE, **settings):
        return samplers.ksampler(self.model, TEXTS, latent, steps=STEPS, cfg=cfg, **settings)

    def ours(self, latent, cfg=GUIDANCE, start=0, **more):
        """Run our sampler. The settings for a low-noise expert are ignored."""
        settings = {"steps": STEPS, "flow_shift": SHIFT, "start_step": start, **more}
        return samplers.our_sampler(self.ref, TEXTS, latent, cfg=(cfg, 9.0), **settings)

    def compare(self, latent, **settings):
        return samplers.assert_near(self.ours(latent, **settings), self.native(latent, **settings))

    def guider(self, low=1.0, boundary=0.875):
        given = {"flow_shift": SHIFT, "boundary_ratio": boundary}
        given |= {"guidance_high": GUIDANCE, "guidance_low": low}
        return WanStreamGuider.execute(self.ref, *TEXTS, **given).args[0]

    def by_guider(self, guider, latent, name="euler"):
        sigmas = samplers.simple_sigmas(self.model, STEPS, name)
        return samplers.guided(guider, latent, sigmas, name)

    def compare_guider(self, latent, name):
        ours = self.by_guider(self.guider(), latent, name)
        native = self.native(latent, sampler=name)
        assert _difference(ours, native["samples"]) <= samplers.NEAR
        return ours


@cache
def text_to_video(folder):
    return One(folder, 1, torch.float32)


@cache
def ti2v(folder):
    return One(folder, 3, torch.float16, in_channels=48)


def check_our_sampler(folder):
    one = text_to_video(folder)
    ours = one.compare(EMPTY)
    assert torch.equal(ours, one.ours(EMPTY, boundary_ratio=0.1, guidance_low=1.0)["samples"])


@for_each("euler", "dpmpp_2m", "heun", "uni_pc", "euler_cfg_pp")
def check_our_guider(folder, name):
    one = text_to_video(folder)
    guider = one.guider()
    ours = one.by_guider(guider, EMPTY, name)
    native = one.native(EMPTY, sampler=name)
    assert _difference(ours, native["samples"]) <= samplers.NEAR
    ignored = one.guider(low=9.0, boundary=0.1)
    assert torch.equal(ours, one.by_guider(ignored, EMPTY, name))
    steps = guider.timeline.steps
    assert {step.expert for step in steps} == {"high"}
    assert guider.recompiled == 0
    assert len({step.bytes_moved for step in steps}) == 1


def begun(images, batch=1):
    """Return ComfyUI's latent for a TI2V video that begins with this many images."""
    size = (16 * WIDTH, 16 * HEIGHT)
    pixels = torch.rand(images, *size[::-1], 3) if images else None
    return Wan22ImageToVideoLatent.execute(Vae(48, 16), *size, FRAMES, batch, pixels).result[0]


def check_start_images(folder):
    model = ti2v(folder)
    latent = begun(1)
    without = model.compare(begun(0))
    result = model.compare(latent)
    assert _difference(result[:, :, :1], latent["samples"][:, :, :1]) <= samplers.NEAR
    assert _difference(result[:, :, 1:], without[:, :, 1:]) > 1e-2
    model.compare(begun(1, batch=2))
    model.compare(begun(5))
    model.compare(latent, cfg=1.0)


def check_given_video(folder):
    model = ti2v(folder)
    video = {"samples": _normal(1, 48, *SIZE, seed=4)}
    model.compare(video, start=3)
    for mask in (begun(1)["noise_mask"], torch.rand(1, 48, *SIZE)):
        model.compare({**video, "noise_mask": mask}, start=1)


@for_each("euler", "dpmpp_2m", "heun")
def check_start_image_by_our_guider(folder, name):
    model = ti2v(folder)
    latent = begun(1)
    samples = latent["samples"]
    model.compare_guider({"samples": torch.zeros_like(samples)}, name)
    ours = model.compare_guider(latent, name)
    assert (ours - samples)[:, :, :1].abs().max() <= 1e-5, "the frame stays"
    plain = model.by_guider(model.guider(), {"samples": samples}, name)
    assert _difference(ours[:, :, 1:], plain[:, :, 1:]) > 100 * samplers.NEAR
