"""Runs in ComfyUI's own Python: experts in ComfyUI's samplers and in ours, with the same settings.

Both start from the same noise, and use euler and the `simple` schedule.
"""

import itertools
from types import SimpleNamespace

import torch
from comfy import samplers, sd
from comfy_extras import nodes_custom_sampler
from comfy_extras.nodes_model_advanced import ModelSamplingSD3

import nodes
from wanstream.nodes.sampler import WanStreamSampler

from .families import _difference, _normal
from .patches import node_results

SEED = 7
NEAR = 1e-4
"""Relative L2 norm between two latents of the same run."""


class Sampler(WanStreamSampler):
    hidden = SimpleNamespace(unique_id=None)


def texts(positive, negative):
    """Return both sides of a text, with so many tokens."""
    return [
        [[_normal(1, tokens, 4096, seed=seed), {"pooled_output": None}]]
        for seed, tokens in enumerate((positive, negative), start=1)
    ]


def shifted(file, shift):
    """Return an expert's MODEL by ComfyUI's nodes."""
    return ModelSamplingSD3().patch(sd.load_diffusion_model(str(file)), shift)[0]


def switching(high, low, boundary=0.875):
    """Return ComfyUI's high-noise expert as a MODEL that calls the other expert at low noise."""
    inner = high.model_options.get("model_function_wrapper")

    def call(apply_model, given):
        def expert(x, t, **conditions):
            is_high = float(t.flatten()[0]) * 1000 >= boundary * 1000
            return (apply_model if is_high else low.model.apply_model)(x, t, **conditions)

        if inner is not None:
            return inner(expert, given)
        return expert(given["input"], given["timestep"], **given["c"])

    both = high.clone()
    both.set_additional_models("low", [low])
    both.set_model_unet_function_wrapper(call)
    return both


def back_and_forth(model, x, sigmas, extra_args=None, callback=None, disable=None):
    """Sampler function that returns to a higher noise level after each step, as restarts do."""
    for step, (sigma, following) in enumerate(itertools.pairwise(sigmas)):
        for at in (sigma, (sigma + following) / 2, sigma):
            denoised = model(x, at.repeat(len(x)), **extra_args)
        x = denoised + (x - denoised) * following / sigma
        if callback is not None:
            callback({"i": step, "denoised": denoised, "x": x})
    return x


def ksampler(
    model, sides, latent, *, steps, cfg, start=0, end=10000, add_noise=True, leftover=False,
    seed=SEED, sampler="euler",
):  # fmt: skip
    """Run KSampler (Advanced)."""
    switch = {True: "enable", False: "disable"}
    settings = (seed, steps, cfg, sampler, "simple", *sides)
    run = nodes.KSamplerAdvanced().sample
    return run(model, switch[add_noise], *settings, latent, start, end, switch[leftover])[0]


def ksamplers(high, low, sides, latent, *, switch, cfg, **settings):
    """Run two KSamplers: one expert before the step `switch`, the other from it on."""
    first = {"cfg": cfg[0], "end": switch, "leftover": True}
    left = ksampler(high, sides, latent, **first, **settings)
    return ksampler(low, sides, left, cfg=cfg[1], start=switch, add_noise=False, **settings)


def our_sampler(experts, sides, latent, *, cfg, **settings):
    """Run our sampler."""
    given = {
        "seed": SEED, "solver": "euler", "schedule": "simple", "boundary_ratio": 0.9,
        "switch_step": -1, "start_step": 0, "guidance_high": cfg[0], "guidance_low": cfg[1],
        **settings,
    }  # fmt: skip
    return Sampler.execute(experts, *sides, latent, **given).result[0]


def simple_sigmas(model, steps, sampler="euler"):
    """Return a MODEL's sigmas, as KSampler makes them for a sampler."""
    discards = sampler in samplers.KSampler.DISCARD_PENULTIMATE_SIGMA_SAMPLERS
    sampling = model.get_model_object("model_sampling")
    sigmas = samplers.calculate_sigmas(sampling, "simple", steps + discards)
    return torch.cat([sigmas[:-2], sigmas[-1:]]) if discards else sigmas


def guided(guider, latent, sigmas, sampler="euler", noise=None):
    """Return SamplerCustomAdvanced's latent for a guider."""
    if isinstance(sampler, str):
        sampler = samplers.sampler_object(sampler)
    source = nodes_custom_sampler.Noise_RandomNoise(SEED)
    if noise is not None:
        source = SimpleNamespace(seed=SEED, generate_noise=lambda _: noise)
    given = {"noise": source, "guider": guider, "sampler": sampler, "sigmas": sigmas}
    node = nodes_custom_sampler.SamplerCustomAdvanced
    made, denoised = node_results(node, **given, latent_image=latent)
    assert denoised["samples"].shape == made["samples"].shape
    assert denoised["samples"].isfinite().all()
    return made["samples"].cpu()


def assert_near(ours, native, most=NEAR):
    """Compare two latents, and return our samples."""
    assert ours["samples"].shape == native["samples"].shape
    assert _difference(ours["samples"], native["samples"]) <= most
    assert ours.get("noise_mask") is native.get("noise_mask")
    return ours["samples"]
