"""Runs of whole models, without streaming."""

from __future__ import annotations

import torch

from wanstream.sampling.steps.schedules import step_seeds
from wanstream.sampling.steps.solvers import Solver


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


def blend_windows(windows, step, latents, velocity_of):
    """Return the weighted sum of `velocity_of(window)` for a step's windows."""
    total = torch.zeros_like(latents)
    placed = windows.at(step, latents.shape[2])
    for window, weights in zip(placed, windows.weights(placed, latents.shape[2]), strict=True):
        total[:, :, list(window)] += velocity_of(window) * torch.tensor(weights)[:, None, None]
    return total
