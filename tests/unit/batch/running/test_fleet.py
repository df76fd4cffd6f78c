"""Batches on several servers: sharing, servers that leave and return, resumption, and kills."""

from __future__ import annotations

import threading
import time

import pytest

from wanstream.batch import errors
from wanstream.batch.journal.entry import State
from wanstream.batch.journal.journal import Journal
from wanstream.batch.running import fleet as fleet_module
from wanstream.batch.running import runner
from wanstream.batch.running.failures import MAX_STREAK
from wanstream.tests.support.batch.fake_batch import Bench, Killed, Mishaps, Server, raising
from wanstream.tests.support.polling import eventually

STATUS_500 = errors.UnreachableError("it answers with status 500")


@pytest.fixture
def fleet_of(tmp_path):
    """`fleet_of(*servers, rows=24, **given)` is a client with restarts in one folder."""

    return lambda *servers, rows=24, **given: Bench(tmp_path, *servers, rows=rows, **given)


def leaving(server: Server, made: int) -> None:
    """Make a server silent, from its next call on, when it has made so many rows."""
    server.called = lambda call: setattr(server, "gone", server.gone or len(server.made) == made)


def test_rows_are_shared_two_at_a_time_and_made_once(fleet_of):
    fleet = fleet_of(Server("a", steps=3), Server("b", steps=3), Server("slow", steps=40))
    fleet.complete()
    assert sorted(fleet.made(), key=int) == [str(number) for number in range(1, 25)]
    made = [len(server.made) for server in fleet.servers]
    assert 1 <= made[2] < min(made[:2])
    assert [server.most for server in fleet.servers] == [2, 2, 2]


def test_a_hanging_request_delays_no_other_server(fleet_of):
    other = Server("other")

    def hang(call: str) -> None:
        assert call != "outcome" or eventually(lambda: len(other.made) >= 20), "others wait for it"

    fleet_of(Server("hung", called=hang), other).complete()
    assert len(other.made) >= 20


@pytest.mark.parametrize("address", ["http://lost", None])
def test_rows_of_a_lost_server_are_made_by_another(fleet_of, address):
    """A backend without an address ends with the batch, so it computes nothing afterwards."""
    lost = Server("lost", steps=5, address=address)
    other = Server("other", steps=2)
    leaving(lost, 2)
    fleet = fleet_of(lost, other)
    jobs = list[str | None]()
    note = fleet.reporter.note

    def note_job(text: str) -> None:
        note(text)
        if "other backends take its" in text:
            jobs.append(fleet.reporter.jobs["http://lost"])

    fleet.reporter.note = note_job
    fleet.complete()
    assert len(other.made) >= 22
    assert jobs == [None], "the bar counts its job no more"
    assert fleet.reporter.having("http://lost has not responded for 10 s: other backends take its")
    assert len(fleet.reporter.having("http://lost may still compute")) == bool(address)


def test_a_server_that_returns_gets_rows_again(fleet_of):
    back = Server("back", steps=5)
    other = Server("other", steps=2)
    back.called = lambda call: setattr(back, "gone", len(back.made) == 2 and len(other.made) < 12)
    fleet = fleet_of(back, other, rows=60)
    fleet.complete()
    assert len(back.made) > 4, "it has made rows after its return"
    assert len(fleet.made()) <= 62, "its two rows may have been made twice, and no other"
    assert not fleet.reporter.having("may still compute"), "its former rows were ended"


def test_the_batch_ends_only_when_all_servers_are_silent(fleet_of):
    first = Server("first", gone=True)
    second = Server("second")
    leaving(second, 5)
    fleet = fleet_of(first, second, timeout_s=100.0)
    said = r"gave up after \d+ s: run the same command"
    with pytest.raises(errors.BackendTimeoutError, match=said):
        fleet.run()
    assert len(second.made) == 5
    assert State.failed not in fleet.states()
    first.gone = second.gone = False
    second.called = lambda call: None
    fleet.complete()
    assert len(fleet.made()) == 24, "what was posted before was found by its id"


def test_a_server_away_at_the_start_works_when_it_comes(fleet_of):
    late = Server("late", steps=2)
    other = Server("other", steps=5)
    late.called = lambda call: setattr(late, "gone", len(other.made) < 5)
    fleet = fleet_of(other, late, rows=40)
    fleet.unreachable = {late.name}
    fleet.complete()
    assert len(late.made) >= 5


