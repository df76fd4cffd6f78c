from __future__ import annotations

import mmap
import threading

import pytest

from wanstream.offload.progress import RunStopped
from wanstream.offload.staging import Staging

NBYTES = 1000


def test_slots_share_no_page_and_are_locked_until_close(limited_page_lock):
    driver = limited_page_lock()
    staging = Staging(3, NBYTES, lock=driver)
    staging.begin_run()
    slots = [staging.take() for _ in range(3)]
    assert {slot.memory.numel() for slot in slots} == {NBYTES}
    assert len({slot.memory.data_ptr() // mmap.PAGESIZE for slot in slots}) == 3
    assert {slot.memory.data_ptr() % mmap.PAGESIZE for slot in slots} == {0}
    assert driver.locked == [(slot.memory.data_ptr(), NBYTES) for slot in slots]
    assert staging.locked_bytes == 3 * NBYTES
    staging.close()
    assert driver.locked == []
    assert staging.locked_bytes == 0


def test_a_slot_is_handed_out_once_its_content_has_left_it():
    staging = Staging(1, NBYTES)
    staging.begin_run()
    slot, waited = staging.take(), []
    slot.drained = lambda: waited.append(True)
    staging.give_back(slot)
    assert waited == []
    assert staging.take() is slot
    assert waited == [True]
    staging.give_back(slot)
    staging.take()
    assert waited == [True]


def test_a_copy_that_a_stopped_run_left_under_way_is_still_waited_for():
    staging = Staging(1, NBYTES)
    staging.begin_run()
    slot, waited = staging.take(), []
    slot.drained = lambda: waited.append(True)
    staging.give_back(slot)
    staging.stop()
    staging.begin_run()
    assert staging.take() is slot
    assert waited == [True]


def test_stop_wakes_a_taker_and_the_next_run_has_every_slot():
    staging = Staging(2, NBYTES)
    staging.begin_run()
    taken, ended = [staging.take(), staging.take()], threading.Event()

    def take_one_more():
        with pytest.raises(RunStopped):
            staging.take()
        ended.set()

    taker = threading.Thread(target=take_one_more)
    taker.start()
    staging.stop()
    assert ended.wait(60)
    taker.join()
    staging.begin_run()
    assert [staging.take(), staging.take()] == taken
