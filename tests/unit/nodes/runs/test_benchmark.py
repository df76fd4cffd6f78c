"""Benchmark runs: order, settings, and report files after failures. No model is opened."""

import errno
import json
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from wanstream.bench import Report, TrialMatrix, TrialTimes
from wanstream.bench.report_tables import run_phase_table
from wanstream.distributed import RestartLimitError, WorkerFailedError
from wanstream.host import ModelRun, OutputFile
from wanstream.host.embedded.files import Folders
from wanstream.nodes.runs import benchmark as benchmark_runs
from wanstream.nodes.runs.run_experts import SamplerRun
from wanstream.offload.sources import InsufficientRamError
from wanstream.plan import AutoOffload, DoesNotFitError
from wanstream.sampling.inputs import DenoiseRequest, ExtraTokens
from wanstream.sampling.steps import DenoiseResult, RequestError, StepProgress
from wanstream.schema import VERSION, Cancelled, Mesh, MeshError, OffloadPolicy, StepRange
from wanstream.schema.records import PhaseRecord
from wanstream.schema.refs import ExpertsRef, LoraRef, WorkersRef
from wanstream.tests.support.bench_runs import make_report, make_timeline, make_variant
from wanstream.tests.support.full_disk import largest_file
from wanstream.tests.support.host.embedded import embedded_host
from wanstream.wan.latents import tensor_digest

EXPERTS = ExpertsRef(high_noise=Path("/models/high.st"), low_noise=Path("/models/low.st"))
LATE = (StepRange(0, 0, 0.5), StepRange(2, 3, 0.0))
LATENTS = torch.zeros(1, 16, 1, 2, 2)
LAYERWISE = OffloadPolicy.layerwise()


def request(steps=4, **changes):
    given = {"noise": LATENTS, "positive": torch.zeros(1, 3, 4096), "steps": steps}
    return DenoiseRequest(**{**given, "switch_step": 2, **changes})


def result(request, seconds=1.0):
    steps = request.step_plan.steps
    walls = [seconds] * len(steps)
    timeline = make_timeline(*walls, switch=request.switch_step, first=steps[0], stall_s=0)
    return DenoiseResult(latents=LATENTS, sigma=0, timeline=timeline)


def sampler_run(ran=None, **values):
    ran = ran or request()
    given = {"experts": EXPERTS, "request": ran, "result": result(ran), "node_id": "sampler"}
    given |= {"requested": LAYERWISE, "policy": LAYERWISE, "device": torch.device("cpu")}
    return SamplerRun(**{**given, "block_counts": {"high": 40, "low": 40}, **values})


def benchmark(*runs, matrix=("", "", ""), traces=None, **times):
    named = benchmark_runs.named_runs(
        dict(zip(("run", "run_b"), runs or (sampler_run(),), strict=False)), {}
    )
    parts = {"matrix": TrialMatrix.parse(*matrix), "times": TrialTimes(**times)}
    return benchmark_runs.Benchmark(title="A benchmark", runs=named, traces=traces, **parts)


class Experts:
    """Fake `run_experts`: records calls and kept reports, fails where `fails` returns an error."""

    def __init__(self, fails=lambda _: None, parts=1):
        self._fails = fails
        self._parts = parts
        self.calls: list[tuple[ExpertsRef, int, OffloadPolicy | AutoOffload]] = []
        self.kept: list[Report] = []
        self.traces: set[Path | None] = set()
        self.workers: set[WorkersRef | None] = set()

    def measure(self, benchmark: benchmark_runs.Benchmark) -> Report:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(benchmark_runs, "run_experts", self)
            given = {"node_id": "benchmark", "on_report": self.kept.append}
            return benchmark_runs.measure(embedded_host, benchmark, **given)

    def __call__(self, host, inputs, *, node_id, measured):
        assert (host, node_id) == (embedded_host, "benchmark")
        ran = inputs.request
        requested = inputs.requested
        self.calls.append((inputs.experts, len(ran.step_plan.steps), requested))
        self.traces.add(measured.traces)
        self.workers.add(inputs.workers)
        made = result(ran, seconds=len(self.calls))
        reported = [record for record in made.timeline.steps for _ in range(self._parts)]
        for done, record in enumerate(reported, start=1):
            told = {"record": record, "done": done, "total": len(reported), "denoised": LATENTS}
            measured.on_step(StepProgress(**told, state=lambda: pytest.fail("state is not read")))
        if (error := self._fails(requested)) is not None:
            raise error
        policy = LAYERWISE if isinstance(requested, AutoOffload) else requested
        values = {"experts": inputs.experts, "requested": requested, "policy": policy}
        return sampler_run(ran, **values, result=made)


