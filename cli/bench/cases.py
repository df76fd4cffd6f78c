"""Cases of a benchmark over workers, with their experts and inputs, and their runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import torch

from ...bench import Setting, Trial, Variant, policy_name
from ...distributed import Driver, Pool, WorkerLostError
from ...host import StartPool, start_pool
from ...nodes.runs import TrialTimes, tensor_digest, with_steps
from ...plan import OffloadJob, check_layout, part_sizes
from ...sampling import DenoiseRequest, seeded_noise
from ...schema import (
    ExpertsRef,
    Mesh,
    MeshError,
    OffloadPolicy,
    Timeline,
    VideoShape,
    WorkersRef,
    plan_residency,
)
from ...testing import TEXT_DIM, TinyShape, make_expert, save_expert_folder

SMALL = TinyShape(layers=8, heads=4, ffn_dim=2048)
TEXT_TOKENS = 512
SEED = 42


def small_experts(folder: Path) -> ExpertsRef:
    """Write two random experts of `SMALL` in bf16, 0.08 GB each, and return their reference."""
    for name, seed in (("high", 1), ("low", 2)):
        save_expert_folder(make_expert(SMALL, seed=seed), folder / name, dtype=torch.bfloat16)
    return ExpertsRef(high_noise=folder / "high", low_noise=folder / "low")


def bench_request(video: VideoShape, *, videos: int, guidance: float, in_channels: int) -> DenoiseRequest:
    """Return a UniPC request with the default boundary, and random noise and texts, which cost as much as real ones."""
    shape = (videos, 16, *video.latent)
    generator = torch.Generator().manual_seed(SEED)
    positive, negative = (torch.randn(1, TEXT_TOKENS, TEXT_DIM, generator=generator) for _ in range(2))
    condition = None
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
    """A run on workers; its timeline has one record per step, over all videos."""

    wall_s: float
    """Seconds from the request to the latents."""
    ranks: Mapping[int, Timeline]
    gathered_bytes: int


@dataclass(frozen=True, kw_only=True)
class BenchCase(Variant):
    """One configuration and its runs, the first one on workers with closed experts.

    Cases with the same number of steps are one job with equal latents.
    """

    mesh: Mesh
    policy: OffloadPolicy
    steps: int
    start_s: float = 0.0
    """Seconds from the start of the workers until all of them were ready."""
    trials: tuple[BenchRun, ...] = ()

    @classmethod
    def of(cls, mesh: Mesh, policy: OffloadPolicy, steps: int) -> BenchCase:
        """Return the case without runs."""
        layout = f" ({mesh})" if mesh.size > 1 else ""
        name = f"{steps} steps, {mesh.size} worker{'s' * (mesh.size != 1)}{layout}, {policy_name(policy)}"
        words = {"Steps": str(steps), "Workers": str(mesh.size), "Layout": str(mesh), "Policy": policy_name(policy)}
        return cls(name=name, settings=words, job=f"{steps} steps", mesh=mesh, policy=policy, steps=steps)

    @property
    def counted(self) -> tuple[BenchRun, ...]:
        """Runs without warm-ups."""
        return tuple(run for run in self.trials if not run.warmup)


def bench_cases(
    counts: Sequence[int], layouts: Sequence[Mesh], settings: Sequence[Setting], job: OffloadJob, videos: int
) -> list[BenchCase]:
    """Return every setting on every layout with one of these numbers of workers; `failed` is set for refused ones.

    `job` is that of all `videos` together; its steps are replaced by those of each case. If `layouts` is empty, the
    defaults are layouts that split the lanes and tokens of a video and, for several videos, also those that distribute
    the videos. One worker always has the trivial layout.
    """
    cases = dict[str, BenchCase]()
    for count in counts:
        chosen = [mesh for mesh in layouts if mesh.size == count]
        for mesh in chosen if layouts and count > 1 else _default_layouts(count, job, videos):
            for setting in settings:
                assert isinstance(setting.policy, OffloadPolicy), "an automatic policy differs between layouts"
                assert setting.steps is not None
                case = BenchCase.of(mesh, setting.policy, setting.steps)
                cases[case.name] = replace(case, failed=_refusal(case, job, videos))
    return [*cases.values()]


def parse_mesh(words: str) -> Mesh:
    """Parse a layout like `data 2 x cfg 2`. Raises MeshError."""
    degrees: dict[str, int] = {}
    for part in words.split(" x "):
        axis, _, degree = part.strip().partition(" ")
        if axis not in dict(Mesh().degrees) or not degree.isascii() or not degree.isdecimal() or axis in degrees:
            raise MeshError(f"{words!r} is not a layout: write axes and degrees like `data 2 x cfg 2`, each axis once")
        degrees[axis] = int(degree)
    return Mesh(**degrees)


def default_counts(most: int) -> tuple[int, ...]:
    """Return the powers of two up to `most`."""
    return tuple(2**power for power in range(most.bit_length()))


def _refusal(case: BenchCase, job: OffloadJob, videos: int) -> str:
    """Return the reason for which the case cannot run; empty if it can."""
    group = max(part_sizes(videos, case.mesh))
    lanes = {expert: group * lanes // videos for expert, lanes in job.lanes.items()}
    try:
        # Only the number of steps counts here, and it may exceed that of the job.
        first_steps = job.of_steps([0] * case.steps)
        check_layout(case.mesh, replace(first_steps, lanes=lanes, lanes_of_steps=()), videos)
        plan_residency(case.policy, {"high": job.expert.blocks, "low": job.expert.blocks})
    except ValueError as err:
        return str(err)
    return ""


def _default_layouts(count: int, job: OffloadJob, videos: int) -> Iterator[Mesh]:
    if count == 1:
        yield Mesh()
        return
    sides = 2 if max(job.lanes.values()) > videos and count % 2 == 0 else 1
    yield Mesh(cfg=sides, ulysses=count // sides)
    if videos > 1:
        yield Mesh(data=count)
        yield Mesh(stage=count)


CLOSE_TIMEOUT_S = 120.0
"""Seconds that workers may take to close their experts."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Settings that all cases share."""

    experts: ExpertsRef
    request: DenoiseRequest
    times: TrialTimes
    workers: WorkersRef
    """Number and layout are replaced by those of each case."""
    device: torch.device


