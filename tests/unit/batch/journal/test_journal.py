"""Journal: row states, persistence, refusals, and locking."""

from __future__ import annotations

import errno
import json
import random
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from wanstream.batch.folder import journal_header
from wanstream.batch.folder.disk import is_full_disk
from wanstream.batch.journal import database
from wanstream.batch.journal.entry import KeptFile, State
from wanstream.batch.journal.journal import Journal
from wanstream.batch.opening import LockedError, locked
from wanstream.batch.rows.rows import Row
from wanstream.tests.support.full_disk import largest_file

FILE = KeptFile(name="00001.mp4", size=3, sha256="abc")


def row_of(number: int, *, at: int = 0, name: str | None = None, fault: str | None = None) -> Row:
    position = at or number
    return Row(line=position + 1, position=position, hash=f"hash {number}", name=name, fault=fault)


def open_journal(path):
    return Journal(path, workflow="w" * 64)


def states(journal: Journal) -> list[State]:
    return [entry.state for entry in journal.entries.values()]


def run_to_done(journal: Journal, digest: str, name: str = "00001.mp4") -> None:
    journal.post({digest: None}, f"id-of-{digest[-1]}")
    files = [KeptFile(name=name, size=1, sha256="")]
    journal.place(digest, files)
    journal.finish(digest, files)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal.sqlite"


@pytest.fixture
def journal(path):
    """A journal with two waiting rows."""
    with open_journal(path) as journal:
        assert journal.enter([row_of(1), row_of(2)], compared=list) == []
        yield journal


def test_another_process_finds_the_states_of_the_rows(path):
    with open_journal(path) as journal:
        journal.enter([row_of(1), row_of(2)], compared=list)
        journal.post({"hash 1": frozenset("ab"), "hash 2": None}, "id")
    with open_journal(path) as journal:
        first, second = journal.entries.values()
        assert (first.state, first.prompt_id, first.saves) == (State.posted, "id", frozenset("ab"))
        assert second.saves is None
        journal.place("hash 1", [FILE])
        journal.fail("hash 2", "too big")
    with open_journal(path) as journal:
        first, second = journal.entries.values()
        assert (first.state, first.files) == (State.placing, (FILE,))
        assert (second.state, second.error) == (State.failed, "too big")
        journal.finish("hash 1", [FILE])
        # The next command retries failed rows and keeps finished ones.
        journal.enter([row_of(1), row_of(2)], compared=list)
        assert states(journal) == [State.done, State.waiting]


def test_row_without_its_files_runs_again(journal):
    for digest, name in {"hash 1": "00001.mp4", "hash 2": "00002.mp4"}.items():
        run_to_done(journal, digest, name)
    rows = [row_of(1), row_of(2, fault="no such node")]
    assert journal.enter(rows, compared=lambda files: None) == [rows[0]]
    assert states(journal) == [State.waiting, State.failed]
    first, second = journal.entries.values()
    assert second.error == "no such node"
    assert [file.name for file in first.files] == ["00001.mp4"], "what is left is not foreign"


def test_a_wrong_order_is_our_fault_and_changes_nothing(journal):
    for wrong in (
        lambda: journal.place("hash 1", [FILE]),
        lambda: journal.finish("hash 1", [FILE]),
        lambda: journal.wait(["hash 1"]),
        lambda: journal.post({"hash 1": None, "nobody": None}, "id"),
        lambda: journal.post({"hash 1": None}, "id", "http://a", elsewhere=True),
    ):
        with pytest.raises(AssertionError):
            wrong()
    assert states(journal) == [State.waiting, State.waiting]
    journal.post({"hash 1": None}, "id", "http://a")
    with pytest.raises(AssertionError):
        journal.post({"hash 1": None}, "other")
    # Rows move to another backend only if this is said.
    journal.post({"hash 1": None}, "other", "http://b", elsewhere=True)
    entry = journal.entries["hash 1"]
    assert (entry.prompt_id, entry.backend, entry.attempts) == ("other", "http://b", 2)
    assert journal.lines_left("id") == journal.lines_left("other") == [2]