@pytest.fixture(autouse=True)
def progress(tmp_path):
    """Open a host and yield the benchmark's progress events."""
    events = []
    folders = Folders(models=tmp_path, output=tmp_path, input=tmp_path)
    with embedded_host.opened(folders, events.append):
        with embedded_host.events.node("benchmark", "WanStreamBenchmark"):
            yield events


def test_finished_run_alone_is_reported_without_another():
    experts = Experts()
    run = sampler_run()
    report = experts.measure(benchmark(run, cooldown_s=30.0))
    assert (experts.calls, experts.kept) == ([], [])
    ((trial,),) = (variant.trials for variant in report.variants)
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
def test_anything_else_is_run(wanted, runs):
    experts = Experts()
    report = experts.measure(benchmark(**wanted))
    assert len(experts.calls) == runs == report.planned == report.done
    assert experts.traces == {wanted.get("traces")}
    assert report.finished


def test_variants_follow_one_another_with_warm_ups_first():
    experts = Experts()
    given = benchmark(matrix=("resident, block_swap 20", "", "4, 8"), repeats=2, warmup=1)
    report = experts.measure(given)
    resident = OffloadPolicy.resident()
    swap = OffloadPolicy.block_swap(20)
    order = [(resident, 4), (resident, 8), (swap, 4), (swap, 8)]
    called = [(policy, steps) for _, steps, policy in experts.calls]
    assert called == [each for each in order for _ in range(3)]
    swaps = [f"block_swap 20, 1 ahead, {steps} steps" for steps in (4, 8)]
    names = ["resident, 4 steps", "resident, 8 steps", *swaps]
    assert [variant.name for variant in report.variants] == names
    for variant in report.variants:
        assert [trial.warmup for trial in variant.trials] == [True, False, False]
    assert [timeline.wall_s for timeline in report.variants[0].measured] == [4 * 2, 4 * 3]


def test_several_runs_are_varied_under_their_names():
    other = replace(EXPERTS, loras=(LoraRef(high_noise=Path("/loras/fast.st")),))
    experts = Experts()
    runs = sampler_run(), sampler_run(experts=other, requested=AutoOffload())
    report = experts.measure(benchmark(*runs, matrix=("", "", "4")))
    names = ["run: layerwise, 1 ahead, 4 steps", "run_b: auto, 4 steps"]
    assert [variant.name for variant in report.variants] == names
    assert [ref for ref, _, _ in experts.calls] == [EXPERTS, other]
    one, two = (variant.settings for variant in report.variants)
    assert not {"LoRAs", "Ran under"} & one.keys()
    assert two["LoRAs"] == "fast.st x 1"
    assert (two["Policy"], two["Ran under"]) == ("auto", "layerwise, 1 ahead, weights from file")
    assert report.variants[0].job != report.variants[1].job


def test_runs_have_the_titles_of_their_nodes():
    a, b, c = (sampler_run(node_id=node) for node in "123")
    titles = {"1": "Fast", "2": "Fast"}
    named = benchmark_runs.named_runs({"run": a, "run_b": b, "run_c": c, "run_d": None}, titles)
    assert named == {"Fast (run)": a, "Fast (run_b)": b, "run_c": c}


@pytest.mark.parametrize("parts", [1, 3])
def test_report_is_kept_before_and_after_each_run(progress, parts):
    """Workers report a step once for each part: it counts once."""
    experts = Experts(parts=parts)
    experts.measure(benchmark(matrix=("", "1, 2", ""), repeats=2))
    done = [(report.done, report.planned) for report in experts.kept]
    assert done == [(number, 4) for number in range(5)]
    assert not any(report.finished for report in experts.kept)
    steps = [(each.done, each.total) for each in progress if each.total != 1]
    assert steps == [(done, 16) for done in range(1, 17)]


