"""Benchmark runs: order, and reports after failures. No model is opened."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from wanstream.bench import Report, TrialTimes
from wanstream.bench.trial_matrix import MatrixError, TrialMatrix
from wanstream.distributed.driver.stage_run import RestartLimitError
from wanstream.distributed.driver.worker_group import WorkerFailedError
from wanstream.host import Host, ModelRun
from wanstream.host.embedded.events import NodeProgress
from wanstream.host.embedded.files import Folders
from wanstream.nodes.runs import benchmark as benchmark_runs
from wanstream.nodes.runs.benchmark import Benchmark, MeasuredModel, measure, named_runs
from wanstream.nodes.runs.run_experts import Measurement, SamplerInputs, SamplerRun
from wanstream.offload.sources import InsufficientRamError
from wanstream.plan import AutoOffload, DoesNotFitError
from wanstream.sampling.inputs import DenoiseRequest
from wanstream.sampling.steps import DenoiseResult, RequestError, RunState, StepProgress
from wanstream.schema import Cancelled, Mesh, MeshError, OffloadPolicy, StepRange
from wanstream.schema.records import StepRecord, Timeline
from wanstream.schema.refs import WorkersRef
from wanstream.schema.refs.experts import ExpertsRef, LoraRef
from wanstream.schema.version import VERSION
from wanstream.tests.support.embedded import embedded_host

EXPERTS = ExpertsRef(
    high_noise=Path("/models/high.safetensors"), low_noise=Path("/models/low.safetensors")
)
LATE = (StepRange(0, 0, 0.5), StepRange(2, 3, 0.0))
LATENTS = torch.zeros(1, 16, 1, 2, 2)


def request(steps: int = 4, **changes: Any) -> DenoiseRequest:
    given = {
        "noise": LATENTS,
        "positive": torch.zeros(1, 3, 4096),
        "steps": steps,
        "switch_step": 2,
    }
    return DenoiseRequest(**{**given, **changes})


def result(request: DenoiseRequest, seconds: float = 1.0) -> DenoiseResult:
    step_plan = request.step_plan
    steps = tuple(
        StepRecord.of(
            index=step,
            expert=step_plan.experts[step],
            sigma=step_plan.schedule.sigmas[step],
            wall_s=seconds,
            compute_s=seconds,
            stall_s=0,
            bytes_moved=0,
        )
        for step in step_plan.steps
    )
    return DenoiseResult(latents=LATENTS, sigma=0, timeline=Timeline(kind="measured", steps=steps))


def sampler_run(ran: DenoiseRequest | None = None, **values: Any) -> SamplerRun:
    ran = ran or request()
    given = {
        "experts": EXPERTS,
        "request": ran,
        "requested": OffloadPolicy.layerwise(),
        "policy": OffloadPolicy.layerwise(),
        "device": torch.device("cpu"),
        "result": result(ran),
        "node_id": "sampler",
        "block_counts": {"high": 40, "low": 40},
    }
    return SamplerRun(**{**given, **values})


def benchmark(
    *runs: SamplerRun,
    matrix: tuple[str, str, str] = ("", "", ""),
    traces: Path | None = None,
    **times: Any,
) -> Benchmark:
    return Benchmark(
        title="A benchmark",
        runs=named_runs(
            dict(zip(("run", "run_b", "run_c"), runs or (sampler_run(),), strict=False)), {}
        ),
        matrix=TrialMatrix.parse(*matrix),
        times=TrialTimes(**times),
        traces=traces,
    )


def _no_state() -> RunState:
    raise AssertionError("a benchmark asks for no state")


class Experts:
    """Fake `run_experts`: records calls, fails where `fails` returns an error."""

    def __init__(
        self,
        fails: Callable[[OffloadPolicy], Exception | None] = lambda policy: None,
        *,
        parts: int = 1,
    ) -> None:
        self._parts = parts
        self.calls: list[tuple[ExpertsRef, int, OffloadPolicy | AutoOffload]] = []
        self.traces: set[Path | None] = set()
        self.workers: set[WorkersRef | None] = set()
        self._fails = fails

    def __call__(
        self, host: Host, inputs: SamplerInputs, *, node_id: str | None, measured: Measurement
    ) -> SamplerRun:
        assert (host, node_id) == (embedded_host, "benchmark")
        request, requested = inputs.request, inputs.requested
        self.calls.append((inputs.experts, len(request.step_plan.steps), requested))
        self.traces.add(measured.traces)
        self.workers.add(inputs.workers)
        made = result(request, seconds=len(self.calls))
        reported = [record for record in made.timeline.steps for _ in range(self._parts)]
        for done, record in enumerate(reported, start=1):
            total = len(reported)
            measured.on_step(
                StepProgress(
                    record=record, done=done, total=total, denoised=LATENTS, state=_no_state
                )
            )
        if (error := self._fails(requested)) is not None:
            raise error
        ran = OffloadPolicy.layerwise() if isinstance(requested, AutoOffload) else requested
        return sampler_run(
            request, experts=inputs.experts, requested=requested, policy=ran, result=made
        )


@pytest.fixture
def progress(tmp_path: Path) -> Iterator[list[NodeProgress]]:
    """Open a host and yield the benchmark's progress events."""
    events: list[NodeProgress] = []
    folders = Folders(models=tmp_path, output=tmp_path, input=tmp_path)
    with (
        embedded_host.opened(folders, events.append),
        embedded_host.events.node("benchmark", "WanStreamBenchmark"),
    ):
        yield events


