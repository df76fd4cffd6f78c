"""Reads that end between two pieces when the run has ended, and measured reads."""

from __future__ import annotations

import math
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise, repeat

import pytest
import torch
from safetensors.torch import save_file

from wanstream.offload.core.threads import RunStopped
from wanstream.offload.formats.layout import allocate_flat, tensor_views
from wanstream.offload.formats.packing import MXFP8, EightBit, stored_bytes
from wanstream.offload.formats.safetensors_header import FileTensor, read_header
from wanstream.offload.sources.base import ReadThreads, SourceError, reads_until, timed_read
from wanstream.offload.sources.file import FileSource
from wanstream.offload.sources.module import TensorSource
from wanstream.offload.sources.quantised import QuantisedSource
from wanstream.plan.programs import BlockKey

KEY = BlockKey("high", 0)
PIECES = 3


def stop_after(pieces: int):
    return reads_until(partial(next, chain(repeat(False, pieces), repeat(True))))


def source_of(kind: str, tensors, path):
    if kind == "tensors":
        return TensorSource({KEY: tensors})
    file = FileSource({KEY: read_header(path).tensors}, computed_dtypes=torch.float32, readers=1)
    return QuantisedSource(file, "fp8", threads=1) if kind == "quantised" else file


@pytest.mark.parametrize("pieces", range(PIECES + 1))
@pytest.mark.parametrize("kind", ["file", "quantised", "tensors"])
def test_a_read_stops_after_any_piece_and_can_be_repeated(tmp_path, kind, pieces):
    # 80 bytes each: tensors in a block start every 256 bytes, so no two are contiguous.
    tensors = {str(number): torch.randn(1, 20) for number in range(PIECES)}
    save_file(tensors, tmp_path / "a.safetensors")
    source = source_of(kind, tensors, tmp_path / "a.safetensors")
    nbytes = source.formats[KEY].stored.nbytes
    whole, stopped, again = (allocate_flat(nbytes, "cpu").zero_() for _ in range(3))
    source.read_block(KEY, whole)
    ended = pytest.raises(RunStopped) if pieces < PIECES else nullcontext()
    with ended, stop_after(pieces):
        source.read_block(KEY, stopped)
    both = (tensor_views(flat, source.formats[KEY].stored).values() for flat in (stopped, whole))
    read = [torch.equal(one, other) for one, other in zip(*both, strict=True)]
    assert read == [True] * pieces + [False] * (PIECES - pieces)
    source.read_block(KEY, again)
    assert torch.equal(again, whole)
    source.close()


PACKINGS = [(EightBit(), struct.pack("<f", math.nan), torch.float32), (MXFP8, b"\xff", torch.uint8)]


@pytest.mark.parametrize("pieces", range(2))
@pytest.mark.parametrize(("packing", "bad", "dtype"), PACKINGS, ids=["rows", "groups"])
def test_a_stop_leaves_the_check_of_scales_to_the_next_read(tmp_path, packing, bad, dtype, pieces):
    shape = (1, 128)
    behind = stored_bytes(shape, torch.uint8, packing) - 128
    (tmp_path / "a").write_bytes(bytes(132) + bad * (behind // len(bad)))
    place = partial(FileTensor, path=tmp_path / "a")
    codes = place(offset=0, nbytes=128, dtype=torch.uint8, shape=shape)
    scale = place(offset=128, nbytes=4, dtype=torch.float32, shape=())
    scales = place(offset=132, nbytes=behind, dtype=dtype, shape=packing.scale_shape(shape))
    packed = replace(codes, packing=packing, behind=scales)
    blocks = {"a": packed, "b": replace(codes, dtype=torch.float8_e4m3fn)}
    scales_of = {KEY: {"b": scale}}
    source = FileSource({KEY: blocks}, computed_dtypes=torch.float32, scales=scales_of, readers=1)
    with pytest.raises(RunStopped), stop_after(pieces):
        source.scales(KEY)
    for _ in range(2):
        with pytest.raises(SourceError, match="NaN"):
            source.scales(KEY)
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


def test_every_read_is_passed_on_once_and_timed(slow):
    keys = [KEY, BlockKey("high", 1)]
    nbytes = slow.formats[KEY].stored.nbytes
    read, expected = (allocate_flat(nbytes, "cpu").zero_() for _ in range(2))
    spans = []
    for key, straight in zip(keys, (False, True), strict=True):
        spans.append(timed_read(slow, key, read, None, straight=straight))
        slow.inner.read_block(key, expected)
        assert torch.equal(read, expected)
    assert slow.reads == keys
    assert [(span.nbytes, span.straight) for span in spans] == [(nbytes, False), (nbytes, True)]
    times = [time for span in spans for time in (span.start, span.end)]
    assert all(first <= second for first, second in pairwise(times))
    slow.fail_at = 2
    with pytest.raises(SourceError, match="went away"):
        timed_read(slow, KEY, read, None)