NO_ROOM = [torch.OutOfMemoryError, DoesNotFitError, InsufficientRamError]
NO_WORKERS = [MeshError, WorkerFailedError, RestartLimitError]


@pytest.mark.parametrize("kind", [*NO_ROOM, *NO_WORKERS])
def test_variant_without_room_or_workers_is_skipped(kind, progress):
    error = kind("no room")
    experts = Experts(fails=lambda policy: error if policy.kind == "resident" else None)
    report = experts.measure(benchmark(matrix=("resident, layerwise", "", ""), repeats=2))
    variants = [(variant.failed, len(variant.trials)) for variant in report.variants]
    assert variants == [("no room", 0), ("", 2)]
    assert report.finished
    done = [each.done for each in progress if each.total == 16]
    assert done == [*range(1, 5), *range(8, 17)], "the bar skips the variant"


def test_other_error_ends_the_benchmark_and_keeps_its_runs():
    fails = {1: None, 2: ValueError("broken")}
    experts = Experts(lambda policy: fails[policy.prefetch_blocks])
    with pytest.raises(ValueError, match="broken"):
        experts.measure(benchmark(matrix=("", "1, 2", "")))
    assert experts.kept[-1].done == 1


def test_stop_ends_the_benchmark_between_runs():
    experts = Experts(fails=lambda _: embedded_host.stop())
    with pytest.raises(Cancelled):
        experts.measure(benchmark(repeats=5, cooldown_s=0.0))
    assert (len(experts.calls), experts.kept[-1].done) == (1, 1)


def test_stop_ends_a_pause():
    experts = Experts()
    timer = threading.Timer(0.2, embedded_host.stop)
    timer.start()
    with pytest.raises(Cancelled):
        experts.measure(benchmark(cooldown_s=300.0, repeats=2))
    timer.join()
    assert experts.calls == []


def test_each_run_follows_a_pause():
    began = time.monotonic()
    assert Experts().measure(benchmark(warmup=1, repeats=2, cooldown_s=0.1)).done == 3
    assert time.monotonic() - began >= 0.3, "a pause may be longer than requested, never shorter"


LATE_LORA = replace(EXPERTS, loras=(LoraRef(low_noise=Path("/loras/low.st"), steps=LATE),))
LATE_STEPS = r"low.st has a strength for steps '2-3: 0', .* 3 steps, 0 to 2: change strength_steps"
SIGMAS = request(steps=None, sigmas=[1.0, 0.9, 0.5, 0.0])
AUTO = {"requested": AutoOffload()}


@pytest.mark.parametrize(
    ("run", "matrix", "error", "message"),
    [
        ({}, ("block_swap 41", "", ""), ValueError, "41, but the high expert has only 40 blocks"),
        ({}, ("", "", "1"), RequestError, "switch step 2 of 1 steps"),
        ({**AUTO, "ran": SIGMAS}, ("", "", "3"), RequestError, "has its sigmas from another node"),
        ({"experts": LATE_LORA}, ("", "", "4, 3"), RequestError, LATE_STEPS),
    ],
)
def test_impossible_variant_is_refused_before_any_run(run, matrix, error, message):
    experts = Experts()
    with pytest.raises(error, match=message):
        experts.measure(benchmark(sampler_run(**run), sampler_run(), matrix=matrix))
    assert (experts.calls, experts.kept) == ([], [])


def test_report_has_the_method_and_no_folder():
    ran = Experts()
    workers = WorkersRef(count=4, mesh=Mesh(data=2, cfg=2))
    times = {"repeats": 3, "warmup": 1, "cooldown_s": 0.0}
    report = ran.measure(benchmark(sampler_run(workers=workers), **times))
    rule = "3 measured after 1 not counted, 0 s of rest before each"
    assert report.method["Runs of each variant"] == rule
    assert report.method["With"] == f"WanStream {VERSION}, without ComfyUI"
    (variant,) = report.variants
    assert variant.settings["Experts"] == "high.st and low.st"
    assert "/models" not in str(report)
    assert ran.workers == {workers}
    assert variant.settings["Workers"] == "4 workers, local: data 2 x cfg 2"


