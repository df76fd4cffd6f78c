"""Probes: they read the given files, release everything, and return plausible rates."""

from __future__ import annotations

import os
import threading
from itertools import chain
from pathlib import Path

import pytest
import torch

from wanstream.offload.probes import machine as probe
from wanstream.offload.probes.machine import (
    BusRates,
    CopyRate,
    probe_bus,
    probe_copy,
    probe_decode,
    probe_disk,
    probe_quantise,
)
from wanstream.tests.support.accelerator import DTYPE, Accelerator

CPU = torch.device("cpu")


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(os.urandom(20_000_001))
    return path


def test_a_file_is_read_and_the_way_is_told(weights: Path) -> None:
    before = threading.active_count()
    rate = probe_disk(weights)
    assert 1e6 < rate.bytes_per_s < 1e12
    assert "page cache" in rate.how
    assert threading.active_count() == before
    assert weights.stat().st_size == 20_000_001


def test_where_direct_reads_are_not_to_be_had_pages_are_dropped_first(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_reads_directly", lambda path: False)
    rate = probe_disk(weights)
    assert rate.bytes_per_s > 1e6
    assert rate.how == "through the page cache, after dropping its pages"


@pytest.mark.parametrize(
    ("refusal", "why"),
    [
        (None, "this system cannot drop cached pages"),
        (
            PermissionError(1, "Operation not permitted"),
            "its pages cannot be dropped (Operation not permitted)",
        ),
    ],
    ids=["unknown", "refused"],
)
def test_where_no_pages_are_dropped_the_file_may_be_warm_and_that_is_said(
    weights: Path, monkeypatch: pytest.MonkeyPatch, refusal: OSError | None, why: str
) -> None:
    def refuse(*_: object) -> None:
        assert refusal is not None
        raise refusal

    if refusal is None:
        monkeypatch.delattr(os, "posix_fadvise", raising=False)
    else:
        monkeypatch.setattr(os, "posix_fadvise", refuse, raising=False)
        monkeypatch.setattr(os, "POSIX_FADV_DONTNEED", 4, raising=False)
    monkeypatch.setattr(probe, "_reads_directly", lambda path: False)
    rate = probe_disk(weights)
    assert rate.how == f"through the page cache, maybe warm: {why}"
    assert rate.bytes_read == 20_000_001


def test_reading_ends_at_the_byte_or_the_second_that_was_given(weights: Path) -> None:
    few = probe_disk(weights, max_bytes=4096)
    assert few.bytes_read == 4096
    assert probe_disk(weights).bytes_read == 20_000_001
    large = weights.with_name("large")
    with large.open("wb") as file:
        file.truncate(600_000_000)  # a sparse file: no disk space is used
    assert 0 < probe_disk(large, max_s=0.0).bytes_read < 600_000_000


def test_what_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        probe_disk(tmp_path / "absent")
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="is empty"):
        probe_disk(tmp_path / "empty")


def test_rates_of_ram_and_of_arithmetic() -> None:
    threads = torch.get_num_threads()
    for rate in (probe_copy(), probe_decode(CPU), probe_quantise()):
        assert 1e6 < rate < 1e13
    assert torch.get_num_threads() == threads


def test_all_rates_of_the_bus_are_told() -> None:
    names = ("h2d", "h2d_pageable", "d2h", "d2h_pageable")
    pairs = {
        name: CopyRate(2 * place * 1e9 + 1e9, 2 * place * 1e9 + 2e9)
        for place, name in enumerate(names)
    }
    rates = BusRates(**pairs, locked=True)
    assert rates.words() == (
        "to the GPU, pinned 1.0 GB/s, 2.0 while it computes; to the GPU, pageable 3.0 GB/s, 4.0 "
        "while it computes; from the GPU, pinned 5.0 GB/s, 6.0 while it computes; from the GPU, "
        "pageable 7.0 GB/s, 8.0 while it computes"
    )


def test_the_bus_alone_and_while_computing(
    gpu: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = 4096
    if gpu.machine is not None:
        side = 64
        monkeypatch.setattr(probe, "PROBED_BYTES", 2**20)
        monkeypatch.setattr(probe, "SIDE", 256)
    matrix = torch.randn(side, side).to(gpu.device, DTYPE)
    held = gpu.runtime.allocated_bytes()
    rates = probe_bus(gpu.device, compute=lambda: torch.mm(matrix, matrix))
    assert gpu.runtime.allocated_bytes() == held
    assert rates.locked
    if gpu.machine is None:
        for rate in chain(rates.h2d, rates.h2d_pageable, rates.d2h, rates.d2h_pageable):
            assert 1e8 < rate < 1e12
        assert 1e8 < probe_decode(gpu.device) < 1e14
