"""L7: the command `wanstream`. Heavy imports wait until a subcommand needs them, so that `--help` answers at once."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .exit_codes import DONE, FAILED, INTERRUPTED


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments` (default: those of the process) and return the exit code."""
    parsed = _parser().parse_args(arguments)
    try:
        return int(parsed.subcommand(parsed))
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="wanstream", description="Wan2.2 A14B with both experts streamed through a few buffers."
    )
    subcommands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(subcommands)
    _add_sample_model(subcommands)
    return parser


def _add_run(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    run = subcommands.add_parser(
        "run",
        help="run an API-format workflow without ComfyUI",
        description="Runs an API-format workflow of WanStream nodes (and LoadImage) without ComfyUI. "
        "Exit code 0: done; 1: a node failed; 2: the workflow or the arguments are wrong; 130: stopped by Ctrl-C.",
    )
    run.add_argument("workflow", type=Path, help="a file from workflows/api, or Workflow > Export (API) in ComfyUI")
    run.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for what the workflow saves")
    run.add_argument(
        "--models",
        type=Path,
        default=Path("models"),
        metavar="DIR",
        help="laid out as ComfyUI's models folder (default: models)",
    )
    run.add_argument(
        "--input", type=Path, default=Path("input"), metavar="DIR", help="where LoadImage looks (default: input)"
    )
    run.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NODE.INPUT=VALUE",
        help="change an input; NODE is a node's id, or its class if only one node has it; may be repeated",
    )
    run.add_argument("--device", choices=["cpu", "cuda"], help="where to compute (default: a GPU if there is one)")
    run.set_defaults(subcommand=_run)


def _add_sample_model(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    sample = subcommands.add_parser(
        "sample-model",
        help="write a tiny random model under the real file names",
        description="Writes a models folder with tiny random weights under the names of the real files, "
        "so that every workflow of this pack runs on it. Its videos show noise.",
    )
    sample.add_argument("folder", type=Path, metavar="DIR", help="the models folder to make")
    sample.set_defaults(subcommand=_sample_model)


def _run(parsed: argparse.Namespace) -> int:
    from .run import RunArguments, run

    return run(
        RunArguments(
            workflow=parsed.workflow,
            output=parsed.out,
            models=parsed.models,
            input=parsed.input,
            changes=tuple(parsed.set),
            device=parsed.device,
        )
    )


def _sample_model(parsed: argparse.Namespace) -> int:
    from .sample_model import SampleModelError, write_sample_model

    try:
        sample = write_sample_model(parsed.folder, on_progress=lambda part: print(part, file=sys.stderr))
    except SampleModelError as err:
        print(err, file=sys.stderr)
        return FAILED
    print(sample.summary())
    return DONE
