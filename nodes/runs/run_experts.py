"""Sampling runs: policy, memory, and execution in this process or on workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import torch

from ...devices import thread_notes
from ...distributed import DistributedResult, part_sizes
from ...host import Host, RunEvents, run_settings, telemetry_options
from ...host.workers import SharedRun, wire_notes
from ...plan import WORTH, AutoOffload
from ...sampling import check_room, denoise, predicted_timeline, request_bytes, request_run_shape
from ...sampling.inputs import DenoiseRequest
from ...sampling.steps import DenoiseResult, SamplingCancelled, StepProgress
from ...schema import OffloadPolicy
from ...schema.records import Advice, Timeline
from ...schema.refs import ExpertsRef, WorkersRef
from ...wan import ExpertPair
from ...wan.measurement import with_resolved_precision
from .preview import MovingPreviews, PreviewSettings

OnStep: TypeAlias = Callable[[StepProgress], None]
OnVisits: TypeAlias = Callable[[str, int], None]
"""See `TelemetryOptions.on_visits`."""

LATENT_PREVIEW_S = 1.0
"""Shortest interval between latents that workers send for a progress bar's preview."""


# `eq=False`: a comparison of tensors has no single truth value.
@dataclass(frozen=True, kw_only=True, eq=False)
class SamplerInputs:
    """Inputs to a sampling run."""

    experts: ExpertsRef
    request: DenoiseRequest
    requested: OffloadPolicy | AutoOffload
    """Policy from the input."""
    workers: WorkersRef | None = None
    """Workers for the run, or None for this process."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Settings for a measured run. It takes all steps, without a progress bar and previews."""

    on_step: OnStep
    """Callback after every step."""
    traces: Path | None = None
    """Folder for a trace of the run. None writes one only if the environment requests it. Workers
    write none."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedRun:
    """Run with a chosen policy and device. `compute` executes it and reports every step."""

    policy: OffloadPolicy
    device: torch.device
    compute: Callable[[OnStep, OnVisits], DenoiseResult]
    predicted: Timeline | None = None
    advise: Callable[[Timeline], Advice | None] = lambda timeline: None
    """Called with the timeline of the run. Returns the planner's choice for one that waited."""
    notes: tuple[str, ...] = ()
    """Sentences on the chosen policy and layout. May be empty."""
    parts: int = 1
    """Number of batch parts. Each step is reported once per part."""


def prepare_here(
    host: Host, pair: ExpertPair, inputs: SamplerInputs, measured: Measurement | None
) -> PreparedRun:
    """Prepare a run on the host's device. The host's Cancel ends it before the next block."""
    ref = inputs.experts
    request = inputs.request
    shape = request_run_shape(pair, request, host.memory.device())
    choice = host.memory.choose_policy(pair, ref, inputs.requested, shape)
    choice = replace(choice, policy=request.options.policy(choice.policy))
    needed = request_bytes(pair, request, chunk_tokens=choice.policy.chunk_tokens)
    # ComfyUI unloads other models here, and may lower the policy to the available memory. So
    # check the room and predict the run afterwards, with the policy that will run.
    pair, policy, device = host.models.load_experts(ref, choice.policy, working_bytes=needed)
    check_room(pair, request, policy, device)
    machine = host.memory.planner.known_machine(device, shape.expert, ref.high_noise)
    predicted = None
    if machine is not None:
        predicted = predicted_timeline(pair, request, policy, machine=machine, device=device)

    notes = (choice.reason, *thread_notes(device))

    def advise(timeline: Timeline) -> Advice | None:
        # A cache skips visits by the content of the video, and the simulator has none. Planning
        # between measured runs would heat the CPU.
        if request.options.cache is not None or measured is not None:
            return None
        return choice.advise(policy) if _waited(timeline) else None

    def compute(on_step: OnStep, on_visits: OnVisits) -> DenoiseResult:
        options = replace(telemetry_options(host), on_visits=on_visits)
        if measured is not None and measured.traces is not None:
            options = replace(options, trace=measured.traces)
        result = denoise(
            pair,
            request,
            policy=policy,
            device=device,
            on_step=on_step,
            should_stop=host.events.should_stop,
            revise=choice.revise_under(policy),
            observe=options,
        )
        return result.with_notes(*notes)

    return PreparedRun(
        policy=policy,
        device=device,
        compute=compute,
        predicted=predicted,
        advise=advise,
        notes=notes,
    )


def _waited(timeline: Timeline) -> bool:
    """Return whether the steps after the first, which reads all weights, waited noticeably."""
    later = timeline.steps[1:]
    stall_s = sum(step.stall_s for step in later)
    wall_s = sum(step.wall_s for step in later)
    return wall_s > 0 and stall_s >= WORTH * wall_s


def prepare_shared(
    host: Host,
    pair: ExpertPair,
    inputs: SamplerInputs,
    workers: WorkersRef,
    preview: PreviewSettings | None,
    measured: Measurement | None,
) -> PreparedRun:
    """Prepare a run on `workers`, starting them if necessary.

    The host's Cancel ends it before the next block.

    Args:
        preview: settings for moving previews. Without them, workers send latents if progress bars
            show them.
        measured: None for a run that may continue from an interrupted one's states.

    Raises MeshError if the layout does not suit the run, and any error from starting the workers.
    """
    request = inputs.request
    shape = request_run_shape(pair, request, host.memory.device())
    run = SharedRun(workers=workers, shape=shape, videos=request.batch, requested=inputs.requested)
    plan = host.memory.plan_workers(run, inputs.experts)
    driver = host.memory.workers(workers, plan.mesh)
    # A measured run must not continue from saved states. Otherwise steps would be missing.
    states = None if measured else host.files.folders().run_states
    preview_s = _latent_interval(host, preview, measured)

    def compute(on_step: OnStep, _: OnVisits) -> DenoiseResult:
        shared = driver.denoise(
            inputs.experts,
            request,
            plan.policy,
            on_step=on_step,
            should_stop=host.events.should_stop,
            preview_s=preview_s,
            states=states,
            is_cancel=host.events.is_stop,  # ComfyUI's bar and previews raise the interrupt
        )
        result: DenoiseResult = replace(shared, latents=shared.latents.to(request.noise.device))
        return result.with_notes(*plan.reasons, *wire_notes(run, driver))

    parts = len(part_sizes(request.batch, plan.mesh))
    device = host.memory.device()
    return PreparedRun(
        policy=plan.policy, device=device, compute=compute, parts=parts, notes=plan.reasons
    )


