"""`wanstream batch`: many videos from one workflow, in this process, on Ray actors or on servers.

Resumable.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from ...batch import (
    MAX_LANES,
    BatchBackend,
    BatchSpec,
    OpenBatch,
    StopRequest,
    check_classes,
    is_full_disk,
    open_batch,
    own_nodes,
    read_rows,
    run_batch,
    server_spec,
)
from ...host.embedded import (
    EmbeddedHost,
    Prompt,
    Sockets,
    api_prompt,
    class_sockets,
    embedded_nodes,
    tidy_workflow,
)
from ...schema.text import error_text, format_count, format_seconds
from .. import arguments
from ..options import BatchOptions
from ..terminal import print_note
from .embedded_backend import EmbeddedBackend
from .ray_backend import check_ray_options, ray_backends

_MAX_REASONS = 10
"""Maximum number of different reasons in the summary. They were printed before, maybe hours ago."""


def batch(options: BatchOptions) -> int:
    """Run the unfinished rows, and return the exit code.

    Prints the failed rows and the number of finished ones.
    """
    with ExitStack() as opened:
        try:
            spec = _spec(options, opened)
            # A dry run must create nothing, so it ends before the folder is made.
            if options.dry_run:
                return _dry_run(spec)
            folder = arguments.create_output_folder(options.output)
            state = opened.enter_context(
                open_batch(spec, folder, options.journal, max_failures=options.max_failures)
            )
        except (ValueError, OSError) as err:
            _print_error(error_text(err), err, options.output)
            return arguments.INVALID
        # Outside the `try`: later errors are failures, not invalid arguments.
        return _run(options, state)


def _run(options: BatchOptions, batch: OpenBatch) -> int:
    """Run the rows, print the summary, and return the exit code."""
    stop = StopRequest()
    began = time.monotonic()
    error: Exception | None = None
    try:
        run_batch(
            batch,
            stop,
            noun="servers" if options.actors.ray is None else "actors",
            timeout_s=options.timeout_s,
            stoppable=arguments.handle_sigint(
                partial(_on_stop, stop, batch.spec.backends), requests=2
            ),
        )
    except (ValueError, OSError) as err:
        error = err
        _print_error(f"failed: {error_text(err)}", err, options.output)
    rows = batch.tally.made.total()
    if rows:
        seconds = time.monotonic() - began
        total = format_seconds(seconds)
        print_note(
            f"{format_count(rows, 'row')} in {total} s, {format_seconds(seconds / rows)} s a row"
        )
    _clean_up(batch)
    left, failed = _print_summary(options, batch)
    # A stop after the last row is a normal end.
    if error is None and stop.requested and left:
        return arguments.INTERRUPTED
    if error is not None or left or failed:
        return arguments.FAILED
    return arguments.DONE


def _spec(options: BatchOptions, opened: ExitStack) -> BatchSpec:
    """Return the rows, workflow and backends from the options. `opened` ends the backends.

    Raises ValueError or OSError. Runs nothing.
    """
    if options.share_weights > MAX_LANES:
        raise arguments.ArgumentError(
            f"--share-weights {options.share_weights}: give a number of rows from 1 to {MAX_LANES}"
        )
    rows = read_rows(options.jobs)
    workflow = api_prompt(arguments.read_json(options.workflow))
    if options.strict and options.servers:
        raise arguments.ArgumentError(
            "--strict has no effect on a server: enable its setting instead (Settings, WanStream)"
        )
    # Ray takes many seconds to start, so wrong options are refused first.
    check_ray_options(options)
    if options.servers:
        return server_spec(options.servers, rows, workflow, options.share_weights)
    workflow, sockets = _embedded_workflow(workflow)
    backends: Sequence[BatchBackend]
    if options.actors.ray is not None:
        backends = opened.enter_context(
            ray_backends(options, workflow, sockets, [row.values for row in rows])
        )
    else:
        backend = EmbeddedBackend(
            options.local, EmbeddedHost(), sockets, output=options.output, strict=options.strict
        )
        backends = [backend]
    return BatchSpec.checked(rows, workflow, backends, options.share_weights)


def _embedded_workflow(workflow: Prompt) -> tuple[Prompt, Sockets]:
    """Return a workflow without frontend-only parts, and the inputs of all embedded nodes.

    Prints a note for each removed part. Raises SetupError for foreign nodes in the workflow.
    """
    classes = embedded_nodes(own_nodes().values())
    tidied = tidy_workflow(workflow, classes)
    for note in tidied.notes:
        print_note(f"note: {note}")
    hint = (
        "only the nodes of this pack run without ComfyUI: start a server, and give its address "
        "with --server"
    )
    check_classes(tidied.prompt, classes, hint)
    return tidied.prompt, class_sockets(classes)


def _dry_run(spec: BatchSpec) -> int:
    """Validate all rows without queueing them."""
    valid = []
    for row in spec.rows:
        faults = spec.faults_of(row)
        for fault in faults:
            print_note(f"{row}: {fault}")
        if not faults:
            valid.append(row)
    unchecked = spec.backends[0].unchecked(spec.workflow)
    for note in filter(None, [unchecked, *spec.notes]):
        print_note(note)
    jobs = spec.planner(print_note)(valid)
    passes = f", in {len(jobs)} passes" * (spec.lanes > 1)
    print(f"{len(valid)} of {len(spec.rows)} rows are valid{passes}; nothing was queued")
    return arguments.DONE if len(valid) == len(spec.rows) else arguments.INVALID


def _on_stop(stop: StopRequest, backends: Sequence[BatchBackend]) -> None:
    stop.count += 1
    if stop.immediate:
        for backend in backends:
            backend.halt()
        return
    # Not `print`: this is a signal handler, and the interrupted code may be printing.
    what = b"job; press Ctrl-C again to stop it"
    if len(backends) > 1:
        what = b"jobs; press Ctrl-C again to stop them"
    os.write(2, b"\nstopping after the running " + what + b" too\n")


def _print_error(text: str, err: Exception, output: Path) -> None:
    print_note(text)
    if is_full_disk(err):
        print_note(f"free space in {output}, then run the same command again to resume")


def _clean_up(batch: OpenBatch) -> None:
    """Clean up and print the remaining latents. Errors do not affect the exit code."""
    try:
        remaining = batch.clean_up()
    except (OSError, ValueError) as err:
        print_note(f"the journal was not copied, or the folder not cleaned up: {error_text(err)}")
        return
    for latent, lines in remaining:
        rows = "a row that is not in the batch"
        if lines:
            rows = f"line {', '.join(map(str, lines))}"
        print_note(f"the latent of {rows}, which is not done, is kept in {latent}")


def _print_summary(options: BatchOptions, batch: OpenBatch) -> tuple[int, int]:
    """Print the failed rows with their reasons and the number of finished ones.

    Returns the numbers of remaining and of failed rows.
    """
    reasons = batch.failures(whole=False)
    for reason, _, lines in reasons[:_MAX_REASONS]:
        print_note(f"{lines} failed: {reason}")
    more = sum(count for _, count, _ in reasons[_MAX_REASONS:])
    if more:
        print_note(f"{more} more failed: their reasons are above, and in {batch.journal.path}")
    rows = len(batch.spec.rows)
    failed = batch.ended - batch.done
    left = rows - batch.ended
    parts = [f"{batch.done} of {rows} rows are done in {options.output}"]
    if failed:
        parts.append(f"{failed} failed: correct them and run the same command again")
    if left:
        parts.append(f"{left} are left: run the same command again to resume")
    print("; ".join(parts))
    if len(batch.spec.backends) > 1:
        elsewhere = "elsewhere" if options.servers else "earlier commands"
        by_name, by_address = batch.done_by()
        for name, count in by_name.items():
            print(f"{name}: {format_count(count, 'row')}")
        for address, count in by_address.items():
            print(f"{address or elsewhere}: {format_count(count, 'row')}")
    return left, failed
