"""Ranges for profilers."""

from __future__ import annotations

import pytest
import torch

from wanstream.devices import NvtxRanges
from wanstream.telemetry import Recorder, TelemetryOptions
from wanstream.telemetry.trace import ranged
from wanstream.tests.support.accelerator import Accelerator

CPU = torch.device("cpu")


class Noted(NvtxRanges):
    """Ranges with recorded calls."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.open: set[int] = set()

    def start(self, name: str) -> int:
        self.names.append(name)
        self.open.add(len(self.names))
        return len(self.names)

    def end(self, number: int) -> None:
        self.open.remove(number)


def test_a_range_ends_with_its_block_whatever_happens() -> None:
    ranges = Noted()
    with ranged(ranges, "a"):
        assert ranges.open == {1}
    with pytest.raises(OSError, match="gone"), ranged(ranges, "b"):
        raise OSError("gone")
    assert (ranges.names, ranges.open) == (["a", "b"], set())
    with ranged(None, "c"):
        pass


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_a_torch_without_cuda_is_told_before_the_run() -> None:
    with pytest.raises(ValueError, match=r"WANSTREAM_NVTX\), and torch .* has no CUDA: unset it"):
        Recorder(CPU, observe=TelemetryOptions(nvtx=True))


def test_nobody_pays_for_ranges_that_nobody_asked_for() -> None:
    assert Recorder(CPU).ranges is None


def test_a_device_takes_ranges(gpu: Accelerator) -> None:
    gpu.need_kernels("NVTX")
    with ranged(NvtxRanges(), "step 0"):
        torch.zeros(1, device="cuda")
    assert isinstance(
        Recorder(torch.device("cuda", 0), observe=TelemetryOptions(nvtx=True)).ranges, NvtxRanges
    )
