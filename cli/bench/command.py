"""`wanstream bench`: measures runs on one or more workers, writes JSON and a page of tables."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from ...bench import TrialMatrix, TrialTimes
from ...host.workers import check_ray, cluster, gpus_of
from ...sampling import request_run_shape
from ...schema import OffloadPolicy
from ...schema.refs import IN_PROCESS, ExpertsRef, check_count
from ...schema.text import error_text, format_count
from ...shapes import VideoShape
from ...wan import open_pair
from .. import arguments
from ..options import BenchOptions
from ..terminal import print_note
from . import cases
from .report import save

MAX_WORKERS = 64
DEFAULT_CPU_WORKERS = 2
"""Default maximum number of workers on a CPU."""
SMALL_SIZE = "128x128x17"
REAL_SIZE = "832x480x81"


def bench(options: BenchOptions) -> int:
    """Measure, write the files, print their paths, and return the exit code."""
    # The folder must outlive the runs, because workers stream the random experts from there.
    with tempfile.TemporaryDirectory() as folder:
        try:
            prepared, found = _prepare(options, Path(folder))
            arguments.create_output_folder(options.output)
        except (ValueError, OSError) as err:
            print_note(err)
            return arguments.INVALID
        refused = [case for case in found if case.failed]
        chosen = [case for case in found if not case.failed]
        for case in refused:
            print_note(f"skipped: {case.name}: {case.failed}")
        if not chosen:
            print_note("no case is left to measure")
            return arguments.INVALID
        measured = list[cases.BenchCase]()
        method = _method(options, prepared)
        paths: tuple[Path, ...] = ()
        try:
            for case in cases.run_cases(prepared, chosen, print_note):
                measured.append(case)
                # After each case, because all cases may take hours.
                known = [*refused, *measured]
                paths = save(known, method=method, device=prepared.device, folder=options.output)
                print_note(f"{case.name}: {case.failed or 'measured'}")
        except (ValueError, OSError) as err:
            print_note(f"failed: {error_text(err)}")
            return arguments.FAILED
    for path in paths:
        print(path)
    return arguments.FAILED if any(case.failed for case in measured) else arguments.DONE


def _experts(options: BenchOptions, folder: Path) -> ExpertsRef:
    if not options.experts:
        return cases.small_experts(folder)
    if len(options.experts) > 2:
        raise arguments.ArgumentError(
            f"--experts names {len(options.experts)} paths: give two, or one pipeline folder"
        )
    high, *low = (path.absolute() for path in options.experts)
    return ExpertsRef(high_noise=high, low_noise=next(iter(low), None))


def _prepare(options: BenchOptions, folder: Path) -> tuple[cases.Bench, list[cases.BenchCase]]:
    """Return the benchmark and the cases. Opens the experts when all options are parsed.

    Random experts are written into `folder`. Raises ValueError and OSError.
    """
    device = arguments.device_of(options.device)
    video = _video(options)
    matrix = TrialMatrix.parse(options.runs.policies, "", options.runs.steps)
    settings = matrix.settings(OffloadPolicy.layerwise())
    if any(not isinstance(setting.policy, OffloadPolicy) for setting in settings):
        raise arguments.ArgumentError(
            "--policies auto: the policy would differ between layouts; name fixed policies"
        )
    if any(setting.steps is None for setting in settings):
        raise arguments.ArgumentError("--steps is empty: give numbers like 10,20")
    threads = options.threads or None
    # One each, because the workers share the cores.
    if threads is None and device.type == "cpu" and options.distributed:
        threads = 1
    # Restarts are off: the time for a new worker would be measured, too.
    workers = replace(cluster(_cluster_name(options)), threads=threads, max_restarts=0)
    counts = _counts(options, device, workers.address)
    layouts = [cases.parse_mesh(words) for words in _split(options.layouts)]
    times = TrialTimes(**vars(options.trials))
    check_ray(workers)
    experts = _experts(options, folder)
    # Only shapes are read here. The workers open the experts again.
    with open_pair(experts) as pair:
        request = cases.bench_request(
            video,
            videos=options.runs.videos,
            guidance=options.runs.guidance,
            in_channels=pair.high.config.in_channels,
        )
        run = request_run_shape(pair, request, device)
    bench = cases.Bench(
        experts=experts, request=request, times=times, workers=workers, device=device
    )
    return bench, cases.bench_cases(counts, layouts, settings, run, options.runs.videos)


def _video(options: BenchOptions) -> VideoShape:
    return arguments.video_shape(
        options.runs.size or (REAL_SIZE if options.experts else SMALL_SIZE)
    )


def _cluster_name(options: BenchOptions) -> str:
    return options.cluster if options.distributed else IN_PROCESS


def _counts(options: BenchOptions, device: torch.device, address: str) -> tuple[int, ...]:
    if not options.distributed:
        return (1,)
    gpus = gpus_of(device)
    if not options.workers:
        most = min(MAX_WORKERS, gpus or DEFAULT_CPU_WORKERS)
        # The default counts are the powers of two up to `most`.
        return tuple(2**power for power in range(most.bit_length()))
    words = _split(options.workers)
    if bad := [word for word in words if not word.isascii() or not word.isdecimal()]:
        raise arguments.ArgumentError(
            f"--workers: {bad[0]!r} is not a number; write a list like 1,2,4"
        )
    for count in map(int, words):
        check_count(count, address, gpus=gpus, most=MAX_WORKERS)
    return tuple(dict.fromkeys(map(int, words)))


def _split(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _method(options: BenchOptions, prepared: cases.Bench) -> str:
    video = _video(options)
    times = prepared.times
    runs = options.runs
    kind = "two random experts of 8 blocks, 4 heads x 128"
    if options.experts:
        kind = "experts from files"
    workers = _cluster_name(options)
    if prepared.workers.threads is not None:
        workers += f", {format_count(prepared.workers.threads, 'CPU thread')} each"
    return (
        f"{kind}; {video.width}x{video.height}, {video.frames} frames, "
        f"{format_count(runs.videos, 'video')} at once, guidance {runs.guidance:g}, UniPC, 512 "
        f"random text tokens; workers {workers}; {times.repeats} measured runs after "
        f"{times.warmup} warm-up runs, {times.cooldown_s:g} s of cooldown before each; times are "
        "median (minimum to maximum) from the request to the latents on the driver; loading is "
        "from the first request to the first block's compute, on workers with closed experts, with "
        "the page cache as it was; the start of workers is listed separately; memory is the "
        "device's, on a CPU the process's RAM, as sampled in the measured runs; text encoder and "
        "VAE are not included"
    )
