"""Batches on several servers: sharing, servers that leave and return, resumption, and kills."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from wanstream.batch.backend import (
    MadeFile,
    Outcome,
)
from wanstream.batch.errors import (
    BackendTimeoutError,
    ForeignResponseError,
    RefusedError,
    UnreachableError,
    UnsuitableError,
)
from wanstream.batch.journal.entry import KeptFile, State
from wanstream.batch.journal.journal import Journal
from wanstream.batch.output_store import OutputStore
from wanstream.batch.rows.rows import Row
from wanstream.batch.running import fleet as fleet_module
from wanstream.batch.running.failures import MAX_LOSSES, MAX_STREAK, FailureLog
from wanstream.batch.running.fleet import run_all
from wanstream.batch.running.job_queue import JobQueue, Submission
from wanstream.batch.running.stop_request import StopRequest
from wanstream.tests.support.fake_batch import (
    Bench,
    Killed,
    Mishaps,
    Reporter,
    Server,
    plan_of,
    rows_of,
)


class SlowDisk(OutputStore):
    """A store with slow syncs, so no server makes all rows before another one starts."""

    def check_file(self, path: Path) -> KeptFile:
        time.sleep(0.01)
        return super().check_file(path)


class Fleet(Bench):
    """A client with several servers, restarted at will on one folder."""

    def __init__(
        self, folder: Path, servers: Sequence[Any], *, rows: int = 24, size: int = 1
    ) -> None:
        super().__init__(folder, *servers, rows=rows, size=size)

    def run(self, journal: Journal | None = None, store: OutputStore | None = None) -> JobQueue:
        return super().run(journal, store or SlowDisk(self.folder))


def test_rows_are_shared_and_each_is_made_once(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, [Server(name, steps=3) for name in "abc"])
    fleet.run()
    fleet.check(range(1, 25))
    assert sorted(fleet.made(), key=int) == [str(number) for number in range(1, 25)]
    assert all(len(server.made) >= 3 for server in fleet.servers)


def test_no_server_has_more_than_two_jobs(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, [Server(name, steps=3) for name in "ab"])
    fleet.run()
    assert [server.most for server in fleet.servers] == [2, 2]


def test_a_slow_server_does_not_keep_the_others_waiting(tmp_path: Path) -> None:
    slow, fast = Server("slow", steps=40), Server("fast")
    fleet = Fleet(tmp_path, [slow, fast])
    fleet.run()
    fleet.check(range(1, 25))
    assert len(slow.made) < len(fast.made)


def test_a_hanging_request_of_one_server_delays_no_other(tmp_path: Path) -> None:
    hung, ended = Server("hung"), threading.Event()
    other = Server("other")

    def hang(call: str) -> None:
        if call == "outcome" and not ended.wait(30):
            raise AssertionError("the other server did not run on")

    def count(call: str) -> None:
        if len(other.made) >= 20:
            ended.set()

    hung.called, other.called = hang, count
    fleet = Fleet(tmp_path, [hung, other])
    fleet.run()
    fleet.check(range(1, 25))
    assert len(other.made) >= 20


def test_rows_of_a_server_that_is_gone_are_made_by_another(tmp_path: Path) -> None:
    lost, other = Server("lost", steps=5), Server("other", steps=2)

    def leave(call: str) -> None:
        lost.gone |= len(lost.made) == 2

    lost.called = leave
    fleet = Fleet(tmp_path, [lost, other])
    fleet.run()
    fleet.check(range(1, 25))
    assert len(other.made) >= 22
    assert fleet.reporter.jobs["http://lost"] is None, (
        "the bar does not count its last job any more"
    )
    assert any(
        "http://lost has not responded for 10 s: other backends take its" in told
        for told in fleet.reporter.told
    )


def test_a_server_that_returns_gets_rows_again_and_its_former_ones_are_ended(
    tmp_path: Path,
) -> None:
    back, other = Server("back", steps=5), Server("other", steps=2)

    def leave_and_return(call: str) -> None:
        back.gone = len(back.made) == 2 and len(other.made) < 12

    back.called = leave_and_return
    fleet = Fleet(tmp_path, [back, other], rows=60)
    fleet.run()
    fleet.check(range(1, 61))
    assert len(back.made) > 4, "it has made rows after its return"
    assert len(fleet.made()) <= 62, "its two rows may have been made twice, and no other"
    assert not any("may still compute" in told for told in fleet.reporter.told)


def test_a_server_that_never_returns_is_named_at_the_end(tmp_path: Path) -> None:
    lost = Server("lost", steps=5)
    lost.called = lambda call: setattr(lost, "gone", lost.gone or len(lost.made) == 2)
    fleet = Fleet(tmp_path, [lost, Server("other", steps=2)])
    fleet.run()
    (told,) = [told for told in fleet.reporter.told if "may still compute" in told]
    assert told.startswith("http://lost may still compute")


def test_the_batch_ends_when_all_servers_are_silent_and_not_before(tmp_path: Path) -> None:
    first, second = Server("first"), Server("second")
    first.gone = True
    second.called = lambda call: setattr(second, "gone", second.gone or len(second.made) == 5)
    fleet = Fleet(tmp_path, [first, second])
    fleet.limits = {"timeout_s": 100.0}
    with pytest.raises(
        BackendTimeoutError, match=r"gave up after \d+ s: run the same command again"
    ):
        fleet.run()
    assert len(second.made) == 5
    assert State.failed not in fleet.states()
    first.gone = second.gone = False
    second.called = lambda call: None
    fleet.run()
    fleet.check(range(1, 25))
    assert len(fleet.made()) == 24, (
        "what was posted before the end of the first run was found by its id"
    )


def test_a_server_that_is_away_at_the_start_works_when_it_comes(tmp_path: Path) -> None:
    late, other = Server("late", steps=2), Server("other", steps=5)
    late.called = lambda call: setattr(late, "gone", len(other.made) < 5)
    fleet = Fleet(tmp_path, [other, late], rows=40)
    fleet.unreachable = {late.name}
    fleet.run()
    fleet.check(range(1, 41))
    assert len(late.made) >= 5


def test_a_server_that_comes_with_another_version_gets_no_rows(tmp_path: Path) -> None:
    class Other(Server):
        def check(self) -> None:
            raise UnsuitableError(f"{self.name} has WanStream 0.0.1, and http://a has 0.1.0")

    fleet = Fleet(tmp_path, [Server("a"), Other("b")])
    fleet.unreachable = {"http://b"}
    fleet.run()
    fleet.check(range(1, 25))
    assert fleet.servers[1].made == []
    assert (
        "http://b has WanStream 0.0.1, and http://a has 0.1.0; it gets no more rows"
        in fleet.reporter.told
    )


def test_a_server_behind_whose_address_another_program_listens_counts_as_gone(
    tmp_path: Path,
) -> None:
    class Taken(Server):
        def post(self, prompt_id: str, prompt: Mapping[str, Any]) -> None:
            raise ForeignResponseError("http://taken does not accept workflows (status 403)")

    fleet = Fleet(tmp_path, [Taken("taken"), Server("a")])
    fleet.run()
    fleet.check(range(1, 25))


def test_a_server_that_takes_no_posts_still_delivers_what_it_has(tmp_path: Path) -> None:
    class Closing(Server):
        def post(self, prompt_id: str, prompt: Mapping[str, Any]) -> None:
            if self.ids:
                raise UnreachableError("http://closing answers with status 500")
            super().post(prompt_id, prompt)

    closing, other = Closing("closing", steps=200), Server("other", steps=2)
    fleet = Fleet(tmp_path, [closing, other])
    fleet.run()
    fleet.check(range(1, 25))
    assert len(closing.made) == 1
    assert closing.ids[0] not in closing.withdrawn
    assert not any(told.startswith("failed") for told in fleet.reporter.told)


def test_a_short_fault_after_a_long_download_moves_no_rows(tmp_path: Path) -> None:
    now, failed = 0.0, threading.Event()

    class Distant(Server):
        def fetch(self, file: MadeFile, part: Path) -> None:
            nonlocal now
            super().fetch(file, part)
            now += 60.0

        def outcome(self, prompt_id: str) -> Outcome:
            if now and not failed.is_set():
                failed.set()
                raise UnreachableError(f"connection reset by {self.name}")
            return super().outcome(prompt_id)

    distant = Distant("distant")
    fleet = Fleet(tmp_path, [distant, Server("other", steps=5)])
    fleet.limits = {"clock": lambda: now}
    fleet.run()
    fleet.check(range(1, 25))
    assert failed.is_set()
    assert not any("other backends take its" in told for told in fleet.reporter.told)
    assert len(fleet.made()) == 24


def test_a_server_whose_last_post_failed_takes_the_rows_of_one_that_is_lost_later(
    tmp_path: Path,
) -> None:
    # The other server takes all rows meanwhile, so the first one cannot show by a post that it
    # accepts rows again.
    first, second = Server("first"), Server("second", steps=10**6)
    calls = 0

    def refuse(call: str) -> None:
        if call == "post" and not second.gone:
            raise UnreachableError("http://first answers with status 500")

    def leave(call: str) -> None:
        nonlocal calls
        calls += len(second.queue) == 2
        second.gone = calls > 50

    first.called, second.called = refuse, leave
    fleet = Fleet(tmp_path, [first, second], rows=2)
    running = threading.Thread(target=fleet.run, daemon=True)
    running.start()
    running.join(30)
    assert not running.is_alive(), "the batch waits for the lost server for ever"
    fleet.check([1, 2])
    assert sorted(first.made) == ["1", "2"]


@pytest.mark.parametrize("rows", [1, 8])
def test_the_batch_ends_when_no_server_takes_posts(tmp_path: Path, rows: int) -> None:
    class Closed(Server):
        def post(self, prompt_id: str, prompt: Mapping[str, Any]) -> None:
            raise UnreachableError(f"{self.name} answers with status 500")

    fleet = Fleet(tmp_path, [Closed("a"), Closed("b")], rows=rows)
    fleet.limits = {"timeout_s": 100.0}
    with pytest.raises(BackendTimeoutError, match="answers with status 500; gave up after"):
        fleet.run()
    assert State.failed not in fleet.states()


def test_a_server_that_fails_every_row_costs_none(tmp_path: Path) -> None:
    broken, sound = Server("broken"), Server("sound", steps=5)
    broken.bad = lambda prompt: "CUDA error: no device"
    fleet = Fleet(tmp_path, [broken, sound])
    assert fleet.run().tally.failures == 0
    fleet.check(range(1, 25))
    assert any(
        told.endswith(
            "failed on http://broken and is tried on another backend: CUDA error: no device"
        )
        for told in fleet.reporter.told
    )


def test_a_row_that_fails_everywhere_fails_once_with_both_reasons(tmp_path: Path) -> None:
    servers = [Server(name) for name in "abc"]
    for server in servers:
        server.bad = lambda prompt, name=server.name: (
            f"too big for {name}" if "5" in prompt else None
        )
    fleet = Fleet(tmp_path, servers)
    assert fleet.run().tally.failures == 1
    fleet.check(number for number in range(1, 25) if number != 5)
    (failed,) = [told for told in fleet.reporter.told if told.startswith("failed")]
    assert failed.count("too big for http://") == 2


def test_a_refused_row_is_tried_on_one_other_server(tmp_path: Path) -> None:
    class Refusing(Server):
        def post(self, prompt_id: str, prompt: Mapping[str, Any]) -> None:
            if "3" in prompt:
                raise RefusedError("'x.safetensors' not in []")
            super().post(prompt_id, prompt)

    fleet = Fleet(tmp_path, [Refusing("a"), Server("b", steps=5)])
    fleet.run()
    fleet.check(range(1, 25))


def test_a_row_that_takes_servers_down_fails_and_the_others_are_done(tmp_path: Path) -> None:
    servers = [Server(name, steps=2) for name in "ab"]
    for server in servers:
        server.deadly = "4"
    fleet = Fleet(tmp_path, servers)
    fleet.run()
    fleet.check(number for number in range(1, 25) if number != 4)
    assert f"failed 4: lost {MAX_LOSSES} times while running" in fleet.reporter.told


def test_the_error_of_one_runner_ends_the_batch(tmp_path: Path) -> None:
    class Full(Server):
        def fetch(self, file: MadeFile, part: Path) -> None:
            raise OSError(28, "No space left on device")

    fleet = Fleet(tmp_path, [Full("full"), Server("other", steps=1000)])
    with pytest.raises(OSError, match="No space left on device"):
        fleet.run()
    assert State.failed not in fleet.states()
    fleet.servers = [Server("full"), Server("other")]
    fleet.run()
    fleet.check(range(1, 25))


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_leaves_nothing_on_any_server(tmp_path: Path, times: int) -> None:
    servers = [Server(name, steps=5) for name in "abc"]
    fleet = Fleet(tmp_path, servers)

    def press(call: str) -> None:
        if len(servers[0].made) == 2:
            fleet.stop.count = times

    servers[0].called = press
    fleet.run()
    assert [server.queue for server in servers] == [[], [], []]
    states = fleet.states()
    assert set(states) == {State.done, State.waiting}
    assert states.count(State.done) == len([*tmp_path.glob("*.txt")])
    fleet.stop, servers[0].called = StopRequest(), lambda call: None
    fleet.run()
    fleet.check(range(1, 25))


def test_a_second_ctrl_c_does_not_wait_for_a_server_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "_END_SECONDS", 1.0)
    hung, other, ended, pressed = (
        Server("hung"),
        Server("other", steps=1000),
        threading.Event(),
        threading.Event(),
    )
    fleet = Fleet(tmp_path, [hung, other])

    def hang(call: str) -> None:
        if call == "outcome":
            pressed.set()
            ended.wait(30)

    def wait() -> None:
        assert not fleet.stop.immediate, "it redraws the bar without a pause"
        if pressed.wait(10) and other.queue:
            fleet.stop.count = 2

    hung.called, fleet.wait = hang, wait
    start = time.monotonic()
    fleet.run()
    assert time.monotonic() - start < 20
    assert other.queue == [], "its rows are cancelled"
    assert hung.queue != [], "the next command polls them"
    ended.set()
    hung.called, fleet.stop, other.steps = (lambda call: None), StopRequest(), 1
    fleet.wait = lambda: time.sleep(0.001)
    fleet.run()
    fleet.check(range(1, 25))


def test_a_resumed_command_polls_the_server_of_each_id(tmp_path: Path) -> None:
    class Cut(Server):
        def fetch(self, file: MadeFile, part: Path) -> None:
            raise Killed

    servers = [Cut("a"), Cut("b")]
    fleet = Fleet(tmp_path, servers, rows=4)
    with pytest.raises(Killed):
        fleet.run()
    with Journal(tmp_path / "journal.sqlite", workflow="w") as journal:
        posted = {
            entry.prompt_id: entry.backend
            for entry in journal.entries.values()
            if entry.state is State.posted
        }
    assert len(posted) >= 2
    for server in servers:
        assert all(
            prompt_id in server.ids
            for prompt_id, address in posted.items()
            if address == server.address
        )
    again = [Server("b"), Server("a")]
    for before, after in zip(servers, again[::-1], strict=True):
        after.queue, after.history, after.files, after.made = (
            before.queue,
            before.history,
            before.files,
            before.made,
        )
    fleet.servers = again
    fleet.run()
    fleet.check(range(1, 5))
    assert sorted(fleet.made()) == ["1", "2", "3", "4"], "nothing is made twice"


def test_rows_of_a_server_that_is_not_in_the_next_command_are_made_elsewhere(
    tmp_path: Path,
) -> None:
    silent = Server("a", steps=1000)
    fleet = Fleet(tmp_path, [silent], rows=4)
    silent.called = lambda call: setattr(silent, "gone", call == "outcome")
    fleet.limits = {"timeout_s": 1.0}
    with pytest.raises(BackendTimeoutError):
        fleet.run()
    fleet.servers, fleet.limits = [Server("b"), Server("c")], {}
    fleet.run()
    fleet.check(range(1, 5))
    assert (
        "line 1 and 1 more were posted to http://a, which is not in this command: computed again "
        "elsewhere, while http://a may still compute them"
    ) in fleet.reporter.told


class Desk:
    """A two-server queue without runners."""

    def __init__(self, folder: Path, rows: int) -> None:
        self.a, self.b = Server("a"), Server("b")
        self.journal = Journal(folder / "journal.sqlite", workflow="w")
        self.rows = rows_of(rows)
        self.journal.enter(self.rows, compared=lambda files: None)
        self.queue = JobQueue(
            journal=self.journal,
            planner=plan_of(1),
            reporter=Reporter(),  # type: ignore[arg-type]
            stop=StopRequest(),
            backends=[self.a, self.b],
        )
        self.queue.enter(self.rows)

    def take(self, server: Server) -> Submission:
        taken = self.queue.take(server)  # type: ignore[arg-type]
        assert taken is not None
        return taken[0]

    def fail(self, server: Server) -> list[Row]:
        """Fail a server's next row."""
        taken = self.take(server)
        self.queue.fail(taken.rows[0], "CUDA error", on=server.name)
        self.queue.end(server.name, taken)
        return taken.rows

    def finish(self, server: Server) -> None:
        """Finish a server's next row."""
        taken = self.take(server)
        (row,) = taken.rows
        files = [KeptFile(name=f"{row.position:05}.txt", size=1, sha256="0")]
        self.journal.place(row.hash, files)
        self.queue.finish(row, on=server.name, files=files)
        self.queue.end(server.name, taken)

    def where(self, row: int) -> tuple[State, str | None, str | None]:
        entry = self.journal.entries[f"hash {row}"]
        return entry.state, entry.backend, entry.prompt_id


