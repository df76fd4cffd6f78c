"""Feed-forwards in chunks of tokens: which are found, the bits, the peak and the way back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from wanstream.block_kernels import TokenChunks
from wanstream.tests.support.alive_tensors import Alive

WIDTH, HIDDEN = 16, 64


class Gated(nn.Module):
    """Gated feed-forward that overwrites its input."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, HIDDEN)
        self.w3 = nn.Linear(WIDTH, HIDDEN)
        self.w2 = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(0.5)
        return self.w2(self.w1(x).sigmoid() * self.w3(x))


class Mixer(nn.Module):
    """Built like a feed-forward, with a mean over the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x) - self.up(x).mean(dim=-2, keepdim=True))


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))


class Block(nn.Module):
    """Attention-like layers, and a feed-forward."""

    def __init__(self, feed_forward: nn.Module) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.ffn = feed_forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.out(self.qkv(x)[..., :WIDTH])
        return y + self.ffn(y.clone())


@pytest.fixture(autouse=True)
def _inference() -> Any:
    with torch.inference_mode():
        yield


def blocks_of(feed_forward: nn.Module) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {f"blocks.{i}": Block(copy.deepcopy(feed_forward)) for i in range(2)}


@pytest.mark.parametrize("shape", [(1, 700, WIDTH), (700, WIDTH), (2, 300, WIDTH)])
@pytest.mark.parametrize("feed_forward", [sequential(), Gated()], ids=["plain", "gated"])
def test_chunks_give_the_same_bits(feed_forward: nn.Module, shape: tuple[int, ...]) -> None:
    blocks = blocks_of(feed_forward)
    x = torch.randn(shape)
    rows: list[int] = []
    for block in blocks.values():
        first = next(each for each in block.ffn.modules() if isinstance(each, nn.Linear))
        first.register_forward_pre_hook(lambda _, given: rows.append(given[0].shape[-2]))
    expected = [block(x) for block in blocks.values()]
    rows.clear()
    notes: list[str] = []
    chunks = TokenChunks(lambda: blocks, notes.append)
    chunks.use(128)
    found = [block(x) for block in blocks.values()]
    assert all(map(torch.equal, found, expected))
    assert max(rows) < 2 * 128 + 16  # the comparison
    rows.clear()
    blocks["blocks.1"](x)
    assert max(rows) <= 128 + 15
    assert notes == ["feed-forwards (blocks.*.ffn) are computed in chunks of 128 tokens"] * 2
    chunks.use(None)
    rows.clear()
    blocks["blocks.0"](x)
    assert rows == [shape[-2]]
    assert "forward" not in vars(blocks["blocks.0"].ffn)


def test_a_module_that_mixes_tokens_is_computed_whole() -> None:
    blocks = blocks_of(Mixer())
    x = torch.randn(1, 700, WIDTH)
    expected = blocks["blocks.0"](x)
    notes: list[str] = []
    chunks = TokenChunks(lambda: blocks, notes.append)
    assert chunks.may_help
    chunks.use(128)
    assert torch.equal(blocks["blocks.0"](x), expected)
    assert torch.equal(blocks["blocks.0"](x), expected)
    [note] = notes
    assert chunks.may_help, "the other block has not computed"
    blocks["blocks.1"](x)
    assert not chunks.may_help
    assert "not computed, because the bits would differ" in note


def test_the_peak_of_a_block_is_at_most_half() -> None:
    """32k tokens: their hidden state dominates."""
    blocks = blocks_of(sequential())
    x = torch.randn(1, 32768, WIDTH)
    chunks = TokenChunks(lambda: blocks, lambda _: None)
    peaks = []
    for chunk_tokens in (None, 2048):
        chunks.use(chunk_tokens)
        with Alive() as alive:
            blocks["blocks.0"](x)
        peaks.append(alive.peak)
    assert peaks[1] <= 0.5 * peaks[0]


def test_code_of_others_stays() -> None:
    """A method set earlier is not chunked, and one set later is not removed."""
    blocks = blocks_of(sequential())
    before = blocks["blocks.0"].ffn
    after = blocks["blocks.1"].ffn
    before.forward = type(before).forward.__get__(before)
    kept = before.forward
    chunks = TokenChunks(lambda: blocks, lambda _: None)
    chunks.use(128)
    assert before.forward is kept
    chunked = after.forward
    around = after.forward = lambda x: chunked(x)
    chunks.use(None)
    assert before.forward is kept
    assert after.forward is around
    assert after(torch.randn(1, 700, WIDTH)).shape == (1, 700, WIDTH)


def test_a_block_of_another_format_is_compared_itself() -> None:
    """Some files have a bf16 first block. Their other blocks scale inputs by all tokens."""
    blocks = {**blocks_of(sequential()), "blocks.2": Block(Mixer())}
    x = torch.randn(1, 700, WIDTH)
    expected = [block(x) for block in blocks.values()]
    chunks = TokenChunks(lambda: blocks, lambda _: None)
    chunks.use(128)
    assert all(map(torch.equal, [block(x) for block in blocks.values()], expected))


def test_blocks_without_a_feed_forward_say_so() -> None:
    notes: list[str] = []
    chunks = TokenChunks(lambda: {"blocks.0": nn.Linear(WIDTH, WIDTH)}, notes.append)
    assert not chunks.may_help
    chunks.use(128)
    assert ["chunk_tokens 128 has no effect" in note for note in notes] == [True]
