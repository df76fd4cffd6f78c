"""Runs of whole models, without streaming."""

from types import MappingProxyType

import torch

from wanstream.sampling.steps.schedules import step_seeds
from wanstream.sampling.steps.solvers import Solver
from wanstream.shapes import ContextWindows


@torch.inference_mode()
def plain_loop(models, request, velocity_of):
    """Compute a run: `velocity_of(model, step, latents, time, text)` is one prompt's velocity."""
    plan = request.step_plan
    first = plan.schedule.sigmas[request.start_step]
    latents = request.noise
    if request.latent is not None:
        latents = first * request.noise + (1 - first) * request.latent
    seeds = step_seeds(request.noise, request.latent)
    solver = Solver(request.solver, plan.schedule, request.start_step, seeds=seeds)
    for step in plan.steps:
        time = torch.tensor([plan.schedule.timesteps[step]])
        given = models[plan.experts[step]], step, latents, time
        velocity = velocity_of(*given, request.positive)
        scale = plan.guidance[step]
        if scale != 1:
            negative = velocity_of(*given, request.negative)
            velocity = negative + scale * (velocity - negative)
        latents = solver.step(velocity, latents)
    return latents


def windowed_loop(models, request, caches=MappingProxyType({})):
    """Compute a run with one forward pass per window and prompt, blended.

    The models have diffusers' caches with these configurations. A cache serves one text and one
    window, as long as every step has the window.
    """
    frames = request.noise.shape[2]
    windows = request.options.windows or ContextWindows(frames=frames, overlap=0)
    condition = request.inputs.image_condition
    for name, cache in caches.items():
        models[name].enable_cache(cache)
    placed = [windows.at(step, frames) for step in range(request.steps)]

    def velocity_of(model, step, latents, time, text):
        total = torch.zeros_like(latents)
        blend = windows.weights(placed[step], frames)
        for window, weights in zip(placed[step], blend, strict=True):
            own = list(window)
            seen = latents[:, :, own]
            if condition is not None:
                image = condition[:, :, own]
                if windows.repeat_image:
                    image[:, :, 0] = condition[:, :, 0]
                seen = torch.cat([seen, image], dim=1)
            gaps = [before for before in range(step) if window not in placed[before]]
            with model.cache_context(f"{text is request.negative} {window} {gaps}"):
                velocity = model(seen, time, text, return_dict=False)[0]
            total[:, :, own] += velocity * torch.tensor(weights)[:, None, None]
        return total

    return plain_loop(models, request, velocity_of)