def test_an_error_of_the_main_thread_ends_the_runners(tmp_path: Path) -> None:
    queue = Desk(tmp_path, 2).queue
    ended = threading.Barrier(3)

    class Endless:
        def run(self) -> None:
            while queue.needs("http://a"):
                time.sleep(0.001)
            ended.wait(10)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_all([Endless(), Endless()], queue, interrupt)  # type: ignore[list-item]
    ended.wait(10)


def test_a_row_that_nobody_has_taken_is_reclaimed_with_its_id(tmp_path: Path) -> None:
    desk = Desk(tmp_path, 2)
    first = desk.take(desk.a)
    desk.queue.unanswered("http://a", 10.0)
    assert desk.queue.give_back("http://a") == [first]
    assert desk.where(1) == (State.posted, "http://a", first.prompt_id), (
        "a killed client would poll it there"
    )
    desk.queue.answered("http://a")
    assert desk.queue.reclaim("http://a", first)
    assert desk.queue.submissions("http://a") == [first]
    assert desk.where(1) == (State.posted, "http://a", first.prompt_id)
    assert [row.hash for row in desk.take(desk.b).rows] == ["hash 2"], "it waits no more"


def test_a_row_that_another_server_has_taken_is_not_reclaimed(tmp_path: Path) -> None:
    desk = Desk(tmp_path, 2)
    first = desk.take(desk.a)
    desk.queue.unanswered("http://a", 10.0)
    desk.queue.give_back("http://a")
    taken = desk.take(desk.b)
    assert taken.rows == first.rows
    assert desk.where(1) == (State.posted, "http://b", taken.prompt_id)
    assert not desk.queue.reclaim("http://a", first)
    # The same holds once the row waits again, after the other server has lost it.
    desk.queue.wait_again("http://b", taken, first=True)
    assert not desk.queue.reclaim("http://a", first)


