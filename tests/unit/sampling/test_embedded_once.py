"""Runs that embed times and texts once.

Bytes read, with and without chunks, by the loop and by model calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from wanstream.sampling import denoise
from wanstream.sampling.inputs import DenoiseRequest
from wanstream.schema import OffloadPolicy
from wanstream.tests.support.sampling_fixtures import changed_request
from wanstream.wan import ExpertPair
from wanstream.wan.checkpoint.meta_model import embedder_part

OpenPair = Callable[..., ExpertPair]
Request = Callable[..., DenoiseRequest]
POLICY = OffloadPolicy.layerwise(1)


def _bytes_of(pair: ExpertPair, part: str) -> int:
    """Return an embedder part's bytes in both experts."""
    experts = (pair.high, pair.low)
    return sum(
        t.nbytes
        for expert in experts
        for name, t in expert.weights.items()
        if embedder_part(name) == part
    )


@pytest.mark.slow  # several loop runs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_equal_run_reads_nothing_and_another_text_what_embeds_texts(
    open_pair: OpenPair, make_request: Request, dtype: torch.dtype
) -> None:
    pair, request = open_pair(dtype=dtype), make_request(batch=2)
    runs = [
        denoise(pair, each, policy=POLICY, device="cpu")
        for each in (request, make_request(batch=2))
    ]
    assert torch.equal(runs[0].latents, runs[1].latents)
    assert runs[0].timeline.non_block_bytes > _bytes_of(pair, "time") + _bytes_of(pair, "text")
    assert runs[1].timeline.non_block_bytes == 0
    other = changed_request(request, positive=request.positive + 1)
    read = denoise(pair, other, policy=POLICY, device="cpu").timeline.non_block_bytes
    assert read == _bytes_of(pair, "text")
    longer = make_request(batch=2, steps=6)
    assert (
        denoise(pair, longer, policy=POLICY, device="cpu").timeline.non_block_bytes
        == _bytes_of(pair, "time") + read
    )


def test_the_weights_that_embed_are_gone_before_the_first_block(
    open_pair: OpenPair, make_request: Request
) -> None:
    pair, there = open_pair(), list[bool]()
    engine = pair.engine(POLICY, "cpu")
    for name, stack in engine.models.blocks.items():
        embedder = engine.models.bare[name].condition_embedder
        stack[0].register_forward_pre_hook(
            lambda *_, embedder=embedder: there.extend(not p.is_meta for p in embedder.parameters())
        )
    denoise(pair, make_request(), policy=POLICY, device="cpu")
    assert there
    assert not any(there)


@pytest.mark.slow  # several loop runs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunk", [16, 256])
@pytest.mark.usefixtures("equal_bf16_rows")
def test_a_run_in_chunks_is_the_run_without(
    open_pair: OpenPair, make_request: Request, dtype: torch.dtype, chunk: int
) -> None:
    """3 latent frames with 4 x 6 patches: 72 tokens, 5 chunks or one."""
    noise = torch.randn(1, 16, 3, 8, 12, generator=torch.Generator().manual_seed(1))
    request: Any = make_request(noise=noise)
    pair = open_pair(dtype=dtype)
    whole = denoise(pair, request, policy=POLICY, device="cpu").latents
    chunked = denoise(
        pair, request, policy=replace(POLICY, chunk_tokens=chunk), device="cpu"
    ).latents
    assert torch.equal(chunked, whole)
    assert torch.equal(denoise(pair, request, policy=POLICY, device="cpu").latents, whole)
