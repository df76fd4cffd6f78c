"""Runs in ComfyUI's own Python: Fun models and Bernini's contexts in our sampler and guider.

`FUN` has tiny models shaped like Fun-Control and Fun-InP, whose conditioning ComfyUI's own nodes
make. The results are compared with ComfyUI's sampling from the same files. Bernini's were not
checked against the original.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
from comfy import sample
from comfy_extras import nodes_custom_sampler, nodes_edit_model, nodes_wan
from comfy_extras.nodes_model_advanced import ModelSamplingSD3

from wanstream.host import current_host
from wanstream.nodes.guider import WanStreamGuider
from wanstream.nodes.latents import vae_of
from wanstream.nodes.runs.file_checks import check_encoder
from wanstream.nodes.variants.bernini import WanStreamBernini
from wanstream.nodes.variants.fun_control import WanStreamFunControl
from wanstream.sampling.steps import Guidance, RequestError
from wanstream.schema.refs.experts import ExpertsRef
from wanstream.wan.latents import WAN21, WAN22

from ..checks import for_each, refused, require
from ..families import Family, _clip, _difference, _normal, _wan_family, native
from ..samplers import NEAR, SEED, guided, ksampler, ksamplers, our_sampler, simple_sigmas, texts

SHIFT = 5.0
STEPS = 5
SWITCH = 2
GUIDANCE = (4.0, 3.0)
"""Guidance scales for the high-noise and the low-noise expert."""
FRAMES = 9
LATENT_HEIGHT = 4
LATENT_WIDTH = 6
HAS_CONTEXTS = importlib.util.find_spec("comfy_extras.nodes_bernini") is not None
"""False for a ComfyUI that does not read context latents."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A model, and the ComfyUI node that makes the conditioning for it."""

    family: Family
    node: type = object
    """Class in `comfy_extras.nodes_wan`."""
    optional: tuple[str, ...] = ()
    """Connected optional inputs. "reference" is the input to a separate ReferenceLatent."""
    pair: bool = False
    """True for a high-noise and a low-noise expert."""

    def inputs(self, *, other=(), batch=1):
        """Return the outputs of the node.

        Args:
            other: Optional inputs that get other pictures.
            batch: Number of samples in the latent.
        """
        channels = self.family.sizes[0][1]
        pixels = 16 if channels == 48 else 8
        vae = Vae(channels, pixels)
        height = LATENT_HEIGHT * pixels
        width = LATENT_WIDTH * pixels
        given = {}
        for seed, name in enumerate(self.optional, start=70):
            frames = FRAMES if name == "control_video" else 1
            seed = seed + 100 * (name in other)
            # Pictures are larger than the video, as users' are, but not for ReferenceLatent.
            larger = 1 if name == "reference" else 2
            given[name] = _pictures(frames, larger * height, larger * width, seed=seed)
            if name == "clip_vision_output":
                given[name] = _clip(tokens=257, width=1280, seed=seed)
        # Next to a CLIP branch, diffusers takes the last 512 rows for text, and the rows before
        # for the image.
        sides = texts(512, 512) if "clip_vision_output" in self.optional else texts(12, 9)
        reference = given.pop("reference", None)
        size = {"width": width, "height": height, "length": FRAMES, "batch_size": batch}
        *sides, latent = self.node.execute(*sides, vae=vae, **size, **given).args
        if reference is not None:
            node = nodes_edit_model.ReferenceLatent
            encoded = {"samples": vae.encode(reference)}
            sides = [node.execute(side, encoded).args[0] for side in sides]
        return sides, latent


