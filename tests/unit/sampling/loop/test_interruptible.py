"""Stops within a block, at the next linear layer or attention piece, and bit-equal full runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from wanstream.sampling import ModelCalls, denoise
from wanstream.sampling.inputs import DenoiseRequest
from wanstream.sampling.loop import interruptible
from wanstream.sampling.loop.interruptible import Interruptible
from wanstream.sampling.loop.lanes import LaneInputs
from wanstream.sampling.loop.oom_fallback import RunPolicy
from wanstream.sampling.steps import SamplingCancelled
from wanstream.schema import OffloadPolicy
from wanstream.telemetry import Recorder
from wanstream.wan import ExpertPair

CPU = torch.device("cpu")
LAYERWISE = OffloadPolicy.layerwise(1)
BLOCKS = 4
LINEARS = 10
"""Linear layers per block."""


@pytest.fixture
def every_block_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wanstream.sampling.loop.oom_fallback.LONG_VISIT_FLOPS", 0)


@pytest.mark.parametrize("rows", [100, 768, 2304, 2500, 3333])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_in_pieces_is_the_same_to_the_bit(
    rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interruptible, "PIECE_FLOPS", 1)
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1, rows, 3, 1, 16, generator=generator).to(dtype)
    query, key, value = (states[:, :, which].permute(0, 2, 1, 3) for which in range(3))
    whole = functional.scaled_dot_product_attention(query, key, value)
    looks: list[int] = []
    with Interruptible(lambda: looks.append(1)):
        pieces = functional.scaled_dot_product_attention(
            query=query, key=key, value=value, attn_mask=None
        )
    assert torch.equal(pieces, whole)
    assert pieces.stride() == whole.stride()
    whole_there = dtype is not torch.float32 and torch.cpu._is_amx_tile_supported()
    assert len(looks) == (1 if rows < 2 * 768 or whole_there else 1 + rows // 768)


@pytest.mark.parametrize(
    ("dtype", "looks"), [(torch.float32, 4), (torch.bfloat16, 1), (torch.float16, 1)], ids=str
)
def test_half_precision_is_attended_in_one_piece_where_amx_computes_it(
    dtype: torch.dtype, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interruptible, "PIECE_FLOPS", 1)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True, raising=False)
    states, looked = torch.zeros(1, 1, 3 * 768, 8, dtype=dtype), []
    with Interruptible(lambda: looked.append(1)):
        functional.scaled_dot_product_attention(states, states, states)
    assert len(looked) == looks


def test_a_mask_keeps_attention_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interruptible, "PIECE_FLOPS", 1)
    states, mask = torch.randn(1, 1, 1600, 8), torch.zeros(1600, 1600).triu_()
    with Interruptible(lambda: None):
        found = functional.scaled_dot_product_attention(states, states, states, attn_mask=mask)
        causal = functional.scaled_dot_product_attention(states, states, states, is_causal=True)
    assert torch.equal(
        found, functional.scaled_dot_product_attention(states, states, states, attn_mask=mask)
    )
    assert torch.equal(
        causal, functional.scaled_dot_product_attention(states, states, states, is_causal=True)
    )


def stop_after(after: int) -> tuple[Callable[[], bool], list[int]]:
    """Return a `should_stop` that is true after `after` polls, and the polls so far."""
    polls: list[int] = []

    def should_stop() -> bool:
        polls.append(1)
        return len(polls) > after

    return should_stop, polls


@pytest.mark.usefixtures("every_block_is_long")
@pytest.mark.parametrize("chunk", [None, 16])
def test_a_stop_ends_a_block_at_its_next_linear_layer(
    chunk: int | None,
    open_pair: Callable[..., ExpertPair],
    make_request: Callable[..., DenoiseRequest],
) -> None:
    pair, request = open_pair(), make_request()
    policy = replace(LAYERWISE, chunk_tokens=chunk)
    expected = denoise(pair, request, policy=policy, device=CPU).latents
    computed: list[int] = []
    hooks = [
        layer.register_forward_hook(lambda *given: computed.append(1))
        for model in pair.engine(policy, CPU).models.bare.values()
        for layer in model.blocks[0].modules()
        if isinstance(layer, torch.nn.Linear)
    ]
    should_stop, polls = stop_after(4)
    with pytest.raises(SamplingCancelled, match="cancelled before block 0 of step 0") as cancelled:
        denoise(pair, request, policy=policy, device=CPU, should_stop=should_stop)
    assert cancelled.value.block == 0
    assert len(polls) == 5, "the block goes on no further"
    assert len(computed) <= 3
    for hook in hooks:
        hook.remove()
    assert torch.equal(
        denoise(pair, request, policy=policy, device=CPU, should_stop=lambda: False).latents,
        expected,
    )


def test_short_blocks_are_asked_before_each_only(
    open_pair: Callable[..., ExpertPair], make_request: Callable[..., DenoiseRequest]
) -> None:
    should_stop, polls = stop_after(10**9)
    denoise(
        open_pair(), make_request(steps=3), policy=LAYERWISE, device=CPU, should_stop=should_stop
    )
    assert len(polls) == 3 * BLOCKS


@pytest.mark.usefixtures("every_block_is_long")
def test_passes_of_other_samplers_stop_inside_too(
    open_pair: Callable[..., ExpertPair], make_request: Callable[..., DenoiseRequest]
) -> None:
    pair, request = open_pair(), make_request()
    policy = RunPolicy(pair, LAYERWISE, CPU, shape=request.noise.shape, sides=(0,))
    should_stop, polls = stop_after(LINEARS // 2)
    lanes = LaneInputs(request, CPU).lanes(request.noise, (0,))
    passes = ModelCalls(policy, ["high"], recorder=Recorder(CPU), should_stop=should_stop)
    with pytest.raises(SamplingCancelled), passes:
        passes.forward("high", lanes, sigma=1.0)
    assert len(polls) == LINEARS // 2 + 1


def test_only_long_blocks_of_a_cpu_that_computes_alone_stop_inside(
    open_pair: Callable[..., ExpertPair],
) -> None:
    pair, large = open_pair(), (1, 16, 5, 128, 160)
    assert RunPolicy(pair, LAYERWISE, CPU, shape=large, sides=(0,)).stops_inside
    assert not RunPolicy(pair, LAYERWISE, CPU, shape=(1, 16, 2, 4, 6), sides=(0, 0)).stops_inside
    assert not RunPolicy(
        pair, LAYERWISE, torch.device("cuda"), shape=large, sides=(0,)
    ).stops_inside
    pair.kernels = replace(pair.kernels, compiler="inductor")
    assert not RunPolicy(pair, LAYERWISE, CPU, shape=large, sides=(0,)).stops_inside
