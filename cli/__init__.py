"""Command line interface `wanstream`. Each subcommand does its heavy imports itself, so that `--help` is fast."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .arguments import DONE, FAILED, INTERRUPTED, Parser, values_of
from .bench.command import add_bench


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments` (default: those of the process) and return the exit code."""
    try:
        parsed = _parser().parse_args(arguments)
        return int(parsed.subcommand(parsed))
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="wanstream", description="Wan2.2 and Wan2.1 with their experts streamed through a few buffers."
    )
    subcommands: Any = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(subcommands)
    _add_batch(subcommands)
    _add_sample_model(subcommands)
    _add_probe(subcommands)
    _add_plan(subcommands)
    add_bench(subcommands)
    return parser


def _add_run(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    run = subcommands.add_parser(
        "run",
        help="run an API-format workflow without ComfyUI",
        description="Runs an API-format workflow of WanStream nodes (and LoadImage) without ComfyUI. "
        "Exit code 0: done; 1: a node failed; 2: the workflow or the arguments are invalid; 130: stopped by Ctrl-C.",
    )
    run.add_argument("workflow", type=Path, help="a file from workflows/api, or Workflow > Export (API) in ComfyUI")
    run.add_argument(
        "--out", dest="output", type=Path, required=True, metavar="DIR", help="folder for the output files"
    )
    run.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="NODE.INPUT=VALUE",
        help="override an input; NODE is a node's id, or its class if only one node has it; may be repeated",
    )
    _add_host_options(run)
    run.set_defaults(subcommand=_run)


