"""Benchmark runs: trials with warm-ups and pauses, for connected runs or a settings matrix.

Report files are written atomically.
"""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import torch
from PIL import Image

from ...bench import (
    Policy,
    Report,
    Trial,
    TrialMatrix,
    TrialTimes,
    Variant,
    csv_document,
    describe_machine,
    html_document,
    json_document,
    policy_name,
    report_chart,
    run_trials,
)
from ...distributed import RestartLimitError, WorkerFailedError
from ...host import Events, Host, ModelRun, OutputFile, ui
from ...host import io as host_io
from ...offload.sources import InsufficientRamError
from ...plan import DoesNotFitError, describe_ram
from ...sampling import run_digest
from ...sampling.inputs import DenoiseRequest
from ...sampling.steps import Guidance, StepProgress
from ...schema import VERSION, MeshError, OffloadPolicy, plan_residency
from ...schema.refs import ExpertsRef, describe_workers
from ...shapes import FRAMES_PER_LATENT, ContextWindows
from ...wan import Nag
from ...wan.latents import space_of, tensor_digest
from .run_experts import Measurement, OnStep, SamplerInputs, SamplerRun, run_experts
from .whole_file import whole_file

AVOIDABLE = (
    torch.OutOfMemoryError,
    DoesNotFitError,
    InsufficientRamError,
    MeshError,
    WorkerFailedError,
    RestartLimitError,
)
"""Errors that another policy or layout may avoid. Any other error ends the benchmark."""

POLL_S = 0.1
"""Seconds between two checks for a Cancel during a pause."""


def describe_request(request: DenoiseRequest) -> dict[str, str]:
    """Return a request's settings by name, as text for a report."""
    _, channels, frames, height, width = request.noise.shape
    pixels = space_of(channels).pixels
    step_plan = request.step_plan
    taken = [step_plan.experts[step] for step in step_plan.steps]
    settings = request.step_settings
    guidance = request.guidance_settings
    options = request.options
    levels = "from another node"
    if settings.sigmas is None:
        levels = f"{settings.schedule}, flow shift {settings.flow_shift:g}"
    found = {
        "Size": f"{width * pixels}x{height * pixels}, {_frames(frames)} frames",
        "Videos": str(request.batch),
        "Steps": f"{len(taken)}: {taken.count('high')} high-noise, {taken.count('low')} low-noise",
        "Solver": settings.solver,
        "Sigmas": levels,
        "Guidance": _guidance(guidance),
    }
    if guidance.context != 1:
        found["Context guidance"] = f"{guidance.context:g}"
    if guidance.nag is not None:
        found["NAG"] = _nag(guidance.nag)
    if options.windows is not None:
        found["Context windows"] = _windows(options.windows)
    if options.cache is not None:
        found["Cache"] = options.cache.words
    return found


def _guidance(guidance: Guidance) -> str:
    if guidance.steps is not None:
        return ", ".join(f"{scale:g}" for scale in guidance.steps) + ", step by step"
    high, low = guidance.scales
    return f"{high:g} high-noise, {low:g} low-noise"


def _nag(nag: Nag) -> str:
    return f"scale {nag.scale:g}, tau {nag.tau:g}, alpha {nag.alpha:g}, in steps of guidance 1"


def _windows(windows: ContextWindows) -> str:
    words = [f"{_frames(windows.frames)} frames", f"{windows.overlap} latent frames shared"]
    if windows.stride != 1:
        words.append(f"stride {windows.stride}")
    words.append(windows.blend)
    if not windows.shift_windows:
        words.append("at fixed positions")
    return ", ".join(words)


def _frames(latent_frames: int) -> int:
    return (latent_frames - 1) * FRAMES_PER_LATENT + 1


def _variant(name: str, inputs: SamplerInputs) -> Variant:
    """Return the report variant, without trials."""
    settings = {
        **_describe_experts(inputs.experts),
        **describe_request(inputs.request),
        **_describe_policy(inputs.requested),
    }
    if inputs.workers is not None:
        settings["Workers"] = describe_workers(inputs.workers)
    return Variant(name=name, settings=settings, job=run_digest(inputs.request, inputs.experts))


