"""Queue of two servers without runners: who gets which rows."""

from __future__ import annotations

import threading
import time

import pytest

from wanstream.batch.errors import UnsuitableError
from wanstream.batch.journal.entry import KeptFile, State
from wanstream.batch.journal.journal import Journal
from wanstream.batch.running.failures import MAX_STREAK
from wanstream.batch.running.fleet import run_all
from wanstream.batch.running.job_queue import JobQueue, Submission
from wanstream.batch.running.stop_request import StopRequest
from wanstream.tests.support.batch.fake_batch import Reporter, Server, plan_of, raising, rows_of

A = "http://a"
B = "http://b"


class Desk:
    """A queue with 12 rows for the servers a and b."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.servers = {A: Server("a"), B: Server("b")}
        parts = {"planner": plan_of(1), "reporter": Reporter(), "stop": StopRequest()}
        self.queue = JobQueue(journal=journal, backends=[*self.servers.values()], **parts)

    def enter(self, count: int) -> Desk:
        self.journal.enter(rows_of(count), compared=list)
        self.queue.enter(rows_of(count))
        return self

    def take(self, name: str) -> Submission | None:
        taken = self.queue.take(self.servers[name])
        return taken and taken[0]

    def fail(self, name, taken=None):
        """Fail a server's next row."""
        taken = taken or self.take(name)
        self.queue.fail(taken.rows[0], "CUDA error", on=name)
        self.queue.end(name, taken)
        return taken.rows

    def finish(self, name: str) -> None:
        """Finish a server's next row."""
        taken = self.take(name)
        (row,) = taken.rows
        files = [KeptFile(name=f"{row.position:05}.txt", size=1, sha256="0")]
        self.journal.place(row.hash, files)
        self.queue.finish(row, on=name, files=files)
        self.queue.end(name, taken)

    def first_row(self) -> tuple[State, str | None, str | None]:
        entry = self.journal.entries["hash 1"]
        return entry.state, entry.backend, entry.prompt_id


@pytest.fixture
def desk(tmp_path):
    with Journal(tmp_path / "journal.sqlite", workflow="w") as journal:
        yield Desk(journal)


def test_an_error_of_the_main_thread_ends_the_runners(desk):
    queue = desk.enter(2).queue
    ended = threading.Barrier(3)

    class Endless:
        def run(self) -> None:
            while queue.needs(A):
                time.sleep(0.001)
            ended.wait(10)

    with pytest.raises(KeyboardInterrupt):
        run_all([Endless(), Endless()], queue, lambda: raising(KeyboardInterrupt())(""))
    ended.wait(10)


def test_a_row_taken_by_nobody_is_reclaimed_with_its_id(desk):
    first = desk.enter(2).take(A)
    desk.queue.unanswered(A, 10.0)
    assert desk.queue.give_back(A) == [first]
    # A killed client would poll it there.
    assert desk.first_row() == (State.posted, A, first.prompt_id)
    desk.queue.answered(A)
    assert desk.queue.reclaim(A, first)
    assert desk.queue.submissions(A) == [first]
    assert desk.first_row() == (State.posted, A, first.prompt_id)
    assert [row.hash for row in desk.take(B).rows] == ["hash 2"], "it waits no more"


def test_a_row_taken_by_another_server_is_not_reclaimed(desk):
    first = desk.enter(2).take(A)
    desk.queue.unanswered(A, 10.0)
    desk.queue.give_back(A)
    taken = desk.take(B)
    assert taken.rows == first.rows
    assert desk.first_row() == (State.posted, B, taken.prompt_id)
    assert not desk.queue.reclaim(A, first)
    # The same holds once the row waits again, after the other server has lost it.
    desk.queue.wait_again(B, taken, first=True)
    assert not desk.queue.reclaim(A, first)


def test_a_server_keeps_its_rows_if_no_other_one_responds(desk):
    first = desk.enter(2).take(A)
    for name in (A, B):
        desk.queue.unanswered(name, 10.0)
    assert desk.queue.give_back(A) == []
    assert desk.queue.submissions(A) == [first]


def test_the_last_rows_go_to_servers_without_any(desk):
    assert desk.enter(2).take(A)
    assert desk.take(A) is None, "the other server has none"
    assert desk.take(B)


def test_a_queued_row_is_withdrawn_for_an_idle_server(desk):
    running = desk.enter(4).take(A)
    queued = desk.take(A)
    running.begun = True
    queued.begun = False
    other = desk.take(B)
    assert not desk.queue.is_superfluous(A, queued), "a row waits"
    last = desk.take(B)
    assert not desk.queue.is_superfluous(A, queued), "the other server is not idle"
    for submission in (other, last):
        desk.queue.end(B, submission)
    assert desk.queue.is_superfluous(A, queued)
    assert not desk.queue.is_superfluous(A, running)


def test_a_suspected_server_gets_only_rows_failed_by_others(desk):
    desk.enter(12)
    assert [desk.fail(A)[0].position for _ in range(MAX_STREAK)] == [1, 2, 3]
    assert desk.take(A) is None, "it is suspected"
    desk.queue.fail(desk.take(B).rows[0], "bad row", on=B)
    # The first row has failed everywhere, so two failures are left.
    assert desk.fail(A)[0].position == 4
    for _ in range(3):
        desk.take(B)
    failed = desk.fail(B)
    assert desk.take(A).rows == failed


def test_a_finished_row_ends_a_streak_of_failures(desk):
    desk.enter(12)
    for _ in range(MAX_STREAK - 1):
        desk.fail(A)
    desk.finish(A)
    desk.fail(A)
    assert desk.take(A)


@pytest.fixture
def suspected(desk: Desk) -> Desk:
    """The server a has failed rows until it is suspected, and has one more row."""
    desk.enter(12)
    taken = [desk.take(A) for _ in range(MAX_STREAK + 1)]
    for submission in taken[:-1]:
        desk.fail(A, submission)
    assert desk.take(A) is None
    return desk


def test_a_suspected_server_takes_all_rows_when_it_is_alone(suspected):
    suspected.queue.unanswered(B, 10.0)
    assert suspected.take(A)


def test_a_server_that_returns_is_not_suspected(suspected):
    suspected.queue.unanswered(A, 10.0)
    suspected.queue.answered(A)
    for _ in range(MAX_STREAK):
        suspected.finish(B)
    assert suspected.take(A)


def test_a_server_is_excluded_when_it_has_no_rows_left(suspected):
    suspected.finish(B)
    assert suspected.take(A) is None, "it may finish this one"
    suspected.queue.end(A, suspected.queue.submissions(A)[0])
    with pytest.raises(UnsuitableError, match="3 rows in a row, of which http://b has finished"):
        suspected.take(A)


def test_rows_that_have_not_ended_in_two_commands_come_last(desk):
    desk.journal.enter(rows_of(3), compared=list)
    for _ in range(2):
        desk.journal.post({"hash 1": None}, "id", None)
        desk.journal.wait(["hash 1"])
    desk.queue.enter(rows_of(3))
    assert [job.rows[0].position for job in desk.queue._waiting] == [2, 3, 1]