def measured(benchmark: Benchmark, experts: Experts, kept: list[Report] | None = None) -> Report:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(benchmark_runs, "run_experts", experts)
        on_report = ([] if kept is None else kept).append
        return measure(embedded_host, benchmark, node_id="benchmark", on_report=on_report)


@pytest.mark.usefixtures("progress")
def test_what_ran_already_is_enough_where_nothing_else_is_wanted() -> None:
    experts, kept, run = Experts(), list[Report](), sampler_run()
    report = measured(benchmark(run, cooldown_s=30.0), experts, kept)
    assert (experts.calls, kept) == ([], [])
    (variant,) = report.variants
    (trial,) = variant.trials
    assert trial.timeline is run.timeline
    assert (report.finished, report.planned, report.done) == (True, 1, 1)
    assert report.method["Runs of each variant"] == "the one that the graph made"


@pytest.mark.parametrize(
    ("wanted", "runs"),
    [
        ({"repeats": 3}, 3),
        ({"warmup": 1}, 2),
        ({"matrix": ("", "", "4")}, 1),
        ({"traces": Path("traces")}, 1),
        ({"matrix": ("layerwise, resident", "1, 2", "4, 8"), "repeats": 2, "warmup": 1}, 18),
    ],
)
@pytest.mark.usefixtures("progress")
def test_anything_else_is_run(wanted: dict[str, Any], runs: int) -> None:
    experts = Experts()
    report = measured(benchmark(**wanted), experts)
    assert len(experts.calls) == runs == report.planned == report.done
    assert experts.traces == {wanted.get("traces")}
    assert report.finished


@pytest.mark.usefixtures("progress")
def test_variants_come_one_after_the_other_each_with_its_warm_ups_first() -> None:
    experts = Experts()
    report = measured(
        benchmark(matrix=("resident, block_swap 20", "", "4, 8"), repeats=2, warmup=1), experts
    )
    resident, swap = OffloadPolicy.resident(), OffloadPolicy.block_swap(20)
    order = [(resident, 4), (resident, 8), (swap, 4), (swap, 8)]
    assert [(policy, steps) for _, steps, policy in experts.calls] == [
        each for each in order for _ in range(3)
    ]
    assert [variant.name for variant in report.variants] == [
        *("resident, 4 steps", "resident, 8 steps", "block_swap 20, 1 ahead, 4 steps"),
        "block_swap 20, 1 ahead, 8 steps",
    ]
    assert [[trial.warmup for trial in variant.trials] for variant in report.variants] == [
        [True, False, False]
    ] * 4
    assert [timeline.wall_s for timeline in report.variants[0].measured] == [4 * 2, 4 * 3]


