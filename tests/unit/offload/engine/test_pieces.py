"""Parameters stored in pieces and joined when their block is bound."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from wanstream.offload import attach_offload
from wanstream.offload.formats import piece_name, read_header
from wanstream.offload.sources import FileSource
from wanstream.plan.programs import BlockKey, step_visits
from wanstream.schema import OffloadPolicy

BLOCKS, WIDTH = 4, 16
STACK = "model"


class Coded(nn.Module):
    """Layer whose weight is made from two stored tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH, device="meta"))
        self.bias = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self.weight.codes.float() * self.weight.scales
        return hidden @ weight.t() + self.bias


class Joined(nn.Parameter):
    """A parameter over two views."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "coded.safetensors"
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for block in range(BLOCKS):
        tensors[f"{block}.codes"] = torch.randint(
            0, 3, (WIDTH, WIDTH), dtype=torch.uint8, generator=generator
        )
        tensors[f"{block}.scales"] = torch.rand(WIDTH, 1, generator=generator)
        tensors[f"{block}.plain"] = torch.randn(WIDTH, WIDTH, generator=generator)
    save_file(tensors, path)
    return path


def test_a_parameter_is_joined_of_views_once_per_block_and_buffer(path: Path) -> None:
    header = read_header(path).tensors
    blocks = [
        nn.Sequential(Coded(), nn.Linear(WIDTH, WIDTH, bias=False, device="meta"))
        for _ in range(BLOCKS)
    ]
    stored = {
        BlockKey(STACK, index): {
            piece_name("0.weight", "codes"): header[f"{index}.codes"],
            piece_name("0.weight", "scales"): header[f"{index}.scales"],
            "1.weight": header[f"{index}.plain"],
        }
        for index in range(BLOCKS)
    }
    dtypes = {
        piece_name("0.weight", "codes"): torch.uint8,
        piece_name("0.weight", "scales"): torch.float32,
        "1.weight": torch.float32,
    }
    calls: list[tuple[int, int]] = []

    def join(key: BlockKey, name: str, pieces: Mapping[str, torch.Tensor]) -> torch.Tensor:
        assert name == "0.weight"
        calls.append((key.block, pieces["codes"].data_ptr()))
        joined = Joined(torch.empty(0), requires_grad=False)
        joined.codes, joined.scales = pieces["codes"], pieces["scales"]
        return joined

    source = FileSource(stored, computed_dtypes=dict.fromkeys(stored, dtypes))
    engine = attach_offload(
        {STACK: blocks},
        policy=OffloadPolicy.layerwise(),
        device="cpu",
        source=source,
        follow_forward=False,
        join=join,
    )
    outputs = []
    with engine:
        for _ in range(3):
            hidden = torch.ones(1, WIDTH)
            with engine.run(step_visits([STACK], engine.block_counts)) as run:
                for visit in run.program.visits:
                    with run.visit(*visit):
                        hidden = blocks[visit.block](hidden)
            outputs.append(hidden)
        assert blocks[0][0].weight.shape == (0,)  # absent outside a run
    expected = torch.ones(1, WIDTH)
    views = load_file(path)
    for index in range(BLOCKS):
        weight = views[f"{index}.codes"].float() * views[f"{index}.scales"]
        expected = (expected @ weight.t() + 1) @ views[f"{index}.plain"].t()
    assert all(torch.equal(output, expected) for output in outputs)
    assert len(calls) == len(set(calls))
    assert {block for block, _ in calls} == set(range(BLOCKS))
    assert blocks[0][0].weight.is_meta  # detached


def test_a_source_without_the_parameter_of_its_pieces_is_refused(path: Path) -> None:
    header = read_header(path).tensors
    name = piece_name("2.weight", "codes")
    source = FileSource(
        {BlockKey(STACK, 0): {name: header["0.codes"]}}, computed_dtypes=torch.uint8
    )
    block = nn.Sequential(Coded())
    with pytest.raises(ValueError, match=r"the source and the module differ in 2\.weight"):
        attach_offload(
            {STACK: [block]}, policy=OffloadPolicy.layerwise(), device="cpu", source=source
        )
    source.close()
