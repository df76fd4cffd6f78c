"""Benchmark runs: trials with warm-ups and pauses, of the connected runs or of a matrix of settings.

The files of the report are written atomically.
"""

from __future__ import annotations

import hashlib
import io
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from datetime import datetime
from pathlib import Path

import torch
from PIL import Image

from ...bench import (
    Policy,
    Report,
    Trial,
    TrialMatrix,
    Variant,
    csv_document,
    describe_machine,
    html_document,
    json_document,
    policy_name,
    report_chart,
)
from ...distributed import RestartLimitError, WorkerFailedError
from ...host import ModelRun, OutputFile, current_host, ui
from ...host import io as host_io
from ...offload import InsufficientRamError
from ...plan import DoesNotFitError, describe_ram
from ...sampling import DenoiseRequest, ExtraTokens, RequestError, StepProgress, check_strengths
from ...schema import (
    FRAMES_PER_LATENT,
    VERSION,
    ExpertsRef,
    MeshError,
    OffloadPolicy,
    WorkersRef,
    describe_workers,
    plan_residency,
)
from ...wan import Nag, space_of
from .run_experts import OnStep, SamplerRun, run_experts

MAX_RUNS = 100
MAX_PAUSE_S = 3600.0
POLL_S = 0.1
"""Seconds between two checks for a Cancel during a pause."""


@dataclass(frozen=True, kw_only=True)
class TrialTimes:
    """Number of runs of each variant, and the pause before each run.

    Raises:
        RequestError: a number is out of range.
    """

    repeats: int = 1
    """Measured runs."""
    warmup: int = 0
    """Runs before them that are not counted."""
    cooldown_s: float = 0.0
    """Pause before each run in seconds."""

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise RequestError(f"{self.repeats} repeats measure nothing: give 1 to {MAX_RUNS}")
        for name in ("repeats", "warmup"):
            if not 0 <= getattr(self, name) <= MAX_RUNS:
                raise RequestError(f"{name} is {getattr(self, name)}: give at most {MAX_RUNS}, and not less than 0")
        if not (math.isfinite(self.cooldown_s) and 0 <= self.cooldown_s <= MAX_PAUSE_S):
            raise RequestError(f"cooldown_s is {self.cooldown_s:g}: give 0 to {MAX_PAUSE_S:g} seconds")

    @property
    def runs(self) -> int:
        """Number of runs of each variant, warm-ups included."""
        return self.warmup + self.repeats


