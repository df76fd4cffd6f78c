"""Streamed and resident blocks are bit-equal under each kernel set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from wanstream.block_kernels import Kernels, math_choice
from wanstream.sampling import denoise
from wanstream.schema import OffloadPolicy
from wanstream.schema.refs import KernelSet

POLICIES = (
    OffloadPolicy.layerwise(1),
    OffloadPolicy.block_swap(2, 1, source="pinned"),
    OffloadPolicy.layerwise(3),
)


@pytest.fixture(
    params=[
        "torch",
        "comfy-kitchen",
        pytest.param("triton", marks=pytest.mark.slow),
    ]  # interpreted, 7 s
)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[KernelSet]:
    math_choice.choose_math.cache_clear()
    if request.param == "triton":
        made = request.getfixturevalue("triton_math").TritonMath()
        monkeypatch.setattr(math_choice, "_triton_math", lambda device: made)
    if request.param == "comfy-kitchen":
        pytest.importorskip("comfy_kitchen")
    yield request.param
    math_choice.choose_math.cache_clear()


def test_streamed_is_resident_to_the_bit(
    kernels: KernelSet, open_pair: Callable[..., Any], make_request: Callable[..., Any]
) -> None:
    request = make_request(steps=2, switch_step=1, guidance=(1.0, 1.0))

    def latents(policy: OffloadPolicy) -> torch.Tensor:
        with open_pair() as pair:
            pair.kernels = Kernels(math=kernels)
            found = denoise(pair, request, policy=policy, device="cpu").latents
            assert pair.engine(policy, "cpu").models["high"].blocks[0].settings.math.name == kernels
            return found

    resident = latents(OffloadPolicy.resident())
    for policy in POLICIES:
        assert torch.equal(latents(policy), resident)
