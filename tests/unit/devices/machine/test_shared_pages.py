"""Page locks for memory with shared pages."""

from __future__ import annotations

import ctypes
import mmap
import random
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from wanstream.devices import PageLockError
from wanstream.devices.machine.shared_pages import SharedPages
from wanstream.offload import map_memory
from wanstream.offload.host_memory.in_place import file_mappings

PAGES = 16


@pytest.mark.parametrize("seed", range(20))
def test_every_page_in_use_is_locked_once(
    limited_page_lock: Callable[..., object], seed: int
) -> None:
    draw, memory = random.Random(seed), map_memory(PAGES * mmap.PAGESIZE)
    driver = limited_page_lock(limit=draw.choice([3, 1000]))
    pages, locked = SharedPages(driver), list[torch.Tensor]()
    for _ in range(60):
        if locked and draw.random() < 0.4:
            pages.unlock_pages(locked.pop(draw.randrange(len(locked))))
        else:
            start, stop = sorted(draw.sample(range(memory.numel() + 1), 2))
            try:
                pages.lock_pages(memory[start:stop])
            except PageLockError:
                pass
            else:
                locked.append(memory[start:stop])
        once = [
            page
            for start, nbytes in driver.locked
            for page in range(start, start + nbytes, mmap.PAGESIZE)
        ]
        assert len(once) == len(set(once))
        used = {
            at // mmap.PAGESIZE
            for part in locked
            for at in range(part.data_ptr(), part[-1:].data_ptr() + 1, 64)
        }
        used |= {part[-1:].data_ptr() // mmap.PAGESIZE for part in locked}
        assert used <= {page // mmap.PAGESIZE for page in once}
        for part in locked:
            split = pages.split(part)
            assert torch.cat(split).numel() == part.numel()
            assert [each.data_ptr() for each in split][1:] == [
                each.data_ptr() + each.numel() for each in split[:-1]
            ]
            for each in split:
                assert any(
                    at <= each.data_ptr() and each[-1:].data_ptr() < at + n
                    for at, n in driver.locked
                )
    for part in locked:
        pages.unlock_pages(part)
    assert not driver.locked


def test_mappings_of_files_are_found_and_those_of_ram_are_not(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(2 * mmap.PAGESIZE))
    of_file = [
        torch.from_file(
            str(tmp_path / "file"), shared=shared, size=2 * mmap.PAGESIZE, dtype=torch.uint8
        )
        for shared in (True, False)
    ]
    shared_with_processes = torch.zeros(mmap.PAGESIZE, dtype=torch.uint8).share_memory_()
    of_ram = [torch.ones(10), map_memory(2**22), shared_with_processes]
    files = list(file_mappings())
    assert all(any(memory.data_ptr() in file for file in files) for memory in of_file)
    assert not any(memory.data_ptr() in file for memory in of_ram for file in files)


@pytest.mark.parametrize("call", ["has", "split", "lock_pages"])
def test_memory_that_is_left_during_a_call_is_unlocked_when_it_ends(
    limited_page_lock: Callable[..., object], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    driver, memory = limited_page_lock(limit=2), map_memory(4 * mmap.PAGESIZE)
    pages, parts = SharedPages(driver), list(memory.split(mmap.PAGESIZE))
    pages.lock_pages(parts[0])
    pages.lock_pages(parts[2])
    held = pages._spans_in

    def leave(of: range) -> object:
        monkeypatch.setattr(pages, "_spans_in", held)
        pages.unlock_pages(parts[2])  # as a finaliser does
        return held(of)

    monkeypatch.setattr(pages, "_spans_in", leave)
    if call == "lock_pages":
        with pytest.raises(PageLockError):
            pages.lock_pages(memory)
    else:
        getattr(pages, call)(parts[0])
    assert driver.locked == [(parts[0].data_ptr(), mmap.PAGESIZE)]
    pages.unlock_pages(parts[0])


def test_memory_stays_until_the_last_user_of_its_pages_has_unlocked(
    limited_page_lock: Callable[..., object],
) -> None:
    driver, page = limited_page_lock(), map_memory(mmap.PAGESIZE)
    pages = SharedPages(driver)
    one_owner, other_owner = (
        (ctypes.c_ubyte * 99).from_address(page.data_ptr() + at) for at in (7, 1000)
    )
    alive = weakref.ref(one_owner)
    one, other = (torch.frombuffer(owner, dtype=torch.uint8) for owner in (one_owner, other_owner))
    pages.lock_pages(one)
    pages.lock_pages(other)
    pages.unlock_pages(one)
    del one_owner, one
    assert alive() is not None, "the page is still locked for the other"
    pages.unlock_pages(other)
    assert alive() is None
    assert not driver.locked
