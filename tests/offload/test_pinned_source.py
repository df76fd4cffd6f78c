from __future__ import annotations

import mmap
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from wanstream.offload.layout import allocate_flat, block_format, tensor_views
from wanstream.offload.module_source import ModuleSource
from wanstream.offload.pinned_source import PinnedSource, page_aligned
from wanstream.offload.source import SourceError
from wanstream.plan import BlockKey

KEYS = [BlockKey("high", index) for index in range(5)]


@pytest.fixture
def stack(make_stack: Callable[..., nn.ModuleList]) -> nn.ModuleList:
    return make_stack(len(KEYS), width=20)


@pytest.fixture
def inner(stack: nn.ModuleList, slow_source):
    """A source that counts its reads in `reads` and can be told to fail."""
    return slow_source(ModuleSource({"high": stack}), seed=0)


def assert_block(source: PinnedSource, key: BlockKey, flat: torch.Tensor, stack: nn.ModuleList) -> None:
    for name, view in tensor_views(flat, source.block_format(key).stored).items():
        assert torch.equal(view, stack[key.block].get_parameter(name))


def test_blocks_are_read_when_asked_for_and_never_again(inner, stack):
    source = PinnedSource(inner, register=False)
    assert list(source.keys()) == KEYS
    assert (inner.reads, source.bytes_held) == ([], 0)
    held = 0
    for key in [KEYS[3], KEYS[0]]:
        block = source.host_block(key)
        held += source.block_format(key).stored.nbytes
        assert source.bytes_held == held
        assert block.numel() == source.block_format(key).stored.nbytes
        assert_block(source, key, block, stack)
    again = source.host_block(KEYS[3])
    assert_block(source, KEYS[3], again, stack)
    into = allocate_flat(again.numel(), "cpu")
    source.read_block(KEYS[3], into)
    assert_block(source, KEYS[3], into, stack)
    assert inner.reads == [KEYS[3], KEYS[0]]
    assert source.scales(KEYS[0]) == {}
    source.close()


def test_blocks_start_at_pages_and_share_none():
    sizes = {KEYS[0]: 256, KEYS[1]: mmap.PAGESIZE, KEYS[2]: mmap.PAGESIZE + 256, KEYS[3]: 0, KEYS[4]: 512}
    places, total = page_aligned(sizes.items())
    page = mmap.PAGESIZE
    assert [(place.start, place.stop) for place in places.values()] == [
        (0, 256),
        (page, 2 * page),
        (2 * page, 3 * page + 256),
        (4 * page, 4 * page),
        (4 * page, 4 * page + 512),
    ]
    assert total == 5 * page
    assert page_aligned([]) == ({}, 0)


def test_memory_is_page_aligned(inner):
    source = PinnedSource(inner, register=False)
    assert {source.host_block(key).data_ptr() % mmap.PAGESIZE for key in KEYS} == {0}
    source.close()


def test_many_threads_read_each_block_once(inner, stack):
    source = PinnedSource(inner, register=False)
    start = threading.Barrier(8)

    def ask_for_all(shift: int) -> list[int]:
        start.wait()
        return [source.host_block(KEYS[(index + shift) % len(KEYS)]).data_ptr() for index in range(len(KEYS))]

    with ThreadPoolExecutor(8) as pool:
        addresses = list(pool.map(ask_for_all, range(8)))
    assert sorted(inner.reads) == KEYS
    assert {tuple(sorted(each)) for each in addresses} == {tuple(sorted(addresses[0]))}
    for key in KEYS:
        assert_block(source, key, source.host_block(key), stack)
    source.close()


