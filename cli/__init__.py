"""Command line interface `wanstream`.

Heavy imports are inside the subcommands, so that `--help` is fast.
"""

from __future__ import annotations

import argparse
import gc
import pkgutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from . import options
from .arguments import INTERRUPTED, INVALID, ArgumentError, Parser
from .terminal import plain_output, print_note


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments` (default: the process's) and return the exit code."""
    with plain_output(), _rare_collections():
        try:
            parsed = _parser().parse_args(arguments)
            # The package may have any name, so `parsed.run` is relative, such as `.plan:plan`.
            run = pkgutil.resolve_name(f"{__package__}{parsed.run}")
            return int(run(options.parsed_options(parsed.kind, parsed)))
        except ArgumentError as err:
            print_note(err)
            return INVALID
        # `run` and `batch` handle the first Ctrl-C themselves.
        except KeyboardInterrupt:
            print_note("stopped")
            return INTERRUPTED


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Collect garbage less often.

    The imports create half a million objects, and Python's own threshold would start a thousand
    collections, which take a tenth of a short command.
    """
    before = gc.get_threshold()
    if before[0]:  # 0 turns collections off
        gc.set_threshold(max(before[0], 20_000), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="wanstream",
        description="Wan2.2 and Wan2.1 with their experts streamed through a few buffers.",
    )
    subcommands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (run, kind, help, description) in _COMMANDS.items():
        subparser = subcommands.add_parser(name, help=help, description=description)
        options.add_options(subparser, kind)
        subparser.set_defaults(run=run, kind=kind)
    return parser


_COMMANDS: dict[str, tuple[str, type[Any], str, str]] = {
    "run": (
        ".run:run",
        options.RunOptions,
        "run an API-format workflow without ComfyUI",
        "Runs an API-format workflow of WanStream nodes (and LoadImage, LoadVideo) without "
        "ComfyUI. Exit code 0: done; 1: a node failed; 2: the workflow or the arguments are "
        "invalid; 130: stopped by Ctrl-C.",
    ),
    "batch": (
        ".batch.command:batch",
        options.BatchOptions,
        "make many videos with one workflow; resumable",
        "Runs a workflow once for every row of a CSV or JSONL file: here, on every GPU with Ray, "
        "or on ComfyUI servers. A journal next to the output files records finished rows: run the "
        "same command again to resume after an interruption. Exit code 0: all rows are done; 1: "
        "some failed; 2: nothing ran; 130: stopped by Ctrl-C.",
    ),
    "make-test-model": (
        ".make_test_model:make_test_model",
        options.ModelOptions,
        "write a tiny random model under the real file names",
        "Writes a models folder with tiny random weights under the names of the real files, on "
        "which the workflows of this pack run, except the native ones: ComfyUI's CLIPLoader reads "
        "text encoders of full size only. For those, take Wan Text Encode and Wan VAE Decode, and "
        "turn on Stream small models in ComfyUI's settings. Its videos show noise. Exit code 0: it "
        "is there; 1: it cannot be written; 2: a workflow is invalid.",
    ),
    "quantise": (
        ".quantise:quantise",
        options.QuantiseOptions,
        "write experts in int8 ConvRot",
        "Writes each expert as a file of half the size of bf16, in the layout of ComfyUI: the "
        "matrices of the blocks in int8 ConvRot with a scale for each row, everything else as it "
        "is. Needs 1 GB of RAM. Exit code 0: done; 1: a file could not be read or written; 2: an "
        "output file exists.",
    ),
    "probe": (
        ".probe:probe",
        options.ProbeOptions,
        "measure this machine for the planner",
        "Measures disk, bus, RAM and a Wan block in a few seconds and stores the profile in the "
        "user's cache folder, for Auto Offload and `wanstream plan --gpu this`.",
    ),
    "selftest": (
        ".selftest.command:selftest",
        options.SelftestOptions,
        "check that streaming works on this device, and measure it",
        "Checks copies, streams, page locks and decoding, and makes whole runs with small random "
        "experts under several policies, which must be equal to resident blocks bit for bit; then "
        "measures as `wanstream probe` does. Takes some minutes. Prints a table and a verdict, and "
        "writes one JSON file to attach to an issue. Exit code 0: it works; 1: a check failed or "
        "could not be run; 2: the arguments are invalid.",
    ),
    "plan": (
        ".plan:plan",
        options.PlanOptions,
        "predict time and memory of a run on any machine",
        "Simulates a run of Wan2.2 A14B or 5B, or of the model in FILE, under every offload policy "
        "that fits, and prints the best ones with the reason. Nothing is loaded, and all figures "
        "are simulated. Only `--gpu this` measures, unless `wanstream probe` has done so.",
    ),
    "bench": (
        ".bench.command:bench",
        options.BenchOptions,
        "measure runs on one or several workers",
        "Measures loading, generation, every step and the memory of every worker, as medians of "
        "several runs, and writes them as JSON and as a page of tables with method, machine and "
        "versions. Without --experts it uses two small random experts, which show how runs scale "
        "but not the speed of real models. Exit code 0: done; 1: a case failed; 2: the arguments "
        "are invalid.",
    ),
}
"""Function, options and help by command. The function is imported when the command runs."""
