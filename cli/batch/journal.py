"""Batch journal: the state of every row in an SQLite file, with lock and checks."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from enum import Enum
from functools import wraps
from itertools import chain, count
from pathlib import Path
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar, get_type_hints

from .folder.journal_header import application_of, header_fault, read_head
from .folder.names import PROMPT_ID, is_made_name, is_of_journal, name_key, number_stem, stem_fault
from .folder.own_files import check_database, check_file
from .rows import Row

_PAGES = bytes(16 * 4096)
"""Some SQLite pages. A transaction needs several, and releases them when it fails."""


def is_full_disk(error: BaseException | None) -> bool:
    """Return True if `error` or one of the causes is a used-up disk, quota or file size limit."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            return True
        error = error.__cause__
    return False


def system_error(err: sqlite3.Error, path: Path) -> OSError:
    """Return the system error behind an SQLite error for `path`, without an errno if there is none.

    SQLite reports an exceeded quota and a file size limit as "disk I/O error", and a missing folder as "unable to open
    database file". Writing a longer temporary file next to `path` fails with the system's own error.
    """
    try:
        with tempfile.TemporaryFile(dir=path.parent) as probe:
            probe.seek(path.stat().st_size if path.is_file() else 0)
            probe.write(_PAGES)
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as cause:
        return cause
    if "disk is full" in str(err):
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return OSError(None, str(err))


class State(str, Enum):
    """Row state."""

    waiting = "waiting"
    """Not sent to a host."""
    posted = "posted"
    """Possibly sent to a host: the prompt id is written first."""
    placing = "placing"
    """The files are fetched and checked. Some may have been renamed already."""
    done = "done"
    failed = "failed"
    """Tried again by the next command."""


@dataclass(frozen=True, kw_only=True)
class KeptFile:
    """One file of a row. `name` is the name in the output folder."""

    name: str
    size: int
    sha256: str
    stamp: str = ""
    """File times and number at the last comparison with `sha256`. Empty before the final rename."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Row state, in the order of the table columns.

    Args:
        line: line in the file of rows. None for a former row, no longer in the file.
        stem: file name stem.
        attempts: number of posts.
        saves: nodes that save the files. None: all nodes.
        files: the row's files. Unless it is `placing` or `done` they are former files, and some are missing.
        backend: last backend's address. None: this process, or the journal is older than recorded addresses.
    """

    hash: str
    line: int | None = None
    stem: str | None = None
    state: State = State.waiting
    prompt_id: str | None = None
    attempts: int = 0
    error: str | None = None
    saves: frozenset[str] | None = None
    files: tuple[KeptFile, ...] = ()
    backend: str | None = None


_COLUMNS = get_type_hints(Entry) | {"state": str, "saves": str | None, "files": str}
"""Column types. `saves` and `files` are JSON lists."""

_FILE = get_type_hints(KeptFile)
_SEAL = "seal"
"""Column with a digest of the others: SQLite does not notice another byte in a text or a number."""


def _columns(entry: Entry) -> dict[str, Any]:
    saves = None if entry.saves is None else json.dumps(sorted(entry.saves))
    files = json.dumps([asdict(file) for file in entry.files])
    columns = vars(entry) | {"state": entry.state.value, "saves": saves, "files": files}
    return columns | {_SEAL: _seal([*columns.values()])}


def _seal(values: Sequence[object]) -> str:
    # `default`, because a damaged value may be bytes.
    return hashlib.sha256(json.dumps(values, default=repr).encode()).hexdigest()[:16]


def entry_of(row: Sequence[Any]) -> Entry:
    """Return the entry for a table row without seal. Raises ValueError for invalid values.

    File names must start with the row's stem, so that no entry names a file outside the folder.
    """
    try:
        values = {name: _typed(value, kind) for (name, kind), value in zip(_COLUMNS.items(), row, strict=True)}
        saves = None if values["saves"] is None else frozenset(_typed(node, str) for node in _listed(values["saves"]))
        files = tuple(_file(file) for file in _listed(values["files"]))
        entry = Entry(**values | {"state": State(values["state"]), "saves": saves, "files": files})
        _check(entry)
    except (ValueError, TypeError, RecursionError) as err:
        raise ValueError(f"the row of line {row[1]!r:.20} is invalid: {err}") from err
    return entry


