"""State of a row in the journal, and its columns in the table."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, get_type_hints

from ..folder.names import PROMPT_ID, is_made_name, stem_fault


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
class RowEntry:
    """Row state, in the order of the table columns.

    Args:
        line: line in the file of rows. None for a former row, no longer in the file.
        stem: file name stem.
        attempts: number of posts.
        saves: nodes that save the files. None: all nodes.
        files: the row's files. Unless it is `placing` or `done` they are former files, and some are
            missing.
        backend: last backend's address. None: this process.
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


COLUMNS = get_type_hints(RowEntry) | {"state": str, "saves": str | None, "files": str}
"""Column types. `saves` and `files` are JSON lists."""

_FILE = get_type_hints(KeptFile)
SEAL = "seal"
"""Column with a digest of the others: SQLite does not notice another byte in a text or a number."""


def columns_of(entry: RowEntry) -> dict[str, Any]:
    """Return the columns of an entry, sealed."""
    saves = None
    if entry.saves is not None:
        saves = json.dumps(sorted(entry.saves))
    files = json.dumps([asdict(file) for file in entry.files])
    # `|` keeps the order of the fields. The seal is a digest of the values in this order.
    columns = vars(entry) | {"state": entry.state.value, "saves": saves, "files": files}
    return columns | {SEAL: seal_of([*columns.values()])}


def seal_of(values: Sequence[object]) -> str:
    """Return a digest of the values of a row."""
    # `default`, because a damaged value may be bytes.
    return hashlib.sha256(json.dumps(values, default=repr).encode()).hexdigest()[:16]


def entry_of(row: Sequence[Any]) -> RowEntry:
    """Return the entry for a table row without seal. Raises ValueError for invalid values.

    File names must start with the row's stem, so that no entry names a file outside the folder.
    """
    try:
        values = {
            name: _typed(value, kind)
            for (name, kind), value in zip(COLUMNS.items(), row, strict=True)
        }
        saves = None
        if values["saves"] is not None:
            saves = frozenset(_typed(node, str) for node in _listed(values["saves"]))
        files = tuple(_file(file) for file in _listed(values["files"]))
        entry = RowEntry(
            **values | {"state": State(values["state"]), "saves": saves, "files": files}
        )
        _check(entry)
    except (ValueError, TypeError, RecursionError) as err:
        raise ValueError(f"the row of line {row[1]!r:.20} is invalid: {err}") from err
    return entry


def _check(entry: RowEntry) -> None:
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
    # The stamp has a default and may be missing.
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