def test_a_server_keeps_its_rows_if_no_other_one_responds(tmp_path: Path) -> None:
    desk = Desk(tmp_path, 2)
    first = desk.take(desk.a)
    for name in ("http://a", "http://b"):
        desk.queue.unanswered(name, 10.0)
    assert desk.queue.give_back("http://a") == []
    assert desk.queue.submissions("http://a") == [first]


def test_the_last_rows_go_to_servers_without_any(tmp_path: Path) -> None:
    desk = Desk(tmp_path, 2)
    desk.take(desk.a)
    assert desk.queue.take(desk.a) is None, "the other server has none"  # type: ignore[arg-type]
    desk.take(desk.b)


def test_a_queued_row_is_withdrawn_for_an_idle_server_when_no_row_waits(tmp_path: Path) -> None:
    desk = Desk(tmp_path, 4)
    running, queued = desk.take(desk.a), desk.take(desk.a)
    running.begun, queued.begun = True, False
    other = desk.take(desk.b)
    assert not desk.queue.is_superfluous("http://a", queued), "a row waits"
    last = desk.take(desk.b)
    assert not desk.queue.is_superfluous("http://a", queued), "the other server is not idle"
    for submission in (other, last):
        desk.queue.end("http://b", submission)
    assert desk.queue.is_superfluous("http://a", queued)
    assert not desk.queue.is_superfluous("http://a", running)