@dataclass(frozen=True, kw_only=True, eq=False)
class MeasuredModel(ModelRun):
    """Finished native model run with a ComfyUI sampler. It can be reported but not repeated."""

    latents: torch.Tensor
    """The sampler's result."""

    def variant(self, name: str) -> Variant:
        """Return the run as a variant with one trial."""
        latents = self.latents
        # ComfyUI's NestedTensor for video with sound has one tensor each.
        parts = latents.unbind() if latents.is_nested else [latents]
        digests = " ".join(map(tensor_digest, parts))
        trial = Trial(timeline=self.timeline, latents=digests)
        return Variant(name=name, settings=self.settings, trials=(trial,))


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """Runs to measure, with a settings matrix and a number of trials."""

    title: str
    runs: Mapping[str, SamplerRun | MeasuredModel]
    """Runs by name in the report."""
    matrix: TrialMatrix
    times: TrialTimes
    traces: Path | None
    """Folder with one trace per run, or None for no traces."""

    @property
    def runs_again(self) -> bool:
        """True if the benchmark makes runs itself, False if it only reports the given ones."""
        return not (self.matrix.is_empty and self.times.runs == 1 and self.traces is None)

    @property
    def policies(self) -> list[Policy]:
        """Policies of the first run's variants, which come first in the report."""
        first = next(iter(self.runs.values()))
        if isinstance(first, MeasuredModel):
            return []
        return [setting.policy for setting in self.matrix.settings(first.requested)]

    def candidates(self) -> list[tuple[str, SamplerInputs]]:
        """Return every setting in the matrix for every run, each with a name.

        Raises:
            ValueError: a setting cannot be run. Raised before any run is made.
        """
        candidates = []
        for title, run in self.runs.items():
            if isinstance(run, MeasuredModel):
                raise ValueError(
                    f"{title} is the run of a MODEL by a sampler of ComfyUI, which only that "
                    "sampler can repeat: set repeats to 1, warmup to 0, trace off, and leave "
                    "policies, prefetch and steps empty"
                )
            for setting in self.matrix.settings(run.requested):
                if isinstance(setting.policy, OffloadPolicy):
                    # Raises for a policy with more swapped blocks than the experts have.
                    plan_residency(setting.policy, run.block_counts)
                request = run.request.with_steps(setting.steps)
                request.step_plan.check_strengths(run.experts.strength_ranges)
                name = f"{title}: {setting.name}"
                if self.matrix.is_empty:
                    name = title
                elif len(self.runs) == 1:
                    name = setting.name
                inputs = SamplerInputs(
                    experts=run.experts,
                    request=request,
                    requested=setting.policy,
                    workers=run.workers,
                )
                candidates.append((name, inputs))
        return candidates


def named_runs(
    runs: Mapping[str, SamplerRun | MeasuredModel | None], titles: Mapping[str, str]
) -> dict[str, SamplerRun | MeasuredModel]:
    """Return the connected runs by node title.

    A repeated title gets the input name added.
    """
    connected = {socket: run for socket, run in runs.items() if run is not None}
    names = {socket: titles.get(run.node_id or "", socket) for socket, run in connected.items()}
    shared = [*names.values()]
    for socket, name in names.items():
        if shared.count(name) > 1:
            names[socket] = f"{name} ({socket})"
    return {name: connected[socket] for socket, name in names.items()}