def _check(entry: Entry) -> None:
    if entry.stem is not None and stem_fault(entry.stem):
        raise ValueError(f"{entry.stem!r} is not the stem of a file name")
    for file in entry.files:
        if entry.stem is None or not is_made_name(file.name, stem=entry.stem):
            raise ValueError(f"{file.name!r} is not the name of a file of {entry.stem!r}")
    if entry.prompt_id is not None and not PROMPT_ID.fullmatch(entry.prompt_id):
        raise ValueError(f"{entry.prompt_id!r} is not a prompt id")
    if entry.state is State.posted and entry.prompt_id is None:
        raise ValueError("it was posted without a prompt id")
    if entry.state in {State.placing, State.done} and not entry.files:
        raise ValueError(f"it is {entry.state.value} and has no files")


def _file(described: object) -> KeptFile:
    if not isinstance(described, dict) or described.keys() | {"stamp"} != _FILE.keys():
        raise ValueError("a file has a name, a size and a sha256")
    return KeptFile(**{name: _typed(value, _FILE[name]) for name, value in described.items()})


def _listed(text: str) -> list[Any]:
    found: list[Any] = _typed(json.loads(text), list)
    return found


def _typed(value: Any, kind: Any) -> Any:
    """Return the value if it has this type or union type. True and False are not numbers."""
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{value!r:.40} is not of type {getattr(kind, '__name__', kind)}")
    return value


def _taken_fault(name: str, *, by_journal: bool) -> str:
    if by_journal:
        return f"name '{name}' is used by the journal: rename the row"
    return (
        f"name '{name}' is used by the files of a former row: if this is a changed row, or continues one, rename it, "
        "or move those files away"
    )


def file_stems(rows: Sequence[Row], taken: Mapping[str, str], journal: str = "") -> dict[str, str | None]:
    """Return a unique file stem for each row, by hash.

    `taken` maps present and former stems to row hashes: a row keeps its stem. A row without a name gets the
    row position, or the next free number. None: the row has a fault, or the name is taken, maybe by the `journal`.
    """
    owned = {digest: stem for stem, digest in taken.items()}
    used = {name_key(stem) for stem in taken}
    stems: dict[str, str | None] = {}
    # Rows with names first, so that no number takes a name.
    for row in sorted(rows, key=lambda row: row.name is None):
        stem = owned.get(row.hash)
        if stem is None and row.fault is None and row.name is not None:
            stem = None if name_key(row.name) in used or is_of_journal(row.name, journal) else row.name
        elif stem is None and row.fault is None:
            numbers = (number_stem(number) for number in chain([row.position], count(len(rows) + 1)))
            stem = next(number for number in numbers if number not in used and not is_of_journal(number, journal))
        stems[row.hash] = stem
        used.add(name_key(stem or ""))
    return stems


class LockedError(OSError):
    """Another process has the lock, or the lock file cannot be created."""


@contextmanager
def locked(path: Path, *, of: str) -> Iterator[None]:
    """Lock a file inside the `with`. The file is not removed.

    The lock is an exclusive SQLite transaction, the only portable file lock in the standard library. The kernel
    releases it however the process ends. It has a file next to the journal, so that the journal stays readable.

    Raises LockedError at once if another process has the lock, or if the file cannot be created.
    """
    with ExitStack() as opened:
        try:
            connection = opened.enter_context(closing(sqlite3.connect(path, isolation_level=None, timeout=0)))
            connection.execute("BEGIN EXCLUSIVE")
        except sqlite3.Error as err:
            if "locked" in str(err):
                raise LockedError(f"another `wanstream batch` is using {of}: wait for it, or stop it") from err
            cause = system_error(err, path)
            raise LockedError(f"{path} cannot be locked: {cause.strerror}") from cause
        yield


