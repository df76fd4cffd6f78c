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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from wanstream.batch.folder import journal_header
from wanstream.batch.folder.disk import is_full_disk
from wanstream.batch.journal.database import (
    DamagedJournalError,
    Database,
    ForeignDatabaseError,
    JournalError,
    OtherJournalError,
    copy_of,
)
from wanstream.batch.journal.entry import KeptFile, State
from wanstream.batch.journal.journal import Journal
from wanstream.batch.opening import LockedError, locked
from wanstream.batch.rows.rows import Row

FILE = KeptFile(name="00001.mp4", size=3, sha256="abc")


def row_of(number: int, *, name: str | None = None, fault: str | None = None) -> Row:
    return Row(line=number + 1, position=number, hash=f"hash {number}", name=name, fault=fault)


def states(journal: Journal) -> list[State]:
    return [entry.state for entry in journal.entries.values()]


def test_a_row_goes_its_way_and_another_process_sees_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with Journal(path, workflow="w") as journal:
        assert journal.enter([row_of(1), row_of(2)], compared=list) == []
        journal.post({"hash 1": frozenset("ab"), "hash 2": None}, "id")
    with Journal(path, workflow="w") as journal:
        first, second = journal.entries.values()
        assert (first.state, first.prompt_id, first.saves) == (State.posted, "id", frozenset("ab"))
        assert second.saves is None
        journal.place("hash 1", [FILE])
        journal.fail("hash 2", "too big")
    with Journal(path, workflow="w") as journal:
        first, second = journal.entries.values()
        assert (first.state, first.files) == (State.placing, (FILE,))
        assert (second.state, second.error) == (State.failed, "too big")
        journal.finish("hash 1", [FILE])
        # The next command retries failed rows and keeps finished ones.
        journal.enter([row_of(1), row_of(2)], compared=list)
        assert states(journal) == [State.done, State.waiting]


