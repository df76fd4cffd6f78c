"""Probe for group transfers."""

from __future__ import annotations

import pytest
import torch

from wanstream.offload.probes import gather as probe
from wanstream.offload.probes import probe_gather
from wanstream.tests.support.accelerator import Accelerator


class GroupOfOne:
    """`Gather` for a single rank, with a gather count."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.gathers = 0

    def compare(self, said: bytes) -> tuple[bytes, ...]:
        return (said,)

    def all_gather(self, into: torch.Tensor, own: torch.Tensor) -> None:
        into.copy_(own, non_blocking=True)
        self.gathers += 1

    def abort(self) -> None:
        raise AssertionError("aborted")


def test_copies_and_gathers_are_measured_on_two_streams(
    gpu: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, held = GroupOfOne(), gpu.runtime.allocated_bytes()
    if gpu.machine is not None:
        monkeypatch.setattr(probe, "PROBE_BYTES", 2**16)
    times = probe_gather(group, gpu.device, 2 * probe.PROBE_BYTES)
    gather_times = ["gather_s", "shard_h2d_s", "gather_during_h2d_s"]
    assert list(times) == ["h2d_s", "h2d_concurrent_s", *gather_times]
    assert all(seconds > 0 for seconds in times.values())
    assert group.gathers == len(gather_times) * (probe.REPEATS + 1), (
        "as many as on every other rank"
    )
    assert gpu.runtime.allocated_bytes() == held
