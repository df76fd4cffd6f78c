"""A run of both experts under this host, and the value that stands for it on an edge."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..host import AnnouncedRun, ExpertsRef, host
from ..host.observed import observed
from ..plan import AutoOffload, OffloadPolicy, Timeline
from ..sampling import (
    Cancelled,
    DenoiseRequest,
    DenoiseResult,
    StepProgress,
    check_room,
    denoise,
    request_job,
    working_bytes,
)
from ..sampling.predicted import predicted_timeline

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

    @property
    def timeline(self) -> Timeline:
        return self.result.timeline


def run_experts(
    ref: ExpertsRef,
    request: DenoiseRequest,
    asked: OffloadPolicy | AutoOffload,
    *,
    node_id: str | None,
    on_step: Callable[[StepProgress], None] | None = None,
    traces: Path | None = None,
) -> SamplerRun:
    """Run the request on the host's device; the host's Cancel ends it before the next block.

    `on_step` is told every step; None: a progress bar of the node's own is. `traces` is a folder for a trace of the
    run; None: one is written where the environment asks for it.
    """
    guided = any(scale != 1 for scale in request.guidance)
    pair = host.experts(ref)
    job = request_job(pair, request, host.device())
    choice = host.choose_policy(ref, asked, job)
    chunk = choice.policy.chunk_tokens
    needed = working_bytes(pair, request.noise.shape, guided=guided, chunk_tokens=chunk)
    pair, policy, device = host.load_experts(ref, choice.policy, working_bytes=needed)
    check_room(pair, request, policy, device)
    machine = host.known_machine(ref, job.expert)
    predicted = None if machine is None else predicted_timeline(pair, request, policy, machine=machine, device=device)
    course, report = request.course(), on_step or _own_bar(request, node_id)
    experts = [course.experts[step] for step in course.steps]
    ids = {"prompt_id": host.run_id(), "node_id": node_id}
    watched = AnnouncedRun(host.announce, experts=experts, predicted=predicted, **ids)

    def each_step(step: StepProgress) -> None:
        watched.step(step.record)
        report(step)

    try:
        with watched:
            result = denoise(
                pair,
                request,
                policy=policy,
                device=device,
                on_step=each_step,
                should_stop=host.should_stop,
                revise=choice.revise_under(policy),
                observe=observed(host) if traces is None else replace(observed(host), trace=traces),
            )
            told = replace(result.told_first(choice.reason), predicted=predicted)
            watched.ended(told.timeline)
    except Cancelled:
        host.raise_if_stopped()
        raise
    return SamplerRun(
        experts=ref,
        request=request,
        asked=asked,
        policy=policy,
        device=device,
        result=told,
        node_id=node_id,
        block_counts={"high": pair.high.config.num_layers, "low": pair.low.config.num_layers},
    )


def _own_bar(request: DenoiseRequest, node_id: str | None) -> Callable[[StepProgress], None]:
    progress = host.progress(len(request.course().steps), node_id)

    def on_step(step: StepProgress) -> None:
        progress.update(step.done, denoised=step.denoised)

    return on_step
