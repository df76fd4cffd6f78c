"""Main loop against an unreliable server and with a client killed at any point."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import pytest

from wanstream.batch.backend import Ended, Interrupted
from wanstream.batch.errors import BackendTimeoutError, UnreachableError
from wanstream.batch.journal import journal as journal_module
from wanstream.batch.journal.entry import State
from wanstream.batch.journal.journal import Journal
from wanstream.batch.output_store import OutputStore
from wanstream.batch.running import collector
from wanstream.batch.running.failures import MAX_LOSSES
from wanstream.batch.running.stop_request import StopRequest
from wanstream.tests.support.batch.fake_batch import ROWS, Bench, Killed, Mishaps, Server, raising

UNSENT = UnreachableError("http://there does not send it now (status 500)")
UNPOSTED = UnreachableError("http://there answers with status 503")


def test_every_row_is_made_once_and_a_removed_file_again(tmp_path):
    bench = Bench(tmp_path, Server())
    OutputStore(tmp_path).part_path("00099.txt").write_text("half")  # from a killed client
    for _ in range(2):
        bench.complete()
        assert len(bench.made()) == ROWS
    (tmp_path / "00003.txt").unlink()
    bench.complete()
    assert bench.made()[ROWS:] == ["3"]


class Chance:
    """Mishaps before and after calls: kills and Ctrl-C here, restarts and silence there."""

    def __init__(self, seed: int, bench: Bench) -> None:
        self.mishaps = Mishaps(seed, 25, 0.08)
        self._bench = bench

    def endanger(self, target: object, *names: str, remote: bool = False) -> None:
        """Replace these methods by ones with mishaps."""
        for name in names:
            setattr(target, name, partial(self._around, getattr(target, name), remote))

    def _around(self, call, remote, *args, **named):
        self.happen(remote)
        answer = call(*args, **named)
        self.happen(remote)
        return answer

    def happen(self, remote: bool) -> None:
        what = self.mishaps.next("kill", "stop", *(["restart", "silence"] if remote else []))
        if what == "kill":
            raise Killed
        if what == "stop":
            self._bench.stop.count += 2
        if what == "restart":
            self._bench.servers[0].restart()
        if what in {"restart", "silence"}:
            raise UnreachableError(what)


@pytest.mark.parametrize("size", [1, 3])
def test_kills_at_any_point_cost_no_row(tmp_path, size):
    """Before and after every call, the response may be lost, the server restart, the client die.

    A killed client starts again in the same folder.
    """
    happened: list[str] = []
    for seed in range(5):
        server = Server(steps=seed % 3, bad=lambda prompt: "too big" if "5" in prompt else None)
        bench = Bench(tmp_path / str(seed), server, size=size)
        chance = Chance(seed, bench)
        calls = ("check", "post", "outcome", "fetch", "withdraw", "interrupt")
        chance.endanger(server, *calls, remote=True)
        server.fetching = lambda _, chance=chance: chance.happen(True)
        for _ in range(chance.mishaps.left + 1):
            store = OutputStore(bench.folder)
            journal = Journal(bench.folder / "journal.sqlite", workflow="w")
            chance.endanger(journal, "enter", "post", "fail", "wait", "place", "finish")
            chance.endanger(store, "check_file", "clear_parts", "place")
            bench.stop = StopRequest()
            with suppress(Killed):
                bench.run(journal, store)
                if not bench.stop.requested:
                    break
        bench.check(number for number in range(1, ROWS + 1) if number != 5)
        assert bench.states().count(State.failed) == 1
        # A row that this client stops does not fail.
        assert {*bench.reporter.failures} == {"failed 5: too big"}
        happened += chance.mishaps.happened
    assert {"kill", "stop", "restart", "silence"} == set(happened)
    assert min(happened.count(what) for what in ("kill", "stop")) > 20


NOT_POSTED = f"5 posts of it failed; error of the last one: {UNPOSTED}"


@pytest.mark.parametrize(
    ("size", "faults", "reason"),
    [
        (1, {"deadly": "4", "steps": 2}, f"lost {MAX_LOSSES} times while running"),
        (4, {"bad": lambda prompt: "4" in prompt and "too big"}, "too big"),
        (1, {"posting": raising(UNPOSTED, "4")}, NOT_POSTED),
    ],
    ids=["lost", "failed", "not posted"],
)
def test_one_faulty_row_fails_alone(tmp_path, size, faults, reason):
    server = Server(**faults)
    bench = Bench(tmp_path, server, size=size)
    assert bench.complete(4).tally.failures == 1
    assert bench.reporter.failures == [f"failed 4: {reason}"]
    assert server.made.count("5") == 1, "nothing is computed twice"
    assert bool(bench.reporter.having("4 rows that ran together failed")) == (size == 4)
    again = Bench(tmp_path, Server())
    again.complete()
    assert len(again.made()) == 1, "a failed row is tried again by the next run"


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("rows", [[3], [3, 4]])
def test_rows_without_files_fail_alone(tmp_path, rows, size):
    server = Server(fetching=raising(UNSENT, *(f"row {row}" for row in rows)))
    bench = Bench(tmp_path, server, size=size)
    bench.complete(*rows)
    failed = {told.partition(";")[0] for told in bench.reporter.failures}
    assert failed == {f"failed {row}: {UNSENT}" for row in rows}
    assert len(bench.made()) == ROWS, "nothing is computed twice"


def test_last_file_is_late_or_fails(tmp_path):
    server = Server(fetching=raising(UNSENT))
    bench = Bench(tmp_path, server, rows=1, timeout_s=100.0)
    bench.complete(1)
    assert sum(bench.slept) == pytest.approx(100.0, abs=1.0)
    assert bench.reporter.failures[0].endswith("in 100 s")
    bench.slept.clear()
    server.fetching = lambda content: raising(UNSENT)(content) if sum(bench.slept) < 50 else None
    bench.complete()


@pytest.mark.parametrize("seconds", [300.0, 1e9])
def test_an_outage_of_posts_fails_no_row(tmp_path, seconds):
    server = Server()
    bench = Bench(tmp_path, server, timeout_s=600.0, clock=lambda: 0.0)
    server.posting = lambda _: raising(UNPOSTED)(_) if sum(bench.slept) < seconds else None
    if seconds == 300.0:
        bench.complete()
    else:
        with pytest.raises(BackendTimeoutError, match="status 503; gave up after 600 s"):
            bench.run()
        assert sum(bench.slept) == pytest.approx(600.0)
    assert State.failed not in bench.states()


def test_the_journal_is_copied_at_the_end_of_a_pass(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "_BACK_UP_SECONDS", -1.0)
    bench = Bench(tmp_path, Server(), size=3)
    copied = list[int]()
    back_up = Journal.back_up

    def count(journal: Journal) -> None:
        back_up(journal)
        copied.append(sum(entry.state is State.done for entry in journal.entries.values()))

    monkeypatch.setattr(Journal, "back_up", count)
    bench.run()
    assert copied == [3, 6, 9, 12]
    (tmp_path / "00001.txt").unlink()
    (tmp_path / "00004.txt").unlink()
    copy = tmp_path / "journal.sqlite.before"
    copy.unlink()
    copy.mkdir()
    bench.complete()
    assert len(bench.reporter.having("the journal was not copied")) == 1


def test_no_row_is_begun_after_the_most_failures(tmp_path):
    server = Server(bad=lambda prompt: "always")
    bench = Bench(tmp_path, server)
    bench.max_failures = 2
    bench.run()
    states = bench.states()
    assert 2 <= states.count(State.failed) <= 3
    assert set(states) == {State.failed, State.waiting}
    assert server.queue == []


def test_a_row_stopped_by_somebody_else_fails(tmp_path):
    server = Server(steps=3)
    bench = Bench(tmp_path, server, rows=1)

    def stop_there(call: str) -> None:
        if call == "outcome" and server.queue and server.queue[0][2] == 2:
            server.interrupt(server.queue[0][0])

    server.called = stop_there
    bench.complete(1)
    assert bench.reporter.told == ["failed 1: interrupted on the server"]


@pytest.mark.parametrize(
    ("faults", "most", "reason"),
    [
        ({"_save": lambda _: Ended(files=())}, 1, "no file was saved: the workflow needs a node"),
        ({"fetch": lambda file, part: part.touch()}, 1, "00001.txt is empty"),
        ({}, 0, "1 files were saved, and a row may have 0: save fewer"),
    ],
)
def test_a_row_without_its_files_fails_with_the_reason(tmp_path, monkeypatch, faults, most, reason):
    monkeypatch.setattr(collector, "MAX_FILES", most)
    bench = Bench(tmp_path, Server(**faults), rows=1)
    bench.complete(1)
    (told,) = bench.reporter.told
    assert told.startswith(f"failed 1: {reason}")


def test_silence_ends_the_run_after_the_timeout(tmp_path):
    server = Server()
    bench = Bench(tmp_path, server, timeout_s=100.0, clock=lambda: 0.0)
    server.called = lambda call: setattr(server, "gone", call == "outcome")
    with pytest.raises(BackendTimeoutError, match="gave up after 100 s"):
        bench.run()
    assert sum(bench.slept) == pytest.approx(100.0)
    assert bench.slept[:3] == [0.5, 0.5, 1.0]
    assert max(bench.slept) == 30.0
    assert bench.states().count(State.posted) == 2
    server.called = lambda call: setattr(server, "gone", False)
    bench.complete()
    assert len(server.made) == ROWS


def test_requests_that_hang_count_for_the_timeout(tmp_path):
    now = 0.0

    def hang(call: str) -> None:
        nonlocal now
        if call == "outcome":
            now += 60.0
            raise UnreachableError("no answer")

    bench = Bench(tmp_path, Server(called=hang), timeout_s=600.0, clock=lambda: now)
    with pytest.raises(BackendTimeoutError, match=r"gave up after 6\d\d s"):
        bench.run()
    assert now <= 660.0


def test_the_time_of_a_download_is_not_silence(tmp_path):
    now = 0.0
    server = Server()

    def download(content: str) -> None:
        nonlocal now
        now += 60.0
        server.called = reset

    def reset(call: str) -> None:
        if call == "outcome":
            server.called = lambda call: None
            raise UnreachableError("connection reset")

    server.fetching = download
    bench = Bench(tmp_path, server, timeout_s=50.0, clock=lambda: now)
    bench.complete()
    assert "connection reset; trying again" in bench.reporter.told


def test_a_row_cleared_from_the_queue_is_posted_again_any_times(tmp_path):
    server = Server(steps=10)
    polls = iter(range(10**6))

    def clear(call: str) -> None:
        """Clear the queue after every second poll, before the row begins."""
        if call == "outcome" and next(polls) < 4 * MAX_LOSSES:
            server.queue = [["other", {}, 0], *server.queue] if len(server.queue) == 1 else []

    server.called = clear
    Bench(tmp_path, server, rows=1).complete()
    assert len(server.ids) > MAX_LOSSES


def stopped_bench(folder, times):
    """Return a bench whose user presses Ctrl-C during the third workflow."""
    server = Server(steps=5)
    bench = Bench(folder, server)

    def press(call: str) -> None:
        if call == "outcome" and len(server.made) == 2 and server.queue[0][2] == 2:
            bench.stop.count += times

    server.called = press
    return bench


@pytest.mark.parametrize(("times", "done"), [(1, 3), (2, 2)])
def test_ctrl_c_leaves_nothing_on_the_server(tmp_path, times, done):
    bench = stopped_bench(tmp_path, times)
    bench.complete(*range(done + 1, ROWS + 1))
    assert bench.servers[0].queue == []
    assert bench.states() == [State.done] * done + [State.waiting] * (ROWS - done)
    Bench(tmp_path, Server()).complete()


def test_a_client_killed_while_it_stops_a_row_has_not_failed_it(tmp_path):
    bench = stopped_bench(tmp_path, 2)
    (server,) = bench.servers
    interrupt = server.interrupt
    server.interrupt = lambda prompt_id: raising(Killed())(interrupt(prompt_id))
    with pytest.raises(Killed):
        bench.run()
    assert Interrupted() in server.history.values()
    server.called = lambda call: None
    bench = Bench(tmp_path, server)
    bench.complete()
    assert not bench.reporter.failures


def test_files_of_others_are_not_replaced(tmp_path):
    foreign = tmp_path / "00002.txt"
    bench = Bench(tmp_path, Server(), rows=3)
    bench.servers[0].called = lambda call: foreign.write_text("mine") and None
    bench.run()
    assert foreign.read_text() == "mine"
    assert bench.states() == [State.done, State.failed, State.done]
    assert "'00002.txt' has appeared" in bench.reporter.told[0]
    foreign.unlink()
    Bench(tmp_path, Server(), rows=3).complete()


def test_a_placed_part_replaces_no_file_and_a_refusal_moves_none(tmp_path):
    bench = Bench(tmp_path, Server(), rows=3)
    store = OutputStore(tmp_path)
    with Journal(tmp_path / "journal.sqlite", workflow="w") as journal:
        journal.enter(bench.rows, compared=lambda files: None)
        for row in bench.rows[:2]:
            part = store.part_path(f"{row.position:05}.txt")
            part.write_text(f"row {row.position}")
            journal.post({row.hash: None}, f"id{row.position}")
            journal.place(row.hash, [store.check_file(part)])
    (tmp_path / "00002.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"00002\.txt, which is not from this batch"):
        bench.run()
    assert [path.read_text() for path in tmp_path.glob("*.txt")] == ["mine"]
    assert len([*(tmp_path / ".wanstream" / "parts").iterdir()]) == 2
    (tmp_path / "00002.txt").unlink()
    bench.complete()


def test_a_checked_file_removed_by_somebody_ends_the_batch(tmp_path):
    class Robbed(OutputStore):
        def check_file(self, path):
            checked = super().check_file(path)
            path.unlink()
            return checked

    bench = Bench(tmp_path, Server(), rows=1)
    with pytest.raises(FileNotFoundError, match=r"00001\.txt: removed from .* after the check"):
        bench.run(store=Robbed(tmp_path))
    bench.complete()