def _pause(seconds: float) -> None:
    """Sleep; raises the host's interrupt after a Cancel."""
    until = time.monotonic() + seconds
    current_host().raise_if_stopped()
    while (remaining := until - time.monotonic()) > 0:
        time.sleep(min(remaining, POLL_S))
        current_host().raise_if_stopped()


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of shape, dtype and values in hex."""
    values = tensor.detach().cpu().contiguous().reshape(-1)
    digest = hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    digest.update(values.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def job_digest(request: DenoiseRequest, experts: object) -> str:
    """Return a digest that is equal for equal requests to equal experts; `experts` is a reference to them."""
    digest = hashlib.sha256(repr(experts).encode())
    for field in fields(request):
        digest.update(f"{field.name}={_value_digest(getattr(request, field.name))};".encode())
    return digest.hexdigest()


def _value_digest(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return tensor_digest(value)
    if isinstance(value, tuple | list):
        return f"[{','.join(map(_value_digest, value))}]"
    if isinstance(value, ExtraTokens):
        # Not `repr`, which shows a large tensor's first and last values only.
        return f"[{_value_digest(value.reference)},{_value_digest(value.context)},{value.foreign_reference!r}]"
    return repr(value)


def with_steps(request: DenoiseRequest, steps: int | None) -> DenoiseRequest:
    """Return the request with another number of steps, or unchanged for None; raises RequestError if it has sigmas."""
    if steps is None:
        return request
    if request.sigmas is not None:
        raise RequestError(
            f"{steps} steps were requested, but the run has its sigmas from another node: leave steps empty"
        )
    return replace(request, steps=steps)


def describe_request(request: DenoiseRequest) -> dict[str, str]:
    """Return the settings of a request by name, as text for a report."""
    _, channels, frames, height, width = request.noise.shape
    pixels = space_of(channels).pixels
    step_plan = request.step_plan
    taken = [step_plan.experts[step] for step in step_plan.steps]
    levels = f"{request.schedule}, flow shift {request.flow_shift:g}" if request.sigmas is None else "from another node"
    return {
        "Size": f"{width * pixels}x{height * pixels}, {_frames(frames)} frames",
        "Videos": str(request.batch),
        "Steps": f"{len(taken)}: {taken.count('high')} high-noise, {taken.count('low')} low-noise",
        "Solver": request.solver,
        "Sigmas": levels,
        "Guidance": _guidance(request),
        **({} if request.context_guidance == 1 else {"Context guidance": f"{request.context_guidance:g}"}),
        **({} if request.nag is None else {"NAG": _nag(request.nag)}),
        **_windows(request),
        **({} if request.cache is None else {"Cache": request.cache.words}),
    }


def _guidance(request: DenoiseRequest) -> str:
    if request.guidance_steps is not None:
        return ", ".join(f"{scale:g}" for scale in request.guidance_steps) + ", step by step"
    high, low = request.guidance
    return f"{high:g} high-noise, {low:g} low-noise"


def _nag(nag: Nag) -> str:
    return f"scale {nag.scale:g}, tau {nag.tau:g}, alpha {nag.alpha:g}, in steps of guidance 1"


def _windows(request: DenoiseRequest) -> dict[str, str]:
    windows = request.windows
    if windows is None:
        return {}
    stride = "" if windows.stride == 1 else f", stride {windows.stride}"
    fixed = "" if windows.shift_windows else ", at fixed positions"
    text = f"{_frames(windows.frames)} frames, {windows.overlap} latent frames shared{stride}, {windows.blend}{fixed}"
    return {"Context windows": text}


def _frames(latent_frames: int) -> int:
    return (latent_frames - 1) * FRAMES_PER_LATENT + 1


@dataclass(frozen=True, kw_only=True, eq=False)
class BenchmarkRun:
    """Variant before its first run."""

    name: str
    experts: ExpertsRef
    request: DenoiseRequest
    requested: Policy
    workers: WorkersRef | None = None
    """Workers of the run; None for this process."""

    def variant(self) -> Variant:
        """Return the variant of the report, without trials."""
        settings = {
            **_describe_experts(self.experts),
            **describe_request(self.request),
            **_describe_policy(self.requested),
        }
        if self.workers is not None:
            settings["Workers"] = describe_workers(self.workers)
        return Variant(name=self.name, settings=settings, job=job_digest(self.request, self.experts))


@dataclass(frozen=True, kw_only=True, eq=False)
class MeasuredModel:
    """Finished run of a native model by a sampler of ComfyUI, which a benchmark can report but not repeat."""

    run: ModelRun
    latents: torch.Tensor
    """The sampler's result."""

    @property
    def device(self) -> torch.device:
        return self.run.device

    @property
    def node_id(self) -> str | None:
        return self.run.node_id

    def variant(self, name: str) -> Variant:
        """Return the run as a variant with one trial."""
        latents = self.latents
        parts = [tensor_digest(part) for part in (latents.unbind() if latents.is_nested else [latents])]
        trial = Trial(timeline=self.run.timeline, latents=" ".join(parts))
        return Variant(name=name, settings=self.run.settings, trials=(trial,))


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """Runs to measure, their matrix of settings and the number of trials."""

    title: str
    runs: Mapping[str, SamplerRun | MeasuredModel]
    """Runs by their names in the report."""
    matrix: TrialMatrix
    times: TrialTimes
    traces: Path | None
    """Folder for a trace of each run; None for no traces."""

    @property
    def runs_again(self) -> bool:
        """True if the benchmark makes runs itself; False if it only reports the given ones."""
        return not (self.matrix.is_empty and self.times.runs == 1 and self.traces is None)

    def candidates(self) -> list[BenchmarkRun]:
        """Return every setting of the matrix for every run.

        Raises:
            ValueError: a setting cannot be run; raised before any run is made.
        """
        candidates = []
        for title, run in self.runs.items():
            if isinstance(run, MeasuredModel):
                raise ValueError(
                    f"{title} is the run of a MODEL by a sampler of ComfyUI, which only that sampler can repeat: set "
                    "repeats to 1, warmup to 0, trace off, and leave policies, prefetch and steps empty"
                )
            for setting in self.matrix.settings(run.requested):
                if isinstance(setting.policy, OffloadPolicy):
                    plan_residency(setting.policy, run.block_counts)
                request = with_steps(run.request, setting.steps)
                check_strengths(request, run.experts.strength_ranges)
                name = setting.name if len(self.runs) == 1 else f"{title}: {setting.name}"
                if self.matrix.is_empty:
                    name = title
                candidates.append(
                    BenchmarkRun(
                        name=name,
                        experts=run.experts,
                        request=request,
                        requested=setting.policy,
                        workers=run.workers,
                    )
                )
        return candidates


