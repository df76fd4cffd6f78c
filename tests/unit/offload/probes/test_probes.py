"""Probes: they read the given files, release everything, and return plausible rates."""

from __future__ import annotations

import os
import threading
from itertools import chain
from pathlib import Path

import pytest
import torch

from wanstream.offload.probes import gather, probe_bus, probe_decode, probe_gather
from wanstream.offload.probes import machine as probe
from wanstream.offload.probes.machine import (
    BusRates,
    CopyRate,
    probe_copy,
    probe_disk,
    probe_quantise,
)
from wanstream.tests.support.accelerator import DTYPE
from wanstream.tests.support.offload.fixtures import ThreadGroup

CPU = torch.device("cpu")
NBYTES = 2_000_001


@pytest.fixture
def weights(tmp_path) -> Path:
    (tmp_path / "weights.safetensors").write_bytes(os.urandom(NBYTES))
    return tmp_path / "weights.safetensors"


def test_a_file_is_read_and_the_route_is_named(weights):
    before = threading.active_count()
    rate = probe_disk(weights)
    assert 1e6 < rate.bytes_per_s < 1e12
    assert "page cache" in rate.how
    assert threading.active_count() == before
    assert weights.stat().st_size == rate.bytes_read == NBYTES


def refuse(*_: object) -> None:
    raise PermissionError(1, "Operation not permitted")


@pytest.mark.parametrize(
    ("advice", "how"),
    [
        ("taken", ", after dropping its pages"),
        ("unknown", ", maybe warm: this system cannot drop cached pages"),
        ("refused", ", maybe warm: its pages cannot be dropped (Operation not permitted)"),
    ],
)
def test_pages_are_dropped_where_direct_reads_are_refused(weights, monkeypatch, advice, how):
    monkeypatch.setattr(probe, "_reads_directly", lambda path: False)
    if advice == "unknown":
        monkeypatch.delattr(os, "posix_fadvise", raising=False)
    if advice == "refused":
        monkeypatch.setattr(os, "posix_fadvise", refuse, raising=False)
        monkeypatch.setattr(os, "POSIX_FADV_DONTNEED", 4, raising=False)
    rate = probe_disk(weights)
    assert rate.how == f"through the page cache{how}"
    assert rate.bytes_read == NBYTES


def test_reading_ends_at_the_given_byte_or_second(weights):
    assert probe_disk(weights, max_bytes=4096).bytes_read == 4096
    os.truncate(weights, 600_000_000)  # a sparse file: no disk space is used
    assert 0 < probe_disk(weights, max_s=0.0).bytes_read < 600_000_000
    with pytest.raises(FileNotFoundError):
        probe_disk(weights.with_name("absent"))
    os.truncate(weights, 0)
    with pytest.raises(ValueError, match="is empty"):
        probe_disk(weights)


def test_rates_of_ram_and_of_arithmetic():
    threads = torch.get_num_threads()
    for rate in (probe_copy(), probe_decode(CPU), probe_quantise()):
        assert 1e6 < rate < 1e13
    assert torch.get_num_threads() == threads


def test_all_rates_of_the_bus_are_in_the_words():
    gb_per_s = {"h2d": 1, "h2d_pageable": 3, "d2h": 5, "d2h_pageable": 7}
    rates = {name: CopyRate(rate * 1e9, rate * 1e9 + 1e9) for name, rate in gb_per_s.items()}
    assert BusRates(**rates, locked=True).words() == (
        "to the GPU, pinned 1.0 GB/s, 2.0 while it computes; to the GPU, pageable 3.0 GB/s, 4.0 "
        "while it computes; from the GPU, pinned 5.0 GB/s, 6.0 while it computes; from the GPU, "
        "pageable 7.0 GB/s, 8.0 while it computes"
    )


def test_the_bus_alone_and_while_computing(gpu, monkeypatch):
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


def test_copies_and_gathers_are_measured_on_two_streams(gpu, monkeypatch):
    group = ThreadGroup(1)
    [one] = group.ranks()
    held = gpu.runtime.allocated_bytes()
    if gpu.machine is not None:
        monkeypatch.setattr(gather, "PROBE_BYTES", 2**16)
    times = probe_gather(one.gather, gpu.device, 2 * gather.PROBE_BYTES)
    gathers = ["gather_s", "shard_h2d_s", "gather_during_h2d_s"]
    assert list(times) == ["h2d_s", "h2d_concurrent_s", *gathers]
    assert all(seconds > 0 for seconds in times.values())
    assert group.gathers[0] == len(gathers) * (gather.REPEATS + 1), "as many as on every other rank"
    group.owns.clear()
    assert gpu.runtime.allocated_bytes() == held
