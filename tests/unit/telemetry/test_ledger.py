"""Queue item phases, collected from several nodes."""

from __future__ import annotations

import time

import pytest
import torch

from wanstream.schema.records import PhaseRecord
from wanstream.telemetry.phases import MAX_QUEUE_ITEMS, PhaseRegistry, QueueItemPhases
from wanstream.tests.support.accelerator import Accelerator

CPU = torch.device("cpu")


def test_phases_are_noted_in_order_and_do_not_overlap() -> None:
    began, ledger = time.perf_counter(), QueueItemPhases()
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


def test_a_phase_that_fails_is_not_noted() -> None:
    ledger = QueueItemPhases()
    with pytest.raises(OSError, match="gone"), ledger.phase("text", CPU):
        raise OSError("gone")
    assert ledger.phases() == ()


def test_only_phases_of_the_schema_have_names() -> None:
    with pytest.raises(AssertionError, match="not a phase"), QueueItemPhases().phase("lunch", CPU):
        pass


def test_times_count_from_where_they_are_asked_from() -> None:
    ledger = QueueItemPhases()
    with ledger.phase("text", CPU):
        pass
    run_began = time.perf_counter()
    (before,) = ledger.phases(since=run_began)
    assert before.start_s + before.wall_s <= 0, "it was over when the run began"
    ledger.add([PhaseRecord(name="high", start_s=0.25, wall_s=1.0)], run_start=run_began)
    _, high = ledger.phases(since=run_began)
    assert (high.name, high.start_s, high.wall_s) == ("high", pytest.approx(0.25), 1.0)
    assert ledger.phases()[1].start_s == pytest.approx(
        ledger.phases()[0].start_s - before.start_s + 0.25
    )


def test_phases_are_told_in_order_of_their_beginning() -> None:
    ledger, now = QueueItemPhases(), time.perf_counter()
    ledger.add([PhaseRecord(name="low", start_s=5.0, wall_s=1.0)], run_start=now)
    ledger.add([PhaseRecord(name="high", start_s=1.0, wall_s=1.0)], run_start=now)
    assert [phase.name for phase in ledger.phases()] == ["high", "low"]


def test_a_queue_item_has_one_ledger_and_the_last_ones_are_kept() -> None:
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


def test_a_phase_ends_when_the_device_has_done_its_work(gpu: Accelerator) -> None:
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