@pytest.mark.usefixtures("progress")
def test_several_runs_are_varied_each_by_its_own_name() -> None:
    other = replace(EXPERTS, loras=(LoraRef(high_noise=Path("/loras/fast.safetensors")),))
    experts = Experts()
    runs = sampler_run(), sampler_run(experts=other, requested=AutoOffload())
    report = measured(benchmark(*runs, matrix=("", "", "4")), experts)
    assert [variant.name for variant in report.variants] == [
        "run: layerwise, 1 ahead, 4 steps",
        "run_b: auto, 4 steps",
    ]
    assert [ref for ref, _, _ in experts.calls] == [EXPERTS, other]
    one, two = (variant.settings for variant in report.variants)
    assert "LoRAs" not in one
    assert two["LoRAs"] == "fast.safetensors x 1"
    assert (two["Policy"], two["Ran under"]) == ("auto", "layerwise, 1 ahead, weights from file")
    assert "Ran under" not in one
    assert report.variants[0].job != report.variants[1].job


def test_runs_go_by_the_titles_of_their_nodes() -> None:
    a, b, c = sampler_run(node_id="1"), sampler_run(node_id="2"), sampler_run(node_id="3")
    titles = {"1": "Fast", "2": "Fast"}
    named = named_runs({"run": a, "run_b": b, "run_c": c, "run_d": None}, titles)
    assert named == {"Fast (run)": a, "Fast (run_b)": b, "run_c": c}


def test_the_report_is_kept_before_the_first_run_and_after_each(
    progress: list[NodeProgress],
) -> None:
    kept: list[Report] = []
    measured(benchmark(matrix=("", "1, 2", ""), repeats=2), Experts(), kept)
    assert [report.done for report in kept] == [0, 1, 2, 3, 4]
    assert {report.planned for report in kept} == {4}
    assert not any(report.finished for report in kept)
    steps = [(told.done, told.total) for told in progress if told.total != 1]
    assert steps == [(done, 16) for done in range(1, 17)]


def test_steps_that_workers_tell_once_for_each_part_are_counted_once(
    progress: list[NodeProgress],
) -> None:
    measured(benchmark(matrix=("", "1, 2", ""), repeats=1), Experts(parts=3))
    steps = [(told.done, told.total) for told in progress if told.total != 1]
    assert steps == [(done, 8) for done in range(1, 9)]


@pytest.mark.parametrize(
    "kind",
    [
        torch.OutOfMemoryError,
        DoesNotFitError,
        InsufficientRamError,
        MeshError,
        WorkerFailedError,
        RestartLimitError,
    ],
)
def test_a_variant_without_room_or_without_its_workers_is_noted_and_the_others_go_on(
    kind: type[Exception], progress: list[NodeProgress]
) -> None:
    error = kind("no room")
    experts = Experts(fails=lambda policy: error if policy.kind == "resident" else None)
    report = measured(benchmark(matrix=("resident, layerwise", "", ""), repeats=2), experts)
    assert [(variant.failed, len(variant.trials)) for variant in report.variants] == [
        ("no room", 0),
        ("", 2),
    ]
    assert report.finished
    assert [told.done for told in progress if told.total == 16] == [*range(1, 5), *range(8, 17)], (
        "the bar goes on behind it"
    )


@pytest.mark.usefixtures("progress")
def test_any_other_error_ends_it_and_what_was_measured_is_kept() -> None:
    experts, kept = (
        Experts(fails=lambda policy: ValueError("broken") if policy.prefetch_blocks == 2 else None),
        [],
    )
    with pytest.raises(ValueError, match="broken"):
        measured(benchmark(matrix=("", "1, 2", "")), experts, kept)
    assert kept[-1].done == 1


@pytest.mark.usefixtures("progress")
def test_a_stop_ends_it_between_two_runs() -> None:
    def stop(policy: OffloadPolicy) -> None:
        embedded_host.stop()

    experts, kept = Experts(fails=stop), list[Report]()
    with pytest.raises(Cancelled):
        measured(benchmark(repeats=5, cooldown_s=0.0), experts, kept)
    assert (len(experts.calls), kept[-1].done) == (1, 1)


@pytest.mark.usefixtures("progress")
def test_each_run_follows_a_pause() -> None:
    began = time.monotonic()
    report = measured(benchmark(warmup=1, repeats=2, cooldown_s=0.1), Experts())
    assert report.done == 3
    assert time.monotonic() - began >= 0.3, "a pause may be longer than requested, never shorter"