def _add_batch(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    batch = subcommands.add_parser(
        "batch",
        help="make many videos with one workflow; resumable",
        description="Runs a workflow once for every row of a CSV or JSONL file, here or on a ComfyUI server. A journal "
        "next to the output files records finished rows: run the same command again to resume after an interruption. "
        "Exit code 0: all rows are done; 1: some failed; 2: nothing ran; 130: stopped by Ctrl-C.",
    )
    batch.add_argument(
        "jobs",
        type=Path,
        metavar="JOBS",
        help='a .csv file with columns node.input, or JSON lines {"node.input": value}; the column `name` sets the '
        "names of the output files",
    )
    batch.add_argument("--workflow", type=Path, required=True, metavar="FILE", help="workflow in API format")
    batch.add_argument(
        "--out", dest="output", type=Path, required=True, metavar="DIR", help="output folder of this batch alone"
    )
    batch.add_argument(
        "--server", metavar="URL", help="address of a ComfyUI server, like http://127.0.0.1:8188 (default: run here)"
    )
    _add_host_options(batch, only="without --server: ")
    batch.add_argument(
        "--journal", type=Path, metavar="FILE", help="journal file (default: journal.sqlite in the folder of --out)"
    )
    batch.add_argument("--max-failures", type=_count, metavar="N", help="start no more rows after N failures")
    batch.add_argument(
        "--timeout",
        dest="timeout_s",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="give up when a server has not responded for this long (default: 600)",
    )
    batch.add_argument(
        "--share-weights",
        type=_count,
        default=1,
        metavar="N",
        help="run up to N rows together, so that weights are read once for all: same videos, more device memory",
    )
    batch.add_argument("--dry-run", action="store_true", help="validate all rows; queue and write nothing")
    batch.set_defaults(subcommand=_batch)


def _add_host_options(parser: argparse.ArgumentParser, *, only: str = "") -> None:
    """Add the options of the embedded host; `only` states in their help when they apply."""
    models = f"{only}folder with the layout of ComfyUI's models folder (default: models)"
    parser.add_argument("--models", type=Path, default=Path("models"), metavar="DIR", help=models)
    images = f"{only}folder for LoadImage (default: input)"
    parser.add_argument("--input", type=Path, default=Path("input"), metavar="DIR", help=images)
    device = f"{only}compute device (default: cuda if available)"
    parser.add_argument("--device", choices=["cpu", "cuda"], help=device)
    parser.add_argument(
        "--strict",
        action="store_true",
        help=f"{only}fail on suspicious inputs: experts or LoRAs that seem swapped, one file as both experts, a LoRA "
        "for another kind of model (default: a warning)",
    )


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{count} is too small: give 1 or more")
    return count


def _add_sample_model(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    sample = subcommands.add_parser(
        "make-test-model",
        help="write a tiny random model under the real file names",
        description="Writes a models folder with tiny random weights under the names of the real files, "
        "so that the workflows of this pack run on it, except native_mixed: ComfyUI's CLIPLoader does not read a text "
        "encoder as small as this one. Its videos show noise.",
    )
    sample.add_argument("folder", type=Path, metavar="DIR", help="the models folder to create")
    sample.set_defaults(subcommand=_sample_model)


def _add_probe(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    probe = subcommands.add_parser(
        "probe",
        help="measure this machine for the planner",
        description="Measures disk, bus, RAM and a Wan block in a few seconds and stores the profile in the user's "
        "cache folder, for Auto Offload and `wanstream plan --gpu this`.",
    )
    probe.add_argument(
        "--models", type=Path, metavar="DIR", help="a file or a folder of weights on the disk to measure"
    )
    probe.add_argument("--device", choices=["cpu", "cuda"], help="compute device (default: cuda if available)")
    probe.add_argument(
        "--size",
        default="832x480x81",
        metavar="WxHxF",
        help="video size for the measured block (default: 832x480x81); fewer tokens if that takes too long",
    )
    probe.add_argument("--json", action="store_true", help="print JSON")
    probe.set_defaults(subcommand=_probe)


def _add_plan(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    plan = subcommands.add_parser(
        "plan",
        help="predict time and memory of a run on any machine",
        description="Simulates a run of Wan2.2 A14B or 5B under every offload policy that fits, and prints the best "
        "ones with the reason. Nothing is loaded, and all figures are simulated. Only `--gpu this` measures, unless "
        "`wanstream probe` has done so.",
    )
    plan.add_argument(
        "--gpu", required=True, metavar="NAME", help='for example "RTX 4060 Ti 16GB"; "this" for this machine'
    )
    plan.add_argument("--ram", dest="ram_gb", type=float, metavar="GB", help="total RAM of the machine")
    plan.add_argument(
        "--ssd", dest="ssd_gb_s", type=float, metavar="GB/S", help="sequential read speed of its disk for a large file"
    )
    plan.add_argument("--size", required=True, metavar="WxHxF", help="video size, for example 1280x720x81")
    plan.add_argument("--model", choices=["a14b", "5b"], default="a14b", help="Wan2.2 model (default: a14b)")
    plan.add_argument("--steps", type=int, default=20, help="steps of both experts together (default: 20)")
    plan.add_argument(
        "--switch-step", type=int, metavar="STEP", help="first step of the low-noise expert (default: half)"
    )
    plan.add_argument(
        "--cfg",
        choices=["both", "high", "none"],
        default="both",
        help="experts with guidance, which compute two lanes (default: both)",
    )
    plan.add_argument(
        "--storage",
        choices=["bf16", "fp8", "Q8_0", "Q5_K", "Q4_K"],
        default="bf16",
        help="format of the weights in RAM: fp8 is quantised from a bf16 file, Q are GGUF files (default: bf16)",
    )
    plan.add_argument("--vram", dest="vram_gb", type=float, metavar="GB", help="maximum device memory of the run")
    plan.add_argument("--models", type=Path, metavar="DIR", help="with --gpu this: folder of the weights")
    plan.add_argument("--device", choices=["cpu", "cuda"], help="with --gpu this: compute device")
    plan.add_argument("--workers", type=int, metavar="N", help="choose layouts for N of these GPUs")
    plan.add_argument(
        "--gpus-per-node", type=int, default=8, metavar="N", help="with --workers: GPUs per machine (default: 8)"
    )
    plan.add_argument(
        "--videos", type=int, default=100, metavar="N", help="with --workers: number of videos (default: 100)"
    )
    plan.add_argument(
        "--compare",
        action="store_true",
        help="also predict weights stored in fp8, and several videos per run",
    )
    plan.add_argument("--json", action="store_true", help="print JSON")
    plan.set_defaults(subcommand=_plan)


def _run(parsed: argparse.Namespace) -> int:
    from .run import RunArguments, run

    return run(values_of(RunArguments, parsed))


def _batch(parsed: argparse.Namespace) -> int:
    from .batch.command import BatchArguments, batch

    return batch(values_of(BatchArguments, parsed))


def _sample_model(parsed: argparse.Namespace) -> int:
    from ..testing import TinyModelError, write_tiny_model

    try:
        sample = write_tiny_model(parsed.folder, on_progress=lambda part: print(part, file=sys.stderr))
    except TinyModelError as err:
        print(err, file=sys.stderr)
        return FAILED
    print(sample.summary())
    return DONE


def _probe(parsed: argparse.Namespace) -> int:
    from .probe import ProbeArguments, probe

    return probe(values_of(ProbeArguments, parsed))


def _plan(parsed: argparse.Namespace) -> int:
    from .plan import PlanArguments, plan

    return plan(values_of(PlanArguments, parsed))
