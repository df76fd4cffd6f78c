"""Stops within a block, at the next linear layer or attention piece, and bit-equal full runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from wanstream.sampling.loop import interruptible
from wanstream.sampling.loop.interruptible import Interruptible
from wanstream.sampling.loop.oom_fallback import RunPolicy
from wanstream.sampling.steps import SamplingCancelled
from wanstream.tests.support.sampling.runs import CPU, LAYERWISE, latents_of, normal, run

BLOCKS = 4


@pytest.fixture
def every_block_is_long(monkeypatch):
    monkeypatch.setattr("wanstream.sampling.loop.oom_fallback.LONG_VISIT_FLOPS", 0)


@pytest.fixture
def every_attention_is_long(monkeypatch):
    monkeypatch.setattr(interruptible, "PIECE_FLOPS", 1)


@pytest.mark.usefixtures("every_attention_is_long")
@pytest.mark.parametrize(
    ("rows", "dtype", "amx"),
    [
        (100, torch.float32, False),
        (2304, torch.float32, True),
        (2500, torch.bfloat16, False),
        (2500, torch.bfloat16, True),
    ],
    ids=str,
)
def test_attention_in_pieces_is_the_same_to_the_bit(rows, dtype, amx, monkeypatch):
    """Half precision is attended in one piece where AMX computes it, in other sums."""
    if not amx and dtype != torch.float32 and torch.cpu._is_amx_tile_supported():
        pytest.skip("pieces of half precision have other bits here")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    states = normal(1, rows, 3, 1, 16, seed=0).to(dtype)
    query, key, value = (states[:, :, which].permute(0, 2, 1, 3) for which in range(3))
    whole = functional.scaled_dot_product_attention(query, key, value)
    looks = list[int]()
    with Interruptible(lambda: looks.append(1)):
        given = {"query": query, "key": key, "value": value, "attn_mask": None}
        pieces = functional.scaled_dot_product_attention(**given)
    assert torch.equal(pieces, whole)
    assert pieces.stride() == whole.stride()
    in_one = rows < 2 * 768 or (amx and dtype != torch.float32)
    assert len(looks) == (1 if in_one else 1 + rows // 768)


@pytest.mark.usefixtures("every_attention_is_long")
@pytest.mark.parametrize("how", [{"attn_mask": torch.zeros(1600, 1600)}, {"is_causal": True}])
def test_a_mask_keeps_attention_whole(how):
    states = torch.randn(1, 1, 1600, 8)
    expected = functional.scaled_dot_product_attention(states, states, states, **how)
    with Interruptible(lambda: None):
        found = functional.scaled_dot_product_attention(states, states, states, **how)
    assert torch.equal(found, expected)


def stop_after(after):
    """Return a `should_stop` that is true after `after` polls, and the polls so far."""
    polls: list[int] = []

    def should_stop() -> bool:
        polls.append(1)
        return len(polls) > after

    return should_stop, polls


@pytest.mark.usefixtures("every_block_is_long")
@pytest.mark.parametrize("chunk", [None, 16])
def test_a_stop_ends_a_block_at_its_next_linear_layer(chunk, pair, make_request):
    request = make_request()
    computed = list[int]()
    policy = replace(LAYERWISE, chunk_tokens=chunk)
    expected = latents_of(pair, request, policy)
    hooks = [
        layer.register_forward_hook(lambda *given: computed.append(1))
        for model in pair.engine(policy, CPU).models.bare.values()
        for layer in model.blocks[0].modules()
        if isinstance(layer, torch.nn.Linear)
    ]
    should_stop, polls = stop_after(4)
    with pytest.raises(SamplingCancelled, match="cancelled before block 0 of step 0") as cancelled:
        run(pair, request, policy, should_stop=should_stop)
    assert cancelled.value.block == 0
    assert len(polls) == 5, "the block goes on no further"
    assert len(computed) <= 3
    for hook in hooks:
        hook.remove()
    assert torch.equal(run(pair, request, policy, should_stop=lambda: False).latents, expected)


def test_short_blocks_poll_before_each_only(open_pair, make_request):
    should_stop, polls = stop_after(10**9)
    run(open_pair(), make_request(steps=3), should_stop=should_stop)
    assert len(polls) == 3 * BLOCKS


def test_long_blocks_on_a_cpu_stop_inside(open_pair):
    pair = open_pair()
    large = (1, 16, 5, 128, 160)

    def stops(shape: tuple[int, ...] = large, device: torch.device = CPU) -> bool:
        return RunPolicy(pair, LAYERWISE, device, shape=shape, sides=(0, 0)).stops_inside

    assert stops()
    assert not stops((1, 16, 2, 4, 6))
    assert not stops(device=torch.device("cuda"))
    pair.kernels = replace(pair.kernels, compiler="inductor")
    assert not stops()