def test_a_row_whose_files_are_gone_runs_again_unless_it_has_a_fault(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.sqlite", workflow="w") as journal:
        rows = [row_of(1), row_of(2)]
        journal.enter(rows, compared=list)
        journal.post({row.hash: None for row in rows}, "id")
        for row in rows:
            journal.place(row.hash, [FILE])
            journal.finish(row.hash, [FILE])
        broken = row_of(2, fault="no such node")
        assert journal.enter([rows[0], broken], compared=lambda files: None) == [rows[0]]
        assert states(journal) == [State.waiting, State.failed]


def test_a_wrong_order_is_our_fault_and_changes_nothing(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.sqlite", workflow="w") as journal:
        journal.enter([row_of(1), row_of(2)], compared=list)
        for wrong in (
            lambda: journal.place("hash 1", [FILE]),
            lambda: journal.finish("hash 1", [FILE]),
            lambda: journal.wait(["hash 1"]),
            lambda: journal.post({"hash 1": None, "nobody": None}, "id"),
        ):
            with pytest.raises(AssertionError):
                wrong()
        assert states(journal) == [State.waiting, State.waiting]
        journal.post({"hash 1": None}, "id")
        with pytest.raises(AssertionError):
            journal.post({"hash 1": None}, "other")
        assert journal.entries["hash 1"].prompt_id == "id"


def test_a_row_with_a_fault_has_failed_and_has_no_files(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.sqlite", workflow="w") as journal:
        journal.enter([row_of(1, fault="no JSON"), row_of(2)], compared=list)
        first, second = journal.entries.values()
        assert (first.state, first.error, first.stem) == (State.failed, "no JSON", None)
        assert second.stem == "00002"


def run_to_done(journal: Journal, digest: str, name: str) -> None:
    journal.post({digest: None}, f"id-of-{digest[-1]}")
    files = [KeptFile(name=name, size=1, sha256="")]
    journal.place(digest, files)
    journal.finish(digest, files)


def test_rows_may_come_go_and_move(tmp_path: Path) -> None:
    def at(number: int, position: int, name: str | None = None) -> Row:
        return Row(line=position, position=position, hash=f"hash {number}", name=name)

    with Journal(tmp_path / "journal.sqlite", workflow="w") as journal:
        journal.enter([at(1, 1), at(2, 2), at(3, 3, "shot")], compared=list)
        for number, name in ((1, "00001.mp4"), (3, "shot.mp4")):
            run_to_done(journal, f"hash {number}", name)
        # A new first row; the second is gone without files; the third changed but kept the name.
        journal.enter([at(4, 1), at(1, 2), at(5, 3, "Shot")], compared=list)
        stems = {digest: entry.stem for digest, entry in journal.entries.items()}
        assert stems == {"hash 3": "shot", "hash 4": "00004", "hash 1": "00001", "hash 5": None}
        assert "is used by the files of a former row" in str(journal.entries["hash 5"].error)
        # The former row's files are moved away, so the name is free.
        journal.enter(
            [at(4, 1), at(1, 2), at(5, 3, "Shot")],
            compared=lambda files: None if files[0].name.startswith("shot") else files,
        )
        assert journal.entries["hash 5"].stem == "Shot"
        assert "hash 3" not in journal.entries
        assert journal.entries["hash 5"].state is State.waiting


def test_a_number_is_never_the_name_of_another_row(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.sqlite", workflow="w") as journal:
        journal.enter([row_of(1), row_of(2, name="00001"), row_of(3)], compared=list)
        assert [entry.stem for entry in journal.entries.values()] == ["00004", "00001", "00003"]


def test_no_row_is_called_like_the_journal(tmp_path: Path) -> None:
    with Journal(tmp_path / "Videos.sqlite", workflow="w") as journal:
        journal.enter(
            [row_of(1, name="videos"), row_of(2, name="videos.SQLITE"), row_of(3, name="video")],
            compared=list,
        )
        first, second, third = journal.entries.values()
        assert (first.state, second.state, third.state) == (
            State.failed,
            State.failed,
            State.waiting,
        )
        assert str(first.error).endswith("'videos' is used by the journal: rename the row")


def test_files_that_are_gone_are_made_again(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.sqlite", workflow="w") as journal:
        journal.enter([row_of(1), row_of(2)], compared=list)
        run_to_done(journal, "hash 1", "00001.mp4")
        (missing,) = journal.enter([row_of(1), row_of(2)], compared=lambda files: None)
        assert missing.hash == "hash 1"
        assert states(journal) == [State.waiting, State.waiting]
        assert [file.name for file in journal.entries["hash 1"].files] == ["00001.mp4"], (
            "what is left is not foreign"
        )


def test_files_of_a_row_that_has_a_fault_now_are_not_made_again(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.sqlite", workflow="w") as journal:
        journal.enter([row_of(1)], compared=list)
        run_to_done(journal, "hash 1", "00001.mp4")
        journal.enter([row_of(1, fault="no such node")], compared=lambda files: None)
        assert (states(journal), journal.entries["hash 1"].error) == (
            [State.failed],
            "no such node",
        )


def test_the_journal_of_another_batch_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    Journal(path, workflow="w").__exit__(None, None, None)
    with pytest.raises(JournalError, match="journal of another workflow"):
        Journal(path, workflow="v")
    changed(path, "PRAGMA user_version = 99")
    with pytest.raises(
        DamagedJournalError, match="its version is 99, and its tables are those of version 4"
    ):
        Journal(path, workflow="w")
    changed(path, "CREATE TABLE of_the_future (a)")
    with pytest.raises(
        OtherJournalError, match=r"another version of WanStream \(99, .*use that version, or move"
    ):
        Journal(path, workflow="w")


@pytest.mark.parametrize("kind", ["text", "database", "folder", "no folder"])
def test_what_is_no_journal_is_left_alone(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "journal.sqlite"
    if kind == "text":
        path.write_text(
            "my notes, long enough to be taken for something else " * 10, encoding="utf-8"
        )
    elif kind == "database":
        connection = sqlite3.connect(path)
        connection.execute("CREATE TABLE mine (a)")
        connection.close()
    elif kind == "folder":
        path.mkdir()
    else:
        path = tmp_path / "none" / "journal.sqlite"
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(JournalError, match="journal"):
        Journal(path, workflow="w")
    assert (path.read_bytes() if path.is_file() else None) == before


def crafted(path: Path, *changes: str) -> Path:
    """Return a journal with one posted row, changed by another program."""
    with Journal(path, workflow="w") as journal:
        journal.enter([row_of(1)], compared=list)
        journal.post({"hash 1": None}, "id")
    return changed(path, *changes)


def changed(path: Path, *changes: str) -> Path:
    with closing(sqlite3.connect(path)) as connection:
        for change in changes:
            connection.execute(change)
        connection.commit()
    return path


def named(name: str) -> str:
    files = json.dumps([{"name": name, "size": 6, "sha256": "0"}])
    return f"UPDATE rows SET state = 'placing', files = '{files}'"


@pytest.mark.parametrize(
    "name",
    [
        "../../victim.txt",
        "/etc/victim",
        "..",
        "00001/../x.mp4",
        "00001.mp4/x",
        "00001\\x.mp4",
        "00002.mp4",
        "",
    ],
)
def test_a_journal_of_somebody_else_cannot_name_a_file_outside_its_folder(
    tmp_path: Path, name: str
) -> None:
    """A file named in `placing` is moved."""
    with pytest.raises(DamagedJournalError, match=r"line 2 is invalid: .* is not"):
        Journal(crafted(tmp_path / "journal.sqlite", named(name)), workflow="w")


def test_a_journal_of_somebody_else_cannot_have_a_folder_removed(tmp_path: Path) -> None:
    """When a row is over, the folder named after the prompt id is removed."""
    for prompt_id in ("../../../home", "/home", "..", ""):
        path = tmp_path / f"{len(prompt_id)}.sqlite"
        with pytest.raises(DamagedJournalError, match="is not a prompt id"):
            Journal(crafted(path, f"UPDATE rows SET prompt_id = '{prompt_id}'"), workflow="w")


@pytest.mark.parametrize(
    "change",
    [
        "CREATE TRIGGER t AFTER UPDATE ON rows BEGIN DELETE FROM rows; END",
        "CREATE VIEW v AS SELECT * FROM rows",
        "CREATE INDEX i ON rows (line)",
        "CREATE TABLE more (a)",
        "ALTER TABLE rows ADD COLUMN more TEXT",
        "DROP TABLE batch",
    ],
)
def test_a_journal_with_more_than_its_tables_is_damaged(tmp_path: Path, change: str) -> None:
    path = crafted(tmp_path / "journal.sqlite", change)
    before = path.read_bytes()
    with pytest.raises(DamagedJournalError, match="changed by another program"):
        Journal(path, workflow="w")
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE rows SET state = 'flying'",
        "UPDATE rows SET state = 7",
        "UPDATE rows SET files = 'no json'",
        "UPDATE rows SET files = '" + "[" * 5000 + "'",
        'UPDATE rows SET files = \'[{"name": "00001.mp4"}]\'',
        "UPDATE rows SET files = '{}'",
        "UPDATE rows SET files = '[7]'",
        "UPDATE rows SET saves = '[[1]]'",
        "UPDATE rows SET saves = x'ff'",
        "UPDATE rows SET line = 'two'",
        "UPDATE rows SET stem = '../x'",
        "UPDATE rows SET stem = CAST(x'ff' AS TEXT)",
        "UPDATE rows SET prompt_id = NULL",
        "UPDATE rows SET state = 'done'",
        "DELETE FROM batch",
    ],
)
def test_nonsense_in_a_journal_is_damage_and_not_a_traceback(tmp_path: Path, change: str) -> None:
    with pytest.raises(DamagedJournalError, match="is damaged"):
        Journal(crafted(tmp_path / "journal.sqlite", change), workflow="w")


def test_a_journal_that_was_cut_or_overwritten_is_damaged(tmp_path: Path) -> None:
    path = crafted(tmp_path / "journal.sqlite")
    whole = path.read_bytes()
    size = len(whole)
    for content in (
        whole[: size // 2],
        whole[:4096],
        b"x" * size,
        whole[:100] + b"\0" * (size - 100),
        b"\0" * size,
    ):
        path.write_bytes(content)
        with pytest.raises(DamagedJournalError, match="is damaged"):
            Journal(path, workflow="w")


def test_a_journal_that_is_damaged_while_it_is_open_keeps_its_last_good_copy(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal.sqlite"
    with Journal(path, workflow="w") as journal:
        journal.enter([row_of(number) for number in range(1000)], compared=list)
        journal.back_up()
        good = copy_of(path).read_bytes()
        with path.open("r+b") as file:
            file.seek(24)  # the change counter: SQLite drops pages it has read
            file.write(b"\xff" * 4)
            file.seek(8 * 4096)
            file.write(b"\xa5" * 8 * 4096)
        with pytest.raises(DamagedJournalError, match=r"damaged"):
            journal.back_up()
    assert copy_of(path).read_bytes() == good
    assert {each.name for each in tmp_path.iterdir()} == {path.name, copy_of(path).name}


@pytest.mark.skipif(sys.platform == "win32", reason="file size limits are POSIX")
@pytest.mark.parametrize("limit", [1, 4000, 10_000])
def test_the_cause_behind_a_disk_io_error_is_named(tmp_path: Path, limit: int) -> None:
    """A file size limit acts like a full disk."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with (
            pytest.raises(JournalError, match="File too large") as met,
            Journal(tmp_path / "j", workflow="w") as journal,
        ):
            journal.enter([row_of(number) for number in range(1000)], compared=list)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert isinstance(met.value.__cause__, OSError)
    assert met.value.__cause__.errno == errno.EFBIG
    assert is_full_disk(met.value)
    assert {path.name for path in tmp_path.iterdir()} <= {"j"}, "the probe leaves nothing"


HOLD = """
import sys, pathlib
from wanstream.batch.opening import locked
with locked(pathlib.Path(sys.argv[1]), of="the batch"):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(path: Path) -> subprocess.Popen[str]:
    command: Sequence[str] = [sys.executable, "-c", HOLD, str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.integration
def test_a_lock_has_one_holder_and_dies_with_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with holder(path) as other:
        with pytest.raises(LockedError, match="another `wanstream batch` is using the batch"):
            with locked(path, of="the batch"):
                pass
        other.kill()
        other.wait()
    with locked(path, of="the batch"):
        with pytest.raises(LockedError):
            with locked(path, of="the batch"):
                pass
    with locked(path, of="the batch"):
        pass


def test_a_lock_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    with pytest.raises(LockedError, match="cannot be locked"):
        with locked(tmp_path / "none" / "lock", of="x"):
            pass


@pytest.mark.parametrize("version", [2, 3])
def test_a_journal_of_an_older_version_is_refused_and_not_changed(
    tmp_path: Path, version: int
) -> None:
    path = tmp_path / "journal.sqlite"
    changed(
        path,
        "CREATE TABLE batch (workflow TEXT NOT NULL)",
        "INSERT INTO batch VALUES ('w')",
        "PRAGMA application_id = 1465078850",
        f"PRAGMA user_version = {version}",
    )
    before = path.read_bytes()
    with pytest.raises(OtherJournalError, match=rf"\({version}, this one reads 4\): use that"):
        Journal(path, workflow="w")
    assert path.read_bytes() == before


def test_rows_move_to_another_backend_only_if_it_is_said(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.sqlite", workflow="w") as journal:
        journal.enter([row_of(1)], compared=list)
        with pytest.raises(AssertionError):
            journal.post({"hash 1": None}, "id", "http://a", elsewhere=True)
        journal.post({"hash 1": None}, "id", "http://a")
        journal.post({"hash 1": None}, "other", "http://b", elsewhere=True)
        entry = journal.entries["hash 1"]
        assert (entry.prompt_id, entry.backend, entry.attempts) == ("other", "http://b", 2)
        assert journal.lines_left("id") == journal.lines_left("other") == [2]


def test_threads_change_the_journal_one_after_the_other(tmp_path: Path) -> None:
    rows = [row_of(number) for number in range(1, 41)]
    with Journal(tmp_path / "journal.sqlite", workflow="w") as journal:
        journal.enter(rows, compared=list)

        def work(share: list[Row]) -> None:
            for row in share:
                journal.post({row.hash: None}, f"id {row.position}".replace(" ", "-"), "http://a")
                journal.fail(row.hash, "too big")

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, [rows[start::4] for start in range(4)]))
        assert states(journal) == [State.failed] * 40
    with Journal(tmp_path / "journal.sqlite", workflow="w") as journal:
        assert states(journal) == [State.failed] * 40


def test_a_journal_is_not_closed_while_a_thread_writes_it(tmp_path: Path) -> None:
    database = Database(tmp_path / "journal.sqlite")
    changing, changed = threading.Event(), threading.Event()

    def change() -> None:
        with database.transaction():
            changing.set()
            time.sleep(0.2)
            changed.set()

    thread = threading.Thread(target=change)
    thread.start()
    assert changing.wait(10)
    database.close()
    assert changed.is_set()
    thread.join()


def filled(path: Path) -> bytes:
    with Journal(path, workflow="w" * 64) as journal:
        journal.enter([row_of(1), row_of(2, name="shot"), row_of(3)], compared=list)
        run_to_done(journal, "hash 1", "00001.mp4")
        journal.post({"hash 2": None}, "id")
        journal.fail("hash 2", "the reason \ud800 of the server")
    return path.read_bytes()


BUILDS = {
    "usual": (),
    "small pages": ("PRAGMA page_size = 512",),
    "automatic vacuum": ("PRAGMA auto_vacuum = FULL",),
    "incremental vacuum, large pages": (
        "PRAGMA page_size = 8192",
        "PRAGMA auto_vacuum = INCREMENTAL",
    ),
    "reserved bytes": (),
}
"""SQLite build settings."""


@pytest.fixture(params=BUILDS)
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Create every database as another SQLite build."""
    connect = sqlite3.connect

    def connect_to_new(path: Path, **options: Any) -> sqlite3.Connection:
        if request.param == "reserved bytes" and not (path.is_file() and path.stat().st_size):
            with closing(connect(path)) as new:
                new.execute("PRAGMA user_version = 1")
            head = bytearray(path.read_bytes())
            head[20], head[105:107] = 12, (len(head) - 12).to_bytes(2, "big")
            path.write_bytes(head)
        connection = connect(path, **options)
        for setting in BUILDS[request.param]:
            connection.execute(setting)  # without effect on an existing database
        return connection

    monkeypatch.setattr(sqlite3, "connect", connect_to_new)
    journal_header._new_head.cache_clear()
    yield request.param
    journal_header._new_head.cache_clear()


def test_every_region_of_a_journal_may_be_overwritten(tmp_path: Path, build: str) -> None:
    """Damage is either noticed or harmless."""
    path, chance = tmp_path / "journal.sqlite", random.Random(3)
    whole = filled(path)
    assert (whole[20] == 12) == (build == "reserved bytes")
    with Journal(path, workflow="w" * 64) as journal:
        before = journal.entries
    regions = [(start, 4) for start in range(0, 200, 4)]
    regions += [(chance.randrange(len(whole)), chance.choice([1, 4, 100, 4096])) for _ in range(50)]
    text = whole.index(b"hash 1")  # a region unchecked by SQLite
    regions += [(at, 1) for at in range(text - 20, text + 150)]
    noticed = 0
    for start, length in regions:
        content = bytearray(whole)
        content[start : start + length] = bytes(
            each ^ chance.randrange(1, 128) for each in whole[start : start + length]
        )
        path.write_bytes(content)
        try:
            with Journal(path, workflow="w" * 64) as journal:
                assert journal.entries == before
        except (DamagedJournalError, ForeignDatabaseError):
            noticed += 1
    assert noticed > 200
    for start, field in ((44, "format of the schema"), (56, "encoding of texts")):
        path.write_bytes(whole[:start] + bytes(4) + whole[start + 4 :])
        with pytest.raises(
            DamagedJournalError, match=f"the {field} is 00000000"
        ):  # as in a database without tables
            Journal(path, workflow="w" * 64)
    assert {each.name for each in tmp_path.iterdir()} == {path.name}


@pytest.mark.parametrize(
    "name",
    ["journal.sqlite", "Journal.SQLITE-wal", "journal.sqlite.before", "journal", "journal.x"],
)
def test_no_file_of_a_row_is_called_like_a_file_of_the_journal(tmp_path: Path, name: str) -> None:
    with Journal(tmp_path / "journal.sqlite", workflow="w") as journal:
        journal.enter([row_of(1, name=name)], compared=list)
        (entry,) = journal.entries.values()
        assert (entry.state is State.failed) == (name != "journal.x")
