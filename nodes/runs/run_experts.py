"""Sampling runs: policy, memory, and execution in this process or on workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch

from ...devices import thread_notes
from ...distributed import DistributedResult
from ...host import ProgressBar, RunEvents, SharedRun, current_host, run_settings, wire_notes
from ...plan import AutoOffload, OffloadJob, part_sizes
from ...sampling import (
    DenoiseRequest,
    DenoiseResult,
    SamplingCancelled,
    StepProgress,
    check_room,
    denoise,
    extra_tokens_of,
    policy_with_cache,
    predicted_timeline,
    request_job,
    working_bytes,
)
from ...schema import ExpertsRef, OffloadPolicy, Timeline, WorkersRef
from ...wan import ExpertPair, with_resolved_precision
from .preview import MovingPreviews, PreviewSettings

OnStep: TypeAlias = Callable[[StepProgress], None]
OnVisits: TypeAlias = Callable[[str, int], None]
"""See `TelemetryOptions.on_visits`."""

LATENT_PREVIEW_S = 1.0
"""Shortest interval between two latents that workers send for the preview of a progress bar."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedRun:
    """Run with its policy and device chosen; `compute` executes it and reports every step."""

    policy: OffloadPolicy
    device: torch.device
    compute: Callable[[OnStep, OnVisits], DenoiseResult]
    predicted: Timeline | None = None
    notes: tuple[str, ...] = ()
    """Sentences on the chosen policy and layout. May be empty."""
    parts: int = 1
    """Number of parts of the batch; each step is reported once per part."""


def prepare_here(
    pair: ExpertPair,
    job: OffloadJob,
    ref: ExpertsRef,
    request: DenoiseRequest,
    requested: OffloadPolicy | AutoOffload,
    *,
    traces: Path | None,
) -> PreparedRun:
    """Prepare a run on the host's device; the host's Cancel ends it before the next block."""
    choice = current_host().choose_policy(ref, requested, job)
    choice = replace(choice, policy=policy_with_cache(choice.policy, request.cache))
    needed = working_bytes(
        pair,
        request.computed_shape,
        sides=extra_tokens_of(pair, request),
        chunk_tokens=choice.policy.chunk_tokens,
        cache=request.cache,
    )
    # ComfyUI unloads other models here, and may lower the policy to the memory that it gets. So the room is checked and
    # the run predicted afterwards, with the policy that will run.
    pair, policy, device = current_host().load_experts(ref, choice.policy, working_bytes=needed)
    check_room(pair, request, policy, device)
    machine = current_host().known_machine(ref, job.expert)
    predicted = None if machine is None else predicted_timeline(pair, request, policy, machine=machine, device=device)

    def compute(on_step: OnStep, on_visits: OnVisits) -> DenoiseResult:
        options = replace(current_host().telemetry_options(), on_visits=on_visits)
        result = denoise(
            pair,
            request,
            policy=policy,
            device=device,
            on_step=on_step,
            should_stop=current_host().should_stop,
            revise=choice.revise_under(policy),
            observe=options if traces is None else replace(options, trace=traces),
        )
        return result.with_note(choice.reason)

    notes = (choice.reason, *thread_notes(device))
    return PreparedRun(policy=policy, device=device, compute=compute, predicted=predicted, notes=notes)


def prepare_shared(
    workers: WorkersRef,
    job: OffloadJob,
    ref: ExpertsRef,
    request: DenoiseRequest,
    requested: OffloadPolicy | AutoOffload,
    preview: PreviewSettings | None,
    *,
    is_measured: bool,
) -> PreparedRun:
    """Prepare a run on `workers` and start them if necessary; the host's Cancel ends it before the next block.

    Args:
        preview: Settings of moving previews. Without them, workers send latents if progress bars show them.
        is_measured: True to take all steps and show no previews, False to continue from states of an interrupted run.

    Raises MeshError if the layout does not suit the run, and any error of starting the workers.
    """
    run = SharedRun(workers=workers, job=job, videos=request.batch, requested=requested)
    host = current_host()
    plan = host.plan_workers(run, ref)
    driver = host.workers(workers, plan.mesh)
    states = None if is_measured else host.state_folder()
    preview_s = _latent_interval(preview, is_measured=is_measured)

    def compute(on_step: OnStep, _: OnVisits) -> DenoiseResult:
        interrupts: list[Exception] = []

        def report(step: StepProgress) -> None:
            # ComfyUI's bar and previews raise its interrupt, which to the driver would be an error that keeps states.
            try:
                on_step(step)
            except Exception as err:
                if not host.is_stop(err):
                    raise
                interrupts.append(err)

        try:
            shared = driver.denoise(
                ref,
                request,
                plan.policy,
                on_step=report,
                should_stop=lambda: bool(interrupts) or host.should_stop(),
                preview_s=preview_s,
                states=states,
            )
        except SamplingCancelled:
            if interrupts:
                raise interrupts[0] from None
            raise
        result: DenoiseResult = replace(shared, latents=shared.latents.to(request.noise.device))
        # Reversed, because `with_note` puts a note in front of the others.
        for reason in reversed((*plan.reasons, *wire_notes(run, driver))):
            result = result.with_note(reason)
        return result

    parts = len(part_sizes(request.batch, plan.mesh))
    return PreparedRun(policy=plan.policy, device=host.device(), compute=compute, parts=parts, notes=plan.reasons)


