"""Parameters stored in pieces and joined when their block is bound."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import nn

from wanstream.offload.formats import piece_name
from wanstream.offload.sources import TensorSource
from wanstream.plan.programs import BlockKey
from wanstream.tests.support.offload.streaming import attach, stream

BLOCKS = 4
WIDTH = 16
STACK = "model"
CODES, SCALES = (piece_name("0.weight", piece) for piece in ("codes", "scales"))


class Coded(nn.Module):
    """Layer whose weight is made from two stored tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH, device="meta"))
        self.bias = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ (self.weight.codes.float() * self.weight.scales).t() + self.bias


class Joined(nn.Parameter):
    """A parameter over two views."""


def test_pieces_are_joined_once_per_block_and_buffer():
    torch.manual_seed(0)
    shape = (WIDTH, WIDTH)
    stored = {}
    for at in range(BLOCKS):
        pieces = {CODES: torch.randint(0, 3, shape).byte(), SCALES: torch.rand(WIDTH, 1)}
        stored[BlockKey(STACK, at)] = {**pieces, "1.weight": torch.randn(shape)}
    joins = list[tuple[int, int]]()
    plain = {"bias": False, "device": "meta"}
    blocks = [nn.Sequential(Coded(), nn.Linear(WIDTH, WIDTH, **plain)) for _ in range(BLOCKS)]

    def join(key: BlockKey, name: str, pieces: Mapping[str, torch.Tensor]) -> torch.Tensor:
        assert name == "0.weight"
        joins.append((key.block, pieces["codes"].data_ptr()))
        joined = Joined(torch.empty(0), requires_grad=False)
        joined.codes = pieces["codes"]
        joined.scales = pieces["scales"]
        return joined

    hidden = expected = torch.ones(1, WIDTH)
    for block in stored.values():
        weight = block[CODES].float() * block[SCALES]
        expected = (expected @ weight.t() + 1) @ block["1.weight"].t()
    stacks = {STACK: blocks}
    with attach(stacks, source=TensorSource(stored), join=join) as engine:
        for _ in range(3):
            assert torch.equal(stream(engine, stacks, [STACK], hidden)[0], expected)
        assert blocks[0][0].weight.shape == (0,), "absent outside a run"
    assert len(joins) == len(set(joins))
    assert {block for block, _ in joins} == set(range(BLOCKS))
    assert blocks[0][0].weight.is_meta, "detached"


def test_pieces_of_an_unknown_parameter_are_refused():
    codes = {piece_name("2.weight", "codes"): torch.zeros(WIDTH, WIDTH, dtype=torch.uint8)}
    with pytest.raises(ValueError, match=r"the source and the module differ in 2\.weight"):
        attach({STACK: [nn.Sequential(Coded())]}, source=TensorSource({BlockKey(STACK, 0): codes}))