def _latent_interval(
    host: Host, preview: PreviewSettings | None, measured: Measurement | None
) -> float | None:
    """Return the seconds between latents sent by workers, or None if nothing shows them."""
    if preview is not None:
        return preview.every_s / 2  # half, because steps do not end when a preview is due
    if measured or not host.settings().shows_latents:
        return None
    return LATENT_PREVIEW_S


@dataclass(frozen=True, kw_only=True, eq=False)
class SamplerRun(SamplerInputs):
    """Finished sampler run: the result, and all values needed to run it again."""

    policy: OffloadPolicy
    """Policy with which the run started."""
    device: torch.device
    result: DenoiseResult
    node_id: str | None
    """Sampler node id."""
    block_counts: Mapping[str, int]
    """Number of blocks per expert."""

    @property
    def timeline(self) -> Timeline:
        return self.result.timeline


def run_experts(
    host: Host,
    inputs: SamplerInputs,
    *,
    node_id: str | None,
    measured: Measurement | None = None,
    preview: PreviewSettings | None = None,
) -> SamplerRun:
    """Run the inputs on the host's device, or on workers.

    The host's Cancel ends it before the next block.

    Args:
        measured: None for a run with a progress bar on the node.
        preview: settings for moving previews, which replace the host's own. None for none.
    """
    request = inputs.request
    previews = None
    # Before the experts are opened, so that a wrong VAE is refused at once.
    if preview is not None:
        previews = MovingPreviews(preview, request.noise, host.memory.device(), host.events)
    inputs, pair, prepared = _prepared(host, inputs, preview, measured)
    plan = request.step_plan
    events = _events_of(host, inputs, prepared, node_id)
    total = len(plan.steps) * prepared.parts
    bar = None if measured else host.events.progress(total, node_id, unit="step")

    def on_visits(expert: str, done: int) -> None:
        # Called on the thread that samples memory, during the computation.
        step, share = events.visits(done, pair.block_counts[expert])
        if bar is not None:
            bar.advance(step + share)

    def on_step(step: StepProgress) -> None:
        events.step(step.record, step.changes)
        if bar is not None:
            bar.update(step.done, denoised=step.denoised if previews is None else None)
        if measured is not None:
            measured.on_step(step)
        # A moving preview shows the first video, which is in part 0.
        if previews is not None and step.denoised is not None and step.part == 0:
            image = previews.update(step.denoised)
            if image is not None:
                # Steps done in this run: the index counts from the start of the schedule.
                events.preview(step.index - plan.start_step + 1, image)

    try:
        # The last one exits first: the VAE of the previews is closed before the end is announced.
        with nullcontext() if bar is None else closing(bar), events, previews or nullcontext():
            result = prepared.compute(on_step, on_visits)
            result = replace(result, predicted=prepared.predicted)
            ranks = result.timelines if isinstance(result, DistributedResult) else None
            events.ended(result.timeline, ranks=ranks, advice=prepared.advise(result.timeline))
    except SamplingCancelled:
        # Raise the host's own interrupt: ComfyUI would report any other exception as a node error.
        host.events.raise_if_stopped()
        raise
    return SamplerRun(
        # Not `asdict`: it would copy all tensors.
        **vars(inputs),
        policy=prepared.policy,
        device=prepared.device,
        result=result,
        node_id=node_id,
        block_counts=pair.block_counts,
    )


def _prepared(
    host: Host, inputs: SamplerInputs, preview: PreviewSettings | None, measured: Measurement | None
) -> tuple[SamplerInputs, ExpertPair, PreparedRun]:
    """Return the inputs, with dtypes resolved here, the open experts and the prepared run."""
    workers = inputs.workers
    if workers is not None:
        # Dtype and arithmetic stay unresolved, because the workers resolve them together. The pair
        # is open only for shapes, until the workers need the memory.
        pair = host.models.experts(inputs.experts)
        return inputs, pair, prepare_shared(host, pair, inputs, workers, preview, measured)
    # Before the settings, because reports show the dtype.
    experts = with_resolved_precision(inputs.experts, host.memory.device())
    inputs = replace(inputs, experts=experts)
    pair = host.models.experts(experts)
    return inputs, pair, prepare_here(host, pair, inputs, measured)


def _events_of(
    host: Host, inputs: SamplerInputs, prepared: PreparedRun, node_id: str | None
) -> RunEvents:
    plan = inputs.request.step_plan
    settings = run_settings(
        inputs.experts,
        inputs.requested,
        prepared.policy,
        inputs.request.noise.shape,
        prepared.device,
        workers=inputs.workers,
    )
    return RunEvents(
        host.events.announce,
        prompt_id=host.events.executing().prompt_id,
        node_id=node_id,
        experts=[plan.experts[step] for step in plan.steps],
        predicted=prepared.predicted,
        settings=settings,
        notes=prepared.notes,
        is_stop=host.events.is_stop,
    )
