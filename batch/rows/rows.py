"""Batch rows, and the jobs they become.

A row sets workflow inputs, as `node.input`, and optionally the `name` of its files, and the name of
the row that it `continues`. An unreadable row fails without the others, except the rows that
continue it.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from ...host.embedded import InputError, Prompt, Sockets, converted, names_an_input, with_inputs
from ...schema.text import parse_json
from ..folder.names import name_key, stem_fault
from .continued import continue_from, latent_name

NAME = "name"
"""Column with the name of the row's files. It is not an input."""

CONTINUES = "continues"
"""Column with the name of the row to continue. It is not an input."""

_COLUMNS = (NAME, CONTINUES)

_OTHER_SEPARATORS = {";", "\t"}


class JobsError(ValueError):
    """The rows file is not usable. The message contains the path."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row in the file.

    `values` are unconverted: text in a CSV file (`as_text`), JSON values otherwise. A row with a
    `fault` has none.
    """

    line: int
    """Number of the first line in the file, from 1."""
    position: int
    """Row number in the file, from 1."""
    hash: str
    """Row identity, independent of the position: SHA-256 of the content, the number of earlier
    duplicates, and the hash of the continued row."""
    name: str | None = None
    continues: str | None = None
    """Name of the continued row."""
    source: str | None = None
    """Hash of the continued row."""
    depth: int = 0
    """Number of rows to finish before it, one after the other."""
    # Rows are dict keys, and a dict field cannot be hashed. The field `hash` covers the content.
    values: Mapping[str, Any] = field(default_factory=dict, hash=False)
    as_text: bool = False
    fault: str | None = None
    is_blocked: bool = False
    """True if the continued row has the fault."""

    def __str__(self) -> str:
        return f"line {self.line}"


def read_rows(path: Path) -> list[Row]:
    """Return all rows in a .csv, .jsonl or .ndjson file, unreadable ones with a fault.

    Raises JobsError.
    """
    parse = _PARSERS.get(path.suffix.lower())
    if parse is None:
        raise JobsError(
            f"{path}: rows are read from a .csv file or from JSON lines in a .jsonl file"
        )
    try:
        # Excel writes a byte order mark.
        content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as err:
        raise JobsError(f"{path} cannot be read: {err.strerror}") from err
    try:
        rows = [*_rows(parse(content), as_text=parse is _csv_rows)]
    except JobsError as err:
        raise JobsError(f"{path}: {err}") from err
    if not rows:
        raise JobsError(f"{path} has no rows")
    return fail_dependents(_linked(rows))


_Parsed: TypeAlias = tuple[int, object, Mapping[str, Any], str | None]
"""A row's line, content, cells and fault. A row with a fault has no cells."""


def _rows(found: Iterable[_Parsed], *, as_text: bool) -> Iterator[Row]:
    """Return the rows. An invalid name, or an earlier row's name, is a fault."""
    seen: Counter[str] = Counter()
    owners: dict[str, int] = {}
    for position, (line, content, cells, fault) in enumerate(found, 1):
        # The order of the keys in a JSON row does not matter.
        text = json.dumps(content, sort_keys=True)
        digest = hashlib.sha256(json.dumps([text, seen[text]]).encode()).hexdigest()
        seen[text] += 1
        name = cells.get(NAME)
        if name is not None:
            wrong = stem_fault(name)
            if wrong is None and owners.setdefault(name_key(name), line) != line:
                wrong = f"is already used by line {owners[name_key(name)]}"
            fault = wrong and f"{NAME} '{name}' {wrong}"
        yield Row(
            line=line,
            position=position,
            hash=digest,
            name=name,
            continues=cells.get(CONTINUES),
            values={key: value for key, value in cells.items() if key not in _COLUMNS},
            as_text=as_text,
            fault=fault,
        )


