"""Engines on several ranks with RAM-resident blocks in one shared segment."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from wanstream.offload import attach_offload
from wanstream.offload.formats.safetensors_header import read_header
from wanstream.offload.host_memory.shared_segment import SharedSegment
from wanstream.offload.sources.file import FileSource
from wanstream.plan.programs import BlockKey
from wanstream.schema import OffloadPolicy

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no file locks of this kind")

BLOCKS = 5
WEIGHTS = ("up.weight", "down.weight")
POLICY = OffloadPolicy.layerwise(1, source="pinned")


@pytest.fixture
def stack(make_stack: Callable[..., nn.ModuleList]) -> nn.ModuleList:
    return make_stack(BLOCKS)


@pytest.fixture
def path(stack: nn.ModuleList, tmp_path: Path) -> Path:
    save_file(
        {f"{i}.{w}": stack[i].get_parameter(w) for i in range(BLOCKS) for w in WEIGHTS},
        tmp_path / "x.safetensors",
    )
    return tmp_path / "x.safetensors"


class Rank:
    """Copied blocks, streamed from the file through a shared segment."""

    def __init__(
        self, stack: nn.ModuleList, path: Path, folder: Path, *, shared_blocks: int = BLOCKS
    ) -> None:
        tensors = read_header(path).tensors
        places = {
            BlockKey("blocks", i): {w: tensors[f"{i}.{w}"] for w in WEIGHTS} for i in range(BLOCKS)
        }
        self.source = FileSource(places, computed_dtypes=torch.float32)
        sizes = {
            key: self.source.formats[key].stored.nbytes for key in list(places)[:shared_blocks]
        }
        self.segment = SharedSegment(self.source.identity, sizes, folder=folder)
        self.blocks = copy.deepcopy(stack)
        self.handle = attach_offload(
            self.blocks, policy=POLICY, device="cpu", source=self.source, shared=self.segment
        )

    def run(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def close(self) -> None:
        self.handle.detach()
        self.segment.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shared").mkdir()
    return tmp_path / "shared"


def test_the_second_rank_reads_nothing_and_computes_the_same_bits(stack, path, folder, run_plain):
    hidden = torch.randn(3, 32)
    first, second = Rank(stack, path, folder), Rank(stack, path, folder)
    expected = run_plain(stack, hidden)
    assert torch.equal(first.run(hidden), expected)
    read = first.source.reader.bytes_read
    for _ in range(2):
        assert torch.equal(second.run(hidden), expected)
        assert torch.equal(first.run(hidden), expected)
    assert (first.source.reader.bytes_read, second.source.reader.bytes_read) == (read, 0)
    first.close()
    assert torch.equal(second.run(hidden), expected), (
        "the blocks remain for the ranks that still use them"
    )
    second.close()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("shared_blocks", [BLOCKS, 2])
def test_ranks_that_start_together_share_the_reading(stack, path, folder, run_plain, shared_blocks):
    hidden = torch.randn(3, 32)
    ranks = [Rank(stack, path, folder, shared_blocks=shared_blocks) for _ in range(3)]
    results: list[torch.Tensor] = []
    threads = [
        threading.Thread(target=lambda rank=rank: results.append(rank.run(hidden)))
        for rank in ranks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = run_plain(stack, hidden)
    assert len(results) == 3
    assert all(torch.equal(result, expected) for result in results)
    block_bytes = 2 * 3 * 32 * 32 * 4
    alone = 3 * (
        BLOCKS - shared_blocks
    )  # a block without a place in the segment is read by every rank
    assert (
        sum(rank.source.reader.bytes_read for rank in ranks)
        == (shared_blocks + alone) * block_bytes
    )
    for rank in ranks:
        rank.close()
    assert list(folder.iterdir()) == []