def named_runs(
    runs: Mapping[str, SamplerRun | MeasuredModel | None], titles: Mapping[str, str]
) -> dict[str, SamplerRun | MeasuredModel]:
    """Return the connected runs by the titles of their nodes; the name of the input is added to a repeated title."""
    connected = {socket: run for socket, run in runs.items() if run is not None}
    names = {socket: titles.get(run.node_id or "", socket) for socket, run in connected.items()}
    shared = [*names.values()]
    return {
        name if shared.count(name) == 1 else f"{name} ({socket})": connected[socket] for socket, name in names.items()
    }


def measure(benchmark: Benchmark, *, node_id: str | None, on_report: Callable[[Report], None]) -> Report:
    """Make all runs of `benchmark`, one after the other; `on_report` gets the report before the first and after each.

    A variant is reported as failed, and the others continue, if it does not fit into memory, if its layout does not
    suit its workers, or if a worker fails or is restarted too often.

    Raises:
        Exception: any other error of `run_experts`, and the host's interrupt.
    """
    report = _empty(benchmark)
    if not benchmark.runs_again:
        return replace(report, variants=tuple(_given_variants(benchmark)), planned=len(benchmark.runs), finished=True)
    candidates = benchmark.candidates()
    report = replace(
        report,
        variants=tuple(candidate.variant() for candidate in candidates),
        planned=len(candidates) * benchmark.times.runs,
    )
    on_report(report)
    steps = [len(candidate.request.step_plan.steps) * benchmark.times.runs for candidate in candidates]
    bar = _TrialBar(sum(steps), node_id)
    for place, candidate in enumerate(candidates):
        for variant in _run_variant(candidate, benchmark, bar):
            variants = [*report.variants]
            variants[place] = variant
            report = replace(report, variants=tuple(variants))
            on_report(report)
        bar.advance_to(sum(steps[: place + 1]))
    return replace(report, finished=True)


def _empty(benchmark: Benchmark) -> Report:
    """Return the report of `benchmark` without its variants."""
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


def _given_variants(benchmark: Benchmark) -> Iterator[Variant]:
    """Yield the given runs as variants with one trial each."""
    for title, run in benchmark.runs.items():
        if isinstance(run, MeasuredModel):
            yield run.variant(title)
        else:
            (candidate,) = replace(benchmark, runs={title: run}).candidates()
            yield _with_trial(candidate.variant(), run)


def _run_variant(candidate: BenchmarkRun, benchmark: Benchmark, bar: _TrialBar) -> Iterator[Variant]:
    """Yield the variant after each of its runs."""
    variant = candidate.variant()
    try:
        for number in range(benchmark.times.runs):
            _pause(benchmark.times.cooldown_s)
            run = run_experts(
                candidate.experts,
                candidate.request,
                candidate.requested,
                workers=candidate.workers,
                node_id=bar.node_id,
                on_step=bar.on_step(len(candidate.request.step_plan.steps)),
                traces=benchmark.traces,
            )
            variant = _with_trial(variant, run, warmup=number < benchmark.times.warmup)
            yield variant
    except (
        torch.OutOfMemoryError,
        DoesNotFitError,
        InsufficientRamError,
        MeshError,
        WorkerFailedError,
        RestartLimitError,
    ) as err:
        # Only errors that another policy or layout may avoid: any other one ends the benchmark.
        yield replace(variant, failed=str(err))


def _with_trial(variant: Variant, run: SamplerRun, *, warmup: bool = False) -> Variant:
    """Return `variant` with one more trial; its settings name the policy of the run if it is not the requested one."""
    settings = dict(variant.settings)
    if run.policy != run.requested:
        settings["Ran under"] = f"{policy_name(run.policy)}, weights from {describe_ram(run.policy)}"
    trial = Trial(timeline=run.timeline, latents=tensor_digest(run.result.latents), warmup=warmup)
    return replace(variant, settings=settings, trials=(*variant.trials, trial), predicted=run.result.predicted)