def measure(
    host: Host, benchmark: Benchmark, *, node_id: str | None, on_report: Callable[[Report], None]
) -> Report:
    """Make all runs in `benchmark`, one after the other.

    `on_report` gets the report before the first run and after each.

    A variant is reported as failed, and the others continue, if it does not fit into memory, if the
    layout does not suit its workers, or if a worker fails or is restarted too often.

    Raises:
        Exception: any other error from `run_experts`, and the host's interrupt.
    """
    report = _empty(host, benchmark)
    if not benchmark.runs_again:
        given = tuple(_given_variants(benchmark))
        return replace(report, variants=given, planned=len(given), finished=True)
    candidates = benchmark.candidates()
    variants = [_variant(*candidate) for candidate in candidates]
    runs = benchmark.times.runs
    # Reported once before the first run, so that an unusable folder ends the benchmark early.
    report = replace(report, variants=tuple(variants), planned=len(candidates) * runs)
    on_report(report)
    steps = [len(inputs.request.step_plan.steps) * runs for _, inputs in candidates]
    bar = _TrialBar(host.events, sum(steps), node_id)
    for place, (_, inputs) in enumerate(candidates):
        for variant in _run_variant(host, variants[place], inputs, benchmark, bar):
            variants[place] = variant
            report = replace(report, variants=tuple(variants))
            on_report(report)
        # A failed variant has taken fewer steps than planned.
        bar.advance_to(sum(steps[: place + 1]))
    return replace(report, finished=True)


def _empty(host: Host, benchmark: Benchmark) -> Report:
    """Return the report for `benchmark` without variants."""
    times = benchmark.times
    now = datetime.now().astimezone()
    runs = "the one that the graph made"
    if benchmark.runs_again:
        runs = (
            f"{times.repeats} measured after {times.warmup} not counted, {times.cooldown_s:g} s of "
            "rest before each"
        )
    # All runs were made by this process, on one device.
    device = next(iter(benchmark.runs.values())).device
    return Report(
        title=benchmark.title,
        variants=(),
        method={
            "Runs of each variant": runs,
            "Figures": "median (least to most)",
            "Made": now.isoformat(sep=" ", timespec="seconds"),
            "With": f"WanStream {VERSION}, {host.name}",
        },
        machine=describe_machine(device),
        phases=host.events.ledger().phases(),
        planned=0,
        finished=False,
    )


def _given_variants(benchmark: Benchmark) -> Iterator[Variant]:
    """Yield the given runs as variants with one trial each."""
    for title, run in benchmark.runs.items():
        if isinstance(run, MeasuredModel):
            yield run.variant(title)
        else:
            yield _with_trial(_variant(title, run), run)


def _run_variant(
    host: Host, variant: Variant, inputs: SamplerInputs, benchmark: Benchmark, bar: _TrialBar
) -> Iterator[Variant]:
    """Yield the variant after each run."""

    def with_run(variant: Variant, number: int) -> Variant:
        _pause(host.events, benchmark.times.cooldown_s)
        on_step = bar.on_step(len(inputs.request.step_plan.steps))
        measured = Measurement(on_step=on_step, traces=benchmark.traces)
        run = run_experts(host, inputs, node_id=bar.node_id, measured=measured)
        return _with_trial(variant, run, warmup=number < benchmark.times.warmup)

    return run_trials(variant, benchmark.times, with_run, failures=AVOIDABLE)


def _pause(events: Events, seconds: float) -> None:
    """Sleep. Raises the host's interrupt after a Cancel."""
    until = time.monotonic() + seconds
    events.raise_if_stopped()
    while (remaining := until - time.monotonic()) > 0:
        time.sleep(min(remaining, POLL_S))
        events.raise_if_stopped()


def _with_trial(variant: Variant, run: SamplerRun, *, warmup: bool = False) -> Variant:
    """Return `variant` with one more trial.

    If the run did not have the requested policy, the settings name the actual one.
    """
    settings = dict(variant.settings)
    if run.policy != run.requested:
        words = policy_name(run.policy), f"weights from {describe_ram(run.policy)}"
        settings["Ran under"] = ", ".join(words)
    trial = Trial(timeline=run.timeline, latents=tensor_digest(run.result.latents), warmup=warmup)
    trials = (*variant.trials, trial)
    return replace(variant, settings=settings, trials=trials, predicted=run.result.predicted)


