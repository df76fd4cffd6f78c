"""`wanstream bench`: measures runs on one worker or on several, and writes JSON and a page of tables."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ...bench import Setting, TrialMatrix
from ...devices import DeviceError, compute_device
from ...host import check_ray, cluster, gpus_of
from ...nodes.runs import TrialTimes
from ...schema import IN_PROCESS, ExpertsRef, Mesh, OffloadPolicy, VideoShape, WorkersRef, check_count
from ...wan import open_pair
from ..arguments import DONE, FAILED, INVALID, ArgumentError, create_output_folder, values_of, video_shape
from .cases import (
    Bench,
    CaseRuns,
    Cases,
    bench_cases,
    bench_request,
    default_counts,
    layout_traits,
    parse_mesh,
    run_cases,
    small_experts,
)
from .report import save


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

    return bench(values_of(BenchArguments, parsed))


MAX_WORKERS = 64
DEFAULT_CPU_WORKERS = 2
"""Default maximum number of workers on a CPU."""
SMALL_SIZE, REAL_SIZE = "128x128x17", "832x480x81"


@dataclass(frozen=True, kw_only=True)
class BenchArguments:
    """Arguments of the command line."""

    distributed: bool
    workers: str
    """Numbers separated by commas; empty: powers of two up to the number of GPUs, on a CPU 1 and 2."""
    layouts: str
    """Like `cfg 2, data 2`; empty: the defaults for each number of workers."""
    policies: str
    steps: str
    size: str
    videos: int
    guidance: float
    repeats: int
    warmup: int
    cooldown_s: float
    experts: tuple[Path, ...]
    """Two files or folders, or one pipeline folder; empty: small random experts."""
    cluster: str
    """`local`, or an entry of the list of clusters."""
    threads: int
    device: str | None
    output: Path


@dataclass(frozen=True, kw_only=True)
class _BenchSpec:
    """The parsed command line."""

    device: torch.device
    video: VideoShape
    settings: Sequence[Setting]
    counts: Sequence[int]
    layouts: Sequence[Mesh]
    workers: WorkersRef
    times: TrialTimes


def bench(arguments: BenchArguments) -> int:
    """Measure, write the files, print their paths, and return the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            spec = _parse(arguments)
            prepared, cases = _prepare(arguments, spec, _experts(arguments, Path(folder)))
            create_output_folder(arguments.output)
        except (ValueError, OSError) as err:
            print(err, file=sys.stderr)
            return INVALID
        for name, why in cases.refused:
            print(f"skipped: {name}: {why}", file=sys.stderr)
        if not cases.cases:
            print("no case is left to measure", file=sys.stderr)
            return INVALID
        measured = list[CaseRuns]()
        paths: tuple[Path, ...] = ()
        try:
            for runs in run_cases(prepared, cases.cases, _log):
                measured.append(runs)
                paths = _save(arguments, prepared, cases, measured)
                _log(f"{runs.case.name}: {runs.failed or 'measured'}")
        except (ValueError, OSError) as err:
            print(f"failed: {err}", file=sys.stderr)
            return FAILED
    for path in paths:
        print(path)
    return FAILED if any(runs.failed for runs in measured) else DONE


def _save(arguments: BenchArguments, prepared: Bench, cases: Cases, measured: Sequence[CaseRuns]) -> tuple[Path, ...]:
    """Write the results so far; called after each case, because all cases may take hours."""
    failed = ((runs.case.name, runs.failed) for runs in measured if runs.failed)
    return save(
        measured,
        method=_method(arguments, prepared),
        without=(*cases.refused, *failed),
        device=prepared.device,
        folder=arguments.output,
    )


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _experts(arguments: BenchArguments, folder: Path) -> ExpertsRef:
    if not arguments.experts:
        return small_experts(folder)
    if len(arguments.experts) > 2:
        raise ArgumentError(f"--experts names {len(arguments.experts)} paths: give two, or one pipeline folder")
    high, low = (*arguments.experts, None)[:2]
    assert high is not None
    return ExpertsRef(high_noise=high.absolute(), low_noise=None if low is None else low.absolute())