@pytest.mark.usefixtures("progress")
def test_a_stop_ends_a_pause() -> None:
    experts = Experts()
    timer = threading.Timer(0.2, embedded_host.stop)
    timer.start()
    try:
        with pytest.raises(Cancelled):
            measured(benchmark(cooldown_s=300.0, repeats=2), experts)
    finally:
        timer.join()
    assert experts.calls == []


@pytest.mark.parametrize(
    ("run", "matrix", "error", "message"),
    [
        (
            {},
            ("block_swap 41", "", ""),
            ValueError,
            "blocks_to_swap is 41, but the high expert has only 40 blocks",
        ),
        (
            {"requested": OffloadPolicy.resident()},
            ("", "1", ""),
            MatrixError,
            "leave prefetch empty",
        ),
        ({}, ("", "", "1"), RequestError, "switch step 2 of 1 steps"),
        (
            {
                "requested": AutoOffload(),
                "request": request(steps=None, sigmas=[1.0, 0.9, 0.5, 0.0]),
            },
            ("", "", "3"),
            RequestError,
            "the run has its sigmas from another node",
        ),
        (
            {
                "experts": replace(
                    EXPERTS, loras=(LoraRef(low_noise=Path("/loras/low.st"), steps=LATE),)
                )
            },
            ("", "", "4, 3"),
            RequestError,
            "low.st has a strength for steps '2-3: 0', and the run has 3 steps, 0 to 2: change "
            "strength_steps",
        ),
    ],
)
@pytest.mark.usefixtures("progress")
def test_what_cannot_be_run_is_refused_before_anything_is(
    run: dict[str, Any], matrix: tuple[str, str, str], error: type[Exception], message: str
) -> None:
    experts, kept = Experts(), list[Report]()
    own_request = run.pop("request", None)
    with pytest.raises(error, match=message):
        measured(
            benchmark(sampler_run(own_request, **run), sampler_run(), matrix=matrix), experts, kept
        )
    assert (experts.calls, kept) == ([], [])


@pytest.mark.usefixtures("progress")
def test_a_report_says_how_and_with_what_it_was_made_and_no_folder() -> None:
    report = measured(benchmark(repeats=3, warmup=1, cooldown_s=0.0), Experts())
    assert (
        report.method["Runs of each variant"]
        == "3 measured after 1 not counted, 0 s of rest before each"
    )
    assert report.method["With"] == f"WanStream {VERSION}, without ComfyUI"
    assert report.variants[0].settings["Experts"] == "high.safetensors and low.safetensors"
    assert "/models" not in str(report)


def test_a_run_on_workers_is_measured_on_the_same_ones() -> None:
    ran, workers = Experts(), WorkersRef(count=4, mesh=Mesh(data=2, cfg=2))
    report = measured(benchmark(sampler_run(workers=workers), repeats=2), ran)
    assert ran.workers == {workers}
    (variant,) = report.variants
    assert variant.settings["Workers"] == "4 workers, local: data 2 x cfg 2"


def native_run() -> MeasuredModel:
    run = ModelRun(
        timeline=result(request()).timeline,
        settings={"Model": "WAN21", "Policy": "layerwise, 1 ahead"},
        device=torch.device("cpu"),
        node_id="ksampler",
    )
    return MeasuredModel(**vars(run), latents=LATENTS)


@pytest.mark.usefixtures("progress")
def test_a_run_of_a_native_model_is_reported_next_to_one_of_wan_sampler() -> None:
    given = named_runs({"run": sampler_run(), "run_b": native_run()}, {"ksampler": "KSampler"})
    experts = Experts()
    report = measured(replace(benchmark(), runs=given), experts)
    assert experts.calls == []
    ours, native = report.variants
    assert (ours.name, native.name) == ("run", "KSampler")
    assert native.settings["Model"] == "WAN21"
    assert native.measured == (native_run().timeline,)
    assert native.latents == ours.latents


@pytest.mark.usefixtures("progress")
@pytest.mark.parametrize("again", [{"repeats": 2}, {"warmup": 1}], ids=str)
def test_a_run_of_a_native_model_cannot_be_repeated(again: dict[str, int]) -> None:
    experts = Experts()
    with pytest.raises(ValueError, match="which only that sampler can repeat: set repeats to 1"):
        measured(replace(benchmark(**again), runs={"KSampler": native_run()}), experts)
    assert experts.calls == []
