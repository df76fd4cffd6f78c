"""A run of both experts under this host, and the value that stands for it on an edge."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..host import AnnouncedRun, ExpertsRef, host
from ..host.run_settings import run_settings
from ..plan import AutoOffload, OffloadPolicy, Timeline, WorkersRef
from ..sampling import Cancelled, DenoiseRequest, DenoiseResult, StepProgress, request_job
from ..wan.compute_dtype import in_own_dtype
from .prepared_run import OnStep, prepare_here
from .shared_run import prepare_shared

if TYPE_CHECKING:
    import torch


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
        ref = in_own_dtype(ref, host.device())  # reports show it
    pair = host.experts(ref)
    job = request_job(pair, request, host.device())
    if workers is None:
        prepared = prepare_here(pair, job, ref, request, asked, traces=traces)
    else:
        prepared = prepare_shared(workers, job, ref, request, asked)
    course = request.course()
    experts = [course.experts[step] for step in course.steps]
    report = on_step or _own_bar(len(experts) * prepared.parts, node_id)
    ids = {"prompt_id": host.run_id(), "node_id": node_id}
    settings = run_settings(ref, asked, prepared.policy, request.noise.shape, prepared.device, workers=workers)
    watched = AnnouncedRun(host.announce, experts=experts, predicted=prepared.predicted, settings=settings, **ids)

    def each_step(step: StepProgress) -> None:
        watched.step(step.record)
        report(step)

    try:
        with watched:
            result, ranks = prepared.compute(each_step)
            told = replace(result, predicted=prepared.predicted)
            watched.ended(told.timeline, ranks=ranks)
    except Cancelled:
        host.raise_if_stopped()
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
    progress = host.progress(total, node_id, unit="step")

    def on_step(step: StepProgress) -> None:
        progress.update(step.done, denoised=step.denoised)

    return on_step
