"""The checked device itself."""

from __future__ import annotations

import pytest
import torch

from wanstream.tests.support.accelerator import checked_accelerator
from wanstream.tests.support.checked_device import HostWait, Issued, StreamWait, TraceEntry, races
from wanstream.tests.support.device_scenarios import KINDS, LAYERWISE, Case

pytestmark = pytest.mark.checked


@pytest.mark.parametrize("seed", range(3))
def test_work_of_inference_mode_is_executed_by_a_later_wait(seed: int) -> None:
    with checked_accelerator(seed) as gpu:
        with torch.inference_mode():
            host, values = torch.zeros(9), torch.ones(9, device=gpu.device)
            gpu.runtime.lock_pages(host.view(torch.uint8))
            host.copy_(values, non_blocking=True)
            del values
        gpu.runtime.current_stream().synchronize()
        gpu.runtime.unlock_pages(host.view(torch.uint8))
        assert torch.equal(host, torch.ones(9))


@pytest.mark.parametrize("kind", KINDS)
def test_torch_finds_the_waits_that_are_missing(kind: str) -> None:
    trace: list[TraceEntry] = []
    with checked_accelerator(1) as gpu:
        assert gpu.machine is not None
        gpu.machine.trace = trace
        case = Case(gpu, LAYERWISE, **KINDS[kind])
        case.run(2)
        case.detach()
        del case
    assert not races(trace)
    assert races([entry for entry in trace if not isinstance(entry, HostWait)])
    working = {entry.stream for entry in trace if isinstance(entry, Issued) and entry.accesses}
    assert len(working) == (2 if kind == "raw" else 3)
    for stream in working:
        assert races([entry for entry in trace if not (isinstance(entry, StreamWait) and entry.stream is stream)])