def test_a_row_with_a_fault_has_failed_and_has_no_files(path):
    with open_journal(path) as journal:
        journal.enter([row_of(1, fault="no JSON"), row_of(2)], compared=list)
        first, second = journal.entries.values()
        assert (first.state, first.error, first.stem) == (State.failed, "no JSON", None)
        assert second.stem == "00002"


def test_rows_may_come_go_and_move(path):
    with open_journal(path) as journal:
        journal.enter([row_of(1), row_of(2), row_of(3, name="shot")], compared=list)
        run_to_done(journal, "hash 1", "00001.mp4")
        run_to_done(journal, "hash 3", "shot.mp4")
        # A new first row; the second is gone without files; the third changed but kept the name.
        rows = [row_of(4, at=1), row_of(1, at=2), row_of(5, at=3, name="Shot")]
        journal.enter(rows, compared=list)
        stems = {digest: entry.stem for digest, entry in journal.entries.items()}
        assert stems == {"hash 3": "shot", "hash 4": "00004", "hash 1": "00001", "hash 5": None}
        assert "is used by the files of a former row" in str(journal.entries["hash 5"].error)
        # The former row's files are moved away, so the name is free.
        journal.enter(rows, compared=lambda files: files if files[0].name != "shot.mp4" else None)
        entry = journal.entries["hash 5"]
        assert (entry.stem, entry.state) == ("Shot", State.waiting)
        assert "hash 3" not in journal.entries


def test_a_number_is_never_the_name_of_another_row(path):
    with open_journal(path) as journal:
        journal.enter([row_of(1), row_of(2, name="00001"), row_of(3)], compared=list)
        assert [entry.stem for entry in journal.entries.values()] == ["00004", "00001", "00003"]


@pytest.mark.parametrize(
    "name",
    ["journal.sqlite", "Journal.SQLITE-wal", "journal.sqlite.before", "Journal", "journal.x"],
)
def test_no_row_is_called_like_a_file_of_the_journal(path, name):
    with open_journal(path) as journal:
        journal.enter([row_of(1, name=name)], compared=list)
        (entry,) = journal.entries.values()
        assert (entry.state is State.failed) == (name != "journal.x")
        fault = f"'{name}' is used by the journal: rename the row"
        assert entry.error is None or entry.error.endswith(fault)


def changed(path, *changes):
    """Change a database by another program."""
    with closing(sqlite3.connect(path)) as connection:
        for change in changes:
            connection.execute(change)
        connection.commit()
    return path


def crafted(path, *changes):
    """Return a changed journal with one posted row."""
    with open_journal(path) as journal:
        journal.enter([row_of(1)], compared=list)
        journal.post({"hash 1": None}, "id")
    return changed(path, *changes)


@pytest.mark.parametrize("version", [2, 3])
def test_a_journal_of_an_older_version_is_refused(path, version):
    table = "CREATE TABLE batch (workflow TEXT NOT NULL)"
    changed(path, table, "PRAGMA application_id = 1465078850", f"PRAGMA user_version = {version}")
    before = path.read_bytes()
    said = rf"\({version}, this one reads 4\): use that"
    with pytest.raises(database.OtherJournalError, match=said):
        open_journal(path)
    assert path.read_bytes() == before


def test_the_journal_of_another_batch_is_refused(path):
    crafted(path)
    with pytest.raises(database.JournalError, match="journal of another workflow"):
        Journal(path, workflow="v")
    changed(path, "PRAGMA user_version = 99")
    said = "is 99, and its tables are those of version 4"
    with pytest.raises(database.DamagedJournalError, match=said):
        open_journal(path)
    changed(path, "CREATE TABLE of_the_future (a)")
    said = r"another version of WanStream \(99, .*or move"
    with pytest.raises(database.OtherJournalError, match=said):
        open_journal(path)


@pytest.mark.parametrize("kind", ["text", "database", "folder", "no folder"])
def test_what_is_no_journal_is_left_alone(tmp_path, path, kind):
    if kind == "text":
        path.write_text("my notes, long enough to be taken for something else " * 10)
    elif kind == "database":
        changed(path, "CREATE TABLE mine (a)")
    elif kind == "folder":
        path.mkdir()
    place = path if kind != "no folder" else tmp_path / "none" / "journal.sqlite"
    before = {each: each.read_bytes() for each in tmp_path.iterdir() if each.is_file()}
    with pytest.raises(database.JournalError, match="journal"):
        open_journal(place)
    assert {each: each.read_bytes() for each in tmp_path.iterdir() if each.is_file()} == before


