from __future__ import annotations

import gc
import logging
import mmap
import platform

import pytest
import torch

from wanstream.devices import PageLockError
from wanstream.devices.machine.shared_pages import SharedPages
from wanstream.devices.xpu import XpuRuntime
from wanstream.offload.core import pages
from wanstream.offload.core.pages import LockedBlocks, map_memory
from wanstream.offload.formats.layout import allocate_flat


def test_blocks_are_locked_and_released(limited_page_lock):
    driver = limited_page_lock(limit=3)
    blocks = LockedBlocks(driver)
    memories = [allocate_flat(4096, "cpu") for _ in range(3)]
    for memory in memories:
        blocks.add(memory)
    assert driver.locked == [(memory.data_ptr(), 4096) for memory in memories]
    blocks.release()
    blocks.release()
    assert driver.locked == []


def test_a_refusal_is_told_once_and_not_tried_again(limited_page_lock, caplog):
    driver = limited_page_lock(limit=1)
    blocks = LockedBlocks(driver)
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            blocks.add(allocate_flat(100_000_000, "cpu"))
    assert driver.attempts == 2
    assert len(caplog.records) == 1
    assert (
        "0.10 GB of RAM are page-locked for the device, but the next 0.10 GB were refused (no more "
        "pages)" in caplog.text
    )
    assert "slower" in caplog.text
    blocks.release()
    assert driver.locked == []


@pytest.mark.parametrize(
    ("system", "release", "words"),
    [
        (
            "Windows",
            "10",
            "Windows locks at most about half of the RAM for a GPU, often less: add RAM, or keep "
            "fewer",
        ),
        (
            "Linux",
            "5.15.153.1-microsoft-standard-WSL2",
            "WSL2 locks about 1 GB, whatever `ulimit -l` says: give the",
        ),
        (
            "Linux",
            "6.8.0-45-generic",
            "Raise the limit on locked memory (`ulimit -l`), free RAM, or keep fewer blocks",
        ),
    ],
)
def test_a_refusal_names_the_limit_of_the_system(
    limited_page_lock, caplog, monkeypatch, system, release, words
):
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "release", lambda: release)
    with caplog.at_level(logging.WARNING):
        LockedBlocks(limited_page_lock(limit=0)).add(allocate_flat(4096, "cpu"))
    assert words in caplog.text


def test_a_family_that_cannot_lock_has_no_limit_to_raise(caplog):
    driver = XpuRuntime(torch.device("xpu", 0))
    with caplog.at_level(logging.WARNING):
        LockedBlocks(driver).add(allocate_flat(4096, "cpu"))
    assert "torch.xpu cannot page-lock memory in place" in caplog.text
    assert "ulimit" not in caplog.text


def test_one_block_is_unlocked_by_itself_and_makes_room_for_another(limited_page_lock):
    driver = limited_page_lock(limit=2)
    blocks = LockedBlocks(driver)
    first, second, third, fourth = (allocate_flat(4096 * n, "cpu") for n in (1, 2, 3, 4))
    for memory in (first, second, third):
        blocks.add(memory)
    assert blocks.nbytes == 3 * 4096, "the third was refused"
    blocks.remove(third)
    assert blocks.nbytes == 3 * 4096
    blocks.remove(first)
    blocks.remove(first)
    assert driver.locked == [(second.data_ptr(), 2 * 4096)]
    blocks.add(fourth)
    assert blocks.nbytes == 6 * 4096
    blocks.release()
    assert (blocks.nbytes, driver.locked) == (0, [])


def test_a_block_is_locked_in_pieces_or_not_at_all(limited_page_lock, monkeypatch, caplog):
    monkeypatch.setattr(pages, "LOCK_BYTES", 4096)
    driver = limited_page_lock(limit=5)
    blocks = LockedBlocks(driver)
    first, second = (allocate_flat(3 * 4096 - 10, "cpu") for _ in range(2))
    blocks.add(first)
    pieces = [
        (first.data_ptr() + at, nbytes) for at, nbytes in ((0, 4096), (4096, 4096), (8192, 4086))
    ]
    assert driver.locked == pieces
    blocks.add(second)
    assert (driver.locked, blocks.nbytes) == (pieces, first.numel()), (
        "the pieces before the refused one are unlocked"
    )
    assert len(caplog.records) == 1
    blocks.remove(first)
    assert driver.locked == []


def test_an_interrupt_between_two_pieces_leaves_none_locked(limited_page_lock, monkeypatch):
    monkeypatch.setattr(pages, "LOCK_BYTES", 4096)
    driver = limited_page_lock()

    def interrupted(memory: torch.Tensor) -> None:
        if driver.locked:
            raise KeyboardInterrupt
        type(driver).lock_pages(driver, memory)

    monkeypatch.setattr(driver, "lock_pages", interrupted)
    blocks = LockedBlocks(driver)
    with pytest.raises(KeyboardInterrupt):
        blocks.add(allocate_flat(3 * 4096, "cpu"))
    assert driver.locked == []


@pytest.mark.parametrize("order", [(2, 5), (5, 2)])
def test_views_that_start_at_one_address_are_each_locked_to_their_end(limited_page_lock, order):
    driver, memory = limited_page_lock(), map_memory(5 * mmap.PAGESIZE)
    blocks, views = (
        LockedBlocks(SharedPages(driver)),
        [memory[: pages * mmap.PAGESIZE] for pages in order],
    )
    for view in views:
        blocks.add(view)
    assert sum(nbytes for _, nbytes in driver.locked) == memory.numel()
    blocks.remove(views[0])
    assert sum(nbytes for _, nbytes in driver.locked) >= views[1].numel()
    blocks.remove(views[1])
    assert driver.locked == []


def test_memory_that_nobody_releases_is_unlocked_before_it_goes(limited_page_lock):
    """Pages must not remain locked after their memory is unmapped.

    The device would copy from them at the same address.
    """
    driver = limited_page_lock()
    blocks = LockedBlocks(driver)
    blocks.add(allocate_flat(4096, "cpu"))
    del blocks
    gc.collect()
    assert driver.locked == []


def test_a_device_takes_memory_where_it_lies(gpu):
    driver, memory = gpu.runtime, allocate_flat(1 << 20, "cpu")
    driver.lock_pages(memory)
    assert gpu.is_locked(memory)
    with pytest.raises(
        PageLockError, match="HostRegister" if gpu.machine is None else "already mapped"
    ):
        driver.lock_pages(memory)
    assert (
        torch.ones(3, device=gpu.device).sum().item() == 3
    )  # the refusal is not blamed on this kernel
    driver.unlock_pages(memory)
    assert not gpu.is_locked(memory)