OPEN = PhaseRecord(name="open", start_s=-2.0, wall_s=1.0)
FIRST_BLOCK = PhaseRecord(name="first block", start_s=0.0, wall_s=0.5)
NATIVE_PHASES = (FIRST_BLOCK, PhaseRecord(name="model", start_s=0.5, wall_s=4.0))


def native_run() -> benchmark_runs.MeasuredModel:
    settings = {"Model": "WAN21", "Policy": "layerwise, 1 ahead"}
    given = {"settings": settings, "device": torch.device("cpu"), "node_id": "ksampler"}
    run = ModelRun(timeline=replace(result(request()).timeline, phases=NATIVE_PHASES), **given)
    return benchmark_runs.MeasuredModel(**vars(run), latents=LATENTS)


def test_native_run_is_reported_and_not_repeated():
    """The report has the phases of the native run, and those of its queue item."""
    given = benchmark_runs.named_runs(
        {"run": sampler_run(), "run_b": native_run()}, {"ksampler": "KSampler"}
    )
    embedded_host.events.ledger().add((OPEN, *NATIVE_PHASES), run_start=time.perf_counter())
    experts = Experts()
    report = experts.measure(replace(benchmark(), runs=given))
    ours, native = report.variants
    assert [phase.name for phase in report.phases] == ["open", "first block", "model"]
    native_rows = [("first block", "", "0.50 s (1 run)"), ("model", "", "4.00 s (1 run)")]
    assert list(run_phase_table(report).rows) == native_rows
    assert (ours.name, native.name, native.settings["Model"]) == ("run", "KSampler", "WAN21")
    assert native.measured == (native_run().timeline,)
    assert native.latents == ours.latents
    for again in ({"repeats": 2}, {"warmup": 1}):
        with pytest.raises(ValueError, match="only that sampler can repeat: set repeats to 1"):
            experts.measure(benchmark(native_run(), **again))
    assert experts.calls == []


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"repeats": 0}, "0 repeats measure nothing: give 1 to 100"),
        ({"repeats": 101}, "repeats is 101: give at most 100"),
        ({"warmup": -1}, "warmup is -1"),
        ({"cooldown_s": -1.0}, "cooldown_s is -1: give 0 to 3600 seconds"),
    ],
)
def test_unusable_trial_times_are_refused(numbers, message):
    with pytest.raises(ValueError, match=message):
        TrialTimes(**numbers)


def test_digest_depends_on_values_shape_and_dtype():
    tensor = torch.arange(6.0).view(2, 3)
    others = [tensor + 1, tensor.view(3, 2), tensor.double(), -tensor, torch.tensor(0.0)]
    assert len({tensor_digest(each) for each in (tensor, *others)}) == 6
    for same in (tensor.clone(), tensor.t().contiguous().t()):
        assert tensor_digest(same) == tensor_digest(tensor)


def test_request_is_described_in_words(make_request):
    words = {"Size": "48x32, 5 frames", "Videos": "2", "Solver": "unipc"}
    words |= {"Steps": "5: 2 high-noise, 3 low-noise", "Sigmas": "wan, flow shift 5"}
    words["Guidance"] = "4 high-noise, 3 low-noise"
    assert benchmark_runs.describe_request(make_request(batch=2)) == words
    steps = {"steps": None, "sigmas": [1.0, 0.5, 0.0], "switch_step": 1, "start_step": 1}
    tokens = ExtraTokens(context=(torch.ones(1, 16, 1, 4, 6),))
    given = {"latent": torch.ones(1, 16, 2, 4, 6), "tokens": tokens, "context_guidance": 1.5}
    words = benchmark_runs.describe_request(make_request(**steps, **given))
    assert (words["Sigmas"], words["Context guidance"]) == ("from another node", "1.5")
    assert words["Steps"] == "1: 0 high-noise, 1 low-noise"


ALL_FILES = [".csv", ".html", ".json", ".png"]


