"""`wanstream run`: runs a workflow in the embedded host, shows its progress and prints the table of its steps."""

from __future__ import annotations

import asyncio
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from tqdm import tqdm  # type: ignore[import-untyped]

from ..bench import run_table
from ..host.embedded import (
    CORE_NODES,
    EmbeddedHost,
    Folders,
    History,
    NodeFailedError,
    NodeProgress,
    Verdict,
    Workflow,
    api_prompt,
    load_workflow,
    nodes_by_id,
    sockets_of,
)
from ..nodes import REPORT, TIMELINE, WARNINGS, WanStreamExtension
from ..schema import Cancelled, Timeline
from .arguments import (
    DONE,
    FAILED,
    INTERRUPTED,
    INVALID,
    ArgumentError,
    check_models,
    create_output_folder,
    device_of,
    error_text,
    handle_sigint,
    read_json,
)
from .inputs import apply_overrides
from .options import RunOptions


def run(options: RunOptions) -> int:
    """Run the workflow, print the table of its steps and the paths of its files, and return the exit code."""
    host = EmbeddedHost()
    try:
        workflow = _load(options, host)
    except ValueError as err:
        print(err, file=sys.stderr)
        return INVALID
    try:
        # The first Ctrl-C ends the run at the next block or node.
        with handle_sigint(host.stop, requests=1), closing(progress_of_run()) as progress:
            history = workflow.run(on_progress=progress.show)
    except NodeFailedError as err:
        if not isinstance(err.__cause__, ValueError | OSError):  # not a refusal but a bug, ours or a library's
            traceback.print_exception(err.__cause__)
        print(f"failed: {error_text(err)}", file=sys.stderr)
        return FAILED
    except Cancelled:
        print("stopped", file=sys.stderr)
        return INTERRUPTED
    finally:
        host.free_experts()
    _print_results(history, options.output)
    return DONE


def _load(options: RunOptions, host: EmbeddedHost) -> Workflow:
    """Return the workflow with the overrides of the command line. Raises ValueError if it is invalid; runs nothing."""
    check_models(options.models)
    device = device_of(options.device)
    nodes = asyncio.run(WanStreamExtension().get_node_list())
    prompt = api_prompt(read_json(options.workflow))
    sockets = {name: sockets_of(node.INPUT_TYPES()) for name, node in nodes_by_id([*nodes, *CORE_NODES]).items()}
    workflow = load_workflow(
        apply_overrides(prompt, options.overrides, sockets),
        host=host,
        nodes=nodes,
        folders=Folders(models=options.models, output=options.output, input=options.input),
        device=device,
        strict=options.strict,
    )
    # ComfyUI would run the valid outputs and drop the others; here a missing file must be reported before the run.
    if workflow.verdict.error or workflow.verdict.node_errors:
        raise ArgumentError(_faults(workflow.verdict))
    for note in workflow.verdict.notes:
        print(f"note: {note}", file=sys.stderr)
    create_output_folder(options.output)
    return workflow


def _faults(verdict: Verdict) -> str:
    """Return ComfyUI's error types and messages, those of the workflow first, then those of each node."""
    lines = []
    if verdict.error:
        # The details of the workflow repeat the faults of its nodes.
        details = "" if verdict.node_errors else verdict.error["details"]
        lines.append(": ".join(filter(None, [verdict.error["type"], verdict.error["message"], details])))
    for node_id, node in verdict.node_errors.items():
        lines += [
            f"  {node_id} ({node['class_type']}): {fault['type']}: {fault['message']}: {fault['details']}"
            for fault in node["errors"]
        ]
    return "\n".join(lines)


def _print_results(history: History, output: Path) -> None:
    for node_id, shown in history.outputs.items():
        for warning in shown.get(WARNINGS, ()):
            print(f"warning: {node_id}: {warning}", file=sys.stderr)
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
"""Seconds between two plain lines of one node."""


def progress_of_run() -> ProgressBars | ProgressLines:
    """Return bars for a terminal, and plain lines for everything else, where a bar would be written again and again."""
    return ProgressBars() if sys.stderr.isatty() else ProgressLines()


class ProgressLines:
    """Writes a plain line at the end of each node, and every `LINE_EVERY_S` during its steps."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._progress: NodeProgress | None = None
        self._shown: NodeProgress | None = None
        self._begin = self._written = 0.0

    def show(self, progress: NodeProgress) -> None:
        """Store the node's progress; write the line of the previous node, or this node's line if it is due."""
        now = self._clock()
        if self._progress is None or self._progress.node_id != progress.node_id:
            self.close()
            self._begin = self._written = now
            self._progress = progress
        elif progress.total > 1:  # not at a node's end, which is reported as 1 of 1: its last step is shown
            self._progress = progress
        if now - self._written >= LINE_EVERY_S:
            self._write(now)

    def close(self) -> None:
        """Write the line of the last node."""
        if self._progress is not self._shown:
            self._write(self._clock())
        self._progress = self._shown = None

    def _write(self, now: float) -> None:
        node = self._progress
        assert node is not None
        steps = f" {node.done}/{node.total} steps" if node.total > 1 else ""
        print(f"{node.node_id}:{steps} {now - self._begin:.1f} s", file=sys.stderr, flush=True)
        self._written, self._shown = now, node


class ProgressBars:
    """Draws a bar for the running node; the lines of finished nodes stay above it."""

    def __init__(self) -> None:
        self._node_id: str | None = None
        self._line: tqdm | None = None

    def show(self, progress: NodeProgress) -> None:
        """Update the line of the node."""
        if self._line is None or self._node_id != progress.node_id:
            self.close()
            self._node_id = progress.node_id
            self._line = tqdm(desc=progress.node_id, unit="step", bar_format=_NO_BAR, file=sys.stderr)
        if progress.total > 1:
            self._line.bar_format = None
            self._line.total, self._line.n = progress.total, progress.done
        self._line.refresh()

    def close(self) -> None:
        """Finish the line of the last node."""
        if self._line is not None:
            self._line.close()
        self._line = None
