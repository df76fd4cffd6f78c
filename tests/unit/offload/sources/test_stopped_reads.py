"""Reads that end between two block pieces, because the run has ended."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, repeat

import pytest
import torch
from safetensors.torch import save_file

from wanstream.offload.engine.threads import RunStopped
from wanstream.offload.formats.layout import allocate_flat
from wanstream.offload.formats.safetensors_header import read_header
from wanstream.offload.sources.base import ReadThreads, SourceError, reads_until
from wanstream.offload.sources.file import FileSource
from wanstream.offload.sources.module import TensorSource
from wanstream.offload.sources.quantised import QuantisedSource
from wanstream.plan import BlockKey

KEY, PIECES = BlockKey("high", 0), 3


def source_of(kind: str, tensors, path):
    if kind == "tensors":
        return TensorSource({KEY: tensors})
    file = FileSource({KEY: read_header(path).tensors}, computed_dtypes=torch.float32, readers=1)
    return QuantisedSource(file, "fp8", threads=1) if kind == "quantised" else file


@pytest.mark.parametrize("pieces", range(PIECES + 1))
@pytest.mark.parametrize("kind", ["file", "quantised", "tensors"])
def test_a_read_stops_after_any_piece_and_can_be_repeated(tmp_path, kind, pieces):
    # 80 bytes each: no two are contiguous in a block, because tensors start at multiples of 256.
    tensors = {str(number): torch.randn(1, 20) for number in range(PIECES)}
    save_file(tensors, tmp_path / "a.safetensors")
    source = source_of(kind, tensors, tmp_path / "a.safetensors")
    nbytes = source.formats[KEY].stored.nbytes
    whole, stopped, again = (allocate_flat(nbytes, "cpu").zero_() for _ in range(3))
    source.read_block(KEY, whole)
    answers = chain(repeat(False, pieces), repeat(True))
    if pieces < PIECES:
        with pytest.raises(RunStopped), reads_until(partial(next, answers)):
            source.read_block(KEY, stopped)
    else:
        with reads_until(partial(next, answers)):
            source.read_block(KEY, stopped)
    places = source.formats[KEY].stored.tensors
    read = [torch.equal(stopped[p.offset :][: p.nbytes], whole[p.offset :][: p.nbytes]) for p in places]
    assert read == [True] * pieces + [False] * (PIECES - pieces)
    source.read_block(KEY, again)
    assert torch.equal(again, whole)
    source.close()


def test_an_error_of_a_piece_is_raised_also_if_the_read_stops():
    stops = []

    def fail() -> None:
        stops.append(True)
        raise SourceError("the disk went away")

    threads = ReadThreads(1, ThreadPoolExecutor)
    with pytest.raises(SourceError, match="went away"), reads_until(lambda: bool(stops)):
        threads.run([fail, fail])
    assert len(stops) == 1
    threads.close()
