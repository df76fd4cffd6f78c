"""Journal file head, read before SQLite opens the file.

SQLite believes most of these bytes: others make it use another page size, create a write-ahead log,
or refuse to write.
"""

from __future__ import annotations

import functools
import sqlite3
import struct
import tempfile
from contextlib import closing
from pathlib import Path

HEAD_BYTES = 100
_MAGIC = b"SQLite format 3\0"
_APPLICATION_AT = 68
_ROOT_PAGE = "largest root page"
_FIXED = (
    ("format of the file", 18, b"\1\1"),
    ("reserved bytes of a page", 20, b"\0"),
    ("payload fractions", 21, b"\x40\x20\x20"),
    ("format of the schema", 44, b"\0\0\0\4"),
    ("size of the cache", 48, bytes(4)),
    (_ROOT_PAGE, 52, bytes(4)),
    ("encoding of texts", 56, b"\0\0\0\1"),
    ("incremental vacuum", 64, bytes(4)),
    ("reserved bytes", 72, bytes(20)),
)
"""Fields that are the same in every journal by an SQLite with the usual settings: name, offset and
value."""


def read_head(path: Path) -> bytes:
    """Return the first bytes of a file, or none if it does not exist. Raises OSError."""
    try:
        with path.open("rb") as file:
            return file.read(HEAD_BYTES)
    except FileNotFoundError:
        return b""


def may_be_journal(head: bytes) -> bool:
    """Return True for the head of an empty file, or one that begins like an SQLite database."""
    return head[: len(_MAGIC)] in (b"", _MAGIC)


def application_of(head: bytes) -> int | None:
    """Return the application id in a database head. None for another file."""
    if len(head) < HEAD_BYTES or not head.startswith(_MAGIC):
        return None
    return int.from_bytes(head[_APPLICATION_AT : _APPLICATION_AT + 4], "big")


@functools.cache
def _new_head() -> bytes:
    """Return the head of a new database: some SQLite builds reserve bytes, or vacuum automatically.

    It has a table: without one, SQLite leaves the formats of the schema and of texts at 0.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "new.sqlite")
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE one (number)")
        return read_head(path)


def header_fault(head: bytes, nbytes: int) -> str:
    """Return the damaged field in the head of a file with `nbytes`, or "".

    Args:
        head: as from `read_head`. Empty for a new journal.
        nbytes: file size, without an unfinished transaction.
    """
    if not nbytes:
        return ""
    if len(head) < HEAD_BYTES or not head.startswith(_MAGIC):
        return "the file is not a database"
    # The head is big-endian on every machine.
    (stored,) = struct.unpack_from(">H", head, 16)
    # SQLite stores 65536 as 1.
    page = {1: 65536}.get(stored, stored)
    if page < 512 or page & (page - 1):
        return f"the size of a page is {page}"
    changes, pages = struct.unpack_from(">II", head, 24)
    for name, start, usual in _FIXED:
        field = slice(start, start + len(usual))
        found = head[field]
        if found == usual:
            continue
        expected = _new_head()[field]
        if found == expected:
            continue
        # With automatic vacuum, this number grows with the tables.
        if name != _ROOT_PAGE or expected == usual or not 0 < int.from_bytes(found, "big") <= pages:
            return f"the {name} is {found.hex()}, not {expected.hex()}"
    (valid_for,) = struct.unpack_from(">I", head, 92)
    # SQLite writes both numbers in every transaction.
    if changes != valid_for:
        return f"the counter of changes is {changes}, and its copy {valid_for}"
    if pages * page != nbytes:
        return f"{pages} pages of {page} bytes are expected, in a file of {nbytes} bytes"
    return ""
