"""Queue item phases, collected from several nodes."""

import time

import pytest
import torch

from wanstream.schema.records import PhaseRecord
from wanstream.telemetry.phases import MAX_QUEUE_ITEMS, PhaseRegistry, QueueItemPhases

CPU = torch.device("cpu")
RUN = (("low", 5.0), ("high", 0.25))


def test_phases_are_noted_in_order_and_do_not_overlap():
    began = time.perf_counter()
    ledger = QueueItemPhases()
    for name in ("open", "text"):
        with ledger.phase(name, CPU):
            time.sleep(0.001)
    ended = time.perf_counter()
    opened, text = ledger.phases()
    assert (opened.name, text.name) == ("open", "text")
    assert opened.wall_s > 0
    assert opened.start_s + opened.wall_s <= text.start_s
    assert text.start_s + text.wall_s <= ended - began
    assert (opened.device_bytes, opened.device_used_bytes) == (None, None)
    assert (opened.rss_bytes or 0) > 1_000_000


def test_failed_and_unknown_phases_are_not_noted():
    ledger = QueueItemPhases()
    with pytest.raises(OSError, match="gone"), ledger.phase("text", CPU):
        raise OSError("gone")
    with pytest.raises(AssertionError, match="not a phase"), ledger.phase("lunch", CPU):
        pass
    assert ledger.phases() == ()


def test_times_count_from_the_given_start():
    ledger = QueueItemPhases()
    with ledger.phase("text", CPU):
        pass
    run_began = time.perf_counter()
    (before,) = ledger.phases(since=run_began)
    assert before.start_s + before.wall_s <= 0, "it was over when the run began"
    low, high = (PhaseRecord(name=name, start_s=at, wall_s=1.0) for name, at in RUN)
    ledger.add([low], run_start=run_began)
    ledger.add([high], run_start=run_began)
    assert [phase.name for phase in ledger.phases()] == ["text", "high", "low"]
    _, found, _ = ledger.phases(since=run_began)
    assert (found.start_s, found.wall_s) == (pytest.approx(0.25), 1.0)
    text, later, _ = ledger.phases()
    assert later.start_s == pytest.approx(text.start_s - before.start_s + 0.25)


def test_queue_item_has_one_ledger_and_the_last_ones_are_kept():
    ledgers = PhaseRegistry()
    first = ledgers.of("0")
    with first.phase("open", CPU):
        pass
    assert ledgers.of("0") is first
    for number in range(1, MAX_QUEUE_ITEMS):
        ledgers.of(str(number))
    assert ledgers.of("0") is first, "asked for again, it is not the oldest"
    ledgers.of("another")
    assert ledgers.of("0") is first
    for number in range(MAX_QUEUE_ITEMS):
        ledgers.of(f"later {number}")
    assert ledgers.of("0").phases() == ()


def test_phase_ends_when_the_device_has_done_its_work(gpu):
    """Nothing else synchronises: the host has issued the work to the device and ends the phase."""
    gpu.need_kernels("times of a busy device")
    ledger = QueueItemPhases()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    with ledger.phase("decode", torch.device("cuda", 0)):
        began.record()
        torch.cuda._sleep(50_000_000)
        ended.record()
    (phase,) = ledger.phases()
    assert began.elapsed_time(ended) > 5, "milliseconds"
    assert phase.wall_s >= began.elapsed_time(ended) / 1000 * 0.98
