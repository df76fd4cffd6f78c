"""Batch bar: whole rows, fractions of running ones, and servers that do not respond."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest

from wanstream.batch.progress import BatchBar
from wanstream.batch.rows.rows import Row
from wanstream.host.embedded.events import NodeProgress


class Watched:
    """A bar, the time as set by the test, and what was drawn last."""

    def __init__(self, capsys, **settings):
        self.now = 0.0
        self._capsys = capsys
        self.bar = BatchBar(**{"rows": 8, "ended": 0, "clock": lambda: self.now, **settings})
        # The elapsed time is tqdm's own.
        self.bar._time = lambda: self.now
        self.bar.start_t = 0.0

    def begin(self, job: str | None, now: float, *, rows: int = 1, on: str = "a") -> None:
        self.now = now
        self.bar.running(on, job, rows)

    def report(self, done: int, total: int, on: str = "a") -> None:
        progress = NodeProgress(node_id="node", class_type="N", done=done, total=total)
        self.bar.show(progress, backend=on)

    def end(self, now: float, on: str = "a") -> None:
        self.now = now
        self.bar.done(on)

    def passed(self, now: float) -> float:
        self.now = now
        return self.bar.passed

    def silence(self, server: str, seconds: float = 0.0) -> None:
        self.bar.unresponsive(server, True)
        self.now += seconds
        self.bar.refresh()

    def drawn(self) -> str:
        return self._capsys.readouterr().err.split("\r")[-1]


@pytest.fixture
def watch(capsys):
    """`watch(rows=8, ended=0, backends=1)` opens a bar."""
    with ExitStack() as opened:

        def start(**settings):
            watched = Watched(capsys, **settings)
            opened.enter_context(watched.bar)
            return watched

        yield start


def test_the_bar_counts_ended_rows_and_tells_what_failed(watch, capsys):
    threads = threading.active_count()
    watched = watch(rows=4, ended=1)
    # Starting a thread may never return if memory is short.
    assert threading.active_count() == threads
    watched.begin("job", 0.0)
    watched.report(3, 20)
    watched.end(10.0)
    watched.bar.failed(Row(line=7, position=6, hash="h"), "too big", "a")
    watched.bar.note("a word")
    watched.bar.refresh()
    printed = capsys.readouterr()
    assert "line 7: too big\n" in printed.err
    assert "node 3/20" in printed.err
    last = printed.err.split("\r")[-1]
    assert "3/4" in last
    assert "<" in last, "the time that is left"
    assert printed.out == ""


def test_a_row_counts_as_far_as_it_is_and_lanes_together(watch, capsys):
    watched = watch(ended=2)
    watched.begin("a", 0.0)
    watched.report(5, 20)
    assert watched.bar.passed == 2.25
    watched.end(10.0)
    assert watched.bar.passed == 3.0
    watched.begin("b", 10.0, rows=4)
    watched.now = 15.0
    watched.report(10, 20)
    assert watched.bar.passed == 5.0, "half of four rows that run together"
    for whole in (4, 5, 6, 7):
        watched.end(15.0)
        assert whole <= watched.bar.passed <= 7.0
    assert watched.bar.passed == 7.0
    told = capsys.readouterr().err.split("\r")
    assert "2/8" in told[1], "words count whole rows alone"
    assert any("28%" in line and "2/8" in line for line in told)
    assert any("62%" in line and "3/8" in line for line in told)


def test_progress_of_the_first_job(watch):
    watched = watch()
    watched.begin("a", 0.0)
    assert watched.passed(5.0) == 0.0
    for done, total, passed in [
        (1, 1, 0.0),  # a node without steps says nothing
        (5, 20, 0.25),
        (15, 20, 0.75),
        (1, 3, 0.75),  # never back
        (20, 20, 0.99),  # it has not ended
    ]:
        watched.report(done, total)
        assert watched.passed(6.0) == passed


def test_without_reports_the_last_job_is_the_measure(watch):
    watched = watch()
    watched.begin("a", 0.0)
    watched.end(40.0)
    assert watched.passed(41.0) == 1.0, "none runs"
    watched.begin("b", 50.0)
    watched.begin("b", 55.0)
    assert watched.passed(60.0) == 1.25
    assert watched.passed(500.0) == 1.99
    watched.begin("c", 500.0)
    assert watched.passed(500.0) == 1.0, "b was given up"
    watched.report(2, 4)
    assert watched.passed(539.0) == 1.5, "steps count more than the last job"
    watched.report(0, 4)
    assert watched.passed(600.0) == 1.5, "a node that begins again takes nothing back"


def test_rows_of_several_backends_count_as_far_as_each_is(watch):
    watched = watch(backends=2, noun="actors")
    for actor, done in (("a", 5), ("b", 10)):
        watched.begin(f"job of {actor}", 0.0, on=actor)
        watched.report(done, 20, on=actor)
    assert watched.bar.passed == 0.75
    watched.end(10.0)
    watched.end(40.0, on="b")
    for actor in "ab":
        watched.begin(f"next of {actor}", 40.0, on=actor)
    assert watched.passed(45.0) == 2 + 0.5 + 0.125, "by the last job of each"
    watched.bar.unresponsive("b", True)
    assert "1 of 2 actors, no answer from b" in watched.drawn()


def test_a_job_that_a_server_has_lost_does_not_count(watch):
    watched = watch(rows=2, backends=2)
    watched.begin("1", 0.0)
    watched.end(10.0)
    watched.begin("2", 10.0)
    assert watched.passed(20.0) == 1.99
    watched.begin(None, 20.0, rows=0)
    assert watched.bar.passed == 1.0
    watched.begin("2", 20.0, on="b")
    watched.end(20.0, on="b")
    assert watched.bar.passed == 2.0
    assert "100%" in watched.drawn()


def test_bar_without_answers(watch):
    watched = watch(rows=4)
    watched.end(60.0)
    assert "<03:00" in watched.drawn()
    watched.silence("a", 300.0)
    gone = watched.drawn()
    assert "1/4 [06:00, no answer for 300 s]" in gone
    assert "<" not in gone
    watched.bar.unresponsive("a", False)
    back = watched.drawn()
    assert "1/4 [06:00<03:00" in back
    assert "answer" not in back


def test_a_row_does_not_advance_while_its_server_is_silent(watch):
    watched = watch(rows=4)
    watched.begin("1", 0.0)
    watched.end(10.0)
    for now in (10.0, 12.0):
        watched.begin("2", now)
    watched.now = 14.0
    watched.bar.unresponsive("a", True)
    assert "no answer for 2 s" in watched.drawn(), "since its last poll"
    for now in (14.0, 18.0, 100.0):
        watched.begin("2", now)  # polled again, without a response
        assert watched.bar.passed == 1.2
    watched.bar.unresponsive("a", False)
    assert watched.bar.passed == 1.2
    assert watched.passed(103.0) == 1.5
    watched.begin("3", 103.0)  # the server has restarted without the row
    assert watched.bar.passed == 1.0


def test_the_bar_names_servers_that_do_not_respond(watch):
    watched = watch(backends=4)
    for server, words in {
        "http://a": "3 of 4 servers, no answer from http://a",
        "http://b": "2 of 4 servers, no answer from http://a, http://b",
        "http://c": "1 of 4 servers, no answer from http://a, http://b, 1 more",
    }.items():
        watched.silence(server)
        assert words in watched.drawn()
    watched.silence("http://d", 30.0)
    assert "no answer for 30 s" in watched.drawn()
    watched.bar.unresponsive("http://b", False)
    assert "1 of 4 servers" in watched.drawn()


@pytest.mark.parametrize(("servers", "left"), [(2, ""), (3, "2 of 2 servers")])
def test_an_excluded_server_is_not_named_any_more(watch, servers, left):
    watched = watch(backends=servers)
    watched.silence("http://b")
    watched.bar.excluded("http://b")
    watched.bar.refresh()
    last = watched.drawn()
    assert "http://b" not in last
    assert left in last


def test_row_that_ends_during_a_redraw_blocks_no_thread(capsys):
    inside = threading.Event()
    redrawn = threading.Event()

    def clock() -> float:
        if threading.current_thread() is ending:
            inside.set()
            redrawn.wait(0.05)
        return 0.0

    def redraw() -> None:
        inside.wait(5)
        bar.refresh()
        redrawn.set()

    ending = threading.Thread(target=lambda: bar.done("a"), daemon=True)
    threads = [ending, threading.Thread(target=redraw, daemon=True)]
    bar = BatchBar(rows=2, ended=0, backends=2, clock=clock)
    bar.running("a", "job", 1)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
    bar.close()