def _linked(rows: Sequence[Row]) -> list[Row]:
    """Return the rows, each with the hash of the continued row.

    An unknown name, or a circle, is a fault.
    """
    # Reversed, so that the first of several rows with one name counts.
    named = {name_key(row.name): row for row in reversed(rows) if row.name is not None}
    linked: dict[str, Row] = {}

    for row in rows:
        # The row and its predecessors, up to one that is linked or is in the chain.
        chain = dict[str, Row]()
        source: Row | None = row
        while source is not None and source.hash not in chain and source.hash not in linked:
            chain[source.hash] = source
            source = named.get(name_key(source.continues or ""))
        for each in reversed(chain.values()):
            linked[each.hash] = _with_source(each, named, linked)
    return [linked[row.hash] for row in rows]


def _with_source(row: Row, named: Mapping[str, Row], linked: Mapping[str, Row]) -> Row:
    if row.continues is None or row.fault is not None:
        return row
    source = named.get(name_key(row.continues))
    if source is None:
        return replace(row, fault=f"{CONTINUES} '{row.continues}': no row has this {NAME}")
    if source.hash not in linked:
        return replace(
            row, fault=f"{CONTINUES} '{row.continues}', which continues it in turn: a circle"
        )
    before = linked[source.hash]
    # A change to the row before is a change to this row: it would continue another video.
    digest = hashlib.sha256(json.dumps([row.hash, before.hash]).encode()).hexdigest()
    return replace(row, hash=digest, source=before.hash, depth=before.depth + 1)


def fail_dependents(rows: Sequence[Row]) -> list[Row]:
    """Return the rows, with a fault for rows that continue a faulty one, directly or not."""
    by_hash = {row.hash: row for row in rows}
    # By depth, so a fault reaches all rows behind it.
    for row in sorted(rows, key=lambda row: row.depth):
        source = by_hash.get(row.source or "")
        if row.fault is None and source is not None and source.fault is not None:
            reason = f"it continues '{row.continues}' ({source}), which cannot run"
            by_hash[row.hash] = replace(row, fault=reason, is_blocked=True)
    return [by_hash[row.hash] for row in rows]


def lines_by_reason(faults: Iterable[tuple[int, str]]) -> dict[str, tuple[int, str]]:
    """Return, by reason, the number of rows with this fault, and their lines as "lines 3, 5-9"."""
    lines: dict[str, list[int]] = {}
    for line, reason in faults:
        lines.setdefault(reason, []).append(line)
    return {reason: (len(found), _lines_text(sorted(found))) for reason, found in lines.items()}


def _lines_text(lines: Sequence[int]) -> str:
    ranges: list[list[int]] = []
    for line in lines:
        if ranges and line == ranges[-1][-1] + 1:
            ranges[-1][1:] = [line]
        else:
            ranges.append([line])
    return f"line{'s' * (len(lines) > 1)} {', '.join('-'.join(map(str, each)) for each in ranges)}"


def _csv_rows(content: bytes) -> Iterator[_Parsed]:
    try:
        text = content.decode()
    except UnicodeDecodeError as err:
        line = content[: err.start].count(b"\n") + 1
        raise JobsError(f"line {line} is not UTF-8: save the file as CSV in UTF-8") from err
    # csv needs the line breaks in quoted cells as they are.
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = _header(next(reader, []))
    except csv.Error as err:
        raise JobsError(f"line 1 is not CSV: {err}") from err
    while True:
        # `line_num` counts physical lines, and a quoted cell may span several.
        line = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as err:
            yield line, str(err), {}, f"this is not CSV: {err}"
            continue
        if cells is None:
            return
        # Filled cells only: spreadsheets append empty ones.
        if any(cells[len(header) :]):
            yield line, cells, {}, f"{len(cells)} cells, but {len(header)} columns"
        elif any(cells):
            # An empty or missing cell keeps the workflow's value.
            values = {column: cell for column, cell in zip(header, cells, strict=False) if cell}
            yield line, values, values, None