_APPLICATION = 0x57535442  # "WSTB" identifies a journal among SQLite files
_VERSION = 4
_ROWS = (
    "CREATE TABLE rows (hash TEXT PRIMARY KEY, line INTEGER, stem TEXT UNIQUE COLLATE NOCASE, state TEXT NOT NULL, "
    "prompt_id TEXT, attempts INTEGER NOT NULL DEFAULT 0, error TEXT, saves TEXT, files TEXT NOT NULL DEFAULT '[]'"
)
_ATTEMPTS = "CREATE TABLE attempts (prompt_id TEXT NOT NULL, hash TEXT NOT NULL)"
_TABLES = {
    _VERSION: (
        "CREATE TABLE batch (workflow TEXT NOT NULL, seal TEXT NOT NULL)",
        f"{_ROWS}, backend TEXT, seal TEXT NOT NULL)",
        _ATTEMPTS,
    ),
    3: ("CREATE TABLE batch (workflow TEXT NOT NULL)", f"{_ROWS}, backend TEXT)", _ATTEMPTS),
    2: ("CREATE TABLE batch (workflow TEXT NOT NULL)", f"{_ROWS})", _ATTEMPTS),
}
"""Tables by version. An older journal is converted when it is opened.

`attempts` contains every prompt id ever used to post a row.
"""
_WITHOUT_BACKEND = 2
_STORED = (*_COLUMNS, _SEAL)
_INSERT = f"INSERT INTO rows ({', '.join(_STORED)}) VALUES ({', '.join(f':{name}' for name in _STORED)})"


_OF_SYSTEM = (
    "locked",
    "unable to open",
    "disk I/O error",
    "disk is full",
    "readonly",
    "permission",
    "out of memory",
    "interrupted",
)
"""Parts of SQLite's messages about system errors. All others are about the file."""

_BACK_UP_SECONDS = 60.0
"""Minimum time between two backups."""

_LOCKED_SECONDS = 60.0
"""Maximum wait for another program that reads or copies the journal."""


class JournalError(OSError):
    """The journal cannot be read or written, or belongs to another batch."""


class DamagedJournalError(JournalError):
    """The file was truncated, overwritten or changed."""


class OtherWorkflowError(JournalError):
    """The file is an intact journal for another workflow."""


class OtherVersionError(JournalError):
    """The file is an intact journal with an unknown version."""


class ForeignDatabaseError(JournalError):
    """The file is another application's database, or a journal with a damaged application id."""


def copy_of(path: Path) -> Path:
    """Return the backup path for `Journal.back_up`."""
    return path.with_name(f"{path.name}.before")


def check_journal(path: Path) -> None:
    """Raise ForeignFileError if a file of the journal at `path` is not this user's regular file.

    SQLite and the copies would follow a link.
    """
    for name in (path.name, f"{path.name}.lock", f"{path.name}.copy", f"{path.name}.recovered"):
        check_database(path.with_name(name))
    check_file(copy_of(path))


_P = ParamSpec("_P")
_R = TypeVar("_R")


def _exclusive(method: Callable[Concatenate[Journal, _P], _R]) -> Callable[Concatenate[Journal, _P], _R]:
    """Run a journal method in one thread at a time: it reads entries and replaces all of them."""

    @wraps(method)
    def locked_method(journal: Journal, /, *arguments: _P.args, **named: _P.kwargs) -> _R:
        with journal.lock:
            return method(journal, *arguments, **named)

    return locked_method