def _parse(arguments: BenchArguments) -> _BenchSpec:
    """Parse the arguments without opening any file. Raises ValueError."""
    try:
        device = compute_device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except DeviceError as err:
        raise ArgumentError(str(err)) from err
    settings = TrialMatrix.parse(arguments.policies, "", arguments.steps).settings(OffloadPolicy.layerwise())
    if any(not isinstance(setting.policy, OffloadPolicy) for setting in settings):
        raise ArgumentError("--policies auto: the policy would differ between layouts; name fixed policies")
    if any(setting.steps is None for setting in settings):
        raise ArgumentError("--steps is empty: give numbers like 10,20")
    threads = arguments.threads or (1 if device.type == "cpu" and arguments.distributed else None)
    place = cluster(arguments.cluster if arguments.distributed else IN_PROCESS)
    workers = WorkersRef(
        count=1,
        address=place.address,
        token_file=place.token_file,
        paths=place.paths,
        threads=threads,
        beyond_loopback=place.remote_machines,
        max_restarts=0,
    )
    spec = _BenchSpec(
        device=device,
        video=_video(arguments),
        settings=settings,
        counts=_counts(arguments, device, place.address),
        layouts=tuple(parse_mesh(words) for words in _split(arguments.layouts)),
        workers=workers,
        times=TrialTimes(repeats=arguments.repeats, warmup=arguments.warmup, cooldown_s=arguments.cooldown_s),
    )
    check_ray(workers)
    return spec


def _prepare(arguments: BenchArguments, spec: _BenchSpec, experts: ExpertsRef) -> tuple[Bench, Cases]:
    """Return the benchmark and its cases. Raises ValueError or OSError for experts that cannot be opened."""
    with open_pair(experts) as opened:
        pair = layout_traits(opened, spec.video, videos=arguments.videos, guidance=arguments.guidance)
        channels = opened.in_channels
    request = bench_request(spec.video, videos=arguments.videos, guidance=arguments.guidance, in_channels=channels)
    bench = Bench(experts=experts, request=request, times=spec.times, workers=spec.workers, device=spec.device)
    return bench, bench_cases(spec.counts, spec.layouts, spec.settings, pair)


def _video(arguments: BenchArguments) -> VideoShape:
    return video_shape(arguments.size or (REAL_SIZE if arguments.experts else SMALL_SIZE))


def _counts(arguments: BenchArguments, device: torch.device, address: str) -> tuple[int, ...]:
    if not arguments.distributed:
        return (1,)
    gpus = gpus_of(device)
    if not arguments.workers:
        return default_counts(min(MAX_WORKERS, gpus or DEFAULT_CPU_WORKERS))
    words = _split(arguments.workers)
    if bad := [word for word in words if not word.isascii() or not word.isdecimal()]:
        raise ArgumentError(f"--workers: {bad[0]!r} is not a number; write a list like 1,2,4")
    for count in map(int, words):
        check_count(count, address, gpus=gpus, most=MAX_WORKERS)
    return tuple(dict.fromkeys(map(int, words)))


def _split(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _method(arguments: BenchArguments, prepared: Bench) -> str:
    video, workers, times = _video(arguments), prepared.workers, prepared.times
    kind = "experts from files" if arguments.experts else "two random experts of 8 blocks, 4 heads x 128"
    cluster_name = arguments.cluster if arguments.distributed else IN_PROCESS
    threads = "" if workers.threads is None else f", {workers.threads} CPU thread{'s' * (workers.threads != 1)} each"
    return (
        f"{kind}; {video.width}x{video.height}, {video.frames} frames, {arguments.videos} video"
        f"{'s' * (arguments.videos != 1)} at once, guidance {arguments.guidance:g}, UniPC, 512 random text tokens; "
        f"workers {cluster_name}{threads}; {times.repeats} measured runs after {times.warmup} warm-up runs, "
        f"{times.cooldown_s:g} s of cooldown before each; times are median (minimum to maximum) from the request to "
        "the latents on the driver; loading is from the first request to the first block's compute, on workers with "
        "closed experts, with the page cache as it was; the start of workers is listed separately; memory is the "
        "device's, on a CPU the process's RAM, as sampled in the measured runs; text encoder and VAE are not included"
    )
