"""`wanstream batch`: many videos of one workflow, in this process, on actors of Ray or on servers; resumable."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from ...host.embedded import Prompt, api_prompt
from ...schema import format_count, format_seconds
from ..arguments import (
    DONE,
    FAILED,
    INTERRUPTED,
    INVALID,
    ArgumentError,
    StopRequest,
    create_output_folder,
    error_text,
    handle_sigint,
    read_json,
)
from ..inputs import InputError, Sockets
from ..options import BatchOptions
from .actors.ray_backend import check_ray_options, ray_backends
from .backend import BatchBackend
from .embedded_backend import EmbeddedBackend, embedded_workflow
from .fleet import run_all
from .folder.journal_header import may_be_journal, read_head
from .job_queue import JobQueue
from .journal import Journal, State, check_journal, copy_of, is_full_disk, locked
from .lanes import MAX_LANES, digest_of_lane, lane_planner
from .output_store import OutputStore, stored_prompt
from .progress import BatchBar
from .resume import FindRows, open_journal, resume
from .rows import Planner, Row, apply_row, fail_dependents, lines_by_reason, read_rows, workflow_digest, workflow_key
from .runner import Runner
from .servers import connect_all, require

JOURNAL = "journal.sqlite"
_TICK_SECONDS = 0.1
_REFRESH_SECONDS = 0.5
_MAX_REASONS = 10
"""Maximum number of different reasons in the summary, which repeats what was printed hours ago."""


@dataclass(frozen=True, kw_only=True)
class _BatchSpec:
    """Rows, workflow and backends of a batch. Rows that do not fit the workflow have a fault."""

    rows: tuple[Row, ...]
    workflow: Prompt
    backends: tuple[BatchBackend, ...]
    """The first one responds, and stands for all in the checks of the rows."""
    lanes: int
    silent: frozenset[str] = frozenset()
    """Names of the backends that do not respond."""
    notes: tuple[str, ...] = ()

    @property
    def sockets(self) -> Sockets:
        """Inputs of all node classes."""
        return self.backends[0].sockets

    def planner(self, report: Callable[[str], None]) -> Planner:
        """Return the function that groups rows into jobs; it calls `report` with the rows that cannot share one."""
        return lane_planner(self.workflow, self.sockets, self.lanes, report)


def batch(options: BatchOptions) -> int:
    """Run the unfinished rows, print the failed ones and the number of finished ones, and return the exit code."""
    with ExitStack() as opened:
        try:
            spec = _read(options, opened)
            if options.dry_run:
                return _dry_run(spec)
            store, journal, notes = _open_state(options, spec, opened)
        except (ValueError, OSError) as err:
            _print_error(error_text(err), err, options.output)
            return INVALID
        stop, made = None, Counter[str]()
        began = time.monotonic()
        try:
            stop = _run(options, spec, store, journal, notes, made)
        except (ValueError, OSError) as err:
            _print_error(f"failed: {error_text(err)}", err, options.output)
        if rows := sum(made.values()):
            seconds = time.monotonic() - began
            total, each = format_seconds(seconds), format_seconds(seconds / rows)
            print(f"{format_count(rows, 'row')} in {total} s, {each} s a row", file=sys.stderr)
        _clean_up(store, journal)
        left, failed = _print_summary(options, spec, journal, made)
    if stop is not None and stop.requested and left:
        return INTERRUPTED
    return FAILED if stop is None or left or failed else DONE


def _print_error(text: str, err: Exception, output: Path) -> None:
    print(text, file=sys.stderr)
    if is_full_disk(err):
        print(f"free space in {output}, then run the same command again to resume", file=sys.stderr)


def _clean_up(store: OutputStore, journal: Journal) -> None:
    """Back up the journal, remove leftovers and print the remaining latents. Errors do not affect the exit code."""
    try:
        journal.back_up()
        remaining = store.remove_leftovers(journal.lines_left)
    except (OSError, ArgumentError) as err:
        print(f"the journal was not copied, or the folder not cleaned up: {error_text(err)}", file=sys.stderr)
        return
    for latent, lines in remaining:
        rows = f"line {', '.join(map(str, lines))}" if lines else "a row that is not in the batch"
        print(f"the latent of {rows}, which is not done, is kept in {latent}", file=sys.stderr)


def _read(options: BatchOptions, opened: ExitStack) -> _BatchSpec:
    """Return rows, workflow and backends of the options; `opened` ends the backends. Raises ValueError or OSError.

    Runs nothing.
    """
    if options.share_weights > MAX_LANES:
        raise ArgumentError(f"--share-weights {options.share_weights}: give a number of rows from 1 to {MAX_LANES}")
    rows = read_rows(options.jobs)
    workflow = api_prompt(read_json(options.workflow))
    if options.strict and options.servers:
        raise ArgumentError("--strict has no effect on a server: enable its setting instead (Settings, WanStream)")
    check_ray_options(options)
    if options.servers:
        return _server_spec(options, rows, workflow)
    workflow = embedded_workflow(workflow)
    backends: tuple[BatchBackend, ...]
    if options.ray is not None:
        backends = opened.enter_context(ray_backends(options, workflow, rows))
    else:
        backends = (EmbeddedBackend(workflow, options),)
    checked = _checked(rows, workflow, backends[0].sockets)
    return _BatchSpec(rows=checked, workflow=workflow, backends=backends, lanes=options.share_weights)


def _server_spec(options: BatchOptions, rows: Sequence[Row], workflow: Prompt) -> _BatchSpec:
    """Return the batch for servers that are different and have everything that the rows need. Raises ValueError."""
    servers = connect_all(options.servers, workflow)
    sockets = servers.backends[0].sockets
    checked = _checked(rows, workflow, sockets)
    if len(servers.backends) > 1:
        require(servers, workflow, [apply_row(workflow, row, sockets) for row in checked if row.fault is None])
    return _BatchSpec(
        rows=checked,
        workflow=workflow,
        backends=servers.backends,
        lanes=options.share_weights,
        silent=servers.silent,
        notes=servers.notes,
    )


def _checked(rows: Sequence[Row], workflow: Prompt, sockets: Sockets) -> tuple[Row, ...]:
    """Return the rows, with a fault for each whose inputs the workflow lacks.

    Raises ArgumentError for a fault that all rows have, such as a misspelled column: none of them can run.
    """
    checked = []
    for row in rows:
        try:
            apply_row(workflow, row, sockets)
        except InputError as err:
            row = replace(row, fault=str(err))
        checked.append(row)
    faults = lines_by_reason((row.line, row.fault) for row in checked if row.fault is not None)
    for fault, (count, lines) in faults.items():
        if count == len(checked):
            raise ArgumentError(f"no row can run: {lines}: {fault}")
    return tuple(fail_dependents(checked))


def _dry_run(spec: _BatchSpec) -> int:
    """Validate all rows without queueing them."""
    valid = []
    for row in spec.rows:
        # The latent that a row continues does not exist yet.
        alone = replace(row, source=None)
        faults = [row.fault] if row.fault else spec.backends[0].faults(apply_row(spec.workflow, alone, spec.sockets))
        for fault in faults:
            print(f"{row}: {fault}", file=sys.stderr)
        valid += [] if faults else [row]
    unchecked = spec.backends[0].unchecked(spec.workflow)
    for note in filter(None, [unchecked, *spec.notes]):
        print(note, file=sys.stderr)
    jobs = spec.planner(lambda text: print(text, file=sys.stderr))(valid)
    passes = f", in {len(jobs)} passes" if spec.lanes > 1 else ""
    print(f"{len(valid)} of {len(spec.rows)} rows are valid{passes}; nothing was queued")
    return DONE if len(valid) == len(spec.rows) else INVALID


def _open_state(options: BatchOptions, spec: _BatchSpec, opened: ExitStack) -> tuple[OutputStore, Journal, list[str]]:
    """Lock and open the output folder and the journal, and restore the state. Raises ValueError or OSError.

    Returns also the notes for the user.
    """
    store = OutputStore(create_output_folder(options.output))
    path = options.journal or options.output / JOURNAL
    lock = path.with_name(f"{path.name}.lock")
    check_journal(path)
    # The lock file and the copy stay next to a journal, also next to a damaged one.
    was_journal = lock.exists() or copy_of(path).exists()
    if options.journal and not was_journal and not may_be_journal(read_head(path)):
        raise ArgumentError(f"--journal {path} is not a journal, and is not changed: give the name of a new file")
    opened.enter_context(locked(store.work_folder / "lock", of=str(options.output)))
    opened.enter_context(locked(lock, of=str(path)))
    start = partial(resume, store=store, rows=spec.rows, find_rows=_row_finder(spec))
    journal, notes = open_journal(path, workflow=workflow_digest(spec.workflow), start=start, is_own=was_journal)
    opened.enter_context(journal)
    notes += start(journal)
    store.remove_leftovers(journal.lines_left)
    return store, journal, notes


def _row_finder(spec: _BatchSpec) -> FindRows:
    """Return the function that finds the rows of a file by the workflow in its metadata."""

    @cache
    def hashes_by_key() -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for row in spec.rows:
            if row.fault is None:
                prompt = apply_row(spec.workflow, row, spec.sockets)
                for key in (workflow_key(prompt, spec.sockets), workflow_digest(prompt)):
                    found.setdefault(key, []).append(row.hash)
        return found

    def find_rows(path: Path) -> list[str]:
        try:
            stored, node_id = stored_prompt(path)
            prompt = api_prompt(stored)
        except ValueError:
            return []
        keys = (str(digest_of_lane(prompt, str(node_id))), workflow_key(prompt, spec.sockets))
        return next((hashes for key in keys if (hashes := hashes_by_key().get(key))), [])

    return find_rows


def _run(
    options: BatchOptions,
    spec: _BatchSpec,
    store: OutputStore,
    journal: Journal,
    notes: list[str],
    made: Counter[str],
) -> StopRequest:
    """Run the rows until all are finished or the user stops the batch. Raises ValueError or OSError.

    Counts the finished rows in `made`, by the name of their backend.
    """
    stop = StopRequest()
    entries = [journal.entries[row.hash] for row in spec.rows]
    ended = sum(entry.state in {State.done, State.failed} for entry in entries)
    failed = _failed(spec.rows, journal)
    faults = [f"{lines}: {error}" for error, (_, lines) in lines_by_reason(failed).items()]
    with ExitStack() as opened:
        bar = opened.enter_context(_bar(options, spec, ended))
        for note in (*faults, *spec.notes, *notes):
            bar.note(note)
        for backend in spec.backends:
            opened.enter_context(backend.opened(store.backend_folder, partial(bar.show, backend=backend.name)))
        queue = JobQueue(
            journal=journal,
            planner=spec.planner(bar.note),
            reporter=bar,
            stop=stop,
            backends=spec.backends,
            max_failures=options.max_failures,
            made=made,
        )
        queue.enter(spec.rows)
        runners = [
            Runner(
                backend=backend,
                queue=queue,
                store=store,
                sleep=partial(_sleep, queue=queue, shown=bar if len(spec.backends) == 1 else None),
                timeout_s=options.timeout_s,
                reachable=backend.name not in spec.silent,
            )
            for backend in spec.backends
        ]
        with handle_sigint(lambda: _on_stop(stop, spec.backends), requests=2):
            run_all(runners, queue, partial(_sleep, _REFRESH_SECONDS, queue=queue, shown=bar))
    return stop


def _bar(options: BatchOptions, spec: _BatchSpec, ended: int) -> BatchBar:
    noun = "actors" if options.ray is not None else "servers"
    return BatchBar(rows=len(spec.rows), ended=ended, backends=len(spec.backends), noun=noun)


def _sleep(seconds: float, *, queue: JobQueue, shown: BatchBar | None) -> None:
    """Sleep until the time is over, the batch is, or the user makes a stop request; then refresh the bar."""
    end, stop = time.monotonic() + seconds, queue.stop
    requested = stop.requested
    while (left := end - time.monotonic()) > 0 and stop.requested == requested and not (stop.immediate or queue.over):
        time.sleep(min(left, _TICK_SECONDS))
    if shown is not None:
        shown.refresh()


def _on_stop(stop: StopRequest, backends: Sequence[BatchBackend]) -> None:
    stop.count += 1
    if stop.immediate:
        for backend in backends:
            backend.halt()
    else:
        # Not `print`: this is a signal handler, and the interrupted code may be printing.
        what = b"jobs; press Ctrl-C again to stop them" if len(backends) > 1 else b"job; press Ctrl-C again to stop it"
        os.write(2, b"\nstopping after the running " + what + b" too\n")


def _failed(rows: Sequence[Row], journal: Journal) -> list[tuple[int, str]]:
    """Return the lines of the failed rows, and the error of each."""
    entries = [(row.line, journal.entries[row.hash]) for row in rows]
    return [(line, str(entry.error)) for line, entry in entries if entry.state is State.failed]


def _print_summary(
    options: BatchOptions, spec: _BatchSpec, journal: Journal, made: Mapping[str, int]
) -> tuple[int, int]:
    """Print the failed rows with their reasons and the number of finished ones; `made` are those by backend.

    Returns the numbers of rows that are left, and that failed.
    """
    entries = [journal.entries[row.hash] for row in spec.rows]
    failed = _failed(spec.rows, journal)
    done = sum(entry.state is State.done for entry in entries)
    reasons = lines_by_reason((line, error.partition("\n")[0]) for line, error in failed)
    for reason, (_, lines) in [*reasons.items()][:_MAX_REASONS]:
        print(f"{lines} failed: {reason}", file=sys.stderr)
    if more := sum(count for count, _ in [*reasons.values()][_MAX_REASONS:]):
        place = options.journal or options.output / JOURNAL
        print(f"{more} more failed: their reasons are above, and in {place}", file=sys.stderr)
    left = len(entries) - done - len(failed)
    parts = [f"{done} of {len(entries)} rows are done in {options.output}"]
    parts += [f"{len(failed)} failed: correct them and run the same command again"] if failed else []
    parts += [f"{left} are left: run the same command again to resume"] if left else []
    print("; ".join(parts))
    if len(spec.backends) > 1:
        of_address = Counter(entry.backend for entry in entries if entry.state is State.done)
        for backend in spec.backends:
            count = of_address[backend.address] if backend.address else made.get(backend.name, 0)
            of_address[backend.address] -= count
            print(f"{backend.name}: {format_count(count, 'row')}")
        for address, count in (+of_address).items():
            where = address or ("elsewhere" if options.servers else "earlier commands")
            print(f"{where}: {format_count(count, 'row')}")
    return left, len(failed)
