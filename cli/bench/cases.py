"""Benchmark cases over workers, with their experts and inputs, and their runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import torch

from ...bench import Setting, Trial, TrialTimes, Variant, policy_name, run_trials
from ...distributed import Driver, Pool, WorkerLostError, check_layout, part_sizes
from ...host.workers import StartPool, start_pool
from ...sampling.inputs import DenoiseRequest
from ...sampling.steps import seeded_noise
from ...schema import Mesh, MeshError, OffloadPolicy, plan_residency
from ...schema.records import Timeline
from ...schema.refs import ExpertsRef, WorkersRef
from ...schema.text import format_count
from ...shapes import TEXT_TOKENS, RunShape, VideoShape
from ...testing import TEXT_DIM, TinyShape, make_expert, save_expert_folder
from ...wan.latents import tensor_digest

SMALL = TinyShape(layers=8, heads=4, ffn_dim=2048)
SEED = 42


def small_experts(folder: Path) -> ExpertsRef:
    """Write two random bf16 experts in shape `SMALL`, 0.08 GB each, and return their reference."""
    for name, seed in (("high", 1), ("low", 2)):
        save_expert_folder(make_expert(SMALL, seed=seed), folder / name, dtype=torch.bfloat16)
    return ExpertsRef(high_noise=folder / "high", low_noise=folder / "low")


def bench_request(
    video: VideoShape, *, videos: int, guidance: float, in_channels: int
) -> DenoiseRequest:
    """Return a UniPC request with the default boundary, and random noise and texts.

    Random values cost as much as real ones.
    """
    # (batch, channels, latent frames, height, width)
    shape = (videos, 16, *video.latent)
    generator = torch.Generator().manual_seed(SEED)
    positive, negative = (
        torch.randn(1, TEXT_TOKENS, TEXT_DIM, generator=generator) for _ in range(2)
    )
    condition = None
    # Image-to-video experts have 36 channels: 16 of noise, 4 of a mask, 16 of the image.
    if in_channels > 16:
        condition = torch.randn(1, in_channels - 16, *shape[2:], generator=generator)
    return DenoiseRequest(
        seeded_noise(shape, SEED),
        positive,
        negative=None if guidance == 1 else negative,
        image_condition=condition,
        steps=1,
        solver="unipc",
        guidance=(guidance, guidance),
    )


@dataclass(frozen=True, kw_only=True)
class BenchRun(Trial):
    """A run on workers. The timeline has one record per step, over all videos."""

    wall_s: float
    """Seconds from the request to the latents."""
    ranks: Mapping[int, Timeline]
    gathered_bytes: int


@dataclass(frozen=True, kw_only=True)
class BenchCase(Variant):
    """One configuration and the runs, the first one on workers with closed experts.

    Cases with the same number of steps are one job with equal latents.
    """

    mesh: Mesh
    policy: OffloadPolicy
    steps: int
    start_s: float = 0.0
    """Seconds from the workers' start until all were ready."""
    trials: tuple[BenchRun, ...] = ()

    @classmethod
    def of(cls, mesh: Mesh, policy: OffloadPolicy, steps: int) -> BenchCase:
        """Return the case without runs."""
        workers = format_count(mesh.size, "worker")
        if mesh.size > 1:
            workers += f" ({mesh})"
        words = {
            "Steps": str(steps),
            "Workers": str(mesh.size),
            "Layout": str(mesh),
            "Policy": policy_name(policy),
        }
        return cls(
            name=f"{steps} steps, {workers}, {policy_name(policy)}",
            settings=words,
            job=f"{steps} steps",
            mesh=mesh,
            policy=policy,
            steps=steps,
        )

    @property
    def counted(self) -> tuple[BenchRun, ...]:
        """Runs without warm-ups."""
        return tuple(run for run in self.trials if not run.warmup)


def bench_cases(
    counts: Sequence[int],
    layouts: Sequence[Mesh],
    settings: Sequence[Setting],
    run: RunShape,
    videos: int,
) -> list[BenchCase]:
    """Return every setting on every layout with one of these numbers of workers.

    `failed` is set for refused ones. `run` covers all `videos` together. Each case replaces the
    steps. If `layouts` is empty, the defaults are layouts that split a video's lanes and tokens
    and, for several videos, also those that distribute the videos. One worker always has the
    trivial layout.
    """
    cases = dict[str, BenchCase]()
    for count in counts:
        chosen = [mesh for mesh in layouts if mesh.size == count]
        if not layouts or count == 1:
            chosen = [*_default_layouts(count, run, videos)]
        for mesh in chosen:
            for setting in settings:
                assert isinstance(setting.policy, OffloadPolicy)  # auto differs between layouts
                assert setting.steps is not None
                case = BenchCase.of(mesh, setting.policy, setting.steps)
                # Cases are kept by name, so a layout given twice is measured once.
                cases[case.name] = replace(case, failed=_refusal(case, run, videos))
    return [*cases.values()]