class _TrialBar:
    """Progress bar over the steps in all runs."""

    def __init__(self, events: Events, total: int, node_id: str | None) -> None:
        self.node_id = node_id
        self._progress = events.progress(total, node_id)
        self._done = 0

    def on_step(self, steps: int) -> OnStep:
        """Return the step callback for the next run.

        Workers may report each step once per batch part.
        """
        before = self._done

        def on_step(step: StepProgress) -> None:
            self.advance_to(before + step.done * steps // step.total)

        return on_step

    def advance_to(self, done: int) -> None:
        """Show `done` steps, including the missing ones in a failed variant."""
        if done != self._done:
            self._done = done
            self._progress.update(done)


def _describe_experts(ref: ExpertsRef) -> dict[str, str]:
    files = [path.name for path in (ref.high_noise, ref.low_noise) if path is not None]
    loras = [f"{path.name} x {strengths}" for path, strengths in ref.lora_files]
    settings = {
        "Experts": " and ".join(files),
        "Computed in": ref.compute_dtype,
        "Kept in RAM": ref.storage,
    }
    chosen = (
        ("Multiplied in", ref.arithmetic, "decoded"),
        ("Kernels", ref.kernels, "auto"),
        ("Attention", ref.attention, "default"),
    )
    settings |= {name: value for name, value, usual in chosen if value != usual}
    if ref.compile:
        settings["Blocks"] = "compiled"
    if loras:
        settings["LoRAs"] = ", ".join(loras)
    return settings


def _describe_policy(policy: Policy) -> dict[str, str]:
    if not isinstance(policy, OffloadPolicy):
        return {"Policy": policy_name(policy)}
    settings = {"Policy": policy_name(policy), "Weights from": describe_ram(policy)}
    if policy.chunk_tokens is not None:
        settings["Tokens at once"] = str(policy.chunk_tokens)
    return settings


logger = logging.getLogger("wanstream.nodes")


class ReportFileError(OSError):
    """A report file could not be written. `errno` comes from the failed call."""


class ReportFiles(AbstractContextManager["ReportFiles"]):
    """JSON, CSV, HTML and PNG for one report in the output folder.

    A context manager around the runs.

    The JSON is written after every run. A full disk is noticed early, and the measurements survive
    a killed process. A stopped or failed benchmark writes all four files. All methods raise
    ReportFileError.
    """

    def __init__(self, place: OutputFile) -> None:
        self._place = place
        self._saved: Report | None = None

    def save(self, report: Report) -> None:
        """Write the JSON for the report so far, over the previous one."""
        self._write(".json", _bytes(json_document(report)))
        self._saved = report

    def finish(self, report: Report) -> Image.Image:
        """Write all four files and return the chart."""
        chart = report_chart(report)
        pixels = io.BytesIO()
        # In memory, because the HTML page contains the same bytes.
        chart.save(pixels, "PNG")
        self.save(report)
        # After the JSON: on a full disk, at least the measurements are complete.
        self._write(".csv", _bytes(csv_document(report)))
        self._write(".html", _bytes(html_document(report, pixels.getvalue())))
        self._write(".png", pixels.getvalue())
        return chart

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, ReportFileError):
            return
        if self._saved is None or not self._saved.done:
            return
        try:
            self.finish(self._saved)
        except ReportFileError as err:
            # Not raised: the error that ended the benchmark must be shown.
            logger.warning("the report of the runs so far is incomplete: %s", err)

    def traces(self) -> Path:
        """Return the path to the trace folder for these runs. It is not created here."""
        # The stem already ends with an underscore after the counter.
        return self._place.path.with_name(f"{self._place.path.stem}traces")

    def chart_preview(self) -> ui.SavedResult:
        """Return the chart file, as the host's page refers to it."""
        name = Path(self._place.filename).with_suffix(".png").name
        return ui.SavedResult(name, self._place.subfolder, host_io.FolderType.output)

    def _write(self, suffix: str, content: bytes) -> None:
        written = self._place.path.with_suffix(".json")
        remedy = ". Nothing was written: make room on the disk and queue again"
        if written.exists():
            remedy = (
                f". All runs before are in {written}: make room on the disk and queue again for "
                "the rest"
            )
        path = self._place.path.with_suffix(suffix)
        with whole_file(path, ReportFileError, remedy=remedy) as unfinished:
            unfinished.write_bytes(content)


def _bytes(text: str) -> bytes:
    """Encode as UTF-8.

    Lone surrogates, as in file names with another encoding, become question marks.
    """
    return text.encode(errors="replace")
