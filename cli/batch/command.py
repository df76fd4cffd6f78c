"""`wanstream batch`: many videos of one workflow, in this process or on a ComfyUI server, from where it stopped."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from ...host.embedded import Prompt, api_prompt
from ..arguments import ArgumentError, made_folder, read_json
from ..exit_codes import DONE, FAILED, INTERRUPTED, INVALID
from ..stop_request import StopRequest
from .backends.base import BatchBackend
from .full_disk import is_full_disk
from .jobs import Planner, single_jobs, with_values, work_of
from .journal import Journal, Lock
from .journal_entry import State
from .journal_recovery import open_journal
from .lanes import check_lanes, lane_of, lane_planner
from .media_check import stored_prompt
from .output_store import OutputStore
from .progress import BatchBar
from .resume import Recognise, Start, take_up
from .rows import Row, RowError, read_rows
from .runner import Limits, Runner
from .target import BatchTarget, embedded_ground, server_ground

JOURNAL = "journal.sqlite"
_TICK_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True)
class BatchArguments:
    """What the command line says."""

    jobs: Path
    workflow: Path
    output: Path
    server: str | None = None
    """The address of a ComfyUI server; None: this process."""
    models: Path = Path("models")
    input: Path = Path("input")
    device: str | None = None
    """None: a GPU if there is one."""
    journal: Path | None = None
    """None: in the output folder."""
    max_failures: int | None = None
    timeout_s: float = 600.0
    share_weights: int = 1
    """Rows that may share one stream of weights."""
    dry_run: bool = False
    strict: bool = False
    """Raise an error for suspicious inputs instead of a warning."""


@dataclass(frozen=True, kw_only=True)
class _BatchSpec:
    """What is to be done, and where. Rows that do not fit the workflow have their fault."""

    rows: tuple[Row, ...]
    workflow: Prompt
    ground: BatchTarget
    lanes: int

    def planner(self, tell: Callable[[str], None]) -> Planner:
        """How rows become jobs; `tell` hears which of them could not share one."""
        if self.lanes > 1:
            return lane_planner(self.workflow, self.ground.sockets, self.lanes, tell)
        return lambda rows: single_jobs(self.workflow, rows, self.ground.sockets)


@dataclass(frozen=True, kw_only=True)
class _BatchState:
    """What is locked while a batch runs, and where it goes on."""

    shelf: OutputStore
    journal: Journal
    start: Start


def batch(arguments: BatchArguments) -> int:
    """Run what is not done yet, print what has failed and how many rows are done, and return the exit code."""
    with ExitStack() as opened:
        try:
            todo = _read(arguments)
            if arguments.dry_run:
                return _dry_run(todo)
            desk = _desk(arguments, todo, opened)
        except (ValueError, OSError) as err:
            print(err, file=sys.stderr)
            _advise(err, arguments.output)
            return INVALID
        try:
            stop = _run(arguments, todo, desk)
        except (ValueError, OSError) as err:
            print(f"failed: {err}", file=sys.stderr)
            _advise(err, arguments.output)
            _put_down(desk)
            return FAILED
        _put_down(desk)
        return _summary(arguments, todo, desk.journal, stop)


def _advise(err: Exception, output: Path) -> None:
    if is_full_disk(err):
        print(f"make room in {output}: the same command goes on then", file=sys.stderr)


def _put_down(desk: _BatchState) -> None:
    """Copy the journal, remove what is of no use any more, and name what is. No error of that counts."""
    try:
        desk.journal.back_up()
        left = desk.shelf.sweep(desk.journal.lines_left)
    except OSError as err:
        print(f"the journal was not copied, or the folder not cleared: {err}", file=sys.stderr)
        return
    for latent, lines in left:
        rows = f"line {', '.join(map(str, lines))}" if lines else "a row that is not in the batch"
        print(f"the latent of {rows}, which is not done, is kept in {latent}", file=sys.stderr)


def _read(arguments: BatchArguments) -> _BatchSpec:
    """Rows, workflow and where it runs. Raises ValueError, before anything runs."""
    check_lanes(arguments.share_weights)
    rows = read_rows(arguments.jobs)
    workflow = api_prompt(read_json(arguments.workflow))
    if arguments.strict and arguments.server is not None:
        raise ArgumentError("--strict: the server decides; turn its setting on (Settings, WanStream) instead")
    if arguments.server is not None:
        ground = server_ground(arguments.server, workflow)
    else:
        folders = {"models": arguments.models, "input_dir": arguments.input, "output": arguments.output}
        ground = embedded_ground(workflow, **folders, device=arguments.device, strict=arguments.strict)
    fitted = tuple(_fitted(row, workflow, ground) for row in rows)
    return _BatchSpec(rows=fitted, workflow=workflow, ground=ground, lanes=arguments.share_weights)


def _fitted(row: Row, workflow: Prompt, ground: BatchTarget) -> Row:
    """The row, with its fault if the workflow has no place for a value of it."""
    try:
        with_values(workflow, row, ground.sockets)
    except RowError as err:
        return replace(row, fault=str(err))
    return row


def _dry_run(todo: _BatchSpec) -> int:
    """Judge every row and queue nothing."""
    valid = []
    for row in todo.rows:
        faults = [row.fault] if row.fault else todo.ground.faults(with_values(todo.workflow, row, todo.ground.sockets))
        for fault in faults:
            print(f"line {row.line}: {fault}", file=sys.stderr)
        valid += [] if faults else [row]
    unjudged = todo.ground.unjudged(todo.workflow)
    if unjudged:
        print(unjudged, file=sys.stderr)
    jobs = todo.planner(lambda text: print(text, file=sys.stderr))(valid)
    passes = f", in {len(jobs)} passes" if todo.lanes > 1 else ""
    print(f"{len(valid)} of {len(todo.rows)} rows are valid{passes}; nothing was queued")
    return DONE if len(valid) == len(todo.rows) else INVALID


def _desk(arguments: BatchArguments, todo: _BatchSpec, opened: ExitStack) -> _BatchState:
    """Everything that this process alone may write now. Raises ValueError or OSError."""
    shelf = OutputStore(made_folder(arguments.output))
    path = arguments.journal or arguments.output / JOURNAL
    opened.enter_context(Lock(shelf.workshop / "lock", of=str(arguments.output)))
    opened.enter_context(Lock(path.with_name(f"{path.name}.lock"), of=str(path)))
    recognise = _recogniser(todo)
    journal, recovered = open_journal(
        path,
        workflow=_digest(todo.workflow),
        start=lambda journal: take_up(journal, shelf, todo.rows, recognise).notes,
    )
    opened.enter_context(journal)
    start = take_up(journal, shelf, todo.rows, recognise)
    shelf.sweep(journal.lines_left)
    return _BatchState(shelf=shelf, journal=journal, start=replace(start, notes=(*recovered, *start.notes)))


def _recogniser(todo: _BatchSpec) -> Recognise:
    """The rows whose workflow a file holds."""

    @cache
    def by_work() -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for row in todo.rows:
            if row.fault is None:
                prompt = with_values(todo.workflow, row, todo.ground.sockets)
                found.setdefault(work_of(prompt, todo.ground.sockets), []).append(row.hash)
        return found

    def recognise(path: Path) -> list[str]:
        try:
            stored, node_id = stored_prompt(path)
            prompt = lane_of(api_prompt(stored), str(node_id))
        except ValueError:
            return []
        return by_work().get(work_of(prompt, todo.ground.sockets), [])

    return recognise


def _run(arguments: BatchArguments, todo: _BatchSpec, desk: _BatchState) -> StopRequest:
    """Run the rows to their end, or to where the user wants it. Raises ValueError or OSError."""
    start, stop = desk.start, StopRequest()
    with ExitStack() as opened:
        bar = opened.enter_context(BatchBar(rows=len(todo.rows), ended=start.done + len(start.faults)))
        for note in (*(f"line {row.line}: {fault}" for row, fault in start.faults), *start.notes):
            bar.note(note)
        host = opened.enter_context(todo.ground.opened(desk.shelf.made, bar.show))
        runner = Runner(
            host=host,
            journal=desk.journal,
            shelf=desk.shelf,
            planner=todo.planner(bar.note),
            teller=bar,
            stop=stop,
            limits=Limits(failures=arguments.max_failures, timeout_s=arguments.timeout_s),
            sleep=lambda seconds: _sleep(seconds, stop, bar),
            failures=len(start.faults),
        )
        with stop.listening(lambda: _on_stop(stop, host)):
            runner.run(start.waiting, start.flights)
    return stop


def _sleep(seconds: float, stop: StopRequest, bar: BatchBar) -> None:
    """Shorter when the user asks for the end meanwhile."""
    end = time.monotonic() + seconds
    asked = stop.soon
    while (left := end - time.monotonic()) > 0 and stop.soon == asked and not stop.at_once:
        time.sleep(min(left, _TICK_SECONDS))
    bar.tick()


def _on_stop(stop: StopRequest, host: BatchBackend) -> None:
    if stop.at_once:
        host.halt()
    else:
        os.write(2, b"\nstopping after what runs now; Ctrl-C again stops that too\n")


def _summary(arguments: BatchArguments, todo: _BatchSpec, journal: Journal, stop: StopRequest) -> int:
    """The rows that failed with their reasons, and how many are done."""
    known = journal.entries()
    entries = [known[row.hash] for row in todo.rows]
    failed = [entry for entry in entries if entry.state is State.failed]
    done = sum(entry.state is State.done for entry in entries)
    for entry in failed:
        print(f"line {entry.line} failed: {entry.error}", file=sys.stderr)
    left = len(entries) - done - len(failed)
    parts = [f"{done} of {len(entries)} rows are done in {arguments.output}"]
    parts += [f"{len(failed)} failed"] if failed else []
    parts += [f"{left} are left: the same command goes on with them"] if left else []
    print("; ".join(parts))
    if stop.soon and left:
        return INTERRUPTED
    return FAILED if left or failed else DONE


def _digest(workflow: Prompt) -> str:
    """The same for workflows that differ in titles alone."""
    plain = {
        node_id: {key: value for key, value in node.items() if key != "_meta"} for node_id, node in workflow.items()
    }
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
