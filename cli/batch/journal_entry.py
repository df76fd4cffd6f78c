"""One row of a journal as a value. A journal is untrusted, so every value in it is checked."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .rows import FILE_NAME

COLUMNS = "hash, line, stem, state, prompt_id, attempts, error, saves, files"

PROMPT_ID = re.compile(r"\w[\w-]{0,99}")
"""Format of prompt ids; without separators, because they become names of folders and parts of URLs."""

_MADE = re.compile(r"(?:~\d{1,9})?(?:\.\w{1,15})?")
"""The text after the stem in the name of a file: a number if there are several, and a suffix."""


class State(str, Enum):
    """The state of a row."""

    waiting = "waiting"
    """Not sent to a host."""
    posted = "posted"
    """Possibly sent to a host: the prompt id is written before it is sent."""
    placing = "placing"
    """Its files are fetched and checked; some of them may have been renamed already."""
    done = "done"
    failed = "failed"
    """Tried again by the next command."""


@dataclass(frozen=True, kw_only=True)
class KeptFile:
    """One file of a row; `name` is that in the output folder."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Entry:
    """State of one row. `stem` is the stem of its file names, `saves` are the nodes that save them; None: all nodes.

    `line` is None for a former row, which is no longer in the file of rows.
    """

    hash: str
    line: int | None
    stem: str | None
    state: State
    prompt_id: str | None
    attempts: int
    error: str | None
    saves: frozenset[str] | None
    files: tuple[KeptFile, ...]


def entry_of(row: Sequence[Any]) -> Entry:
    """Return the entry of a table row in the order of `COLUMNS`. Raises ValueError for invalid values.

    File names must start with the row's stem, so that no entry names a file outside the folder.
    """
    digest, line, stem, state, prompt_id, attempts, error, saves, files = row
    try:
        entry = Entry(
            hash=_typed(digest, str),
            line=None if line is None else _typed(line, int),
            stem=None if stem is None else _typed(stem, str),
            state=State(state),
            prompt_id=None if prompt_id is None else _typed(prompt_id, str),
            attempts=_typed(attempts, int),
            error=None if error is None else _typed(error, str),
            saves=None if saves is None else frozenset(_typed(node, str) for node in _listed(saves)),
            files=tuple(_file(file) for file in _listed(files)),
        )
        _check(entry)
    except (ValueError, TypeError, RecursionError) as err:
        raise ValueError(f"the row of line {line!r:.20} is invalid: {err}") from err
    return entry


def _check(entry: Entry) -> None:
    if entry.stem is not None and not FILE_NAME.fullmatch(entry.stem):
        raise ValueError(f"{entry.stem!r} is not the stem of a file name")
    for file in entry.files:
        if entry.stem is None or not file.name.startswith(entry.stem):
            raise ValueError(f"{file.name!r} is not a file of {entry.stem!r}")
        if not _MADE.fullmatch(file.name[len(entry.stem) :]):
            raise ValueError(f"{file.name!r} is not the name of a file in this folder")
    if entry.prompt_id is not None and not PROMPT_ID.fullmatch(entry.prompt_id):
        raise ValueError(f"{entry.prompt_id!r} is not a prompt id")
    if entry.state is State.posted and entry.prompt_id is None:
        raise ValueError("it was posted without a prompt id")
    if entry.state in {State.placing, State.done} and not entry.files:
        raise ValueError(f"it is {entry.state.value} and has no files")


def _file(described: object) -> KeptFile:
    if not isinstance(described, dict) or described.keys() != {"name", "size", "sha256"}:
        raise ValueError("a file has a name, a size and a sha256")
    return KeptFile(
        name=_typed(described["name"], str),
        size=_typed(described["size"], int),
        sha256=_typed(described["sha256"], str),
    )


def _listed(text: object) -> list[Any]:
    found: list[Any] = _typed(json.loads(_typed(text, str)), list)
    return found


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{value!r:.40} is not of type {kind.__name__}")
    return value