class _TrialBar:
    """Progress bar over the steps of all runs."""

    def __init__(self, total: int, node_id: str | None) -> None:
        self.node_id = node_id
        self._progress = current_host().progress(total, node_id)
        self._done = 0

    def on_step(self, steps: int) -> OnStep:
        """Return the step callback of the next run; workers may report each step once per part of the batch."""
        before = self._done

        def on_step(step: StepProgress) -> None:
            self.advance_to(before + step.done * steps // step.total)

        return on_step

    def advance_to(self, done: int) -> None:
        """Show `done` steps, which include the missing ones of a failed variant."""
        if done != self._done:
            self._done = done
            self._progress.update(done)


def _describe_experts(ref: ExpertsRef) -> dict[str, str]:
    files = [path.name for path in (ref.high_noise, ref.low_noise) if path is not None]
    loras = [
        f"{path.name} x {strengths}"
        for lora in ref.loras
        for path, strengths in ((lora.high_noise, lora.high), (lora.low_noise, lora.low))
        if path is not None
    ]
    settings = {"Experts": " and ".join(files), "Computed in": ref.compute_dtype, "Kept in RAM": ref.storage}
    if ref.arithmetic != "decoded":
        settings["Multiplied in"] = ref.arithmetic
    if ref.kernels != "auto":
        settings["Kernels"] = ref.kernels
    if ref.attention != "default":
        settings["Attention"] = ref.attention
    if ref.compile:
        settings["Blocks"] = "compiled"
    return {**settings, "LoRAs": ", ".join(loras)} if loras else settings


def _describe_policy(policy: Policy) -> dict[str, str]:
    if not isinstance(policy, OffloadPolicy):
        return {"Policy": policy_name(policy)}
    settings = {"Policy": policy_name(policy), "Weights from": describe_ram(policy)}
    return settings if policy.chunk_tokens is None else {**settings, "Tokens at once": str(policy.chunk_tokens)}


logger = logging.getLogger("wanstream.nodes")


class ReportFileError(OSError):
    """A file of the report could not be written; `errno` is that of the failed call."""


class ReportFiles(AbstractContextManager["ReportFiles"]):
    """JSON, CSV, HTML and PNG of one report in the output folder; a context manager around the runs.

    The JSON is written after every run: a full disk is noticed early, and the measurements survive a killed process.
    A benchmark that was stopped or failed writes all four files. All methods raise ReportFileError.
    """

    def __init__(self, place: OutputFile) -> None:
        self._place = place
        self._saved: Report | None = None

    def save(self, report: Report) -> None:
        """Write the JSON of the report so far over the one before."""
        self._write(".json", _bytes(json_document(report)))
        self._saved = report

    def finish(self, report: Report) -> Image.Image:
        """Write all four files and return the chart."""
        chart = report_chart(report)
        pixels = io.BytesIO()
        chart.save(pixels, "PNG")
        self.save(report)
        self._write(".csv", _bytes(csv_document(report)))
        self._write(".html", _bytes(html_document(report, pixels.getvalue())))
        self._write(".png", pixels.getvalue())
        return chart

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, ReportFileError) or self._saved is None or not self._saved.done:
            return
        try:
            self.finish(self._saved)
        except ReportFileError as err:  # not raised: the error that ended the benchmark must be shown
            logger.warning("the report of the runs so far is incomplete: %s", err)

    def traces(self) -> Path:
        """Return the path of the folder for traces of these runs, which is not created here."""
        return self._place.path.with_name(f"{self._place.path.stem}traces")

    def chart_preview(self) -> ui.SavedResult:
        """Return the chart's file as the host's page refers to it."""
        name = Path(self._place.filename).with_suffix(".png").name
        return ui.SavedResult(name, self._place.subfolder, host_io.FolderType.output)

    def _write(self, suffix: str, content: bytes) -> None:
        path = self._place.path.with_suffix(suffix)
        unfinished = path.with_name(path.name + ".part")
        try:
            unfinished.write_bytes(content)
            unfinished.replace(path)
        except OSError as err:
            raise ReportFileError(err.errno, f"{path} could not be written: {err.strerror}. {self._remedy()}") from err
        finally:
            unfinished.unlink(missing_ok=True)

    def _remedy(self) -> str:
        """Return the end of an error message: the files that exist, and the way out."""
        written = self._place.path.with_suffix(".json")
        if written.exists():
            return f"All runs before are in {written}: make room on the disk and queue again for the rest"
        return "Nothing was written: make room on the disk and queue again"


def _bytes(text: str) -> bytes:
    """Encode as UTF-8; lone surrogates, as in file names of another encoding, become question marks."""
    return text.encode(errors="replace")
