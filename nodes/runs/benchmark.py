"""What a benchmark runs under this host: the runs that it was given, or every setting of a matrix for each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Protocol

import torch

from ...bench import Policy, Report, Trial, TrialMatrix, Variant, describe_machine, policy_name
from ...distributed import RestartLimitError, WorkerFailedError
from ...host import current_host
from ...offload import NoRamError
from ...plan import DoesNotFitError, describe_ram
from ...sampling import DenoiseRequest, DenoiseResult, StepProgress
from ...schema import VERSION, ExpertsRef, MeshError, OffloadPolicy, WorkersRef, describe_workers, plan_residency
from .run_experts import OnStep, SamplerRun, run_experts
from .trials import TrialTimes, as_trial, describe_request, job_digest, trials, with_steps


class RunExperts(Protocol):
    """Runs a request under this host; see `run_experts`."""

    def __call__(
        self,
        ref: ExpertsRef,
        request: DenoiseRequest,
        asked: Policy,
        *,
        node_id: str | None,
        workers: WorkersRef | None,
        on_step: OnStep | None,
        traces: Path | None,
    ) -> SamplerRun: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class BenchmarkRun:
    """A variant before its first run."""

    name: str
    experts: ExpertsRef
    request: DenoiseRequest
    asked: Policy
    workers: WorkersRef | None = None
    """Those that compute it; None: this process."""

    def variant(self) -> Variant:
        """The variant, without a run."""
        settings = {**_expert_words(self.experts), **describe_request(self.request), **_policy_words(self.asked)}
        if self.workers is not None:
            settings["Workers"] = describe_workers(self.workers)
        return Variant(name=self.name, settings=settings, job=job_digest(self.request, self.experts))


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """What is to be measured, and how."""

    title: str
    runs: Mapping[str, SamplerRun]
    """By name."""
    matrix: TrialMatrix
    times: TrialTimes
    traces: Path | None
    """A folder for a trace of each run; None: none is made."""

    @property
    def runs_again(self) -> bool:
        """Whether more is wanted than what ran already."""
        return not (self.matrix.is_empty and self.times.runs == 1 and self.traces is None)

    def candidates(self) -> list[BenchmarkRun]:
        """Every setting of the matrix for every run. Raises ValueError for one that cannot be run, before any is."""
        found = []
        for title, run in self.runs.items():
            for setting in self.matrix.settings(run.asked):
                if isinstance(setting.policy, OffloadPolicy):
                    plan_residency(setting.policy, run.block_counts)
                request = with_steps(run.request, setting.steps)
                name = setting.name if len(self.runs) == 1 else f"{title}: {setting.name}"
                if self.matrix.is_empty:
                    name = title
                found.append(
                    BenchmarkRun(
                        name=name, experts=run.experts, request=request, asked=setting.policy, workers=run.workers
                    )
                )
        return found


def named_runs(runs: Mapping[str, SamplerRun | None], titles: Mapping[str, str]) -> dict[str, SamplerRun]:
    """The runs that are connected, by the titles of their nodes; two of one title are told apart by their input."""
    connected = {socket: run for socket, run in runs.items() if run is not None}
    names = {socket: titles.get(run.node_id or "", socket) for socket, run in connected.items()}
    shared = [*names.values()]
    return {
        name if shared.count(name) == 1 else f"{name} ({socket})": connected[socket] for socket, name in names.items()
    }


def measure(
    benchmark: Benchmark, *, node_id: str | None, keep: Callable[[Report], None], run: RunExperts = run_experts
) -> Report:
    """Make all runs of `benchmark`, one after the other; `keep` is given the report before the first and after each.

    A variant that finds no room in memory, or whose workers fail, cannot share its steps or are lost too often, is
    noted as failed, and the others go on. Raises what else `run` raises, and the host's interrupt where the user stops.
    """
    report = _empty(benchmark)
    if not benchmark.runs_again:
        return replace(report, variants=tuple(_as_ran(benchmark)), planned=len(benchmark.runs), finished=True)
    candidates = benchmark.candidates()
    report = replace(
        report,
        variants=tuple(candidate.variant() for candidate in candidates),
        planned=len(candidates) * benchmark.times.runs,
    )
    keep(report)
    steps = [len(candidate.request.step_plan.steps) * benchmark.times.runs for candidate in candidates]
    bar = _TrialBar(sum(steps), node_id)
    for place, candidate in enumerate(candidates):
        for variant in _measured(candidate, benchmark, bar, run):
            variants = [*report.variants]
            variants[place] = variant
            report = replace(report, variants=tuple(variants))
            keep(report)
        bar.reach(sum(steps[: place + 1]))
    return replace(report, finished=True)


def _empty(benchmark: Benchmark) -> Report:
    times, now = benchmark.times, datetime.now().astimezone()
    again = f"{times.repeats} measured after {times.warmup} not counted, {times.cooldown_s:g} s of rest before each"
    device = next(iter(benchmark.runs.values())).device
    return Report(
        title=benchmark.title,
        variants=(),
        method={
            "Runs of each variant": again if benchmark.runs_again else "the one that the graph made",
            "Figures": "median (least to most)",
            "Made": now.isoformat(sep=" ", timespec="seconds"),
            "With": f"WanStream {VERSION}, {current_host().name()}",
        },
        machine=describe_machine(device),
        phases=current_host().ledger().phases(),
        planned=0,
        finished=False,
    )


def _as_ran(benchmark: Benchmark) -> Iterator[Variant]:
    for candidate, run in zip(benchmark.candidates(), benchmark.runs.values(), strict=True):
        yield _with_trial(candidate.variant(), run, as_trial(run.result))


def _measured(candidate: BenchmarkRun, benchmark: Benchmark, bar: _TrialBar, run: RunExperts) -> Iterator[Variant]:
    """The variant after each of its runs."""
    variant, made = candidate.variant(), list[SamplerRun]()

    def once() -> DenoiseResult:
        ran = run(
            candidate.experts,
            candidate.request,
            candidate.asked,
            workers=candidate.workers,
            node_id=bar.node_id,
            on_step=bar.of_run(len(candidate.request.step_plan.steps)),
            traces=benchmark.traces,
        )
        made.append(ran)
        return ran.result

    try:
        for trial in trials(benchmark.times, once, check=current_host().raise_if_stopped):
            variant = _with_trial(variant, made.pop(), trial)
            yield variant
    except (
        torch.OutOfMemoryError,
        DoesNotFitError,
        NoRamError,
        MeshError,
        WorkerFailedError,
        RestartLimitError,
    ) as err:
        yield replace(variant, failed=str(err))


def _with_trial(variant: Variant, run: SamplerRun, trial: Trial) -> Variant:
    """`variant` with one more run; where it ran under another policy than was asked for, the settings say so."""
    settings = dict(variant.settings)
    if run.policy != run.asked:
        settings["Ran under"] = f"{policy_name(run.policy)}, weights from {describe_ram(run.policy)}"
    return replace(variant, settings=settings, trials=(*variant.trials, trial), predicted=run.result.predicted)


class _TrialBar:
    """One progress bar over the steps of all runs."""

    def __init__(self, total: int, node_id: str | None) -> None:
        self.node_id = node_id
        self._progress = current_host().progress(total, node_id)
        self._done = 0

    def of_run(self, steps: int) -> OnStep:
        """Takes the steps of a run, which workers may tell once for each part of it."""
        before = self._done

        def on_step(step: StepProgress) -> None:
            self.reach(before + step.done * steps // step.total)

        return on_step

    def reach(self, done: int) -> None:
        """So many steps are behind us, those too that a variant was to take and did not."""
        if done != self._done:
            self._done = done
            self._progress.update(done)


def _expert_words(ref: ExpertsRef) -> dict[str, str]:
    files = [path.name for path in (ref.high_noise, ref.low_noise) if path is not None]
    loras = [
        f"{path.name} x {strength:g}"
        for lora in ref.loras
        for path, strength in ((lora.high_noise, lora.strength_high), (lora.low_noise, lora.strength_low))
        if path is not None
    ]
    words = {"Experts": " and ".join(files), "Computed in": ref.compute_dtype, "Kept in RAM": ref.storage}
    if ref.attention != "default":
        words["Attention"] = ref.attention
    if ref.compile:
        words["Blocks"] = "compiled"
    return {**words, "LoRAs": ", ".join(loras)} if loras else words


def _policy_words(asked: Policy) -> dict[str, str]:
    if not isinstance(asked, OffloadPolicy):
        return {"Policy": policy_name(asked)}
    words = {"Policy": policy_name(asked), "Weights from": describe_ram(asked)}
    return words if asked.chunk_tokens is None else {**words, "Tokens at once": str(asked.chunk_tokens)}
