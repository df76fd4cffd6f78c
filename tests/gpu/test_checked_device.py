"""The checked device itself, and product functions with waits for a device."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from wanstream.devices import DeviceRuntime, clock_for
from wanstream.offload.core import pages
from wanstream.offload.transfers.cuda import CudaStreams
from wanstream.tests.support.accelerator import HOST_WAITS, Accelerator, checked_accelerator
from wanstream.tests.support.checked_device import HostWait, Issued, StreamWait, TraceEntry, races
from wanstream.tests.support.offload.device_scenarios import KINDS, LAYERWISE, PINNED, Case

pytestmark = pytest.mark.checked
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("seed", range(3))
def test_work_of_inference_mode_is_executed_by_a_later_wait(seed):
    with checked_accelerator(seed) as gpu:
        with torch.inference_mode():
            host = torch.zeros(9)
            values = torch.ones(9, device=gpu.device)
            gpu.runtime.lock_pages(host.view(torch.uint8))
            host.copy_(values, non_blocking=True)
            del values
        gpu.runtime.current_stream().synchronize()
        gpu.runtime.unlock_pages(host.view(torch.uint8))
        assert torch.equal(host, torch.ones(9))


@pytest.mark.parametrize("kind", KINDS)
def test_torch_finds_the_waits_that_are_missing(kind):
    trace: list[TraceEntry] = []
    with checked_accelerator(1) as gpu:
        gpu.need_fake("").trace = trace
        case = Case(gpu, LAYERWISE, **KINDS[kind])
        case.run(2)
        case.detach()
        del case
    assert not races(trace)
    assert races([entry for entry in trace if not isinstance(entry, HostWait)])
    working = {entry.stream for entry in trace if isinstance(entry, Issued) and entry.accesses}
    assert len(working) == (2 if kind == "raw" else 3)
    for stream in working:
        assert races([e for e in trace if not isinstance(e, StreamWait) or e.stream is not stream])


def unmapped_while_locked(gpu: Accelerator, patch: pytest.MonkeyPatch) -> None:
    gpu.runtime.lock_pages(gpu.need_fake("").map_memory(99))


def unlocked_and_unmapped_under_a_copy(gpu: Accelerator, patch: pytest.MonkeyPatch) -> None:
    memory = gpu.need_fake("").map_memory(99)
    gpu.runtime.lock_pages(memory)
    gpu.delay()
    torch.empty(99, dtype=torch.uint8, device=gpu.device).copy_(memory, non_blocking=True)
    gpu.runtime.unlock_pages(memory)


def stream_returned_under_a_copy(gpu: Accelerator, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CudaStreams, "settle", lambda self: None)
    case = Case(gpu, LAYERWISE)
    case.run(1, delay=1)
    case.engine.detach()


def blocks_deleted_while_locked(gpu: Accelerator, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pages, "_unlock_all", lambda driver, blocks: None)
    case = Case(gpu, PINNED)
    case.run(1)
    case.drop()


def memory_unmapped_that_could_not_be_unlocked(gpu: Accelerator, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeviceRuntime, "unlock_pages", lambda self, memory: self._unlock(memory))
    refused_unlocks(gpu)


def refused_unlocks(gpu: Accelerator) -> None:
    gpu.need_fake("").refuse_unlocks = True
    case = Case(gpu, PINNED)
    case.run(1)
    case.engine.detach()


PLANTS = {
    unmapped_while_locked: "memory is unmapped while it is page-locked",
    unlocked_and_unmapped_under_a_copy: "race: unmapping",
    stream_returned_under_a_copy: "a stream is returned while its work is under way",
    blocks_deleted_while_locked: "memory is unmapped while it is page-locked",
    memory_unmapped_that_could_not_be_unlocked: "memory is unmapped while it is page-locked",
}
"""Ends of host memory and streams still used by the device, and the reported problem."""


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_an_end_under_use_is_reported(plant):
    with (
        pytest.raises(AssertionError, match=PLANTS[plant]),
        pytest.MonkeyPatch.context() as patch,
        checked_accelerator(0) as gpu,
    ):
        plant(gpu, patch)
        gc.collect()


def test_memory_that_could_not_be_unlocked_stays_mapped():
    with checked_accelerator(0) as gpu:
        refused_unlocks(gpu)
        gc.collect()
        machine = gpu.need_fake("")
        assert machine.locked
        assert not machine.problems
        machine.locked.clear()
    gpu.runtime._still_locked.clear()


def waits(gpu: Accelerator) -> None:
    torch.zeros(1, device=gpu.device)
    clock_for(gpu.device).settle()


def test_a_wait_that_is_not_listed_is_reported(monkeypatch):
    with checked_accelerator(0) as gpu:
        waits(gpu)
    monkeypatch.delitem(HOST_WAITS, "devices/clock.py settle")
    words = r"waits for the device in devices/clock\.py settle: remove it"
    with pytest.raises(AssertionError, match=words):
        with checked_accelerator(0) as gpu:
            waits(gpu)


def test_waits_of_a_test_itself_are_not_counted():
    with checked_accelerator(0) as gpu:
        assert float(torch.ones(1, device=gpu.device)) == 1.0
        assert gpu.machine is not None
        assert not gpu.machine.host_waits


@pytest.mark.parametrize("name", HOST_WAITS)
def test_listed_functions_exist(name):
    file, function = name.split()
    assert f"def {function}(" in (ROOT / file).read_text(encoding="utf-8")
