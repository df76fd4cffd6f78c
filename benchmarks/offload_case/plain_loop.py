"""The loop of everybody but WanStream: the same schedule, solver and guidance over whole forward passes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from diffusers import WanTransformer3DModel

from wanstream.devices import clock_for
from wanstream.sampling import DenoiseRequest
from wanstream.sampling.solvers import make_solver

ExpertOf = Callable[[str], WanTransformer3DModel]
"""Gives the model of the expert "high" or "low", ready to be called; asked once per step."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlainResult:
    """What a run of the plain loop leaves."""

    latents: torch.Tensor
    step_s: list[float]


def denoise_plain(
    expert_of: ExpertOf, request: DenoiseRequest, *, dtype: torch.dtype, device: torch.device
) -> PlainResult:
    """Denoise with two forward passes per step; equal to `wanstream.sampling.denoise` bit for bit on exact weights."""
    step_plan = request.step_plan
    solver = make_solver(request.solver, step_plan.schedule)
    clock = clock_for(device)
    texts = [text.to(device, dtype) for text in (request.positive, request.negative) if text is not None]
    latents, step_s = request.noise.to(device), []
    with torch.inference_mode():
        for step, expert in enumerate(step_plan.experts):
            began = time.perf_counter()
            model = expert_of(expert)
            timestep = torch.tensor([step_plan.schedule.timesteps[step]], device=device)
            shown = latents.to(dtype)
            positive, negative = (
                model(hidden_states=shown, timestep=timestep, encoder_hidden_states=text, return_dict=False)[0].float()
                for text in texts
            )
            velocity = negative + request.guidance_of(expert) * (positive - negative)
            latents = solver.step(velocity, latents)
            clock.settle()
            step_s.append(time.perf_counter() - began)
    return PlainResult(latents=latents.to("cpu", copy=True), step_s=step_s)