def parse_mesh(words: str) -> Mesh:
    """Parse a layout like `data 2 x cfg 2`. Raises MeshError."""
    degrees: dict[str, int] = {}
    for part in words.split(" x "):
        axis, _, degree = part.strip().partition(" ")
        is_number = degree.isascii() and degree.isdecimal()
        if axis not in dict(Mesh().degrees) or not is_number or axis in degrees:
            raise MeshError(
                f"{words!r} is not a layout: write axes and degrees like `data 2 x cfg 2`, each "
                "axis once"
            )
        degrees[axis] = int(degree)
    return Mesh(**degrees)


def _refusal(case: BenchCase, run: RunShape, videos: int) -> str:
    """Return why a case cannot run; empty if it can."""
    # The largest part, because `run` covers all videos.
    group = replace(run, samples=max(part_sizes(videos, case.mesh)) * run.samples // videos)
    try:
        # Only the number of steps counts here, and it may exceed the run's own.
        check_layout(case.mesh, group.of_steps([0] * case.steps), videos)
        plan_residency(case.policy, dict.fromkeys(("high", "low"), run.blocks.blocks))
    except ValueError as err:
        return str(err)
    return ""


def _default_layouts(count: int, run: RunShape, videos: int) -> Iterator[Mesh]:
    if count == 1:
        yield Mesh()
        return
    sides = 1
    if max(run.lanes.values()) > videos and count % 2 == 0:
        sides = 2
    yield Mesh(cfg=sides, ulysses=count // sides)
    if videos > 1:
        yield Mesh(data=count)
        yield Mesh(stage=count)


CLOSE_TIMEOUT_S = 120.0
"""Seconds that workers may take to close their experts."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Settings shared by all cases."""

    experts: ExpertsRef
    request: DenoiseRequest
    times: TrialTimes
    workers: WorkersRef
    """Each case replaces number and layout."""
    device: torch.device


def run_cases(
    bench: Bench,
    cases: Sequence[BenchCase],
    log: Callable[[str], None],
    start: StartPool = start_pool,
) -> Iterator[BenchCase]:
    """Run all cases in order. Consecutive cases with the same number of workers share them.

    A case's error is in `failed` and does not end the others. Raises errors from starting workers.
    """
    for count, group in groupby(cases, key=lambda case: case.mesh.size):
        log(f"starting {format_count(count, 'worker')}")
        started = time.monotonic()
        with closing(start(replace(bench.workers, count=count), bench.device)) as pool:
            start_s = time.monotonic() - started
            for case in group:
                yield _run_case(bench, replace(case, start_s=start_s), pool, log)


def _run_case(bench: Bench, case: BenchCase, pool: Pool, log: Callable[[str], None]) -> BenchCase:
    ref = replace(bench.workers, count=case.mesh.size, mesh=case.mesh)
    driver = Driver(pool, ref, case.mesh)
    request = bench.request.with_steps(case.steps)
    # Closed, so that the first run measures loading.
    for request_to_close in [worker.call("close") for worker in pool.workers]:
        with suppress(WorkerLostError):  # lost in the previous case; the driver replaces it
            request_to_close.result(CLOSE_TIMEOUT_S)

    def with_run(case: BenchCase, number: int) -> BenchCase:
        log(f"{case.name}: run {number + 1} of {bench.times.runs}")
        time.sleep(bench.times.cooldown_s)
        started = time.monotonic()
        ran = driver.denoise(bench.experts, request, case.policy)
        run = BenchRun(
            wall_s=time.monotonic() - started,
            timeline=ran.timeline,
            ranks=ran.timelines,
            latents=tensor_digest(ran.latents),
            gathered_bytes=ran.gathered_bytes,
            warmup=number < bench.times.warmup,
        )
        return replace(case, trials=(*case.trials, run))

    failures = (ValueError, RuntimeError, OSError)
    # The last one has all runs.
    *_, case = run_trials(case, bench.times, with_run, failures=failures)
    return replace(case, failed=case.failed.partition("\n")[0])
