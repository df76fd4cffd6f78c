"""`wanstream run`: a workflow in the embedded host, progress while it runs, the table of its steps at the end."""

from __future__ import annotations

import asyncio
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from ..bench import run_table
from ..host.embedded import (
    ComfyNode,
    History,
    LoadImage,
    NodeFailedError,
    Prompt,
    Verdict,
    api_prompt,
    embedded_host,
    nodes_by_id,
    run_workflow,
    validate_workflow,
)
from ..nodes import REPORT, TIMELINE, WARNINGS, WanStreamExtension
from ..schema import Cancelled, Timeline
from .arguments import ArgumentError, check_models, made_folder, read_json
from .exit_codes import DONE, FAILED, INTERRUPTED, INVALID
from .overrides import with_changes
from .progress import ProgressBars, ProgressLines, progress_of_run


@dataclass(frozen=True, kw_only=True)
class RunArguments:
    """What the command line says."""

    workflow: Path
    output: Path
    models: Path
    input: Path
    changes: tuple[str, ...] = ()
    """Each one `node.input=value`."""
    device: str | None = None
    """None: a GPU if there is one."""
    strict: bool = False
    """Raise an error for suspicious inputs instead of a warning."""


def run(arguments: RunArguments) -> int:
    """Run the workflow, print the table of its steps and the paths of its files, and return the exit code."""
    nodes = asyncio.run(WanStreamExtension().get_node_list())
    try:
        prompt = _checked_prompt(arguments, nodes)
    except ValueError as err:
        print(err, file=sys.stderr)
        return INVALID
    try:
        with _ctrl_c_stops_the_run(), progress_of_run() as progress:
            history = _execute(arguments, prompt, nodes, progress)
    except NodeFailedError as err:
        if not isinstance(err.__cause__, ValueError | OSError):  # no refusal but a fault, ours or a library's
            traceback.print_exception(err.__cause__)
        print(f"failed: {err}", file=sys.stderr)
        return FAILED
    except Cancelled:
        print("stopped", file=sys.stderr)
        return INTERRUPTED
    _print_results(history, arguments.output)
    return DONE


def _checked_prompt(arguments: RunArguments, nodes: Sequence[type[ComfyNode]]) -> Prompt:
    """The workflow as the command line changes it; raises ValueError if it cannot run, before anything does."""
    check_models(arguments.models)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("--device cuda: this torch finds no CUDA device")
    workflow = api_prompt(read_json(arguments.workflow))
    prompt = with_changes(workflow, arguments.changes, nodes_by_id([*nodes, LoadImage]))
    verdict = validate_workflow(
        prompt, nodes, models=arguments.models, input_dir=arguments.input, output=arguments.output
    )
    # ComfyUI would run the outputs that are valid; whoever asked for a file wants to know at once that there is none.
    if verdict.error or verdict.node_errors:
        raise ArgumentError(_faults(verdict))
    made_folder(arguments.output)
    return prompt


def _execute(
    arguments: RunArguments, prompt: Prompt, nodes: Sequence[type[ComfyNode]], progress: ProgressBars | ProgressLines
) -> History:
    try:
        return run_workflow(
            prompt,
            nodes=nodes,
            models=arguments.models,
            output=arguments.output,
            input_dir=arguments.input,
            on_progress=progress.show,
            device=torch.device(arguments.device) if arguments.device else None,
            strict=arguments.strict,
        )
    finally:
        embedded_host.free_experts()


@contextmanager
def _ctrl_c_stops_the_run() -> Iterator[None]:
    """Inside, the first Ctrl-C ends the run before the next block or node; a second one ends the process as usual."""

    def stop(signum: int, frame: FrameType | None) -> None:
        embedded_host.stop()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _faults(verdict: Verdict) -> str:
    """ComfyUI's error types and messages, those of the workflow first, then those of each node."""
    lines = []
    if verdict.error:
        # Where nodes are at fault, they say more than the workflow as a whole.
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