def failures_of(losses: Mapping[str, int], reasons: Mapping[str, str]) -> FailureLog:
    """Return the log after losses and failures for `row`, by server."""
    log = FailureLog("abc")
    for name, count in losses.items():
        for _ in range(count):
            log.lose(name, "row", "")
    for name, reason in reasons.items():
        log.fail(name, "row", reason)
    return log


@pytest.mark.parametrize(
    ("losses", "reasons", "alive", "suits"),
    [
        ({}, {}, ["a", "b"], True),
        ({"a": 1}, {}, ["a", "b"], False),
        ({"a": 1}, {}, ["a"], True),
        ({"a": 1}, {}, [], True),
        ({"a": 1, "b": 1}, {}, ["a", "b"], True),
        ({"b": 1}, {}, ["a", "b"], True),
        ({}, {"a": "x"}, ["a", "b"], False),
        ({"b": 1}, {"a": "x"}, ["a", "b"], True),
    ],
)
def test_a_row_goes_to_a_server_that_has_failed_or_lost_it_less_often(
    losses: dict[str, int], reasons: dict[str, str], alive: list[str], suits: bool
) -> None:
    assert failures_of(losses, reasons).suits("a", "row", alive) == suits


@pytest.mark.parametrize(
    ("reasons", "alive", "retry"),
    [
        ({}, ["a", "b"], True),
        ({}, ["a"], False),
        ({"a": "x"}, ["a", "b"], True),
        ({"b": "x"}, ["a", "b", "c"], False),
    ],
)
def test_a_failed_row_is_tried_on_one_more_server(
    reasons: dict[str, str], alive: list[str], retry: bool
) -> None:
    assert failures_of({}, reasons).retries("a", "row", alive) == retry


