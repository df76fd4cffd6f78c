"""Parameters stored in pieces and joined when their block is bound."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from wanstream.offload.formats import piece_name, read_header
from wanstream.offload.sources import FileSource
from wanstream.plan.programs import BlockKey
from wanstream.tests.support.offload.streaming import attach, stream

BLOCKS = 4
WIDTH = 16
STACK = "model"


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


@pytest.fixture
def values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (WIDTH, WIDTH)
    tensors = {}
    for block in range(BLOCKS):
        tensors[f"{block}.codes"] = torch.randint(0, 3, shape, generator=generator).byte()
        tensors[f"{block}.scales"] = torch.rand(WIDTH, 1, generator=generator)
        tensors[f"{block}.plain"] = torch.randn(shape, generator=generator)
    return tensors


@pytest.fixture
def path(tmp_path, values) -> Path:
    save_file(values, tmp_path / "coded.safetensors")
    return tmp_path / "coded.safetensors"


def test_pieces_are_joined_once_per_block_and_buffer(path, values):
    header = read_header(path).tensors
    joins = list[tuple[int, int]]()
    plain = {"bias": False, "device": "meta"}
    blocks = [nn.Sequential(Coded(), nn.Linear(WIDTH, WIDTH, **plain)) for _ in range(BLOCKS)]
    names = {"codes": piece_name("0.weight", "codes"), "scales": piece_name("0.weight", "scales")}
    names["plain"] = "1.weight"
    stored = {BlockKey(STACK, at): {} for at in range(BLOCKS)}
    for key, places in stored.items():
        places |= {name: header[f"{key.block}.{own}"] for own, name in names.items()}
    dtypes = dict.fromkeys(names.values(), torch.float32) | {names["codes"]: torch.uint8}

    def join(key: BlockKey, name: str, pieces: Mapping[str, torch.Tensor]) -> torch.Tensor:
        assert name == "0.weight"
        joins.append((key.block, pieces["codes"].data_ptr()))
        joined = Joined(torch.empty(0), requires_grad=False)
        joined.codes = pieces["codes"]
        joined.scales = pieces["scales"]
        return joined

    source = FileSource(stored, computed_dtypes=dict.fromkeys(stored, dtypes))
    hidden = expected = torch.ones(1, WIDTH)
    for index in range(BLOCKS):
        weight = values[f"{index}.codes"].float() * values[f"{index}.scales"]
        expected = (expected @ weight.t() + 1) @ values[f"{index}.plain"].t()
    stacks = {STACK: blocks}
    with attach(stacks, source=source, join=join) as engine:
        for _ in range(3):
            assert torch.equal(stream(engine, stacks, [STACK], hidden)[0], expected)
        assert blocks[0][0].weight.shape == (0,), "absent outside a run"
    assert len(joins) == len(set(joins))
    assert {block for block, _ in joins} == set(range(BLOCKS))
    assert blocks[0][0].weight.is_meta, "detached"


def test_pieces_of_an_unknown_parameter_are_refused(path):
    codes = {piece_name("2.weight", "codes"): read_header(path).tensors["0.codes"]}
    source = FileSource({BlockKey(STACK, 0): codes}, computed_dtypes=torch.uint8)
    with pytest.raises(ValueError, match=r"the source and the module differ in 2\.weight"):
        attach({STACK: [nn.Sequential(Coded())]}, source=source)
    source.close()