class Journal(AbstractContextManager["Journal"]):
    """Open journal for several threads. Only the process with the lock may use it."""

    entries: dict[str, Entry]
    """All rows by hash, in line order. Entries are replaced, not changed."""
    workflow: str
    """Workflow digest."""

    def __init__(self, path: Path, *, workflow: str) -> None:
        """Open or create the journal for the workflow with this digest. Raises JournalError."""
        self._path = path
        self.workflow = workflow
        self._backed_up = time.monotonic()
        self.lock = threading.RLock()
        self._check_header()
        self._connection = self._connect()
        try:
            with self._transaction() as execute:
                found = self._read_or_create(execute, workflow)
            if reserved := [each.stem for each in found if each.stem and is_of_journal(each.stem, path.name)]:
                raise ValueError(f"{reserved[0]!r} is not the stem of a file name here")
            self.entries = {entry.hash: entry for entry in found}
        except (JournalError, ValueError) as err:
            self._connection.close()
            if isinstance(err, JournalError):
                raise
            raise self._damaged(str(err)) from err

    def _connect(self) -> sqlite3.Connection:
        try:
            # `lock` keeps the threads apart.
            connection = sqlite3.connect(
                self._path, isolation_level=None, timeout=_LOCKED_SECONDS, check_same_thread=False
            )
            # Before anything is read: an untrusted file may contain triggers, views and functions.
            connection.execute("PRAGMA trusted_schema = OFF")
        except sqlite3.Error as err:
            self._raise(err)
        return connection

    def _check_header(self) -> None:
        """Check the file head, after SQLite has rolled back an unfinished transaction. Raises JournalError."""
        rollback = Path(f"{self._path}-journal")
        try:
            if self._path.is_file() and rollback.is_file() and rollback.stat().st_size:
                with closing(self._connect()) as connection:
                    connection.execute("SELECT * FROM sqlite_master").fetchall()
            head = read_head(self._path)
            nbytes = self._path.stat().st_size if self._path.is_file() else 0
            fault = header_fault(head, nbytes)
        except sqlite3.Error as err:
            self._raise(err)
        except OSError as err:
            if isinstance(err, JournalError):
                raise
            raise JournalError(f"the journal {self._path} cannot be read: {err.strerror}") from err
        if application_of(head) not in {None, _APPLICATION}:
            raise ForeignDatabaseError(
                f"{self._path} is a database, but not a journal of a batch: give another --journal"
            )
        if fault:
            raise self._damaged(fault)

    def _damaged(self, fault: str) -> DamagedJournalError:
        return DamagedJournalError(f"the journal {self._path} is damaged: {fault}")

    @_exclusive
    def __exit__(self, *error: object) -> None:
        # Not while another thread writes: a thread waiting for a hung server may still run when the batch ends.
        self._connection.close()

    @_exclusive
    def enter(self, rows: Sequence[Row], *, gone: Callable[[Entry], bool]) -> list[Row]:
        """Replace the journal rows, but keep former ones that are `placing`, or done and not `gone`.

        Failed rows are set to waiting, rows with a fault to failed. Returns the done rows with `gone` files. They
        run again, and their `files` are kept until then.
        """
        present = {row.hash for row in rows}
        missing = {entry.hash for entry in self.entries.values() if entry.state is State.done and gone(entry)}
        kept = [
            entry
            for entry in self.entries.values()
            if entry.hash in present or (entry.state in {State.placing, State.done} and entry.hash not in missing)
        ]
        entries = {entry.hash: replace(entry, line=None) for entry in kept if entry.hash not in present}
        stems = file_stems(rows, {entry.stem: entry.hash for entry in kept if entry.stem}, self._path.name)
        for row in rows:
            fault = row.fault
            if fault is None and stems[row.hash] is None:
                fault = _taken_fault(str(row.name), by_journal=is_of_journal(str(row.name), self._path.name))
            entry = replace(self.entries.get(row.hash, Entry(hash=row.hash)), line=row.line, stem=stems[row.hash])
            if entry.state in {State.waiting, State.failed} or row.hash in missing:
                entry = replace(entry, state=State.failed if fault else State.waiting, error=fault)
            entries[row.hash] = entry
        self._save({**dict.fromkeys(self.entries), **entries})
        self.entries = entries
        return [row for row in rows if row.hash in missing and row.fault is None]

    @_exclusive
    def post(
        self,
        saves: Mapping[str, frozenset[str] | None],
        prompt_id: str,
        backend: str | None = None,
        *,
        elsewhere: bool = False,
    ) -> None:
        """Record that rows are about to be sent under this id to the backend with this address.

        `saves` maps row hashes to the nodes of their files. `elsewhere`: the previous backend does not respond. Results
        under the former id are no longer used.
        """
        state = State.posted if elsewhere else State.waiting
        found = [(self._row(digest, state), nodes) for digest, nodes in saves.items()]
        rows = [
            replace(row, state=State.posted, prompt_id=prompt_id, saves=nodes, backend=backend) for row, nodes in found
        ]
        self._save(
            {row.hash: replace(row, attempts=row.attempts + 1) for row in rows},
            attempts=[(prompt_id, row.hash) for row in rows],
        )

    @_exclusive
    def lines_left(self, prompt_id: str) -> list[int] | None:
        """Return the lines of unfinished rows posted under this id. None for an unknown id."""
        with self._transaction() as execute:
            found = execute("SELECT hash FROM attempts WHERE prompt_id = ?", (prompt_id,)).fetchall()
        posted = [self.entries[digest] for (digest,) in found if digest in self.entries]
        if not posted:
            return None
        return sorted(entry.line for entry in posted if entry.state is not State.done and entry.line is not None)

    @_exclusive
    def adopt(self, digest: str, stem: str, files: Sequence[KeptFile]) -> None:
        """Assign finished files with this stem to an unfinished row, and set it to `placing`.

        The former row with this stem loses it.
        """
        row = self._row(digest, State.waiting, State.posted, State.failed)
        owners = [each for each in self.entries.values() if name_key(each.stem or "") == name_key(stem)]
        self._save(
            {owner.hash: replace(owner, stem=None, files=()) for owner in owners}
            | {digest: replace(row, state=State.placing, stem=stem, files=tuple(files), error=None)}
        )

    @_exclusive
    def back_up_if_old(self) -> None:
        """Write a copy as `back_up`, unless the last attempt was less than a minute ago."""
        if time.monotonic() - self._backed_up > _BACK_UP_SECONDS:
            self.back_up()

    @_exclusive
    def back_up(self) -> None:
        """Write a copy next to the journal, atomically.

        Raises OSError, or DamagedJournalError if the copy is not intact. The previous copy is kept then.
        """
        self._backed_up = time.monotonic()
        unfinished = self._path.with_name(f"{self._path.name}.copy")
        try:
            unfinished.unlink(missing_ok=True)
            with closing(sqlite3.connect(unfinished)) as copy:
                self._connection.backup(copy)
                # `backup` does not check pages: a damaged journal would replace the last good copy.
                (found,) = copy.execute("PRAGMA integrity_check(1)").fetchone()
            if found != "ok":
                raise DamagedJournalError(
                    f"the journal {self._path} is damaged: {found}; {copy_of(self._path).name} was not changed: run "
                    "the same command again to resume from it"
                )
            unfinished.replace(copy_of(self._path))
        except sqlite3.Error as err:
            self._raise(err)
        finally:
            unfinished.unlink(missing_ok=True)

    @_exclusive
    def wait(self, hashes: Iterable[str]) -> None:
        """Set these rows to waiting: the host does not have them."""
        rows = [self._row(digest, State.posted, State.placing) for digest in hashes]
        self._save({row.hash: replace(row, state=State.waiting) for row in rows})

    @_exclusive
    def fail(self, digest: str, error: str) -> None:
        """Set the row to failed, with the reason."""
        row = self._row(digest, State.waiting, State.posted)
        text = error.encode("utf-8", "backslashreplace").decode()  # SQLite takes no lone surrogates
        self._save({digest: replace(row, state=State.failed, error=text)})

    @_exclusive
    def place(self, digest: str, files: Sequence[KeptFile]) -> None:
        """Record the row's files, checked and synced to disk, before they are renamed."""
        assert files, "a row needs files to be placed"
        row = self._row(digest, State.posted)
        self._save({digest: replace(row, state=State.placing, files=tuple(files))})

    @_exclusive
    def finish(self, digest: str, files: Sequence[KeptFile] = ()) -> None:
        """Set the row to done: all files have their names. `files` are the same with their stamps."""
        row = self._row(digest, State.placing)
        self._save({digest: replace(row, state=State.done, error=None, files=tuple(files) or row.files)})

    @_exclusive
    def stamp(self, files: Mapping[str, Sequence[KeptFile]]) -> None:
        """Record file stamps of done rows, by row hash, after the content was compared again."""
        self._save(
            {digest: replace(self._row(digest, State.done), files=tuple(kept)) for digest, kept in files.items()}
        )

    def _read_or_create(self, execute: Callable[..., sqlite3.Cursor], workflow: str) -> list[Entry]:
        """Return the rows of this workflow's journal, converted from an older version. Create the tables if empty.

        Raises JournalError, or ValueError for damaged rows.
        """
        tables = [*execute("SELECT sql, type FROM sqlite_master")]
        if not tables:
            self._create(execute, workflow)
            return []
        (found,) = execute("PRAGMA integrity_check(1)").fetchone()
        if found != "ok":
            raise self._damaged(found)
        version = self._version(execute, tables)
        columns = [name for name in _STORED if version == _VERSION or name != _SEAL]
        columns = [name for name in columns if version > _WITHOUT_BACKEND or name != "backend"]
        rows = [*execute(f"SELECT {', '.join(columns)} FROM rows ORDER BY line")]
        before, *seal = execute("SELECT * FROM batch").fetchone() or (None,)
        if not isinstance(before, str) or (version == _VERSION and seal != [_seal([before])]):
            raise self._damaged("the digest of its workflow is missing or was changed")
        if before != workflow:
            raise OtherWorkflowError(
                f"{self._path} is the journal of another workflow, and the workflow of a batch cannot change: give "
                "another --out (or --journal), or the original workflow"
            )
        if version == _VERSION:
            if broken := [row for *row, seal in rows if seal != _seal(row)]:
                entry_of(broken[0])  # raises for an invalid value, with a better message
                raise self._damaged(f"a value in the row of line {broken[0][1]} was changed")
            return [entry_of(row) for *row, _ in rows]
        entries = [entry_of(row if version > _WITHOUT_BACKEND else [*row, None]) for row in rows]
        execute("DROP TABLE rows")
        execute("DROP TABLE batch")
        self._create(execute, workflow, but=_ATTEMPTS)
        for entry in entries:
            execute(_INSERT, _columns(entry))
        return entries

    def _create(self, execute: Callable[..., sqlite3.Cursor], workflow: str, *, but: str = "") -> None:
        for statement in _TABLES[_VERSION]:
            if statement != but:
                execute(statement)
        execute(f"PRAGMA application_id = {_APPLICATION}")
        execute(f"PRAGMA user_version = {_VERSION}")
        execute("INSERT INTO batch VALUES (?, ?)", (workflow, _seal([workflow])))

    def _version(self, execute: Callable[..., sqlite3.Cursor], tables: Sequence[Sequence[object]]) -> int:
        """Return the version by the tables in the file. Raises JournalError, also for triggers, views and others."""
        (version,) = execute("PRAGMA user_version").fetchone()
        # SQLite creates an index without SQL for a PRIMARY KEY or UNIQUE column.
        created = {sql for sql, kind in tables if (kind, sql) != ("index", None)}
        known = next((number for number, expected in _TABLES.items() if created == {*expected}), None)
        if known is None and version not in _TABLES:
            raise OtherVersionError(
                f"{self._path.name} was written by another version of WanStream ({version}, this one reads "
                f"{min(_TABLES)} to {_VERSION}): use that version, or move {self._path.name} and its copy away and run "
                f"the same command again, which resumes with the videos in the folder\n(in {self._path.parent})"
            )
        if known is None:
            found = repr([*created.difference(_TABLES.get(version, ()))] or "a table is missing")
            raise self._damaged(f"it was changed by another program ({found:.80})")
        if known != version:
            raise self._damaged(f"its version is {version}, and its tables are those of version {known}")
        return known

    def _raise(self, err: sqlite3.Error) -> NoReturn:
        """Raise the journal error for an SQLite error, caused by the system error if SQLite hides one."""
        # Exactly this class for a malformed file or another file type. This and other classes for the contents.
        if type(err) is sqlite3.DatabaseError or not any(text in str(err) for text in _OF_SYSTEM):
            raise self._damaged(str(err)) from err
        cause = system_error(err, self._path)
        raise JournalError(f"the journal {self._path} cannot be written: {cause.strerror}") from cause

    def _row(self, digest: str, *states: State) -> Entry:
        """Return a row entry, which has to be in one of these states."""
        assert digest in self.entries, f"there is no row {digest}"
        assert self.entries[digest].state in states, f"{self.entries[digest]} is not {states}"
        return self.entries[digest]

    def _save(self, changes: Mapping[str, Entry | None], *, attempts: Iterable[tuple[str, str]] = ()) -> None:
        """Write changed entries and remove None entries in one transaction with the new attempts."""
        # Without a look at the other entries: a batch of thousands of rows changes each row three times.
        changed = {digest: entry for digest, entry in changes.items() if entry != self.entries.get(digest)}
        with self._transaction() as execute:
            # Before any row is inserted: stems are unique, and a stem may pass from one row to another.
            for digest in changed:
                execute("DELETE FROM rows WHERE hash = ?", (digest,))
            for entry in changed.values():
                if entry is not None:
                    execute(_INSERT, _columns(entry))
            for attempt in attempts:
                execute("INSERT INTO attempts VALUES (?, ?)", attempt)
        for digest, entry in changed.items():
            if entry is None:
                self.entries.pop(digest)
            else:
                self.entries[digest] = entry

    @contextmanager
    def _transaction(self) -> Iterator[Callable[..., sqlite3.Cursor]]:
        """Execute all statements inside the `with` or none."""
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection.execute
                self._connection.execute("COMMIT")
            except BaseException:
                self._connection.rollback()
                raise
        except sqlite3.Error as err:
            self._raise(err)