def placing(name: str) -> str:
    files = json.dumps([{"name": name, "size": 6, "sha256": "0"}])
    return f"UPDATE rows SET state = 'placing', files = '{files}'"


OUTSIDE = ["../../victim.txt", "/etc/victim", "..", "00001/../x.mp4", "00001.mp4/x", ""]
DAMAGES = {
    "line 2 is invalid: .* is not": [  # a file named in `placing` is moved
        *map(placing, [*OUTSIDE, "00001\\\\x.mp4", "00002.mp4"])
    ],
    "is not a prompt id": [  # the folder with this name is removed at the end of a row
        f"UPDATE rows SET prompt_id = '{name}'" for name in ("../../../home", "/home", "..", "")
    ],
    "changed by another program": [
        "CREATE TRIGGER t AFTER UPDATE ON rows BEGIN DELETE FROM rows; END",
        "CREATE VIEW v AS SELECT * FROM rows",
        "CREATE INDEX i ON rows (line)",
        "CREATE TABLE more (a)",
        "ALTER TABLE rows ADD COLUMN more TEXT",
        "DROP TABLE batch",
    ],
    "is damaged": [
        "DELETE FROM batch",
        *(f"UPDATE rows SET state = {value}" for value in ("'flying'", "7", "'done'")),
        *(f"UPDATE rows SET files = '{value}'" for value in ("no json", "[" * 5000, "{}", "[7]")),
        *(f"UPDATE rows SET saves = {value}" for value in ("'[[1]]'", "x'ff'")),
        *(f"UPDATE rows SET stem = {value}" for value in ("'../x'", "CAST(x'ff' AS TEXT)")),
        'UPDATE rows SET files = \'[{"name": "00001.mp4"}]\'',
        "UPDATE rows SET line = 'two'",
        "UPDATE rows SET prompt_id = NULL",
    ],
}


@pytest.mark.parametrize(
    ("change", "words"), [(change, words) for words, found in DAMAGES.items() for change in found]
)
def test_a_journal_changed_by_another_program_is_damaged(path, change, words):
    before = crafted(path, change).read_bytes()
    with pytest.raises(database.DamagedJournalError, match=words):
        open_journal(path)
    assert path.read_bytes() == before


def test_journal_damaged_while_open_keeps_its_copy(path):
    with open_journal(path) as journal:
        journal.enter([row_of(number) for number in range(1000)], compared=list)
        journal.back_up()
        good = database.copy_of(path).read_bytes()
        with path.open("r+b") as file:
            file.seek(24)  # the change counter: SQLite drops pages it has read
            file.write(b"\xff" * 4)
            file.seek(8 * 4096)
            file.write(b"\xa5" * 8 * 4096)
        with pytest.raises(database.DamagedJournalError, match=r"damaged"):
            journal.back_up()
    assert database.copy_of(path).read_bytes() == good
    assert {each.name for each in path.parent.iterdir()} == {path.name, database.copy_of(path).name}


@pytest.mark.parametrize("limit", [1, 4000, 10_000])
def test_the_cause_behind_a_disk_io_error_is_named(path, limit):
    with largest_file(limit), pytest.raises(database.JournalError, match="File too large") as met:
        with open_journal(path) as new:
            new.enter([row_of(number) for number in range(1000)], compared=list)
    assert isinstance(met.value.__cause__, OSError)
    assert met.value.__cause__.errno == errno.EFBIG
    assert is_full_disk(met.value)
    assert {each.name for each in path.parent.iterdir()} <= {path.name}, "the probe leaves nothing"