@pytest.mark.slow  # runs a whole batch
@pytest.mark.parametrize("size", [1, 3])
def test_fifty_mishaps_in_a_hundred_rows_on_four_servers_cost_nothing(
    tmp_path: Path, size: int
) -> None:
    mishaps = Mishaps(size, 50, 0.25)

    def before(server: Server) -> None:
        server.gone = server.gone and mishaps.random.random() > 0.05
        what = mishaps.next("kill", "restart", "gone")
        if what == "kill":
            raise Killed
        if what == "restart":
            server.restart()
        if what:
            server.gone = what == "gone"

    servers = [Server(name, steps=number % 3) for number, name in enumerate("abcd")]
    fleet = Fleet(tmp_path, servers, rows=100, size=size)
    for server in servers:
        server.called = lambda call, server=server: before(server)
    fleet.run_through(mishaps)
    fleet.check(range(1, 101))
    assert not fleet.reporter.failures
    assert {"kill", "restart", "gone"} == set(mishaps.happened)
    assert mishaps.left == 0


def test_requests_that_hang_count_for_the_timeout(tmp_path: Path) -> None:
    class Hung(Server):
        now = 0.0

        def outcome(self, prompt_id: str) -> Outcome:
            self.now += 60.0
            raise UnreachableError(f"no answer from {self.name}")

    hung = Hung("hung")
    fleet = Fleet(tmp_path, [hung], rows=6)
    fleet.limits = {"timeout_s": 600.0, "clock": lambda: hung.now}
    with pytest.raises(BackendTimeoutError, match=r"gave up after 6\d\d s"):
        fleet.run()
    assert hung.now <= 660.0