class Vae:
    """A VAE whose latents depend on every pixel: averages over latent pixels, mixed and bent."""

    def __init__(self, latent_channels, pixels):
        self.latent_channels = latent_channels
        self._pixels = pixels
        self._mix = _normal(latent_channels, 6, seed=60)

    def spacial_compression_encode(self):
        return self._pixels

    def encode(self, pixels):
        """Return latents for pictures [frames, height, width, 3].

        The first picture is a latent frame by itself.
        """
        frames, height, width, _ = pixels.shape
        first = pixels[:1].repeat(4, 1, 1, 1) if frames % 4 else pixels[:0]
        groups = torch.cat([first, pixels[frames % 4 :]])
        size = self._pixels
        cells = groups.reshape(-1, 4, height // size, size, width // size, size, 3)
        halves = cells.unflatten(1, (2, 2)).mean(dim=(2, 4, 6))
        mixed = torch.einsum("tshwc,dsc->dthw", 6 * (halves - 0.5), self._mix.view(-1, 2, 3))
        return (2 * mixed.tanh() + 0.3 * mixed)[None]


def _family(name, channels, **settings):
    base = "WAN22" if settings.get("latent_channels") == 48 else "WAN21"
    size = {"dim": 256, "layers": 4}
    return _wan_family(name, base, "model.WanModel", channels=channels, **size, **settings)


def _fun_control(name, channels, latent, **model):
    """Return a Fun Control 2.2 model for latents with this many channels."""
    settings = {"latent_channels": latent, "in_dim_ref_conv": latent}
    family = _family(name, channels, model_type="t2v", **settings)
    optional = ("ref_image", "start_image", "control_video")
    return Variant(family=family, node=nodes_wan.Wan22FunControlToVideo, optional=optional, **model)


def _fun_control_21():
    """Return a later Fun Control 2.1 model. ComfyUI's node has no input for its reference."""
    family = _family("fun_control_21", 48, model_type="i2v", in_dim_ref_conv=16)
    optional = ("reference", "clip_vision_output", "start_image", "control_video")
    return Variant(family=family, node=nodes_wan.WanFunControlToVideo, optional=optional)


def _fun_inp(family, *more, **model):
    optional = (*more, "start_image", "end_image")
    return Variant(family=family, node=nodes_wan.WanFunInpaintToVideo, optional=optional, **model)


FUN = {
    case.family.name: case
    for case in (
        _fun_control("fun_control_22", 52, 16, pair=True),
        _fun_inp(_family("fun_inp_22", 36, model_type="t2v"), pair=True),
        _fun_control_21(),
        _fun_inp(_family("fun_inp_21", 36, model_type="i2v"), "clip_vision_output"),
        _fun_control("fun_control_5b", 148, 48),
        _fun_inp(_family("fun_inp_5b", 100, model_type="t2v", latent_channels=48)),
    )
}


def _pictures(frames, height, width, *, seed):
    return torch.rand(frames, height, width, 3, generator=torch.Generator().manual_seed(seed))


class Models:
    """A variant's experts in fp32 files, run by ComfyUI and by us."""

    def __init__(self, folder, variant):
        self.variant = variant
        self.experts = ("high", "low") if variant.pair else ("high",)
        self.files = []
        for seed, expert in enumerate(self.experts, start=1):
            self.files.append(folder / f"{variant.family.name}_{expert}.safetensors")
            if not self.files[-1].exists():
                replace(variant.family, seed=seed).write(self.files[-1], "fp32")
        low = self.files[1] if variant.pair else None
        settings = {"single": not variant.pair, "compute_dtype": "float32"}
        self.ref = ExpertsRef(high_noise=self.files[0], low_noise=low, **settings)

    @cached_property
    def models(self):
        """MODELs after Load Diffusion Model and ModelSamplingSD3."""
        loaded = [native(path, self.variant.family) for path in self.files]
        return [ModelSamplingSD3().patch(model, SHIFT)[0] for model in loaded]

    @cached_property
    def sigmas(self):
        return simple_sigmas(self.models[0], STEPS)

    def native_run(self, inputs):
        """Return KSampler's latent. Pairs run in two, which switch at the step `SWITCH`."""
        sides, latent = inputs
        if not self.variant.pair:
            run = ksampler(self.models[0], sides, latent, steps=STEPS, cfg=GUIDANCE[0])
        else:
            settings = {"steps": STEPS, "switch": SWITCH, "cfg": GUIDANCE}
            run = ksamplers(*self.models, sides, latent, **settings)
        return run["samples"].cpu()

    def native_dual_run(self, inputs):
        """Return the Dual CFG Guider's latent, with steps, noise and guidance of `native_run`."""
        sides, latent = inputs
        noise = sample.prepare_noise(latent["samples"], SEED)
        without_context = [[text, {"pooled_output": None}] for text, _ in sides[1]]
        parts = (slice(SWITCH + 1), slice(SWITCH, None)) if self.variant.pair else (slice(None),)
        for model, part, scale in zip(self.models, parts, GUIDANCE, strict=False):
            guider = nodes_custom_sampler.Guider_DualCFG(model)
            guider.set_conds(*sides, without_context)
            guider.set_cfg(scale, CONTEXT_SCALE)
            latent = {"samples": guided(guider, latent, self.sigmas[part], noise=noise)}
            noise = torch.zeros_like(noise)
        return latent["samples"]

    def ours(self, inputs, **changes):
        """Return our sampler's latent, with the settings of `native_run`."""
        switch = SWITCH if self.variant.pair else -1
        given = {"steps": STEPS, "flow_shift": SHIFT, "switch_step": switch, **changes}
        return our_sampler(self.ref, *inputs, cfg=GUIDANCE, **given)["samples"]

    def guider(self, inputs, **more):
        # The native run switches at a step, and the guider at a noise level.
        boundary = float(self.sigmas[SWITCH - 1 : SWITCH + 1].mean())
        given = {"flow_shift": SHIFT, "boundary_ratio": boundary, **more}
        given |= {"guidance_high": GUIDANCE[0], "guidance_low": GUIDANCE[1]}
        return WanStreamGuider.execute(self.ref, *inputs[0], **given).args[0]

    def by_guider(self, inputs):
        """Return the latent of ComfyUI's Euler over our guider, at `native_run`'s sigmas."""
        return guided(self.guider(inputs), inputs[1], self.sigmas)

    def assert_parity(self, inputs):
        """Compare whole runs by our sampler and our guider. Return ComfyUI's latent."""
        expected = self.native_run(inputs)
        for run in (self.ours, self.by_guider):
            assert _difference(run(inputs), expected) <= NEAR
        return expected


@for_each(*FUN)
def check_fun_model(folder, name):
    variant = FUN[name]
    models = Models(folder, variant)
    plain = models.assert_parity(variant.inputs())
    for each in variant.optional:
        changed = models.native_run(variant.inputs(other=(each,)))
        assert _difference(changed, plain) > 1e-3, f"{each} has no effect"


def check_a_missing_image_embedding_is_refused(folder):
    models = Models(folder, FUN["fun_inp_21"])
    inputs = replace(models.variant, optional=("start_image", "end_image")).inputs()
    words = "the model has an image branch (Wan2.1 I2V), and the request has no image embedding"
    for run in (models.ours, models.by_guider):
        refused(partial(run, inputs), words, kind=RequestError)


# They have every per-video value: image, mask, reference and CLIP, in a pair and with 48 channels.
@for_each("fun_control_22", "fun_control_21", "fun_control_5b")
def check_two_videos(folder, name):
    Models(folder, FUN[name]).assert_parity(FUN[name].inputs(batch=2))


def bernini(folder, *, pair):
    """Experts with text-to-video tensors, as Bernini has."""
    require(HAS_CONTEXTS, "context latents")
    family = _family("bernini_pair" if pair else "bernini", 16, model_type="t2v")
    return Models(folder, Variant(family=family, pair=pair))


def context_inputs(*sizes, batch=1):
    """Return BerniniConditioning's outputs for contexts in these sizes."""
    context = [_normal(1, 16, *size, seed=90 + number) for number, size in enumerate(sizes)]
    values = {"context_latents": context} if context else {}
    sides = [[[text, {**given, **values}]] for ((text, given),) in texts(12, 9)]
    return sides, {"samples": torch.zeros(batch, 16, 3, LATENT_HEIGHT, LATENT_WIDTH)}


SOURCE = (3, 4, 6)
IMAGES = ((1, 8, 4), (1, 2, 10))
"""Sizes of context latents."""


@for_each((False, 1, SOURCE), (True, 1, SOURCE, *IMAGES), (False, 1, *IMAGES), (True, 2, *IMAGES))
def check_contexts(folder, pair, batch, *sizes):
    """A source, images, or both, in an expert or a pair, for one or two videos."""
    models = bernini(folder, pair=pair)
    inputs = context_inputs(*sizes, batch=batch)
    plain = models.native_run(context_inputs())
    assert _difference(models.assert_parity(inputs)[:1], plain) > 0.01


CONTEXT_SCALE = 1.75


@for_each((False, 1), (True, 1), (True, 2))
def check_context_guidance(folder, pair, batch):
    """Whole runs are those of ComfyUI's dual guider, for one and two videos."""
    models = bernini(folder, pair=pair)
    inputs = context_inputs(SOURCE, *IMAGES, batch=batch)
    guidance = Guidance(context=CONTEXT_SCALE)
    ours = models.ours(inputs, guidance=guidance)
    assert _difference(ours, models.native_dual_run(inputs)) <= NEAR
    assert _difference(ours, models.ours(inputs)) > 0.01
    words = "context_guidance is 1.75, which Wan Guider does not apply"
    refused(lambda: models.guider(inputs, guidance=guidance), words, kind=RequestError)


SIZE = {"width": 48, "height": 32}
"""Pixel size for 4 x 6 latent pixels."""


def _ours(node, vae, **inputs):
    """Return our node's outputs, with the test VAE in place of a file."""
    space = WAN22 if vae.latent_channels == WAN22.channels else WAN21
    positive, negative = texts(3, 3)
    given = {"positive": positive, "negative": negative, "vae": "vae", "batch_size": 1, **inputs}
    with (
        patch(f"{vae_of.__module__}.open_vae", lambda path: SimpleNamespace(space=space)),
        patch(f"{check_encoder.__module__}._vae", lambda *_, **__: ()),
        patch(f"{node.__module__}.encode_here", lambda _, path, video: vae.encode(video)),
        patch.object(type(current_host().files), "model_path", lambda *_: Path("vae")),
    ):
        return list(node.execute(**given).args)


def _check_options(ours, theirs):
    """Compare what two nodes have put next to the text."""
    ((_, ours),) = ours
    ((_, theirs),) = theirs
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


# The last one is longer than the control video.
@for_each((16, 9), (48, 9), (16, 17))
def check_fun_control_node(_, channels, frames):
    """Our node writes what ComfyUI's does."""
    factor = 2 if channels == 48 else 1
    vae = Vae(channels, 8 * factor)
    size = {side: factor * length for side, length in SIZE.items()}
    control = _pictures(13, 96, 100, seed=1)
    given = {**size, "control_video": control, "start_image": _pictures(1, 64, 80, seed=2)}
    reference = _pictures(2, 50, 60, seed=3)
    ours = _ours(WanStreamFunControl, vae, **given, frames=frames, reference_image=reference)
    given |= {"length": frames, "batch_size": 1, "ref_image": reference}
    theirs = nodes_wan.Wan22FunControlToVideo.execute(*texts(3, 3), vae, **given).args
    for side in (0, 1):
        _check_options(ours[side], theirs[side])


def check_bernini_node(_):
    require(HAS_CONTEXTS, "context latents")
    from comfy_extras.nodes_bernini import BerniniConditioning

    vae = Vae(16, 8)
    pictures = _pictures(2, 50, 60, seed=3)
    videos = {"source_video": _pictures(13, 96, 100, seed=1)}
    videos["reference_video"] = _pictures(5, 70, 40, seed=4)
    node = partial(_ours, WanStreamBernini, vae, **SIZE, frames=9, longest_side=64)
    ours = node(reference_image=pictures, **videos)
    given = {"vae": vae, "batch_size": 1, "length": 9, "ref_max_size": 64, **SIZE, **videos}
    images = {"reference_images": {"reference_image_0": pictures}}
    sides = {"positive": [["", {}]], "negative": [["", {}]]}
    theirs = BerniniConditioning.execute(**sides, **given, **images).args
    contexts = [results[0][0][1]["context_latents"] for results in (ours, theirs)]
    torch.testing.assert_close(*contexts, rtol=0, atol=1e-5)
