"""Mapped host memory, and blocks page-locked where they lie."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import platform
import subprocess
import sys

import psutil
import pytest
import torch

from wanstream.devices import PageLockError
from wanstream.devices.machine.shared_pages import SharedPages
from wanstream.devices.xpu import XpuRuntime
from wanstream.offload.core import pages
from wanstream.offload.core.pages import HUGE_PAGE, LockedBlocks, in_pages, map_memory
from wanstream.offload.formats.layout import allocate_flat
from wanstream.tests.support.offload.fixtures import LimitedPageLock

PAGE = mmap.PAGESIZE
linux = pytest.mark.skipif(sys.platform != "linux", reason="memory as Linux maps it")

FAULTS_OF_TEN_ROUNDS = """
import resource, sys, torch
from wanstream.offload.core.pages import keep_freed_memory
count, megabytes = map(int, sys.argv[1:])
keep_freed_memory()
def block():
    tensors = [torch.ones(megabytes * 2**20, dtype=torch.uint8) for _ in range(count)]
torch.set_num_threads(1)
for _ in range(2):  # the first tensors of a process leave small things between them
    block()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    block()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_bytes_are_rounded_up_to_pages():
    assert [in_pages(nbytes) // PAGE for nbytes in (0, 1, PAGE, PAGE + 1)] == [0, 1, 1, 2]


@pytest.mark.parametrize("advice", [pages.TAKES_ADVICE, False], ids=["here", "other systems"])
@pytest.mark.parametrize("nbytes", [0, 12_345, HUGE_PAGE + 4096])
def test_mapped_memory_has_exactly_its_size_and_starts_at_a_page(monkeypatch, nbytes, advice):
    monkeypatch.setattr(pages, "TAKES_ADVICE", advice)
    memory = map_memory(nbytes).fill_(7)
    assert (memory.shape, memory.dtype, memory.is_inference()) == ((nbytes,), torch.uint8, False)
    assert int(memory.sum()) == 7 * nbytes
    page = HUGE_PAGE if advice and nbytes >= HUGE_PAGE else PAGE
    assert not nbytes or memory.data_ptr() % page == 0


def test_memory_is_mapped_without_any_advice(monkeypatch):
    class Refusing(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Refusing)
    assert int(map_memory(HUGE_PAGE + 5).fill_(1).sum()) == HUGE_PAGE + 5


@linux
@pytest.mark.parametrize("nbytes", [PAGE, 2 * HUGE_PAGE])
def test_a_forked_process_finds_zeros_and_changes_nothing(nbytes):
    memory = map_memory(nbytes).fill_(7)
    seen, written = os.pipe()
    if (child := os.fork()) == 0:
        os.write(written, bytes([ctypes.string_at(memory.data_ptr() + nbytes - 1, 1)[0]]))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(seen, 1) == b"\0"
    assert memory.eq(7).all()
    os.close(seen)
    os.close(written)


@linux
def test_memory_goes_with_its_last_view():
    process = psutil.Process()
    memory = map_memory(16 * HUGE_PAGE).fill_(1)
    gc.collect()  # memory left by earlier tests must not go later
    rss = process.memory_info().rss
    view = memory[:10]
    del memory
    gc.collect()
    assert process.memory_info().rss > rss - 8 * HUGE_PAGE, "a view keeps it"
    del view
    gc.collect()
    assert process.memory_info().rss < rss - 8 * HUGE_PAGE


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
@pytest.mark.parametrize(("count", "megabytes"), [(3, 9), (6, 17), (8, 9), (7, 31)])
@pytest.mark.integration
def test_freed_activations_are_not_faulted_in_again(count, megabytes):
    command = [sys.executable, "-c", FAULTS_OF_TEN_ROUNDS, str(count), str(megabytes)]
    faults = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert faults < (10 * count * megabytes * 2**20 // 4096) / 10


def flats(*pages: float) -> list[torch.Tensor]:
    return [allocate_flat(int(4096 * each), "cpu") for each in pages]


def test_a_refusal_is_logged_once_and_not_tried_again(caplog):
    driver = LimitedPageLock(limit=1)
    blocks = LockedBlocks(driver)
    for memory in flats(*[100e6 / 4096] * 4):
        blocks.add(memory)
    assert driver.attempts == 2
    assert len(caplog.records) == 1
    words = "0.10 GB of RAM are page-locked for the device, but the next 0.10 GB were refused"
    assert f"{words} (no more pages)" in caplog.text
    assert "slower" in caplog.text
    blocks.release()
    assert blocks.add(flats(1)[0]), "there is room again"


@pytest.mark.parametrize(
    ("system", "release", "words"),
    [
        ("Windows", "10", "Windows locks at most about half of the RAM for a GPU, often less: add"),
        ("Linux", "5.15-microsoft-standard-WSL2", "WSL2 locks about 1 GB, whatever `ulimit -l`"),
        ("Linux", "6.8.0-45-generic", "Raise the limit on locked memory (`ulimit -l`), free RAM"),
    ],
)
def test_a_refusal_names_the_limit_of_the_system(caplog, monkeypatch, system, release, words):
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "release", lambda: release)
    LockedBlocks(LimitedPageLock(limit=0)).add(*flats(1))
    assert words in caplog.text


def test_a_family_that_cannot_lock_has_no_limit_to_raise(caplog):
    LockedBlocks(XpuRuntime(torch.device("xpu", 0))).add(*flats(1))
    assert "torch.xpu cannot page-lock memory in place" in caplog.text
    assert "ulimit" not in caplog.text


def test_a_block_is_locked_in_pieces_or_not_at_all(monkeypatch, caplog):
    monkeypatch.setattr(pages, "LOCK_BYTES", 4096)
    driver = LimitedPageLock(limit=5)
    blocks = LockedBlocks(driver)
    first, second = (allocate_flat(3 * 4096 - 10, "cpu") for _ in range(2))
    blocks.add(first)
    sizes = ((0, 4096), (4096, 4096), (8192, 4086))
    pieces = [(first.data_ptr() + at, nbytes) for at, nbytes in sizes]
    assert driver.locked == pieces
    blocks.add(second)
    assert driver.locked == pieces, "the pieces before the refused one are unlocked"
    assert blocks.nbytes == first.numel()
    assert len(caplog.records) == 1
    blocks.remove(first)
    assert driver.locked == []


def test_an_interrupt_between_two_pieces_leaves_none_locked(monkeypatch):
    monkeypatch.setattr(pages, "LOCK_BYTES", 4096)
    driver = LimitedPageLock()

    def interrupted(memory: torch.Tensor) -> None:
        if driver.locked:
            raise KeyboardInterrupt
        LimitedPageLock.lock_pages(driver, memory)

    monkeypatch.setattr(driver, "lock_pages", interrupted)
    with pytest.raises(KeyboardInterrupt):
        LockedBlocks(driver).add(*flats(3))
    assert driver.locked == []


@pytest.mark.parametrize("order", [(2, 5), (5, 2)])
def test_views_that_start_together_are_each_locked_to_their_end(order):
    driver = LimitedPageLock()
    memory = map_memory(5 * PAGE)
    blocks = LockedBlocks(SharedPages(driver))
    views = [memory[: each * PAGE] for each in order]
    for view in views:
        blocks.add(view)
    assert sum(nbytes for _, nbytes in driver.locked) == memory.numel()
    blocks.remove(views[0])
    assert sum(nbytes for _, nbytes in driver.locked) >= views[1].numel()
    blocks.remove(views[1])
    assert driver.locked == []


def test_a_device_locks_memory_where_it_lies(gpu):
    driver = gpu.runtime
    memory = allocate_flat(1 << 20, "cpu")
    driver.lock_pages(memory)
    assert gpu.is_locked(memory)
    words = "HostRegister" if gpu.machine is None else "already mapped"
    with pytest.raises(PageLockError, match=words):
        driver.lock_pages(memory)
    ones = torch.ones(3, device=gpu.device)
    assert ones.sum().item() == 3, "the refusal is not blamed on this kernel"
    driver.unlock_pages(memory)
    assert not gpu.is_locked(memory)