def test_a_block_that_is_there_does_not_wait_for_one_that_is_read(stack):
    class Gate(ModuleSource):
        def __init__(self) -> None:
            super().__init__({"high": stack})
            self.open = threading.Event()
            self.entered = threading.Event()

        def read_block(self, key: BlockKey, into: torch.Tensor) -> None:
            if key == KEYS[1]:
                self.entered.set()
                assert self.open.wait(60)
            super().read_block(key, into)

    gate = Gate()
    source = PinnedSource(gate, register=False)
    source.host_block(KEYS[0])
    with ThreadPoolExecutor(2) as pool:
        reading = pool.submit(source.host_block, KEYS[1])
        assert gate.entered.wait(60)
        there = pool.submit(source.host_block, KEYS[0]).result(timeout=60)
        assert not reading.done()
        gate.open.set()
        assert_block(source, KEYS[1], reading.result(), stack)
    assert_block(source, KEYS[0], there, stack)
    source.close()


def test_a_block_that_could_not_be_read_is_tried_again(inner, stack):
    source = PinnedSource(inner, register=False)
    source.host_block(KEYS[0])
    inner.fail_at = 1
    with pytest.raises(SourceError, match="the disk went away"):
        source.host_block(KEYS[1])
    assert source.bytes_held == source.block_format(KEYS[0]).stored.nbytes
    inner.fail_at = None
    assert_block(source, KEYS[1], source.host_block(KEYS[1]), stack)
    assert inner.reads == KEYS[:2]
    source.close()


def test_blocks_are_locked_one_by_one_until_close(inner, limited_page_lock):
    driver = limited_page_lock()
    source = PinnedSource(inner, register=True, driver=driver)
    assert driver.locked == []
    blocks = [source.host_block(key) for key in (KEYS[2], KEYS[0], KEYS[2])]
    assert driver.locked == [(block.data_ptr(), block.numel()) for block in blocks[:2]]
    del blocks
    source.close()
    source.close()
    assert driver.locked == []


def test_a_refused_lock_leaves_an_ordinary_block(inner, stack, limited_page_lock, caplog):
    driver = limited_page_lock(limit=1)
    source = PinnedSource(inner, register=True, driver=driver)
    for key in KEYS:
        assert_block(source, key, source.host_block(key), stack)
    assert len(driver.locked) == 1
    assert len(caplog.records) == 1
    source.close()
    assert driver.locked == []


def test_after_close_nothing_is_held_and_nothing_can_be_asked_for(inner, stack):
    source = PinnedSource(inner, register=False)
    still_used = source.host_block(KEYS[0])
    source.close()
    assert source.bytes_held == 0
    assert_block(source, KEYS[0], still_used, stack)  # memory goes with its last reader, not under it
    for key in KEYS[:2]:
        with pytest.raises(SourceError, match=rf"block {key.block} of 'high': the source was closed"):
            source.host_block(key)


@pytest.mark.skipif(sys.platform != "linux", reason="counts in /proc")
def test_the_mapping_goes_at_close(inner):
    def shared_mappings() -> int:
        return Path("/proc/self/maps").read_text().count("/dev/zero")

    before = shared_mappings()
    source = PinnedSource(inner, register=False)
    source.host_block(KEYS[0])
    assert shared_mappings() == before + 1
    source.close()
    assert shared_mappings() == before


def test_a_block_is_filled_before_it_is_locked(inner):
    seen = []

    class Looking:
        def lock(self, memory: torch.Tensor) -> None:
            seen.append(memory.clone())

        def unlock(self, memory: torch.Tensor) -> None: ...

    source = PinnedSource(inner, register=True, driver=Looking())
    assert torch.equal(source.host_block(KEYS[1]), seen[0])
    assert seen[0].any()
    source.close()


def test_more_memory_than_the_system_gives_is_refused_with_numbers():
    class Huge:
        def keys(self):
            return [KEYS[0]]

        def block_format(self, key):
            return block_format({"a": ((1 << 47,), torch.uint8)}, torch.uint8)

    with pytest.raises(SourceError, match=r"140737\.5 GB of RAM for all blocks are refused"):
        PinnedSource(Huge(), register=False)