def test_a_server_that_fails_rows_which_another_one_finishes_gets_no_more(tmp_path: Path) -> None:
    broken, sound = Server("broken"), Server("sound", steps=50)
    broken.bad = lambda prompt: "CUDA error: an illegal memory access was encountered"
    fleet = Fleet(tmp_path, [broken, sound])
    assert fleet.run().tally.failures == 0
    fleet.check(range(1, 25))
    (told,) = [told for told in fleet.reporter.told if told.endswith("it gets no more rows")]
    assert (
        "http://sound has finished one: restart it, or leave it out of the next batch; its last "
        "error: CUDA error: a" in told
    )
    assert len(broken.ids) <= MAX_STREAK + 1, (
        "it does not fail all rows while the other one makes the first"
    )


def test_rows_that_fail_everywhere_cost_no_server(tmp_path: Path) -> None:
    servers = [Server(name, steps=number) for number, name in enumerate("abc")]
    for server in servers:
        server.bad = lambda prompt: "bad row" if int(next(iter(prompt))) <= 40 else None
    fleet = Fleet(tmp_path, servers, rows=60)
    assert fleet.run().tally.failures == 40
    fleet.check(range(41, 61))
    assert not any("gets no more rows" in told for told in fleet.reporter.told)


def test_two_servers_that_fail_different_rows_do_not_wait_for_each_other(tmp_path: Path) -> None:
    first, second = Server("first"), Server("second")
    first.bad = lambda prompt: "first fails it" if int(next(iter(prompt))) % 2 else None
    second.bad = lambda prompt: None if int(next(iter(prompt))) % 2 else "second fails it"
    fleet = Fleet(tmp_path, [first, second], rows=60)
    running = threading.Thread(target=fleet.run, daemon=True)
    running.start()
    running.join(60)
    assert not running.is_alive()
    done = sum(state is State.done for state in fleet.states())
    assert done + sum(told.startswith("failed") for told in fleet.reporter.told) == 60


