"""Runs on workers that compute next to nothing."""

import pytest
import torch

from wanstream.schema import OffloadPolicy
from wanstream.tests.support.distributed.fake_pool import expected


@pytest.fixture
def request_of(make_task):
    """`request_of(batch=1, seed=1, **changes)`: a request with 6 steps, 3 high-noise ones."""

    def make(batch=1, *, seed=1, **changes):
        noise = torch.randn((batch, 16, 2, 4, 6), generator=torch.Generator().manual_seed(seed))
        return make_task(request={"noise": noise, "steps": 6, "switch_step": 3, **changes}).request

    return make


@pytest.fixture
def experts(experts_ref):
    return experts_ref()


@pytest.fixture
def run(request_of, experts):
    """`run(driver, batch=1, **options)` computes a request on a driver and checks the latents.

    `request` and `experts` may be others.
    """

    def denoise(driver, batch=1, **options):
        request = options.pop("request", None) or request_of(batch)
        of = options.pop("experts", experts)
        result = driver.denoise(of, request, OffloadPolicy.layerwise(1), **options)
        assert torch.equal(result.latents, expected(request.noise, range(6)))
        return result

    return denoise