def report(trials):
    variant = make_variant("a", *[make_timeline(2.0)] * trials)
    return make_report(variant, planned=3, finished=trials == 3)


def files(folder: Path) -> benchmark_runs.ReportFiles:
    name = "a_00001_.json"
    return benchmark_runs.ReportFiles(
        OutputFile(path=folder / name, filename=name, subfolder="sub")
    )


def suffixes(folder: Path) -> list[str]:
    return sorted(path.suffix for path in folder.iterdir())


def test_last_report_replaces_the_one_before(tmp_path):
    place = files(tmp_path)
    for trials in (0, 1, 2):
        place.save(report(trials))
        assert json.loads((tmp_path / "a_00001_.json").read_text())["done"] == trials
    assert suffixes(tmp_path) == [".json"]
    assert place.finish(report(3)).mode == "RGB"
    assert suffixes(tmp_path) == ALL_FILES
    shown = {"filename": "a_00001_.png", "subfolder": "sub", "type": "output"}
    assert place.chart_preview() == shown
    assert place.traces() == tmp_path / "a_00001_traces"
    assert not place.traces().exists()


def test_file_name_in_another_encoding_is_reported(tmp_path):
    """Linux file names may hold bytes outside UTF-8: Python decodes them to lone surrogates."""
    (variant,) = report(3).variants
    named = replace(variant, name="caf\udce9", settings={"Experts": "caf\udce9.safetensors"})
    files(tmp_path).finish(replace(report(3), variants=(named,)))
    assert "caf?.safetensors" in (tmp_path / "a_00001_.html").read_text(encoding="utf-8")
    assert "caf?" in (tmp_path / "a_00001_.csv").read_text(encoding="utf-8")


FULL = benchmark_runs.ReportFileError(errno.ENOSPC, "full")


@pytest.mark.parametrize(
    ("trials", "error", "left"),
    [
        *((2, KeyboardInterrupt(), ALL_FILES), (0, KeyboardInterrupt(), [".json"])),
        *((2, None, [".json"]), (2, FULL, [".json"])),
    ],
)
def test_stopped_benchmark_leaves_its_runs_in_all_files(tmp_path, trials, error, left):
    with nullcontext() if error is None else pytest.raises(type(error)), files(tmp_path) as place:
        place.save(report(trials))
        if error is not None:
            raise error
    assert suffixes(tmp_path) == left
    if left == ALL_FILES:
        assert "Unfinished: 2 of 3 runs were made." in (tmp_path / "a_00001_.html").read_text()


def test_failed_files_do_not_hide_why_the_benchmark_ended(tmp_path, caplog):
    with pytest.raises(ZeroDivisionError), files(tmp_path) as place:
        place.save(report(2))
        (tmp_path / "a_00001_.csv").mkdir()
        raise ZeroDivisionError
    assert "a_00001_.csv could not be written" in caplog.text
    lost = r"gone/a_00001_\.json could not be written: No such file"
    with pytest.raises(benchmark_runs.ReportFileError, match=lost):
        files(tmp_path / "gone").save(report(0))


def test_full_disk_leaves_the_reports_before(tmp_path):
    place = files(tmp_path)
    place.save(report(1))

    def refusal(room, write, given):
        with largest_file(room), pytest.raises(benchmark_runs.ReportFileError) as failed:
            write(given)
        assert failed.value.errno == errno.EFBIG
        return str(failed.value)

    def kept() -> tuple[int, bool]:
        report = json.loads((tmp_path / "a_00001_.json").read_text())
        return report["done"], report["finished"]

    json_file, page = (tmp_path / f"a_00001_.{suffix}" for suffix in ("json", "html"))
    said = refusal(100, place.save, report(2))
    assert f"{json_file} could not be written: File too large" in said
    assert f"All runs before are in {json_file}: make room" in said
    assert (suffixes(tmp_path), kept()) == ([".json"], (1, False))
    # Room for the JSON and the CSV, not for the page.
    said = refusal(5_000, place.finish, report(3))
    assert f"{page} could not be written: File too large" in said
    assert (suffixes(tmp_path), kept()) == ([".csv", ".json"], (3, True))