def _header(cells: list[str]) -> list[str]:
    header = [cell.strip() for cell in cells]
    inputs = [cell for cell in header if cell not in _COLUMNS]
    wrong = [cell for cell in inputs if not names_an_input(cell) or set(cell) & _OTHER_SEPARATORS]
    if wrong:
        raise JobsError(
            f"column '{wrong[0]}': call columns node.input, {NAME} or {CONTINUES}, and separate "
            "them by commas"
        )
    twice = [cell for cell, count in Counter(header).items() if count > 1]
    if twice:
        raise JobsError(f"there are two columns '{twice[0]}'")
    return header


def _json_rows(content: bytes) -> Iterator[_Parsed]:
    # `bytes.splitlines` splits at CR and LF only. `str.splitlines` would also split at U+2028,
    # U+0085 and others inside JSON strings.
    for line, raw in enumerate(content.splitlines(), 1):
        if not raw.strip():
            continue
        try:
            values = _json_object(raw)
        except ValueError as err:
            # The row's hash is computed from JSON, and JSON takes hex but not arbitrary bytes.
            yield line, raw.hex(), {}, str(err)
        else:
            yield line, values, values, None


_PARSERS = dict.fromkeys((".jsonl", ".ndjson"), _json_rows) | {".csv": _csv_rows}
"""Parsers by file suffix."""


def _json_object(raw: bytes) -> dict[str, Any]:
    values = parse_json(raw)
    if not isinstance(values, dict):
        raise InputError('a row is an object: {"node.input": value, ...}')
    wrong = [key for key in values if key not in _COLUMNS and not names_an_input(key)]
    if wrong:
        raise InputError(f"'{wrong[0]}': write node.input, {NAME} or {CONTINUES}")
    for key in _COLUMNS:
        if not isinstance(values.get(key, ""), str):
            raise InputError(f"{key} is a text, not {json.dumps(values[key])}")
    return values


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """One workflow to queue, and its rows."""

    prompt: Prompt
    rows: tuple[Row, ...]
    saves: Mapping[str, frozenset[str] | None]
    """Nodes that save a row's files, by row hash. None: all nodes."""
    reason: str = field(default="", compare=False)
    """Reason why a single row could not share the job with others."""


Planner: TypeAlias = Callable[[Sequence[Row]], list[BatchJob]]
"""Groups rows without faults into jobs. Every row is in one job."""


def apply_row(workflow: Prompt, row: Row, sockets: Sockets) -> Prompt:
    """Return a copy of the workflow with the row's values.

    Raises InputError, also for a row's fault.
    """
    if row.fault is not None:
        raise InputError(row.fault)
    prompt = with_inputs(workflow, row.values, sockets, as_text=row.as_text)
    if row.source is None:
        return prompt
    return continue_from(prompt, workflow, latent_name(workflow_digest(workflow), row.source))


def workflow_key(prompt: Prompt, sockets: Sockets) -> str:
    """Return a text, equal for equivalent workflows.

    Ignores titles and number notation.
    """
    traits: dict[str, object] = {}
    for node_id, node in prompt.items():
        known = sockets.get(node.get("class_type", ""), {})
        inputs = {
            name: converted(known[name], value)[0]
            if name in known and not isinstance(value, list)
            else value
            for name, value in node.get("inputs", {}).items()
        }
        traits |= node_traits(
            {node_id: {"class_type": node.get("class_type"), "inputs": inputs}}, node_id
        )
    return json.dumps(traits, sort_keys=True)


def workflow_digest(prompt: Prompt) -> str:
    """Return a workflow digest that ignores titles and number notation."""
    return hashlib.sha256(workflow_key(prompt, {}).encode()).hexdigest()


def node_traits(prompt: Prompt, node_id: str) -> dict[str, object]:
    """Return a node's class under its id, and its inputs under `node.input`."""
    node = prompt[node_id]
    inputs = {f"{node_id}.{name}": _plain(value) for name, value in node.get("inputs", {}).items()}
    return {node_id: node.get("class_type"), **inputs}


def _plain(value: object) -> object:
    """Return the value, with 4 instead of 4.0, because rows may contain either notation."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