def test_a_suspected_server_gets_only_rows_that_others_have_failed(tmp_path: Path) -> None:
    desk = Desk(tmp_path, 12)
    for number in range(1, 4):
        (row,) = desk.fail(desk.a)
        assert row.position == number
    assert desk.queue.take(desk.a) is None, "it is suspected"  # type: ignore[arg-type]
    (failed_there,) = desk.take(desk.b).rows
    desk.queue.fail(failed_there, "bad row", on="http://b")
    taken = desk.take(desk.a)
    assert taken.rows[0].position == 4, "the first row failed everywhere, so two failures are left"
    desk.queue.fail(taken.rows[0], "CUDA error", on="http://a")
    desk.queue.end("http://a", taken)
    for _ in range(3):
        desk.take(desk.b)
    failed = desk.fail(desk.b)
    assert desk.take(desk.a).rows == failed


def test_a_server_is_left_out_when_it_has_no_rows_left(tmp_path: Path) -> None:
    desk = Desk(tmp_path, 12)
    for _ in range(2):
        desk.fail(desk.a)
    third, held = desk.take(desk.a), desk.take(desk.a)
    desk.queue.fail(third.rows[0], "CUDA error", on="http://a")
    desk.queue.end("http://a", third)
    desk.finish(desk.b)
    assert desk.queue.take(desk.a) is None, "it may finish this one"  # type: ignore[arg-type]
    desk.queue.end("http://a", held)
    with pytest.raises(
        UnsuitableError, match="failed 3 rows in a row, of which http://b has finished one"
    ):
        desk.queue.take(desk.a)  # type: ignore[arg-type]


