"""Runs split into several samplers, and runs under a mask."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from wanstream.sampling import denoise
from wanstream.sampling.inputs import DenoiseRequest, native_inputs, native_latent
from wanstream.sampling.steps import DenoiseResult
from wanstream.schema import OffloadPolicy
from wanstream.wan import ExpertPair

POLICY = OffloadPolicy.layerwise(1)
LATENT = torch.randn(1, 16, 2, 4, 6, generator=torch.Generator().manual_seed(20))
LEFT_HALF = (torch.arange(6) < 3).float().expand(1, 1, 2, 4, 6)
SOFT = torch.rand(1, 1, 2, 4, 6, generator=torch.Generator().manual_seed(21))

Request = Callable[..., DenoiseRequest]
OpenPair = Callable[..., ExpertPair]


def _run(pair: ExpertPair, request: DenoiseRequest) -> DenoiseResult:
    return denoise(pair, request, policy=POLICY, device="cpu")


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def _handed_on(result: DenoiseResult) -> dict[str, Any]:
    """Return the next run's arguments from the last one's LATENT."""
    latent = native_latent(result.latents, {}, sigma=result.sigma)
    inputs = native_inputs([[torch.zeros(1, 1, 4096), {}]], None, latent)
    return {"latent": inputs.latent, "latent_sigma": inputs.latent_sigma, "add_noise": False}


@pytest.mark.parametrize("cuts", [(2,), (1, 3), (1, 2, 3, 4)])
@pytest.mark.parametrize("schedule", ["simple", "wan"])
def test_a_run_in_pieces_is_the_run_as_a_whole(
    cuts: tuple[int, ...], schedule: str, open_pair: OpenPair, make_request: Request
) -> None:
    pair, settings = open_pair(), {"solver": "euler", "schedule": schedule}
    whole = _run(pair, make_request(**settings))
    given: dict[str, Any] = {}
    for start, end in pairwise((0, *cuts, 5)):
        stage = make_request(
            **settings, start_step=start, end_step=end, leftover_noise=True, **given
        )
        result = _run(pair, stage)
        assert [step.index for step in result.timeline.steps] == list(range(start, end))
        assert result.sigma == stage.step_plan.schedule.sigmas[end]
        given = _handed_on(result)
    assert whole.sigma == result.sigma == 0
    assert _distance(result.latents, whole.latents) <= 1e-5


def test_sigmas_cut_by_hand_are_the_same_pieces(open_pair: OpenPair, make_request: Request) -> None:
    pair, settings = open_pair(), {"solver": "euler", "steps": None, "switch_step": None}
    sigmas = [1.0, 0.95, 0.9, 0.8, 0.5, 0.0]
    whole = _run(pair, make_request(**settings, sigmas=sigmas))
    high = _run(pair, make_request(**settings, sigmas=sigmas[:3]))
    assert high.sigma == pytest.approx(0.9)
    low = _run(pair, make_request(**settings, sigmas=sigmas[2:], **_handed_on(high)))
    assert [step.expert for step in low.timeline.steps] == ["high", "low", "low"]
    assert _distance(low.latents, whole.latents) <= 1e-5


@pytest.mark.parametrize("solver", ["euler", "unipc"])
def test_an_early_end_without_leftover_noise_goes_down_to_zero(
    solver: str, open_pair: OpenPair, make_request: Request
) -> None:
    pair, whole = (
        open_pair(),
        make_request(solver=solver, schedule="simple").step_plan.schedule.sigmas,
    )
    cut = _run(pair, make_request(solver=solver, schedule="simple", end_step=3))
    by_hand = make_request(solver=solver, steps=None, sigmas=[*whole[:3], 0.0])
    assert cut.sigma == 0
    assert torch.equal(cut.latents, _run(pair, by_hand).latents)


@pytest.mark.parametrize("mask", [None, LEFT_HALF])
def test_without_added_noise_the_noise_counts_for_nothing(
    mask: torch.Tensor | None, open_pair: OpenPair, make_request: Request
) -> None:
    pair, given = open_pair(), {"start_step": 2, "add_noise": False, "latent": LATENT, "mask": mask}
    noises = torch.zeros_like(LATENT), torch.full_like(LATENT, float("nan"))
    ends = [_run(pair, make_request(noise=noise, **given)) for noise in noises]
    assert torch.equal(ends[0].latents, ends[1].latents)


@pytest.mark.parametrize("solver", ["euler", "unipc"])
@pytest.mark.parametrize("batch", [1, 2])
def test_what_a_mask_keeps_is_the_given_latent(
    solver: str, batch: int, open_pair: OpenPair, make_request: Request
) -> None:
    latent = LATENT.repeat(batch, 1, 1, 1, 1)
    result = _run(
        open_pair(), make_request(batch=batch, solver=solver, latent=latent, mask=LEFT_HALF)
    ).latents
    assert torch.allclose(result[..., 3:], latent[..., 3:], atol=1e-5)
    assert not torch.allclose(result[..., :3], latent[..., :3], atol=0.1)


@pytest.mark.parametrize("solver", ["euler", "unipc"])
def test_a_mask_that_frees_everything_changes_nothing(
    solver: str, open_pair: OpenPair, make_request: Request
) -> None:
    pair, free = open_pair(), torch.ones(1, 16, 2, 4, 6)
    plain, masked = (
        make_request(solver=solver, latent=LATENT, start_step=1, mask=mask) for mask in (None, free)
    )
    assert _distance(_run(pair, masked).latents, _run(pair, plain).latents) <= 1e-5


@pytest.mark.parametrize("mask", [LEFT_HALF, SOFT, SOFT.repeat(1, 16, 1, 1, 1).cumprod(1)])
@pytest.mark.parametrize("latent", [LATENT, None])
def test_a_masked_run_is_comfyuis_loop(
    mask: torch.Tensor,
    latent: torch.Tensor | None,
    open_pair: OpenPair,
    plain_models: Any,
    make_request: Request,
) -> None:
    request = make_request(
        solver="euler", schedule="simple", mask=mask, latent=latent, guidance=(1.0, 1.0)
    )
    sigmas, models = request.step_plan.schedule.sigmas, plain_models()
    noise, given = request.noise, torch.zeros_like(LATENT) if latent is None else latent
    latents = noise
    with torch.inference_mode():
        for i, (sigma, after) in enumerate(pairwise(sigmas)):
            seen = latents * mask + (sigma * noise + (1 - sigma) * given) * (1 - mask)
            model, time = models["high" if i < 2 else "low"], torch.tensor([sigma * 1000])
            end = seen - sigma * model(seen, time, request.positive, return_dict=False)[0]
            end = end * mask + given * (1 - mask)
            latents = latents + (latents - end) / sigma * (after - sigma)
    assert _distance(_run(open_pair(), request).latents, latents) <= 1e-5


def test_a_masked_run_goes_on_from_what_it_was_handed(
    open_pair: OpenPair, make_request: Request
) -> None:
    """As in ComfyUI, a run without added noise keeps the masked latent with its own noise."""
    handed = make_request(
        solver="euler", start_step=2, add_noise=False, latent=LATENT, mask=LEFT_HALF
    )
    result = _run(open_pair(), handed).latents
    assert torch.allclose(result[..., 3:], LATENT[..., 3:], atol=1e-5)
