"""Runs in ComfyUI's own Python: sigmas, noise and image condition, equal to the bit."""

from types import SimpleNamespace as Namespace

import torch
from comfy import latent_formats, model_base, model_sampling, sample, samplers

from wanstream.sampling.inputs.conditioning import image_condition
from wanstream.sampling.steps import seeded_noise
from wanstream.sampling.steps.schedules import simple_schedule
from wanstream.wan.latents.space import denormalise, normalise

from ..checks import for_each
from ..families import _normal

SHAPE = (2, 16, 3, 4, 6)
SEED = 2**63 + 5


def check_simple_sigmas(_):
    sampling = model_sampling.ModelSamplingDiscreteFlow()
    for steps in (1, 4, 20, 27, 38, 40, 186):
        for shift in (1.0, 3.0, 5.0, 8.0, 12.0):
            sampling.set_parameters(shift=shift)
            ours = torch.tensor(simple_schedule(steps, shift).sigmas)
            assert torch.equal(ours, samplers.simple_scheduler(sampling, steps))


@for_each(None, [3, 0])
def check_noise(_, index):
    ours = seeded_noise(SHAPE, SEED, batch_index=index)
    assert torch.equal(ours, sample.prepare_noise(torch.zeros(SHAPE), SEED, index))


@for_each(latent_formats.Wan21, latent_formats.Wan22)
def check_latent_space(_, form):
    wan = form()
    image = _normal(1, wan.latent_channels, 3, 4, 6, seed=0)
    assert torch.equal(normalise(image), wan.process_in(image))
    assert torch.equal(denormalise(image), wan.process_out(image))


def check_masked_image(_):
    wan = latent_formats.Wan21()
    image = _normal(1, 16, 3, 4, 6, seed=0)
    mask = torch.ones(SHAPE)
    mask = mask[:1, :1]
    mask[:, :, :1] = 0
    patches = Namespace(weight=torch.zeros(1, 36))
    model = Namespace(
        diffusion_model=Namespace(patch_embedding=patches),
        latent_format=wan,
        process_latent_in=wan.process_in,
        image_to_video=False,
    )
    # One that is too short too.
    for each in (mask, torch.rand(1, 4, 3, 4, 6), torch.rand(1, 3, 2, 4, 6)):
        given = {"concat_latent_image": image.clone(), "concat_mask": each}
        zeros = torch.zeros(SHAPE)
        theirs = model_base.WAN21.concat_cond(model, noise=zeros, device="cpu", **given)
        # ComfyUI repeats the condition over the batch. A request gets it once.
        assert torch.equal(image_condition(image, each).expand_as(theirs), theirs)
