"""Feed-forwards in chunks of tokens: which are found, the bits, the peak and the way back."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from wanstream.block_kernels import TokenChunks
from wanstream.tests.support.offload.alive_tensors import Alive

WIDTH = 16
HIDDEN = 64


class Gated(nn.Module):
    """Gated feed-forward that overwrites its input."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, HIDDEN) for _ in range(2))
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


def plain() -> nn.Module:
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
def _inference():
    with torch.inference_mode():
        yield


class Chunked(TokenChunks):
    """Chunks for two blocks, with recorded notes."""

    def __init__(self, feed_forward: nn.Module) -> None:
        torch.manual_seed(0)
        self.blocks = {f"blocks.{i}": Block(copy.deepcopy(feed_forward)) for i in range(2)}
        self.notes: list[str] = []
        super().__init__(lambda: self.blocks, self.notes.append)

    def compute(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [block(x) for block in self.blocks.values()]


@pytest.mark.parametrize("shape", [(1, 700, WIDTH), (700, WIDTH), (2, 300, WIDTH)])
@pytest.mark.parametrize("feed_forward", [plain(), Gated()], ids=["plain", "gated"])
def test_chunks_give_the_same_bits(feed_forward, shape):
    chunks = Chunked(feed_forward)
    x = torch.randn(shape)
    rows = []
    for block in chunks.blocks.values():
        first = next(each for each in block.ffn.modules() if isinstance(each, nn.Linear))
        first.register_forward_pre_hook(lambda _, given: rows.append(given[0].shape[-2]))
    expected = chunks.compute(x)
    rows.clear()
    chunks.use(128)
    assert all(map(torch.equal, chunks.compute(x), expected))
    assert max(rows) < 2 * 128 + 16  # the comparison
    rows.clear()
    chunks.blocks["blocks.1"](x)
    assert max(rows) <= 128 + 15
    assert chunks.notes == ["feed-forwards (blocks.*.ffn) are computed in chunks of 128 tokens"] * 2
    chunks.use(None)
    rows.clear()
    chunks.blocks["blocks.0"](x)
    assert rows == [shape[-2]]
    assert "forward" not in vars(chunks.blocks["blocks.0"].ffn)


def test_a_module_that_mixes_tokens_is_computed_whole():
    chunks = Chunked(Mixer())
    x = torch.randn(1, 700, WIDTH)
    first, second = chunks.blocks.values()
    expected = first(x)
    assert chunks.may_help
    chunks.use(128)
    for _ in range(2):
        assert torch.equal(first(x), expected)
    [note] = chunks.notes
    assert "not computed, because the bits would differ" in note
    assert chunks.may_help, "the other block has not computed"
    second(x)
    assert not chunks.may_help


def test_a_block_of_another_format_is_compared_itself():
    """Some files have a bf16 first block. Their other blocks scale inputs by all tokens."""
    chunks = Chunked(plain())
    x = torch.randn(1, 700, WIDTH)
    chunks.blocks["blocks.2"] = Block(Mixer())
    expected = chunks.compute(x)
    chunks.use(128)
    assert all(map(torch.equal, chunks.compute(x), expected))


def test_the_peak_of_a_block_is_at_most_half():
    """32k tokens: their hidden state dominates."""
    chunks = Chunked(plain())
    x = torch.randn(1, 32768, WIDTH)
    peaks = []
    for chunk_tokens in (None, 2048):
        chunks.use(chunk_tokens)
        with Alive() as alive:
            chunks.blocks["blocks.0"](x)
        peaks.append(alive.peak)
    assert peaks[1] <= 0.5 * peaks[0]


def test_methods_set_by_others_stay():
    """A method set earlier is not chunked, and one set later is not removed."""
    chunks = Chunked(plain())
    before, after = (block.ffn for block in chunks.blocks.values())
    kept = before.forward = type(before).forward.__get__(before)
    chunks.use(128)
    assert before.forward is kept
    chunked = after.forward
    around = after.forward = lambda x: chunked(x)
    chunks.use(None)
    assert before.forward is kept
    assert after.forward is around
    assert after(torch.randn(1, 700, WIDTH)).shape == (1, 700, WIDTH)


def test_blocks_without_a_feed_forward_have_a_note():
    chunks = Chunked(plain())
    chunks.blocks = {"blocks.0": nn.Linear(WIDTH, WIDTH)}
    assert not chunks.may_help
    chunks.use(128)
    assert ["chunk_tokens 128 has no effect" in note for note in chunks.notes] == [True]
