"""Page locks for memory with shared pages."""

from __future__ import annotations

import ctypes
import mmap
import random
import weakref
from functools import partial

import pytest
import torch

from wanstream.devices import PageLockError
from wanstream.devices.machine.shared_pages import SharedPages
from wanstream.offload import map_memory
from wanstream.offload.host_memory.in_place import file_mappings
from wanstream.tests.support.offload.fixtures import LimitedPageLock

PAGES = 16
PAGE = mmap.PAGESIZE


def span(memory: torch.Tensor) -> range:
    return range(memory.data_ptr(), memory.data_ptr() + memory.numel())


@pytest.mark.parametrize("seed", range(20))
def test_every_page_in_use_is_locked_once(seed):
    draw = random.Random(seed)
    memory = map_memory(PAGES * PAGE)
    driver = LimitedPageLock(limit=draw.choice([3, 1000]))
    pages = SharedPages(driver)
    locked = list[torch.Tensor]()
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
        spans = [range(start, start + nbytes) for start, nbytes in driver.locked]
        once = [page // PAGE for each in spans for page in each[::PAGE]]
        assert len(once) == len(set(once))
        for part in locked:
            assert set(range(span(part)[0] // PAGE, span(part)[-1] // PAGE + 1)) <= set(once)
            split = [span(each) for each in pages.split(part)]
            edges = [edge for each in split for edge in (each.start, each.stop)]
            assert [span(part).start, *edges[1:-1:2]] == edges[::2]
            assert edges[-1] == span(part).stop
            for each in split:
                assert any(each[0] in whole and each[-1] in whole for whole in spans)
    for part in locked:
        pages.unlock_pages(part)
    assert not driver.locked


def test_mappings_of_files_are_found_and_those_of_ram_are_not(tmp_path):
    (tmp_path / "file").write_bytes(bytes(2 * PAGE))
    map_file = partial(torch.from_file, str(tmp_path / "file"), size=2 * PAGE, dtype=torch.uint8)
    of_file = [map_file(shared=shared) for shared in (True, False)]
    shared_with_processes = torch.zeros(PAGE, dtype=torch.uint8).share_memory_()
    of_ram = [torch.ones(10), map_memory(2**22), shared_with_processes]
    files = list(file_mappings())
    assert all(any(memory.data_ptr() in file for file in files) for memory in of_file)
    assert not any(memory.data_ptr() in file for memory in of_ram for file in files)


@pytest.mark.parametrize("call", ["has", "split", "lock_pages"])
def test_memory_left_during_a_call_is_unlocked_at_its_end(monkeypatch, call):
    driver = LimitedPageLock(limit=2)
    memory = map_memory(4 * PAGE)
    pages = SharedPages(driver)
    parts = list(memory.split(PAGE))
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
    assert driver.locked == [(parts[0].data_ptr(), PAGE)]
    pages.unlock_pages(parts[0])


def test_memory_stays_until_the_last_user_of_its_pages():
    driver = LimitedPageLock()
    page = map_memory(PAGE)
    pages = SharedPages(driver)
    places = (page.data_ptr() + 7, page.data_ptr() + 1000)
    one_owner, other_owner = ((ctypes.c_ubyte * 99).from_address(place) for place in places)
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
