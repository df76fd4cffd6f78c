from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from wanstream.batch.progress import BatchBar
from wanstream.batch.rows.rows import Row
from wanstream.host.embedded.events import NodeProgress


def test_the_bar_counts_rows_that_ended_and_tells_what_failed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = Row(line=7, position=6, hash="h")
    with BatchBar(rows=4, ended=1) as bar:
        bar.running("a server", "a", 1)
        bar.show(
            NodeProgress(node_id="sampler", class_type="S", done=3, total=20), backend="a server"
        )
        bar.done("a server")
        bar.failed(row, "too big", "a server")
        bar.refresh()
    told = capsys.readouterr().err
    assert "line 7: too big\n" in told
    assert "sampler 3/20" in told
    last = told.split("\r")[-1]
    assert "3/4" in last
    assert "<" in last, "the time that is left"


def test_a_row_counts_as_far_as_it_is_and_lanes_together(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = [0.0]
    with BatchBar(rows=8, ended=2, clock=lambda: now[0]) as bar:
        bar.running("a server", "a", 1)
        bar.show(
            NodeProgress(node_id="sampler", class_type="S", done=5, total=20), backend="a server"
        )
        assert bar.passed == 2.25
        now[0] = 10.0
        bar.done("a server")
        assert bar.passed == 3.0
        bar.running("a server", "b", 4)
        now[0] = 15.0
        bar.show(
            NodeProgress(node_id="sampler", class_type="S", done=10, total=20), backend="a server"
        )
        assert bar.passed == 5.0, "half of four rows that run together"
        for whole in (4, 5, 6, 7):
            bar.done("a server")
            assert whole <= bar.passed <= 7.0
        assert bar.passed == 7.0
    told = capsys.readouterr().err.split("\r")
    assert "2/8" in told[1], "words count whole rows alone"
    assert any("28%" in line and "2/8" in line for line in told)
    assert any("62%" in line and "3/8" in line for line in told)


def test_rows_of_several_actors_count_as_far_as_each_is(capsys: pytest.CaptureFixture[str]) -> None:
    with BatchBar(rows=8, ended=0, backends=2, noun="actors") as bar:
        for actor, done in (("actor 0", 5), ("actor 1", 10)):
            bar.running(actor, f"job of {actor}", 1)
            bar.show(
                NodeProgress(node_id="sampler", class_type="S", done=done, total=20), backend=actor
            )
        assert bar.passed == 0.75
        bar.show(
            NodeProgress(node_id="sampler", class_type="S", done=15, total=20), backend="actor 0"
        )
        assert bar.passed == 1.25
        bar.unresponsive("actor 1", True)
    assert "1 of 2 actors, no answer from actor 1" in capsys.readouterr().err


class Clocked:
    """A one-row bar, and the time as set by the test."""

    def __init__(self) -> None:
        self.now = 0.0
        self.bar = BatchBar(rows=9, ended=0, clock=lambda: self.now)
        self.before = 0.0

    def begin(self, job: str, now: float) -> None:
        self.now = now
        self.bar.running("a server", job, 1)

    def report(self, done: int, total: int) -> None:
        self.bar.show(
            NodeProgress(node_id="n", class_type="N", done=done, total=total), backend="a server"
        )

    def end(self, now: float) -> None:
        self.now = now
        self.bar.done("a server")
        self.before += 1

    def fraction(self, now: float) -> float:
        self.now = now
        return self.bar.passed - self.before


@pytest.fixture
def bar() -> Iterator[Clocked]:
    clocked = Clocked()
    with clocked.bar:
        yield clocked


def test_the_first_job_is_as_far_as_the_steps_of_its_longest_node(bar: Clocked) -> None:
    bar.begin("a", 0.0)
    assert bar.fraction(5.0) == 0.0
    bar.report(0, 1)
    bar.report(1, 1)
    assert bar.fraction(6.0) == 0.0, "a node without steps says nothing"
    bar.report(5, 20)
    assert bar.fraction(7.0) == 0.25
    bar.report(15, 20)
    assert bar.fraction(9.0) == 0.75
    bar.report(1, 3)
    assert bar.fraction(10.0) == 0.75, "never back"
    bar.report(20, 20)
    assert bar.fraction(11.0) == 0.99, "it has not ended"


def test_the_steps_of_the_next_job_count_and_not_the_time_of_the_last_one(bar: Clocked) -> None:
    bar.begin("a", 0.0)
    bar.report(4, 4)
    bar.end(100.0)
    assert bar.fraction(101.0) == 0.0, "none runs"
    bar.begin("b", 200.0)
    bar.report(2, 4)
    assert bar.fraction(290.0) == 0.5
    bar.report(0, 4)
    assert bar.fraction(301.0) == 0.5, "a node that begins again takes nothing back"


def test_without_reports_the_last_job_is_the_measure(bar: Clocked) -> None:
    bar.begin("a", 0.0)
    assert bar.fraction(30.0) == 0.0
    bar.end(40.0)
    bar.begin("b", 50.0)
    bar.begin("b", 55.0)
    assert bar.fraction(60.0) == 0.25
    assert bar.fraction(500.0) == 0.99


def test_a_job_that_was_given_up_is_no_measure(bar: Clocked) -> None:
    bar.begin("a", 0.0)
    bar.report(3, 4)
    bar.begin("b", 2.0)
    assert bar.fraction(2.0) == 0.0
    bar.report(1, 4)
    assert bar.fraction(3.0) == 0.25


def test_nothing_is_left_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    with BatchBar(rows=1, ended=0) as bar:
        bar.note("a word")
    assert capsys.readouterr().out == ""


def test_the_bar_says_that_nothing_answers_and_its_time_left_does_not_grow(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = [1000.0]
    with BatchBar(rows=4, ended=0, clock=lambda: now[0]) as bar:
        bar._time, bar.start_t = lambda: now[0], now[0]
        now[0] += 60
        bar.done("a server")
        assert "<03:00" in capsys.readouterr().err.split("\r")[-1]
        bar.unresponsive("a server", True)
        now[0] += 300
        bar.refresh()
        gone = capsys.readouterr().err.split("\r")[-1]
        assert "1/4 [06:00, no answer for 300 s]" in gone
        assert "<" not in gone
        bar.unresponsive("a server", False)
        back = capsys.readouterr().err.split("\r")[-1]
        assert "1/4 [06:00<03:00" in back
        assert "answer" not in back


def test_a_bar_starts_no_thread() -> None:
    """Starting a thread may never return if memory is short."""
    before = threading.active_count()
    with BatchBar(rows=2, ended=0):
        assert threading.active_count() == before


def test_jobs_of_several_servers_count_by_the_last_job_of_each(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = [0.0]
    with BatchBar(rows=8, ended=0, backends=2, clock=lambda: now[0]) as bar:
        for server in ("a", "b"):
            bar.running(server, f"1 of {server}", 1)
        now[0] = 10.0
        bar.done("a")
        now[0] = 40.0
        bar.done("b")
        for server in ("a", "b"):
            bar.running(server, f"2 of {server}", 1)
        now[0] = 45.0
        assert bar.passed == 2 + 0.5 + 0.125


def test_the_bar_names_servers_that_do_not_respond(capsys: pytest.CaptureFixture[str]) -> None:
    now = [1000.0]
    with BatchBar(rows=4, ended=0, backends=4, clock=lambda: now[0]) as bar:
        bar.unresponsive("http://a", True)
        assert "3 of 4 servers, no answer from http://a" in capsys.readouterr().err.split("\r")[-1]
        for server in ("http://b", "http://c"):
            bar.unresponsive(server, True)
        assert (
            "1 of 4 servers, no answer from http://a, http://b, 1 more"
            in capsys.readouterr().err.split("\r")[-1]
        )
        bar.unresponsive("http://d", True)
        now[0] += 30
        bar.refresh()
        assert "no answer for 30 s" in capsys.readouterr().err.split("\r")[-1]
        bar.unresponsive("http://b", False)
        assert "1 of 4 servers" in capsys.readouterr().err.split("\r")[-1]


def test_a_job_that_a_server_has_lost_does_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    with BatchBar(rows=2, ended=0, backends=2, clock=lambda: now[0]) as bar:
        for job in ("1", "2"):
            bar.running("a", job, 1)
            now[0] += 10.0
            if job == "1":
                bar.done("a")
        assert bar.passed == 1.99
        bar.running("a", None, 0)
        assert bar.passed == 1.0
        bar.running("b", "2", 1)
        bar.done("b")
        assert bar.passed == 2.0
    assert "100%" in capsys.readouterr().err.split("\r")[-1]


@pytest.mark.parametrize(("servers", "left"), [(2, None), (3, "2 of 2 servers")])
def test_an_excluded_server_is_not_named_any_more(
    capsys: pytest.CaptureFixture[str], servers: int, left: str | None
) -> None:
    with BatchBar(rows=2, ended=0, backends=servers) as bar:
        bar.unresponsive("http://b", True)
        bar.excluded("http://b")
        bar.refresh()
        last = capsys.readouterr().err.split("\r")[-1]
        assert "http://b" not in last
        assert left is None or left in last


def test_a_row_that_ends_while_the_bar_is_redrawn_blocks_no_thread(
    capsys: pytest.CaptureFixture[str],
) -> None:
    inside, redrawn = threading.Event(), threading.Event()

    def clock() -> float:
        if threading.current_thread() is ending:
            inside.set()
            redrawn.wait(0.5)
        return 0.0

    def end_row() -> None:
        bar.done("a")

    def redraw() -> None:
        inside.wait(5)
        bar.refresh()
        redrawn.set()

    ending = threading.Thread(target=end_row, daemon=True)
    bar = BatchBar(rows=2, ended=0, backends=2, clock=clock)
    bar.running("a", "job", 1)
    threads = [ending, threading.Thread(target=redraw, daemon=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
    bar.close()
