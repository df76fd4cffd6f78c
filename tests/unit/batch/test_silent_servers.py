"""Batch servers that do not respond: the bar and the messages, meanwhile and at the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from wanstream.batch.errors import (
    UnreachableError,
)
from wanstream.batch.progress import BatchBar
from wanstream.batch.running import fleet as fleet_module
from wanstream.batch.running import runner
from wanstream.tests.support.fake_batch import Bench, Reporter, Server


class Named(Reporter):
    """Reporter that also lists the servers silent now and the ones silent at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.silent: set[str] = set()
        self.were_silent: set[str] = set()

    def unresponsive(self, backend: str, unresponsive: bool) -> None:
        (self.silent.add if unresponsive else self.silent.discard)(backend)
        self.were_silent |= self.silent


def fleet_of(folder: Path, *servers: Server) -> tuple[Bench, Named]:
    fleet, reporter = Bench(folder, *servers, rows=24), Named()
    fleet.reporter = reporter
    return fleet, reporter


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("request_kind", ["post", "outcome"])
def test_a_server_is_named_while_its_request_hangs_and_no_more_when_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request_kind: str
) -> None:
    monkeypatch.setattr(runner, "GRACE_SECONDS", 0.2)
    slow, other = Server("slow"), Server("other", steps=3)
    fleet, reporter = fleet_of(tmp_path, slow, other)
    hung = threading.Event()

    def hang(call: str) -> None:
        if call == request_kind and not hung.is_set():
            hung.set()
            until(lambda: slow.name in reporter.silent)

    slow.called = hang
    fleet.run()
    fleet.check(range(1, 25))
    assert hung.is_set()
    assert reporter.were_silent == {slow.name}
    assert reporter.silent == set()


def test_a_server_that_downloads_for_a_long_time_is_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "GRACE_SECONDS", 0.1)
    distant = Server("distant")
    fleet, reporter = fleet_of(tmp_path, distant, Server("other"))
    distant.called = lambda call: time.sleep(
        0.3 if call == "fetch" and len(distant.made) == 1 else 0.0
    )
    fleet.run()
    fleet.check(range(1, 25))
    assert distant.name not in reporter.were_silent


def test_a_server_that_hangs_at_the_end_is_named_with_the_rows_that_it_may_still_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "_END_SECONDS", 0.2)
    monkeypatch.setattr(runner, "GRACE_SECONDS", 0.0)
    hung, ended = Server("hung", steps=10**6), threading.Event()
    fleet, reporter = fleet_of(tmp_path, hung, Server("other"))
    timed_out: list[str] = []

    def hang(call: str) -> None:
        if call == "outcome" and not timed_out and len(hung.queue) == 2:
            timed_out.append(call)
            raise UnreachableError("timed out")  # the rows go to the other server
        if timed_out:
            ended.wait(30)

    hung.called = hang
    fleet.run()
    ended.set()
    fleet.check(range(1, 25))
    assert "http://hung may still compute 2 rows that were given to other backends" in reporter.told


def test_a_row_does_not_advance_while_its_server_is_silent(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = 0.0

    def passed_at(seconds: float) -> float:
        nonlocal now
        now = seconds
        bar.running("a", "2", 1)  # polled again, without a response
        return bar.passed

    with BatchBar(rows=4, ended=0, clock=lambda: now) as bar:
        bar.running("a", "1", 1)
        now = 10.0
        bar.done("a")
        bar.running("a", "2", 1)
        now = 12.0
        bar.running("a", "2", 1)
        now = 14.0
        bar.unresponsive("a", True)
        assert "no answer for 2 s" in capsys.readouterr().err.split("\r")[-1], "since its last poll"
        assert [passed_at(seconds) for seconds in (14.0, 18.0, 100.0)] == [1.2, 1.2, 1.2]
        bar.unresponsive("a", False)
        assert bar.passed == 1.2
        now = 103.0
        assert bar.passed == 1.5
        bar.running("a", "3", 1)  # the server has restarted without the row
        assert bar.passed == 1.0


def test_rows_of_a_server_that_refuses_connections_are_given_away_after_ten_seconds(
    tmp_path: Path,
) -> None:
    lost = Server("lost", steps=5)
    fleet, reporter = fleet_of(tmp_path, lost, Server("other", steps=2))
    lost.called = lambda call: setattr(lost, "gone", lost.gone or len(lost.made) == 2)
    fleet.run()
    (told,) = [told for told in reporter.told if "other backends take its" in told]
    assert told.startswith("http://lost has not responded for 10 s: ")


def test_a_row_that_is_given_away_counts_no_more_on_its_server(tmp_path: Path) -> None:
    class AtNote(Named):
        def note(self, text: str) -> None:
            super().note(text)
            if "other backends take its" in text:
                self.jobs_then = dict(self.jobs)

    lost = Server("lost", steps=5)
    fleet, _ = fleet_of(tmp_path, lost, Server("other", steps=2))
    fleet.reporter = reporter = AtNote()
    lost.called = lambda call: setattr(lost, "gone", lost.gone or len(lost.made) == 2)
    fleet.run()
    assert reporter.jobs_then["http://lost"] is None
