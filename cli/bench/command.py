"""`wanstream bench`: measures runs on one worker or on several, and writes JSON and a page of tables."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

from ...bench import TrialMatrix
from ...host import check_ray, cluster, gpus_of
from ...nodes.runs import TrialTimes
from ...sampling import request_job
from ...schema import IN_PROCESS, ExpertsRef, OffloadPolicy, VideoShape, WorkersRef, check_count
from ...wan import open_pair
from ..arguments import DONE, FAILED, INVALID, ArgumentError, create_output_folder, device_of, error_text, video_shape
from ..options import BenchOptions
from .cases import (
    Bench,
    BenchCase,
    bench_cases,
    bench_request,
    default_counts,
    parse_mesh,
    run_cases,
    small_experts,
)
from .report import save

MAX_WORKERS = 64
DEFAULT_CPU_WORKERS = 2
"""Default maximum number of workers on a CPU."""
SMALL_SIZE, REAL_SIZE = "128x128x17", "832x480x81"


def bench(options: BenchOptions) -> int:
    """Measure, write the files, print their paths, and return the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            prepared, cases = _prepare(options, Path(folder))
            create_output_folder(options.output)
        except (ValueError, OSError) as err:
            print(err, file=sys.stderr)
            return INVALID
        refused, chosen = ([case for case in cases if bool(case.failed) is skips] for skips in (True, False))
        for case in refused:
            print(f"skipped: {case.name}: {case.failed}", file=sys.stderr)
        if not chosen:
            print("no case is left to measure", file=sys.stderr)
            return INVALID
        measured, method = list[BenchCase](), _method(options, prepared)
        paths: tuple[Path, ...] = ()
        try:
            for case in run_cases(prepared, chosen, _log):
                measured.append(case)
                # After each case, because all cases may take hours.
                paths = save([*refused, *measured], method=method, device=prepared.device, folder=options.output)
                _log(f"{case.name}: {case.failed or 'measured'}")
        except (ValueError, OSError) as err:
            print(f"failed: {error_text(err)}", file=sys.stderr)
            return FAILED
    for path in paths:
        print(path)
    return FAILED if any(case.failed for case in measured) else DONE


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _experts(options: BenchOptions, folder: Path) -> ExpertsRef:
    if not options.experts:
        return small_experts(folder)
    if len(options.experts) > 2:
        raise ArgumentError(f"--experts names {len(options.experts)} paths: give two, or one pipeline folder")
    high, *low = (path.absolute() for path in options.experts)
    return ExpertsRef(high_noise=high, low_noise=low[0] if low else None)


def _prepare(options: BenchOptions, folder: Path) -> tuple[Bench, list[BenchCase]]:
    """Return the benchmark and its cases; opens the experts when all options are parsed.

    Random experts are written into `folder`. Raises ValueError and OSError.
    """
    device, video = device_of(options.device), _video(options)
    settings = TrialMatrix.parse(options.policies, "", options.steps).settings(OffloadPolicy.layerwise())
    if any(not isinstance(setting.policy, OffloadPolicy) for setting in settings):
        raise ArgumentError("--policies auto: the policy would differ between layouts; name fixed policies")
    if any(setting.steps is None for setting in settings):
        raise ArgumentError("--steps is empty: give numbers like 10,20")
    place = cluster(options.cluster if options.distributed else IN_PROCESS)
    workers = WorkersRef(
        count=1,
        address=place.address,
        token_file=place.token_file,
        paths=place.paths,
        threads=options.threads or (1 if device.type == "cpu" and options.distributed else None),
        beyond_loopback=place.remote_machines,
        max_restarts=0,
    )
    counts = _counts(options, device, place.address)
    layouts = [parse_mesh(words) for words in _split(options.layouts)]
    times = TrialTimes(repeats=options.repeats, warmup=options.warmup, cooldown_s=options.cooldown_s)
    check_ray(workers)
    experts = _experts(options, folder)
    with open_pair(experts) as pair:
        request = bench_request(video, videos=options.videos, guidance=options.guidance, in_channels=pair.in_channels)
        job = request_job(pair, request, device)
    bench = Bench(experts=experts, request=request, times=times, workers=workers, device=device)
    return bench, bench_cases(counts, layouts, settings, job, options.videos)


def _video(options: BenchOptions) -> VideoShape:
    return video_shape(options.size or (REAL_SIZE if options.experts else SMALL_SIZE))


def _counts(options: BenchOptions, device: torch.device, address: str) -> tuple[int, ...]:
    if not options.distributed:
        return (1,)
    gpus = gpus_of(device)
    if not options.workers:
        return default_counts(min(MAX_WORKERS, gpus or DEFAULT_CPU_WORKERS))
    words = _split(options.workers)
    if bad := [word for word in words if not word.isascii() or not word.isdecimal()]:
        raise ArgumentError(f"--workers: {bad[0]!r} is not a number; write a list like 1,2,4")
    for count in map(int, words):
        check_count(count, address, gpus=gpus, most=MAX_WORKERS)
    return tuple(dict.fromkeys(map(int, words)))


def _split(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _method(options: BenchOptions, prepared: Bench) -> str:
    video, workers, times = _video(options), prepared.workers, prepared.times
    kind = "experts from files" if options.experts else "two random experts of 8 blocks, 4 heads x 128"
    cluster_name = options.cluster if options.distributed else IN_PROCESS
    threads = "" if workers.threads is None else f", {workers.threads} CPU thread{'s' * (workers.threads != 1)} each"
    return (
        f"{kind}; {video.width}x{video.height}, {video.frames} frames, {options.videos} video"
        f"{'s' * (options.videos != 1)} at once, guidance {options.guidance:g}, UniPC, 512 random text tokens; "
        f"workers {cluster_name}{threads}; {times.repeats} measured runs after {times.warmup} warm-up runs, "
        f"{times.cooldown_s:g} s of cooldown before each; times are median (minimum to maximum) from the request to "
        "the latents on the driver; loading is from the first request to the first block's compute, on workers with "
        "closed experts, with the page cache as it was; the start of workers is listed separately; memory is the "
        "device's, on a CPU the process's RAM, as sampled in the measured runs; text encoder and VAE are not included"
    )