def run_cases(
    bench: Bench, cases: Sequence[BenchCase], log: Callable[[str], None], start: StartPool = start_pool
) -> Iterator[BenchCase]:
    """Run all cases, in their order; consecutive cases with the same number of workers share them.

    An error of a case is in its `failed` and does not end the others. Raises the errors of starting workers.
    """
    for count, group in groupby(cases, key=lambda case: case.mesh.size):
        log(f"starting {count} worker{'s' * (count != 1)}")
        started = time.monotonic()
        with closing(start(replace(bench.workers, count=count), bench.device)) as pool:
            start_s = time.monotonic() - started
            for case in group:
                yield _run_case(bench, replace(case, start_s=start_s), pool, log)


def _run_case(bench: Bench, case: BenchCase, pool: Pool, log: Callable[[str], None]) -> BenchCase:
    ref = replace(bench.workers, count=case.mesh.size, mesh=case.mesh)
    driver, request = Driver(pool, ref, case.mesh), with_steps(bench.request, case.steps)
    for request_to_close in [worker.call("close") for worker in pool.workers]:
        with suppress(WorkerLostError):  # lost in the previous case; the driver replaces it
            request_to_close.result(CLOSE_TIMEOUT_S)
    runs = list[BenchRun]()
    for number in range(bench.times.runs):
        log(f"{case.name}: run {number + 1} of {bench.times.runs}")
        time.sleep(bench.times.cooldown_s)
        started = time.monotonic()
        try:
            ran = driver.denoise(bench.experts, request, case.policy)
        except (ValueError, RuntimeError, OSError) as err:
            return replace(case, trials=tuple(runs), failed=str(err).splitlines()[0])
        runs.append(
            BenchRun(
                wall_s=time.monotonic() - started,
                timeline=ran.timeline,
                ranks=ran.timelines,
                latents=tensor_digest(ran.latents),
                gathered_bytes=ran.gathered_bytes,
                warmup=number < bench.times.warmup,
            )
        )
    return replace(case, trials=tuple(runs))