HOLD = """
import sys, pathlib
from wanstream.batch.opening import locked
with locked(pathlib.Path(sys.argv[1]), of="the batch"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.integration
def test_a_lock_has_one_holder_and_dies_with_it(tmp_path):
    lock = tmp_path / "lock"
    command = [sys.executable, "-c", HOLD, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(LockedError, match="another `wanstream batch` is using the batch"):
            locked(lock, of="the batch").__enter__()
        other.kill()
        other.wait()
    for _ in range(2):
        with locked(lock, of="the batch"), pytest.raises(LockedError):
            locked(lock, of="the batch").__enter__()


def test_threads_change_the_journal_one_after_the_other(path):
    rows = [row_of(number) for number in range(1, 41)]

    def work(row: Row) -> None:
        journal.post({row.hash: None}, f"id-{row.position}", "http://a")
        journal.fail(row.hash, "too big")

    with open_journal(path) as journal:
        journal.enter(rows, compared=list)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, rows))
    with open_journal(path) as journal:
        assert states(journal) == [State.failed] * 40


def test_a_journal_is_not_closed_while_a_thread_writes_it(path):
    opened = database.Database(path)
    changing = threading.Event()
    ended = threading.Event()

    def change() -> None:
        with opened.transaction():
            changing.set()
            time.sleep(0.2)
            ended.set()

    with ThreadPoolExecutor(1) as pool:
        changed = pool.submit(change)
        assert changing.wait(10)
        opened.close()
        assert ended.is_set()
        changed.result()


def filled(path):
    with open_journal(path) as journal:
        journal.enter([row_of(1), row_of(2, name="shot"), row_of(3)], compared=list)
        run_to_done(journal, "hash 1")
        journal.post({"hash 2": None}, "id")
        journal.fail("hash 2", "the reason \ud800 of the server")
    return path.read_bytes()


BUILDS = {
    "usual": (),
    "small pages": ("PRAGMA page_size = 512",),
    "automatic vacuum": ("PRAGMA auto_vacuum = FULL",),
    "incremental vacuum": ("PRAGMA page_size = 8192", "PRAGMA auto_vacuum = INCREMENTAL"),
    "reserved bytes": (),
}
"""SQLite build settings."""


@pytest.fixture(params=BUILDS)
def build(request, monkeypatch):
    """Create every database as another SQLite build."""
    connect = sqlite3.connect

    def connect_to_new(path, **options):
        if request.param == "reserved bytes" and not (path.is_file() and path.stat().st_size):
            with closing(connect(path)) as new:
                new.execute("PRAGMA user_version = 1")
            head = bytearray(path.read_bytes())
            head[20] = 12
            head[105:107] = (len(head) - 12).to_bytes(2, "big")
            path.write_bytes(head)
        connection = connect(path, **options)
        for setting in BUILDS[request.param]:
            connection.execute(setting)  # without effect on an existing database
        return connection

    monkeypatch.setattr(sqlite3, "connect", connect_to_new)
    journal_header._new_head.cache_clear()
    yield request.param
    journal_header._new_head.cache_clear()


def test_every_region_of_a_journal_may_be_overwritten(path, build):
    """Damage is either noticed or harmless."""
    chance = random.Random(3)
    whole = filled(path)
    noticed = 0
    assert (whole[20] == 12) == (build == "reserved bytes")
    with open_journal(path) as journal:
        before = journal.entries
    regions = [(start, 4) for start in range(0, 200, 8)]
    regions += [(chance.randrange(len(whole)), chance.choice([1, 4, 100, 4096])) for _ in range(25)]
    text = whole.index(b"hash 1")  # a region unchecked by SQLite
    regions += [(at, 1) for at in range(text - 20, text + 150, 3)]
    for start, length in regions:
        content = bytearray(whole)
        content[start : start + length] = bytes(
            each ^ chance.randrange(1, 128) for each in whole[start : start + length]
        )
        path.write_bytes(content)
        try:
            with open_journal(path) as journal:
                assert journal.entries == before
                journal.post({"hash 3": None}, "id")
        except (database.DamagedJournalError, database.ForeignDatabaseError):
            noticed += 1
    assert noticed > 60
    for start, field in ((44, "format of the schema"), (56, "encoding of texts")):
        path.write_bytes(whole[:start] + bytes(4) + whole[start + 4 :])
        # As in a database without tables.
        with pytest.raises(database.DamagedJournalError, match=f"the {field} is 00000000"):
            open_journal(path)
    assert {each.name for each in path.parent.iterdir()} == {path.name}