def _latent_interval(preview: PreviewSettings | None, *, is_measured: bool) -> float | None:
    """Return the seconds between latents sent by workers, or None if nothing shows them."""
    if preview is not None:
        return preview.every_s / 2  # half of it, because steps do not end when a preview is due
    return None if is_measured or not current_host().shows_latents() else LATENT_PREVIEW_S


@dataclass(frozen=True, kw_only=True, eq=False)
class SamplerRun:
    """Finished run of a sampler: its result, and all values that are needed to run it again."""

    experts: ExpertsRef
    request: DenoiseRequest
    requested: OffloadPolicy | AutoOffload
    """Policy of the input."""
    policy: OffloadPolicy
    """Policy with which the run started."""
    device: torch.device
    result: DenoiseResult
    node_id: str | None
    """Id of the sampler node."""
    block_counts: Mapping[str, int]
    """Number of blocks of each expert."""
    workers: WorkersRef | None = None
    """Workers of the run; None for this process."""

    @property
    def timeline(self) -> Timeline:
        return self.result.timeline


def run_experts(
    ref: ExpertsRef,
    request: DenoiseRequest,
    requested: OffloadPolicy | AutoOffload,
    *,
    node_id: str | None,
    workers: WorkersRef | None = None,
    on_step: OnStep | None = None,
    traces: Path | None = None,
    preview: PreviewSettings | None = None,
) -> SamplerRun:
    """Run the request on the host's device, or on `workers`; the host's Cancel ends it before the next block.

    Args:
        on_step: Callback after every step; None for a progress bar on the node.
        traces: Folder for a trace of the run; None writes one only if the environment says so. Workers write none.
        preview: Settings of moving previews, which replace those of the host; None for none.
    """
    previews = _previews(preview, request) if preview else None
    if workers is None:
        ref = with_resolved_precision(ref, current_host().device())  # before the settings: reports show the dtype
    pair = current_host().experts(ref)
    job = request_job(pair, request, current_host().device())
    if workers is None:
        prepared = prepare_here(pair, job, ref, request, requested, traces=traces)
    else:
        prepared = prepare_shared(workers, job, ref, request, requested, preview, is_measured=on_step is not None)
    experts = [request.step_plan.experts[step] for step in request.step_plan.steps]
    ids = {"prompt_id": current_host().run_id(), "node_id": node_id}
    settings = run_settings(ref, requested, prepared.policy, request.noise.shape, prepared.device, workers=workers)
    events = _events_of(prepared, experts=experts, settings=settings, **ids)
    bar = None if on_step else current_host().progress(len(experts) * prepared.parts, node_id, unit="step")
    step_plan = request.step_plan
    counts = pair.block_counts
    reports = _Reports(
        events=events, bar=bar, on_step=on_step, previews=previews, block_counts=counts, start_step=step_plan.start_step
    )
    try:
        with nullcontext() if bar is None else closing(bar), events, previews or nullcontext():
            result = replace(prepared.compute(reports.step, reports.visits), predicted=prepared.predicted)
            events.ended(result.timeline, ranks=result.timelines if isinstance(result, DistributedResult) else None)
    except SamplingCancelled:
        # The host's own interrupt: ComfyUI would report any other exception as an error of the node.
        current_host().raise_if_stopped()
        raise
    return SamplerRun(
        experts=ref,
        request=request,
        requested=requested,
        policy=prepared.policy,
        device=prepared.device,
        result=result,
        node_id=node_id,
        block_counts=pair.block_counts,
        workers=workers,
    )


def _events_of(prepared: PreparedRun, **run: Any) -> RunEvents:
    return RunEvents(current_host().announce, predicted=prepared.predicted, notes=prepared.notes, **run)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Reports:
    """Run callbacks: page events, and the progress bar or a measured run's callback."""

    events: RunEvents
    bar: ProgressBar | None
    on_step: OnStep | None
    previews: MovingPreviews | None
    block_counts: Mapping[str, int]
    start_step: int

    def visits(self, expert: str, done: int) -> None:
        step, share = self.events.visits(done, self.block_counts[expert])
        if self.bar is not None:
            self.bar.advance(step + share)

    def step(self, step: StepProgress) -> None:
        self.events.step(step.record, step.changes)
        if self.bar is not None:
            self.bar.update(step.done, denoised=step.denoised if self.previews is None else None)
        if self.on_step is not None:
            self.on_step(step)
        # A moving preview shows the first video, which part 0 has.
        if self.previews is not None and step.denoised is not None and step.part == 0:
            image = self.previews.update(step.denoised)
            if image is not None:
                self.events.preview(step.index - self.start_step + 1, image)


def _previews(settings: PreviewSettings, request: DenoiseRequest) -> MovingPreviews:
    """Return the previews of a run; raises the errors of `MovingPreviews`."""
    host = current_host()
    return MovingPreviews(
        settings,
        request.noise,
        host.device(),
        is_watched=host.has_viewers,
        check=host.raise_if_stopped,
        is_stop=host.is_stop,
    )
