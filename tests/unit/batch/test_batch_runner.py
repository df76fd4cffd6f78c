"""Main loop against an unreliable server and with a client killed at any point.

Before and after every call, `Chance` may lose the response, restart the server, or kill the
client. A killed client starts again in the same folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from wanstream.batch.backend import (
    Ended,
    Interrupted,
    MadeFile,
    Outcome,
    UnderWay,
    Unknown,
)
from wanstream.batch.errors import (
    BackendTimeoutError,
    UnreachableError,
)
from wanstream.batch.journal import journal as journal_module
from wanstream.batch.journal.entry import KeptFile, State
from wanstream.batch.journal.journal import Journal
from wanstream.batch.output_store import OutputStore
from wanstream.batch.rows.rows import Row
from wanstream.batch.running import collector
from wanstream.batch.running.failures import (
    MAX_LOSSES,
)
from wanstream.batch.running.stop_request import StopRequest
from wanstream.tests.support.fake_batch import ROWS, Bench, Killed, Mishaps, Server


def test_every_row_has_its_file_and_none_is_posted_twice(tmp_path: Path) -> None:
    bench = Bench(tmp_path, Server())
    bench.run()
    bench.check(range(1, ROWS + 1))
    assert len(bench.made()) == ROWS
    bench.run()
    assert len(bench.made()) == ROWS


class Chance:
    """Mishaps before and after calls: kills and Ctrl-C here, restarts and silence there."""

    def __init__(self, seed: int, server: Server) -> None:
        self.mishaps, self.server = Mishaps(seed, 25, 0.08), server
        self.stop = StopRequest()

    def around(self, call: Callable[..., Any], *arguments: Any, remote: bool) -> Any:
        self._maybe(remote)
        answer = call(*arguments)
        self._maybe(remote)
        return answer

    def _maybe(self, remote: bool) -> None:
        what = self.mishaps.next("kill", "stop", *(["restart", "silence"] if remote else []))
        if what == "kill":
            raise Killed
        if what == "stop":
            self.stop.count += 2
        if what == "restart":
            self.server.restart()
        if what in {"restart", "silence"}:
            raise UnreachableError(what)


class Wire:
    """A host seen over an unreliable network."""

    name = address = "http://there"
    window = 2

    def __init__(self, server: Server, chance: Chance) -> None:
        self._server, self._chance = server, chance

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments: self._chance.around(
            getattr(self._server, name), *arguments, remote=True
        )

    def release(self, prompt_id: str) -> None:
        pass

    def fetch(self, file: MadeFile, part: Path) -> None:
        part.write_text("half")
        self._chance.around(self._server.fetch, file, part, remote=True)


class MortalJournal(Journal):
    """A journal whose writer may die before and after each change."""

    chance: Chance

    def enter(self, *arguments: Any, **named: Any) -> list[Row]:
        return list(
            self.chance.around(
                lambda: super(MortalJournal, self).enter(*arguments, **named), remote=False
            )
        )

    def post(self, *arguments: Any, **named: Any) -> None:
        self.chance.around(
            lambda: super(MortalJournal, self).post(*arguments, **named), remote=False
        )

    def fail(self, *arguments: Any) -> None:
        self.chance.around(super().fail, *arguments, remote=False)

    def wait(self, *arguments: Any) -> None:
        self.chance.around(super().wait, *arguments, remote=False)

    def place(self, *arguments: Any) -> None:
        self.chance.around(super().place, *arguments, remote=False)

    def finish(self, *arguments: Any) -> None:
        self.chance.around(super().finish, *arguments, remote=False)


class MortalStore(OutputStore):
    """A store in which the client may die before and after a file is checked, named or removed."""

    chance: Chance

    def check_file(self, path: Path) -> KeptFile:
        checked: KeptFile = self.chance.around(super().check_file, path, remote=False)
        return checked

    def clear_parts(self) -> None:
        self.chance.around(super().clear_parts, remote=False)

    def place(self, files: Iterable[KeptFile]) -> list[KeptFile] | None:
        placed = [
            self.chance.around(super(MortalStore, self).place, [file], remote=False)
            for file in files
        ]
        return None if None in placed else [file for (file,) in placed]


@pytest.mark.parametrize("size", [1, 3])
def test_whatever_is_killed_when_every_row_has_one_file(tmp_path: Path, size: int) -> None:
    happened: list[str] = []
    for seed in range(12):
        server = Server(steps=seed % 3)
        server.bad = lambda prompt: "too big" if "5" in prompt else None
        chance = Chance(seed, server)
        bench = Bench(tmp_path / str(seed), Wire(server, chance), size=size)
        for _ in range(chance.mishaps.left + 1):
            store = MortalStore(bench.folder)
            journal = MortalJournal(bench.folder / "journal.sqlite", workflow="w")
            store.chance = journal.chance = chance
            bench.stop = chance.stop = StopRequest()
            try:
                bench.run(journal, store)
            except Killed:
                continue
            if not bench.stop.requested:
                break
        bench.check(number for number in range(1, ROWS + 1) if number != 5)
        assert bench.states().count(State.failed) == 1
        failures = {*bench.reporter.failures}
        assert failures == {"failed 5: too big"}, "what this client has stopped has not failed"
        happened += chance.mishaps.happened
    assert {"kill", "stop", "restart", "silence"} == set(happened)
    assert min(happened.count(what) for what in ("kill", "stop")) > 50


def test_a_row_that_takes_the_server_down_fails_and_the_others_are_done(tmp_path: Path) -> None:
    server = Server(steps=2)
    server.deadly = "4"
    bench = Bench(tmp_path, server)
    bench.run()
    bench.check(number for number in range(1, ROWS + 1) if number != 4)
    assert f"failed 4: lost {MAX_LOSSES} times while running" in bench.reporter.told


class Withholding(Server):
    """Server that does not send the files of some rows."""

    def __init__(self, *withheld: str) -> None:
        super().__init__()
        self.withheld = {f"row {number}" for number in withheld}

    def fetch(self, file: MadeFile, part: Path) -> None:
        if self.files[file.filename] in self.withheld:
            part.write_text("half")
            raise UnreachableError("http://there does not send it now (status 500)")
        super().fetch(file, part)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("withheld", [["3"], ["3", "4"]])
def test_files_that_never_come_cost_their_rows_alone(
    tmp_path: Path, withheld: list[str], size: int
) -> None:
    bench = Bench(tmp_path, Withholding(*withheld), size=size)
    bench.run()
    bench.check(number for number in range(1, ROWS + 1) if str(number) not in withheld)
    assert bench.states().count(State.failed) == len(withheld)
    failed = {told.partition(";")[0] for told in bench.reporter.failures}
    assert failed == {
        f"failed {row}: http://there does not send it now (status 500)" for row in withheld
    }
    assert len(bench.made()) == ROWS, "nothing is computed twice"


def test_the_only_file_that_is_left_is_requested_for_the_timeout_and_then_fails(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path, Withholding("1"), rows=1)
    bench.limits = {"timeout_s": 100.0}
    bench.run()
    assert sum(bench.slept) == pytest.approx(100.0, abs=1.0)
    assert bench.states() == [State.failed]
    (failed,) = bench.reporter.failures
    assert failed.endswith("in 100 s")


def test_a_file_that_comes_late_is_fetched(tmp_path: Path) -> None:
    class Late(Withholding):
        def fetch(self, file: MadeFile, part: Path) -> None:
            if sum(bench.slept) > 50:
                self.withheld = set()
            super().fetch(file, part)

    bench = Bench(tmp_path, Late("1"), rows=1)
    bench.run()
    bench.check([1])


class Refusing(Server):
    """Server that responds, but accepts no workflow until `seconds` have been slept."""

    def __init__(self, slept: list[float], seconds: float) -> None:
        super().__init__()
        self._slept, self._seconds = slept, seconds

    def post(self, prompt_id: str, prompt: Mapping[str, Any]) -> None:
        if sum(self._slept) < self._seconds:
            raise UnreachableError("http://there answers with status 503")
        super().post(prompt_id, prompt)


def test_an_outage_of_posts_alone_fails_no_row(tmp_path: Path) -> None:
    bench = Bench(tmp_path, Server())
    bench.servers = [Refusing(bench.slept, 300.0)]
    bench.run()
    bench.check(range(1, ROWS + 1))
    assert not bench.reporter.failures


def test_an_outage_of_posts_alone_ends_the_run_after_the_timeout(tmp_path: Path) -> None:
    bench = Bench(tmp_path, Server())
    bench.servers = [Refusing(bench.slept, 1e9)]
    bench.limits = {"timeout_s": 100.0, "clock": lambda: 0.0}
    with pytest.raises(BackendTimeoutError, match="status 503; gave up after 100 s"):
        bench.run()
    assert sum(bench.slept) == pytest.approx(100.0)
    assert State.failed not in bench.states()


def test_the_journal_is_copied_at_the_end_of_a_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_BACK_UP_SECONDS", -1.0)
    bench, copied = Bench(tmp_path, Server(), size=3), []
    inner = Journal.back_up

    def counted(journal: Journal) -> None:
        inner(journal)
        copied.append(sum(entry.state is State.done for entry in journal.entries.values()))

    monkeypatch.setattr(Journal, "back_up", counted)
    bench.run()
    assert copied == [3, 6, 9, 12]


def test_a_copy_that_cannot_be_written_costs_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_BACK_UP_SECONDS", -1.0)
    (tmp_path / "journal.sqlite.before").mkdir()
    bench = Bench(tmp_path, Server())
    bench.run()
    bench.check(range(1, ROWS + 1))
    assert len([told for told in bench.reporter.told if "the journal was not copied" in told]) == 1


class Broken(Server):
    """Server that cannot accept row 4, because something in it breaks the server."""

    def post(self, prompt_id: str, prompt: Mapping[str, Any]) -> None:
        if "4" in prompt:
            raise UnreachableError("http://there answers with status 500")
        super().post(prompt_id, prompt)


def test_a_row_that_a_server_cannot_take_fails_with_what_the_server_said(tmp_path: Path) -> None:
    bench = Bench(tmp_path, Broken())
    bench.run()
    bench.check(number for number in range(1, ROWS + 1) if number != 4)
    (failed,) = bench.reporter.failures
    assert failed == (
        "failed 4: 5 posts of it failed; error of the last one: http://there answers with status "
        "500"
    )


def test_rows_that_fail_together_are_tried_alone(tmp_path: Path) -> None:
    server = Server()
    server.bad = lambda prompt: "too big" if "5" in prompt else None
    bench = Bench(tmp_path, server, size=4)
    bench.run()
    bench.check(number for number in range(1, ROWS + 1) if number != 5)
    assert bench.reporter.failures == ["failed 5: too big"]
    assert server.made.count("6") == 1


def test_a_row_that_failed_is_tried_again_by_the_next_run(tmp_path: Path) -> None:
    server = Server()
    server.bad = lambda prompt: "too big" if "5" in prompt else None
    bench = Bench(tmp_path, server)
    assert bench.run().tally.failures == 1
    assert State.failed in bench.states()
    server.bad = lambda prompt: None
    assert bench.run().tally.failures == 0
    bench.check(range(1, ROWS + 1))
    assert len(server.made) == ROWS


def test_after_so_many_failures_nothing_more_is_begun(tmp_path: Path) -> None:
    server = Server()
    server.bad = lambda prompt: "always"
    bench = Bench(tmp_path, server)
    bench.max_failures = 2
    bench.run()
    states = bench.states()
    assert 2 <= states.count(State.failed) <= 3
    assert set(states) == {State.failed, State.waiting}
    assert server.queue == []


def test_a_workflow_that_saves_nothing_is_a_failure_in_words(tmp_path: Path) -> None:
    server = Server()
    server._save = lambda prompt: Ended(files=())  # type: ignore[method-assign]
    bench = Bench(tmp_path, server, rows=1)
    bench.run()
    assert "no file was saved" in bench.reporter.told[0]


def test_an_empty_file_is_a_failure_in_words(tmp_path: Path) -> None:
    class Hollow(Server):
        def fetch(self, file: MadeFile, part: Path) -> None:
            part.touch()

    bench = Bench(tmp_path, Hollow(), rows=1)
    bench.run()
    assert bench.reporter.told == ["failed 1: 00001.txt is empty"]
    bench.check([])


def test_silence_ends_the_run_after_a_while_and_nothing_is_lost(tmp_path: Path) -> None:
    server = Server()
    bench = Bench(tmp_path, server)
    bench.limits = {"timeout_s": 100.0, "clock": lambda: 0.0}
    server.called = lambda call: setattr(server, "gone", call == "outcome")
    with pytest.raises(BackendTimeoutError, match="gave up after 100 s"):
        bench.run()
    assert sum(bench.slept) == pytest.approx(100.0)
    assert bench.slept[:3] == [0.5, 0.5, 1.0]
    assert max(bench.slept) == 30.0
    assert bench.states().count(State.posted) == 2
    server.called = lambda call: setattr(server, "gone", False)
    bench.run()
    bench.check(range(1, ROWS + 1))
    assert len(server.made) == ROWS


def test_short_silences_do_not_add_up(tmp_path: Path) -> None:
    class Stammering(Server):
        def outcome(self, prompt_id: str) -> Outcome:
            self.gone = not self.gone
            return super().outcome(prompt_id)

    bench = Bench(tmp_path, Stammering())
    bench.servers[0].window = 1
    bench.limits = {"timeout_s": 1.0}
    bench.run()
    bench.check(range(1, ROWS + 1))
    assert sum(bench.slept) > 2.0


def test_a_row_that_others_take_out_of_the_queue_is_posted_as_often_as_it_takes(
    tmp_path: Path,
) -> None:
    class Cleared(Server):
        left = 2 * MAX_LOSSES

        def outcome(self, prompt_id: str) -> Outcome:
            self.left -= 1
            if self.left < 0:
                return super().outcome(prompt_id)
            if self.left % 2:
                return UnderWay(begun=False)
            self.queue = []
            return Unknown()

    bench = Bench(tmp_path, Cleared(), rows=1)
    bench.run()
    bench.check([1])


def test_what_a_killed_client_had_half_fetched_is_removed(tmp_path: Path) -> None:
    bench = Bench(tmp_path, Server())
    OutputStore(tmp_path).part_path("00099.txt").write_text("half")
    bench.run()
    bench.check(range(1, ROWS + 1))


class Impatient(Server):
    """Server whose user presses Ctrl-C during the third workflow."""

    def __init__(self, stop: StopRequest, times: int) -> None:
        super().__init__(steps=5)
        self._stop, self._times = stop, times

    def outcome(self, prompt_id: str) -> Outcome:
        if len(self.made) == 2 and self.queue and self.queue[0][2] == 2:
            for _ in range(self._times):
                self._stop.count += 1
        return super().outcome(prompt_id)


@pytest.mark.parametrize(("times", "done"), [(1, [1, 2, 3]), (2, [1, 2])])
def test_ctrl_c_leaves_nothing_on_the_server(tmp_path: Path, times: int, done: list[int]) -> None:
    bench = Bench(tmp_path, Server())
    bench.servers = [Impatient(bench.stop, times)]
    bench.run()
    bench.check(done)
    assert bench.servers[0].queue == []
    assert bench.states() == [State.done] * len(done) + [State.waiting] * (ROWS - len(done))
    bench.servers, bench.stop = [Server()], StopRequest()
    bench.run()
    bench.check(range(1, ROWS + 1))


def test_a_client_that_is_killed_while_it_stops_a_row_has_not_failed_it(tmp_path: Path) -> None:
    class Last(Impatient):
        def interrupt(self, prompt_id: str) -> None:
            super().interrupt(prompt_id)
            raise Killed

    bench = Bench(tmp_path, Server())
    server = Last(bench.stop, 2)
    bench.servers = [server]
    with pytest.raises(Killed):
        bench.run()
    assert Interrupted() in server.history.values()
    bench.stop, server._times = StopRequest(), 0
    bench.run()
    bench.check(range(1, ROWS + 1))
    assert not bench.reporter.failures


def test_a_row_that_somebody_else_stops_fails_in_words(tmp_path: Path) -> None:
    class Stopped(Server):
        def outcome(self, prompt_id: str) -> Outcome:
            found = super().outcome(prompt_id)
            if self.queue and self.queue[0][2] == 2:
                self.interrupt(self.queue[0][0])
            return found

    bench = Bench(tmp_path, Stopped(steps=3), rows=1)
    bench.run()
    assert bench.reporter.told == ["failed 1: interrupted on the server"]


def test_files_of_others_are_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "00003.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"00003\.txt, which is not from this batch"):
        Bench(tmp_path, Server()).run()
    assert (tmp_path / "00003.txt").read_text() == "mine"


def test_a_file_that_appears_while_the_batch_runs_is_not_replaced(tmp_path: Path) -> None:
    class Busy(Server):
        def outcome(self, prompt_id: str) -> Outcome:
            (tmp_path / "00002.txt").write_text("mine")
            return super().outcome(prompt_id)

    bench = Bench(tmp_path, Busy(), rows=3)
    bench.run()
    assert (tmp_path / "00002.txt").read_text() == "mine"
    assert bench.states() == [State.done, State.failed, State.done]
    assert "'00002.txt' has appeared" in bench.reporter.told[0]
    (tmp_path / "00002.txt").unlink()
    bench.servers = [Server()]
    bench.run()
    bench.check([1, 2, 3])


def test_a_row_with_too_many_files_fails_before_any_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "MAX_FILES", 0)
    bench = Bench(tmp_path, Server(), rows=1)
    bench.run()
    assert bench.reporter.told == ["failed 1: 1 files were saved, and a row may have 0: save fewer"]


def test_a_sealed_part_never_replaces_a_file_of_others_and_a_refusal_moves_nothing(
    tmp_path: Path,
) -> None:
    bench, store = Bench(tmp_path, Server(), rows=3), OutputStore(tmp_path)
    with Journal(tmp_path / "journal.sqlite", workflow="w") as journal:
        journal.enter(bench.rows, compared=lambda files: None)
        for number in (1, 2):
            store.part_path(f"0000{number}.txt").write_text(f"row {number}")
            journal.post({f"hash {number}": None}, f"id{number}")
            journal.place(
                f"hash {number}", [store.check_file(store.part_path(f"0000{number}.txt"))]
            )
    (tmp_path / "00002.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"00002\.txt, which is not from this batch"):
        bench.run()
    assert {path.name for path in tmp_path.glob("*.txt")} == {"00002.txt"}
    assert (tmp_path / "00002.txt").read_text() == "mine"
    assert len([*(tmp_path / ".wanstream" / "parts").iterdir()]) == 2
    (tmp_path / "00002.txt").unlink()
    bench.run()
    bench.check([1, 2, 3])


def test_a_file_that_was_removed_is_made_again_alone(tmp_path: Path) -> None:
    bench = Bench(tmp_path, Server())
    bench.run()
    (tmp_path / "00003.txt").unlink()
    bench.run()
    bench.check(range(1, ROWS + 1))
    assert [made for made in bench.made() if bench.made().count(made) > 1] == ["3", "3"]


def test_a_checked_file_that_somebody_removes_ends_the_batch_in_words(tmp_path: Path) -> None:
    class Robbed(OutputStore):
        def check_file(self, path: Path) -> KeptFile:
            checked = super().check_file(path)
            path.unlink()
            return checked

    bench = Bench(tmp_path, Server(), rows=1)
    with pytest.raises(FileNotFoundError, match=r"00001\.txt: removed from .* after the check"):
        bench.run(store=Robbed(tmp_path))
    bench.run()
    bench.check([1])


def test_the_time_of_a_download_does_not_count_as_silence(tmp_path: Path) -> None:
    now = 0.0

    class Distant(Server):
        broken = False

        def fetch(self, file: MadeFile, part: Path) -> None:
            nonlocal now
            super().fetch(file, part)
            now += 60.0
            self.broken = True

        def outcome(self, prompt_id: str) -> Outcome:
            broken, self.broken = self.broken, False
            if broken:
                raise UnreachableError("connection reset")
            return super().outcome(prompt_id)

    bench = Bench(tmp_path, Distant())
    bench.limits = {"timeout_s": 50.0, "clock": lambda: now}
    bench.run()
    bench.check(range(1, ROWS + 1))
    assert "connection reset; trying again" in bench.reporter.told
