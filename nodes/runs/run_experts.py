"""Sampling runs: policy, memory, and execution in this process or on workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from ...devices import in_own_dtype
from ...distributed import part_sizes
from ...host import RunEvents, SharedRun, current_host, observed, run_settings
from ...plan import AutoOffload
from ...sampling import (
    DenoiseRequest,
    DenoiseResult,
    SamplingCancelled,
    StepProgress,
    cached_policy,
    check_room,
    denoise,
    predicted_timeline,
    request_job,
    working_bytes,
)
from ...schema import ExpertsRef, OffloadPolicy, Timeline, WorkersRef

if TYPE_CHECKING:
    import torch

    from ...plan import OffloadJob
    from ...wan import ExpertPair


OnStep: TypeAlias = "Callable[[StepProgress], None]"


class RunResult(NamedTuple):
    """What came of a run."""

    result: DenoiseResult
    ranks: Mapping[int, Timeline]
    """What each worker did, where there were some."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedRun:
    """Everything is decided; `compute` does it, and tells every step."""

    policy: OffloadPolicy
    device: torch.device
    compute: Callable[[OnStep], RunResult]
    predicted: Timeline | None = None
    parts: int = 1
    """In how many the videos are computed; each step is told for each of them."""


def prepare_here(
    pair: ExpertPair,
    job: OffloadJob,
    ref: ExpertsRef,
    request: DenoiseRequest,
    asked: OffloadPolicy | AutoOffload,
    *,
    traces: Path | None,
) -> PreparedRun:
    """A run on the host's device; the host's Cancel ends it before the next block."""
    choice = current_host().choose_policy(ref, asked, job)
    choice = replace(choice, policy=cached_policy(choice.policy, request.cache))
    chunk = choice.policy.chunk_tokens
    needed = working_bytes(pair, request.computed_shape, guided=request.guided, chunk_tokens=chunk, cache=request.cache)
    pair, policy, device = current_host().load_experts(ref, choice.policy, working_bytes=needed)
    check_room(pair, request, policy, device)
    machine = current_host().known_machine(ref, job.expert)
    predicted = None if machine is None else predicted_timeline(pair, request, policy, machine=machine, device=device)

    def compute(on_step: OnStep) -> RunResult:
        result = denoise(
            pair,
            request,
            policy=policy,
            device=device,
            on_step=on_step,
            should_stop=current_host().should_stop,
            revise=choice.revise_under(policy),
            observe=observed(current_host()) if traces is None else replace(observed(current_host()), trace=traces),
        )
        return RunResult(result.with_note(choice.reason), {})

    return PreparedRun(policy=policy, device=device, compute=compute, predicted=predicted)


def prepare_shared(
    workers: WorkersRef,
    job: OffloadJob,
    ref: ExpertsRef,
    request: DenoiseRequest,
    asked: OffloadPolicy | AutoOffload,
) -> PreparedRun:
    """A run on `workers`, which are started if they are not there; the host's Cancel ends it before the next block.

    Raises MeshError for a layout that does not suit the run, and what starting the workers raises.
    """
    shared = SharedRun(workers=workers, job=job, videos=request.batch, asked=asked)
    plan = current_host().plan_workers(shared, ref)
    driver = current_host().workers(workers, plan.mesh)

    def compute(on_step: OnStep) -> RunResult:
        ran = driver.denoise(ref, request, plan.policy, on_step=on_step, should_stop=current_host().should_stop)
        result = DenoiseResult(latents=ran.latents.to(request.noise.device), sigma=ran.sigma, timeline=ran.timeline)
        for reason in reversed(plan.reasons):
            result = result.with_note(reason)
        return RunResult(result, ran.timelines)

    parts = len(part_sizes(request.batch, plan.mesh))
    return PreparedRun(policy=plan.policy, device=current_host().device(), compute=compute, parts=parts)


@dataclass(frozen=True, kw_only=True, eq=False)
class SamplerRun:
    """What a sampler ran: everything that is needed to run it again, and what came of it."""

    experts: ExpertsRef
    request: DenoiseRequest
    asked: OffloadPolicy | AutoOffload
    """The policy that was connected."""
    policy: OffloadPolicy
    """The one that the run began with."""
    device: torch.device
    result: DenoiseResult
    node_id: str | None
    """Of the node that ran it."""
    block_counts: Mapping[str, int]
    """How many blocks each expert has."""
    workers: WorkersRef | None = None
    """Those that computed it; None: this process."""
    ranks: Mapping[int, Timeline] = field(default_factory=dict)
    """What each worker did, by rank."""

    @property
    def timeline(self) -> Timeline:
        return self.result.timeline


def run_experts(
    ref: ExpertsRef,
    request: DenoiseRequest,
    asked: OffloadPolicy | AutoOffload,
    *,
    node_id: str | None,
    workers: WorkersRef | None = None,
    on_step: OnStep | None = None,
    traces: Path | None = None,
) -> SamplerRun:
    """Run the request on the host's device, or on `workers`; the host's Cancel ends it before the next block.

    `on_step` is told every step; None: a progress bar of the node's own is. `traces` is a folder for a trace of the
    run; None: one is written where the environment asks for it. Workers write none.
    """
    if workers is None:
        ref = in_own_dtype(ref, current_host().device())  # reports show it
    pair = current_host().experts(ref)
    job = request_job(pair, request, current_host().device())
    if workers is None:
        prepared = prepare_here(pair, job, ref, request, asked, traces=traces)
    else:
        prepared = prepare_shared(workers, job, ref, request, asked)
    step_plan = request.step_plan
    experts = [step_plan.experts[step] for step in step_plan.steps]
    report = on_step or _own_bar(len(experts) * prepared.parts, node_id)
    ids = {"prompt_id": current_host().run_id(), "node_id": node_id}
    settings = run_settings(ref, asked, prepared.policy, request.noise.shape, prepared.device, workers=workers)
    watched = RunEvents(
        current_host().announce, experts=experts, predicted=prepared.predicted, settings=settings, **ids
    )

    def each_step(step: StepProgress) -> None:
        watched.step(step.record)
        report(step)

    try:
        with watched:
            result, ranks = prepared.compute(each_step)
            told = replace(result, predicted=prepared.predicted)
            watched.ended(told.timeline, ranks=ranks)
    except SamplingCancelled:
        current_host().raise_if_stopped()
        raise
    return SamplerRun(
        experts=ref,
        request=request,
        asked=asked,
        policy=prepared.policy,
        device=prepared.device,
        result=told,
        node_id=node_id,
        block_counts=pair.block_counts,
        workers=workers,
        ranks=ranks,
    )


def _own_bar(total: int, node_id: str | None) -> Callable[[StepProgress], None]:
    progress = current_host().progress(total, node_id, unit="step")

    def on_step(step: StepProgress) -> None:
        progress.update(step.done, denoised=step.denoised)

    return on_step