def test_a_server_that_comes_with_another_version_gets_no_rows(fleet_of):
    fleet = fleet_of(Server("a"), Server("b"))
    fleet.servers[1].check = lambda: raising(errors.UnsuitableError("b has WanStream 0.0.1"))("")
    fleet.unreachable = {"http://b"}
    fleet.complete()
    assert fleet.servers[1].made == []
    assert "b has WanStream 0.0.1; it gets no more rows" in fleet.reporter.told


@pytest.mark.parametrize(
    "posting",
    [
        raising(errors.ForeignResponseError("http://odd does not accept workflows (status 403)")),
        raising(errors.RefusedError("required input is missing")),
        raising(errors.RefusedError("'x.safetensors' not in []"), "3"),
    ],
    ids=["another program", "refuses all rows", "refuses a row"],
)
def test_a_server_that_refuses_rows_costs_none(fleet_of, posting):
    servers = Server("odd", posting=posting), Server("a", steps=5)
    assert fleet_of(*servers).complete().tally.failures == 0


def test_a_server_without_posts_still_delivers_its_rows(fleet_of):
    closing = Server("closing", steps=200)
    closing.posting = lambda prompt: raising(STATUS_500)("") if closing.ids else None
    fleet = fleet_of(closing, Server("other", steps=2))
    fleet.complete()
    assert len(closing.made) == 1
    assert closing.ids[0] not in closing.withdrawn
    assert not fleet.reporter.failures


def test_server_after_a_failed_post_takes_rows_of_a_lost_one(fleet_of):
    # The other server takes all rows meanwhile, so the first one cannot show by a post that it
    # accepts rows again.
    first = Server("first")
    second = Server("second", steps=10**6)
    calls = iter(range(50))

    def leave(call: str) -> None:
        second.gone = len(second.queue) == 2 and next(calls, None) is None

    first.posting = lambda prompt: None if second.gone else raising(STATUS_500)("")
    second.called = leave
    fleet_of(first, second, rows=2).complete()
    assert sorted(first.made) == ["1", "2"]


@pytest.mark.parametrize("rows", [1, 8])
def test_the_batch_ends_when_no_server_takes_posts(fleet_of, rows):
    servers = [Server(name, posting=raising(STATUS_500)) for name in "ab"]
    fleet = fleet_of(*servers, rows=rows, timeout_s=100.0)
    with pytest.raises(errors.BackendTimeoutError, match="answers with status 500; gave up after"):
        fleet.run()
    assert State.failed not in fleet.states()


def test_the_error_of_one_runner_ends_the_batch(fleet_of, tmp_path):
    full = Server("full", fetching=raising(OSError(28, "No space left on device")))
    fleet = fleet_of(full, Server("other", steps=1000))
    with pytest.raises(OSError, match="No space left on device"):
        fleet.run()
    assert State.failed not in fleet.states()
    parts = [path for path in tmp_path.rglob("*.txt") if path.read_text() == "half"]
    assert not parts, "they fill the disk"
    fleet_of(Server("full"), Server("other")).complete()


def test_a_second_ctrl_c_does_not_wait_for_a_server_that_hangs(fleet_of, monkeypatch):
    monkeypatch.setattr(fleet_module, "_END_SECONDS", 1.0)
    hung = Server("hung")
    other = Server("other", steps=1000)
    ended = threading.Event()
    pressed = threading.Event()
    fleet = fleet_of(hung, other)

    def hang(call: str) -> None:
        if call == "outcome":
            pressed.set()
            ended.wait()

    def wait() -> None:
        assert not fleet.stop.immediate, "it redraws the bar without a pause"
        if pressed.wait(10) and other.queue:
            fleet.stop.count = 2

    hung.called = hang
    fleet.wait = wait
    fleet.run()
    assert other.queue == [], "its rows are cancelled"
    assert hung.queue != [], "the next command polls them"
    ended.set()
    hung.called = lambda call: None
    other.steps = 1
    fleet_of(hung, other).complete()


def test_a_resumed_command_polls_the_server_of_each_id(fleet_of, tmp_path):
    before = {name: Server(name, fetching=raising(Killed())) for name in "ab"}
    fleet = fleet_of(*before.values(), rows=4)
    with pytest.raises(Killed):
        fleet.run()
    with Journal(tmp_path / "journal.sqlite", workflow="w") as journal:
        entries = [each for each in journal.entries.values() if each.state is State.posted]
    assert len(entries) >= 2
    assert all(entry.prompt_id in before[str(entry.backend)[-1]].ids for entry in entries)
    for server in before.values():
        server.fetching = lambda content: None
    fleet.servers = [before["b"], before["a"]]
    fleet.complete()
    assert sorted(fleet.made()) == ["1", "2", "3", "4"], "nothing is made twice"


