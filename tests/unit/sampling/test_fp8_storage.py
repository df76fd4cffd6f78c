"""Runs with a pair stored in fp8.

They are bit-equal wherever a block is resident, with half the bytes. Decoding time is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import nn

from wanstream.sampling import denoise
from wanstream.sampling.inputs import DenoiseRequest
from wanstream.sampling.steps import DenoiseResult
from wanstream.schema import OffloadPolicy
from wanstream.wan import ExpertPair
from wanstream.wan.experts.open import open_experts

pytestmark = pytest.mark.usefixtures("exact_blocks")

LAYERWISE = OffloadPolicy.layerwise(1)
PINNED = OffloadPolicy.layerwise(1, source="pinned")
POLICIES = {
    "from the file": LAYERWISE,
    "two ahead": OffloadPolicy.layerwise(2),
    "half from the file": OffloadPolicy.block_swap(2, 1),
    "resident": OffloadPolicy.resident(),
    "from RAM": PINNED,
    "partly from RAM": replace(PINNED, ram_blocks=3),
    "some in RAM": replace(PINNED, ram_blocks=2),
    "half from RAM": OffloadPolicy.block_swap(2, 1, source="pinned"),
}

Models = Mapping[str, WanTransformer3DModel]


@pytest.fixture
def pair(tiny_expert_folder: Callable[..., Path]) -> Iterator[Callable[..., ExpertPair]]:
    """`pair(dtype, **options)`: experts with one dtype for files and computation."""
    opened: list[ExpertPair] = []

    def make(dtype: torch.dtype = torch.bfloat16, **options: str) -> ExpertPair:
        folders = [tiny_expert_folder(seed=seed, dtype=dtype) for seed in (1, 2)]
        opened.append(open_experts(*folders, compute_dtype=dtype, **options))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def quantised(models: Models) -> Models:
    """Round all block matrices by the plain formula."""
    for model in models.values():
        for block in model.blocks:
            for module in block.modules():
                if isinstance(module, nn.Linear):
                    values = module.weight.float()
                    scale = values.abs().amax(1, keepdim=True) / 448.0
                    rounded = (values / scale).to(torch.float8_e4m3fn).float() * scale
                    module.weight.data = rounded.to(module.weight.dtype)
    return models


def run(
    pair: ExpertPair, request: DenoiseRequest, policy: OffloadPolicy = LAYERWISE
) -> DenoiseResult:
    return denoise(pair, request, policy=policy, device="cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_it_is_the_model_whose_rows_were_quantised(
    dtype, pair, make_request, plain_models, plain_denoise
):
    request = make_request(guidance=(4.0, 1.0))
    expected = plain_denoise(quantised(plain_models(dtype=dtype)), request)
    assert torch.equal(run(pair(dtype, storage="fp8"), request).latents, expected)


@pytest.mark.slow  # several loop runs
def test_where_a_block_lives_changes_no_bit(pair, make_request):
    request = make_request()
    streamed = pair(storage="fp8")
    expected = run(streamed, request).latents
    for name, policy in POLICIES.items():
        assert torch.equal(run(streamed, request, policy).latents, expected), name
    # The second run starts with blocks in the buffers.
    assert torch.equal(run(streamed, request, policy).latents, expected)
    assert not torch.equal(run(pair(), request).latents, expected)


@pytest.mark.slow  # several loop runs
@pytest.mark.parametrize("policy", [LAYERWISE, PINNED], ids=["file", "RAM"])
def test_half_the_bytes_move_and_decoding_takes_its_time(pair, make_request, policy):
    request = make_request()
    plain, kept = (
        run(pair(), request, policy).timeline,
        run(pair(storage="fp8"), request, policy).timeline,
    )
    for before, after in zip(plain.steps, kept.steps, strict=True):
        assert 1 <= after.bytes_moved * 2 / before.bytes_moved < 1.02  # row scales
        assert before.decode_s == 0
        assert after.decode_s > 0
        assert (
            after.transfers.read_bytes == before.transfers.read_bytes
        )  # the file is as large as it was
    assert kept.steps[0].transfers.read_bytes == plain.steps[0].bytes_moved


def test_the_thread_that_computes_keeps_its_threads(pair, make_request):
    before = torch.get_num_threads()
    run(pair(storage="fp8"), make_request(), PINNED)
    assert torch.get_num_threads() == before


def test_the_latents_are_close_to_those_of_the_file(pair, make_request):
    plain, kept = (
        run(pair(torch.float32, storage=storage), make_request()).latents
        for storage in ("as stored", "fp8")
    )
    assert 0 < (kept - plain).norm() / plain.norm() < 0.2