def test_a_finished_row_ends_a_streak_of_failures(tmp_path: Path) -> None:
    desk = Desk(tmp_path, 12)
    for _ in range(2):
        desk.fail(desk.a)
    desk.finish(desk.a)
    desk.fail(desk.a)
    desk.take(desk.a)


def test_a_backend_that_ends_with_the_batch_computes_nothing_after_it(tmp_path: Path) -> None:
    lost = Server("lost", steps=5)
    lost.address = None
    lost.called = lambda call: setattr(lost, "gone", lost.gone or len(lost.made) == 2)
    fleet = Fleet(tmp_path, [lost, Server("other", steps=2)])
    fleet.run()
    fleet.check(range(1, 25))
    assert any("other backends take its" in told for told in fleet.reporter.told)
    assert not any("may still compute" in told for told in fleet.reporter.told)


def test_a_suspected_server_takes_all_rows_when_it_is_alone(tmp_path: Path) -> None:
    desk = Desk(tmp_path, 12)
    for _ in range(MAX_STREAK):
        desk.fail(desk.a)
    assert desk.queue.take(desk.a) is None  # type: ignore[arg-type]
    desk.queue.unanswered("http://b", 10.0)
    desk.take(desk.a)


def test_a_server_that_returns_after_a_silence_is_not_suspected(tmp_path: Path) -> None:
    desk = Desk(tmp_path, 12)
    for _ in range(MAX_STREAK):
        desk.fail(desk.a)
    desk.queue.unanswered("http://a", 10.0)
    desk.queue.answered("http://a")
    for _ in range(MAX_STREAK):
        desk.finish(desk.b)
    desk.take(desk.a)


def test_a_server_that_refuses_all_rows_costs_none(tmp_path: Path) -> None:
    class Odd(Server):
        def post(self, prompt_id: str, prompt: Mapping[str, Any]) -> None:
            raise RefusedError("required input is missing")

    fleet = Fleet(tmp_path, [Odd("odd"), Server("sound")])
    assert fleet.run().tally.failures == 0
    fleet.check(range(1, 25))


def test_rows_that_have_not_ended_in_two_commands_come_last(tmp_path: Path) -> None:
    rows = rows_of(3)
    with Journal(tmp_path / "journal.sqlite", workflow="w") as journal:
        journal.enter(rows, compared=list)
        for _ in range(2):
            journal.post({rows[0].hash: None}, "id", None)
            journal.wait([rows[0].hash])
        queue = JobQueue(
            journal=journal,
            planner=plan_of(1),
            reporter=Reporter(),
            stop=StopRequest(),
            backends=[Server()],
        )  # type: ignore[arg-type, list-item]
        queue.enter(rows)
        taken = [queue._waiting[place].rows[0].position for place in range(3)]
    assert taken == [2, 3, 1]
