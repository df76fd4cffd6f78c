"""Command line of the case."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

RESULTS = Path(__file__).parent.parent / "results"
SHAPE_NAMES = ("cpu", "quick", "tiny")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="offload.py")
    commands = parser.add_subparsers(dest="command", required=True)
    child = commands.add_parser("run", help="one run in this process (called by the others)")
    child.add_argument("task")
    ready = commands.add_parser("prepare", help="write all files of the case cpu, 23 GB")
    ready.add_argument("work", type=Path)
    ready.add_argument("--shape", choices=SHAPE_NAMES, default="cpu")
    for name, text in (
        ("cpu", "two experts of 2.8 GB"),
        ("cpu3gb", "the same experts inside a memory limit"),
        ("quick", "a small pair, to check the programs"),
    ):
        case = commands.add_parser(name, help=text)
        case.add_argument("work", type=Path, help="folder for the weights, 23 GB, written once")
        case.add_argument("--only", nargs="*", metavar="VARIANT", help="only these variants")
        case.add_argument("--repetitions", type=int, default=1 if name == "quick" else 3)
        case.add_argument(
            "--shape", choices=SHAPE_NAMES, default="quick" if name == "quick" else "cpu"
        )
        case.add_argument("--limit-gib", type=float, default=3.0 if name == "cpu3gb" else None)
        case.add_argument(
            "--retries", type=int, default=2, help="how often a disturbed run is repeated"
        )
        case.add_argument(
            "--minutes", type=float, default=None, help="begin no run after this time"
        )
        case.add_argument("--threads", type=int, default=2)
        case.add_argument(
            "--fresh", action="store_true", help="begin a new session instead of resuming"
        )
        case.add_argument("--results", type=Path, default=RESULTS)
        case.add_argument(
            "--no-result", action="store_true", help="write nothing into benchmarks/results"
        )
    gpu = commands.add_parser("gpu", help="A14B block shapes on a GPU, part by part")
    gpu.add_argument("work", type=Path)
    gpu.add_argument("part", help="one of the parts that offload_case/gpu_case.py lists, or merge")
    gpu.add_argument("--device", default="cuda", help="cpu: a tiny pair, to check the programs")
    gpu.add_argument("--threads", type=int, default=8)
    gpu.add_argument("--results", type=Path, default=RESULTS)
    gpu.add_argument("--only", nargs="*", metavar="VARIANT")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """See benchmarks/offload.py."""
    chosen = _parser().parse_args(arguments)
    # Raise SystemExit on SIGTERM, so that the session ends the child process and removes the
    # control group.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if chosen.command == "run":
        # Imported here, so that session imports do not count as run memory.
        from .child import run
        from .task import Task

        run(Task.from_json(chosen.task))
        return
    if chosen.command == "prepare":
        from .cpu_case import prepare

        prepare(chosen.work, chosen.shape)
        return
    if chosen.command == "gpu":
        from .gpu_case import run_part

        run_part(chosen)
        return
    from .cpu_case import run_case

    run_case(chosen)