def test_rows_of_a_former_server_are_made_elsewhere(fleet_of):
    silent = Server("a", steps=1000)
    fleet = fleet_of(silent, rows=4, timeout_s=1.0)
    silent.called = lambda call: setattr(silent, "gone", call == "outcome")
    with pytest.raises(errors.BackendTimeoutError):
        fleet.run()
    fleet = fleet_of(Server("b"), Server("c"), rows=4)
    fleet.complete()
    told = "line 1 and 1 more were posted to http://a, which is not in this command: "
    told += "computed again elsewhere, while http://a may still compute them"
    assert told in fleet.reporter.told


@pytest.mark.slow  # runs a whole batch
@pytest.mark.parametrize("size", [1, 3])
def test_fifty_mishaps_on_four_servers_cost_no_row(fleet_of, size):
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
    fleet = fleet_of(*servers, rows=100, size=size)
    for server in servers:
        server.called = lambda call, server=server: before(server)
    fleet.run_through(mishaps)
    fleet.check(range(1, 101))
    assert not fleet.reporter.failures
    assert {"kill", "restart", "gone"} == set(mishaps.happened)
    assert mishaps.left == 0


def test_a_server_that_fails_rows_of_another_gets_no_more(fleet_of):
    words = "CUDA error: an illegal memory access was encountered"
    broken = Server("broken", bad=lambda prompt: words)
    fleet = fleet_of(broken, Server("sound", steps=50))
    assert fleet.complete().tally.failures == 0
    (told,) = fleet.reporter.having("it gets no more rows")
    remedy = "restart it, or leave it out of the next batch; its last error: CUDA error: a"
    assert f"http://sound has finished one: {remedy}" in told
    assert len(broken.ids) <= MAX_STREAK + 1, "it does not fail all rows during the first one"
    assert fleet.reporter.having("failed on http://broken and is tried on another backend: CUDA")


def test_failing_servers_do_not_wait_for_each_other(fleet_of):
    def failing(odd: int) -> Server:
        return Server(str(odd), bad=lambda prompt: int(next(iter(prompt))) % 2 == odd and "bad")

    fleet = fleet_of(failing(0), failing(1), rows=60)
    fleet.run()
    done = fleet.states().count(State.done)
    assert done + len(fleet.reporter.failures) == 60


@pytest.mark.parametrize("request_kind", ["post", "outcome"])
def test_a_server_is_named_only_while_its_request_hangs(fleet_of, monkeypatch, request_kind):
    monkeypatch.setattr(runner, "GRACE_SECONDS", 0.2)
    slow = Server("slow")
    named = list[bool]()
    fleet = fleet_of(slow, Server("other", steps=3))

    def hang(call: str) -> None:
        if call == request_kind and not named:
            named.append(eventually(lambda: slow.name in fleet.reporter.silent))

    slow.called = hang
    fleet.complete()
    assert named == [True]
    assert (fleet.reporter.were_silent, fleet.reporter.silent) == ({slow.name}, set())


def test_a_server_is_not_named_during_a_long_download(fleet_of, monkeypatch):
    monkeypatch.setattr(runner, "GRACE_SECONDS", 0.1)
    distant = Server("distant")
    distant.fetching = lambda content: time.sleep(0.3 if len(distant.made) == 1 else 0.0)
    fleet = fleet_of(distant, Server("other"))
    fleet.complete()
    assert distant.name not in fleet.reporter.were_silent


def test_a_server_that_hangs_at_the_end_is_named_with_its_rows(fleet_of, monkeypatch):
    monkeypatch.setattr(fleet_module, "_END_SECONDS", 0.2)
    monkeypatch.setattr(runner, "GRACE_SECONDS", 0.0)
    hung = Server("hung", steps=10**6)
    ended = threading.Event()

    def time_out(call: str) -> None:
        if call == "outcome" and len(hung.queue) == 2:
            hung.called = lambda call: ended.wait() and None
            raise errors.UnreachableError("timed out")  # the rows go to the other server

    hung.called = time_out
    fleet = fleet_of(hung, Server("other"))
    fleet.complete()
    ended.set()
    told = "http://hung may still compute 2 rows that were given to other backends"
    assert told in fleet.reporter.told
