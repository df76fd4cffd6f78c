"""Options of `wanstream bench`."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..command_line import values_of


def add_bench(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    bench = subcommands.add_parser(
        "bench",
        help="measure runs on one or several workers",
        description="Measures loading, generation, every step and the memory of every worker, as medians of several "
        "runs, and writes them as JSON and as a page of tables with method, machine and versions. Without --experts "
        "it uses two small random experts, which show how runs scale but not the speed of real models. Exit code 0: "
        "done; 1: a case failed; 2: the arguments are invalid.",
    )
    bench.add_argument("--distributed", action="store_true", help="use workers (needs Ray); default: this process")
    bench.add_argument(
        "--workers", default="", metavar="N,N", help="numbers of workers (default: 1,2,4,8 up to the number of GPUs)"
    )
    bench.add_argument(
        "--layouts",
        default="",
        metavar="WORDS",
        help='for example "cfg 2, data 2, cfg 2 x ulysses 2" (default: common layouts for each number)',
    )
    bench.add_argument("--policies", default="layerwise", metavar="WORDS", help="layerwise, block_swap N, resident")
    bench.add_argument("--steps", default="10,20", metavar="N,N", help="numbers of steps (default: 10,20)")
    bench.add_argument(
        "--size", default="", metavar="WxHxF", help="video size (default: 832x480x81, 128x128x17 with random experts)"
    )
    bench.add_argument("--videos", type=int, default=1, metavar="N", help="videos per request (default: 1)")
    bench.add_argument("--guidance", type=float, default=4.0, help="CFG scale; 1: one lane per video (default: 4)")
    _add_trials(bench)
    bench.add_argument(
        "--experts", type=Path, nargs="+", default=[], metavar="PATH", help="high-noise and low-noise, or one pipeline"
    )
    bench.add_argument(
        "--cluster", default="local", metavar="NAME", help="local, or an entry of clusters.json (default: local)"
    )
    bench.add_argument("--threads", type=int, default=0, metavar="N", help="CPU threads per worker (on a CPU: 1)")
    bench.add_argument("--device", choices=["cpu", "cuda"], help="compute device (default: cuda if available)")
    bench.add_argument("--out", dest="output", type=Path, required=True, metavar="DIR", help="folder of both files")
    bench.set_defaults(subcommand=_bench)


def _add_trials(bench: argparse.ArgumentParser) -> None:
    bench.add_argument("--repeats", type=int, default=3, metavar="N", help="measured runs (default: 3)")
    bench.add_argument("--warmup", type=int, default=1, metavar="N", help="warm-up runs before them (default: 1)")
    bench.add_argument(
        "--cooldown",
        dest="cooldown_s",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="pause before each run (default: 0)",
    )


def _bench(parsed: argparse.Namespace) -> int:
    from .command import BenchArguments, bench

    return bench(values_of(BenchArguments, parsed))
