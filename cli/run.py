"""`wanstream run`: a workflow in the embedded host, with progress and a table of its steps."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from tqdm import tqdm  # type: ignore[import-untyped]

from ..bench import run_table
from ..host.embedded import (
    EmbeddedHost,
    Folders,
    History,
    NodeFailedError,
    NodeProgress,
    Verdict,
    Workflow,
    api_prompt,
    apply_overrides,
    class_sockets,
    embedded_nodes,
    load_workflow,
)
from ..nodes import REPORT, TIMELINE, WARNINGS, WanStreamExtension
from ..schema import Cancelled
from ..schema.records import Timeline
from ..schema.text import error_text
from . import arguments
from .options import RunOptions
from .terminal import print_bug, print_note


def run(options: RunOptions) -> int:
    """Run the workflow, print its table of steps and file paths, and return the exit code."""
    host = EmbeddedHost()
    try:
        workflow = _load(options, host)
    except ValueError as err:
        print_note(err)
        return arguments.INVALID
    try:
        # The first Ctrl-C ends the run at the next block or node.
        with arguments.handle_sigint(host.stop, requests=1), closing(progress_of_run()) as progress:
            history = workflow.run(on_progress=progress.show)
    except NodeFailedError as err:
        print_bug(err)
        print_note(f"failed: {error_text(err)}")
        return arguments.FAILED
    except Cancelled:
        print_note("stopped")
        return arguments.INTERRUPTED
    finally:
        host.free_experts()
    _print_results(history, options.output)
    return arguments.DONE


def _load(options: RunOptions, host: EmbeddedHost) -> Workflow:
    """Return the workflow with the overrides from the command line.

    Raises ValueError if it is invalid. Runs nothing.
    """
    arguments.check_models(options.models)
    device = arguments.device_of(options.device)
    nodes = asyncio.run(WanStreamExtension().get_node_list())
    prompt = api_prompt(arguments.read_json(options.workflow))
    sockets = class_sockets(embedded_nodes(nodes))
    workflow = load_workflow(
        apply_overrides(prompt, options.overrides, sockets),
        host=host,
        nodes=nodes,
        folders=Folders(models=options.models, output=options.output, input=options.input),
        device=device,
        strict=options.strict,
    )
    # ComfyUI would run the valid outputs and drop the others. Here a missing file must be reported
    # before the run.
    if workflow.verdict.error or workflow.verdict.node_errors:
        raise arguments.ArgumentError(_faults(workflow.verdict))
    for note in workflow.verdict.notes:
        print_note(f"note: {note}")
    # Last, so that an invalid workflow creates nothing.
    arguments.create_output_folder(options.output)
    return workflow


def _faults(verdict: Verdict) -> str:
    """Return ComfyUI's error types and messages, for the workflow first, then for each node."""
    lines = []
    if verdict.error:
        # The workflow's details repeat the faults of the nodes.
        details = "" if verdict.node_errors else verdict.error["details"]
        lines.append(
            ": ".join(filter(None, [verdict.error["type"], verdict.error["message"], details]))
        )
    for node_id, node in verdict.node_errors.items():
        lines += [
            f"  {node_id} ({node['class_type']}): {fault['type']}: {fault['message']}: "
            f"{fault['details']}"
            for fault in node["errors"]
        ]
    return "\n".join(lines)


def _print_results(history: History, output: Path) -> None:
    for node_id, shown in history.outputs.items():
        for warning in shown.get(WARNINGS, ()):
            print_note(f"warning: {node_id}: {warning}")
    for shown in history.outputs.values():
        if REPORT in shown:
            print(*shown[REPORT])
            continue
        for timeline in shown.get(TIMELINE, ()):
            ran = Timeline.from_dict(timeline)
            print(run_table(ran).text(), *ran.changes, sep="\n")
    for shown in history.outputs.values():
        for file in shown.get("images", ()):
            print(output / file["subfolder"] / file["filename"])


_NO_BAR = "{desc}: {elapsed}"

LINE_EVERY_S = 10.0
"""Seconds between two plain lines for one node."""


def progress_of_run() -> ProgressBars | ProgressLines:
    """Return bars for a terminal, and plain lines for everything else.

    Elsewhere a bar would be written again and again.
    """
    if sys.stderr.isatty():
        return ProgressBars()
    return ProgressLines()


class ProgressLines:
    """Writes a plain line at the end of each node, and every `LINE_EVERY_S` during its steps."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._progress: NodeProgress | None = None
        self._shown: NodeProgress | None = None
        self._begin = self._written = 0.0

    def show(self, progress: NodeProgress) -> None:
        """Store the node's progress.

        Write the previous node's line, or this node's line if it is due.
        """
        now = self._clock()
        if self._progress is None or self._progress.node_id != progress.node_id:
            self.close()
            self._begin = self._written = now
            self._progress = progress
        elif progress.total > 1:
            # Not at a node's end: it is reported as 1 of 1, and the line should show the last step.
            self._progress = progress
        if now - self._written >= LINE_EVERY_S:
            self._write(now)

    def close(self) -> None:
        """Write the last node's line."""
        if self._progress is not self._shown:
            self._write(self._clock())
        self._progress = self._shown = None

    def _write(self, now: float) -> None:
        node = self._progress
        assert node is not None
        steps = f" {node.done}/{node.total} steps" * (node.total > 1)
        print_note(f"{node.node_id}:{steps} {now - self._begin:.1f} s")
        self._written = now
        self._shown = node


class ProgressBars:
    """Draws a bar for the running node. The lines of finished nodes stay above it."""

    def __init__(self) -> None:
        self._node_id: str | None = None
        self._line: tqdm | None = None

    def show(self, progress: NodeProgress) -> None:
        """Update the node's line."""
        if self._line is None or self._node_id != progress.node_id:
            self.close()
            self._node_id = progress.node_id
            self._line = tqdm(
                desc=progress.node_id, unit="step", bar_format=_NO_BAR, file=sys.stderr
            )
        if progress.total > 1:
            # None selects tqdm's own format with bar and total.
            self._line.bar_format = None
            self._line.total = progress.total
            self._line.n = progress.done
        self._line.refresh()

    def close(self) -> None:
        """Finish the last node's line."""
        if self._line is not None:
            self._line.close()
        self._line = None
