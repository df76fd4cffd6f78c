"""Offload case: run plan, summary, and one tiny run for each kind."""

import json
import signal
import sys
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest

from wanstream.benchmarks.offload_case import child
from wanstream.benchmarks.offload_case.command import main
from wanstream.benchmarks.offload_case.cpu_case import planned_rounds
from wanstream.benchmarks.offload_case.gpu_case import PARTS
from wanstream.benchmarks.offload_case.model_files import expert_folders, weight_files
from wanstream.benchmarks.offload_case.session import Planned, Session, Settings
from wanstream.benchmarks.offload_case.shapes import SHAPES
from wanstream.benchmarks.offload_case.summary import summarise
from wanstream.benchmarks.offload_case.task import RunReport, Task
from wanstream.benchmarks.offload_case.variants import all_variants

OURS = ("layerwise", "layerwise-buffered", "half", "pinned", "wanstream-resident")
PEERS = ("mmap", "swap", "cpu-offload", "disk-offload", "group-leaf-disk", "group-block-disk")


TIMES = {"load_s": 0.5, "user_s": 8.0, "system_s": 1.0}
REPORT = {
    **TIMES,
    "import_rss_bytes": 4e8,
    "peak_rss_bytes": 9e8,
    "read_bytes": 10**9,
    "checksum": "same",
    **dict.fromkeys(("step_bytes", "device_peak_bytes", "device_weight_bytes")),
    **dict.fromkeys(("host_weight_bytes", "timeline", "predicted")),
}
WATCHED = {"wall_s": 9.0, "anonymous_peak_bytes": 6e8, "others_s": 0.2, "stolen_s": 0.0}


def run(variant="layerwise", *, steps=(2.0, 1.0, 3.0, 1.0), **changed):
    """Return one line for a session."""
    report = {**REPORT, "step_s": list(steps), "total_s": 0.5 + sum(steps)}
    line = {"variant": variant, "report": report, "watched": {**WATCHED, "exit_code": 0}}
    line |= {"repetition": 0, "limited": False, "attempt": 0, "disturbed": False, "latents": ""}
    return line | {"group_bytes": None, "reason": None, **changed}


def test_every_round_has_the_main_variants():
    rounds = planned_rounds(blocks=30, repetitions=3, limited=False)
    names = [[plan.variant for plan in planned] for planned in rounds]
    main = ["resident", "resident-kept", "layerwise", "half"]
    assert [planned[:4] for planned in names] == [main] * 3
    others = [name for planned in names for name in planned[4:]]
    assert len(others) == len(set(others))
    assert {*OURS, *PEERS} <= {*others, *names[0]}
    assert {plan.repetition for plan in rounds[2][:4]} == {2}
    # Inside a limit the resident model also runs free: that it does not survive is a result.
    limited = planned_rounds(blocks=30, repetitions=2, limited=True)
    every = [(plan.variant, plan.limited) for planned in limited for plan in planned]
    assert every[:2] == [("resident", False), ("layerwise", True)]
    assert {("resident", True), ("group-block-disk-heap", True)} <= {*every}
    for part in PARTS.values():
        assert {*part.capped, *part.free} <= all_variants(SHAPES[part.shape].expert.layers).keys()


@pytest.mark.parametrize(
    ("there", "missing"),
    [
        ([], [0, 1, 2]),
        ([{}], []),
        ([{"disturbed": True}], [1, 2]),
        ([{"disturbed": True}, {"disturbed": True, "attempt": 1}], [2]),
        ([{"report": None}], [0, 1, 2]),
        # Killed for its memory: that is a result.
        ([{"report": None, "group_bytes": {"limit": 1, "peak": 1, "kills": 1}}], []),
    ],
)
def test_disturbed_runs_are_repeated(tmp_path, there, missing):
    session = Session(tmp_path / "lines.jsonl", Settings(shape="tiny", work=tmp_path))
    lines = "".join(json.dumps(run(**line)) + "\n" for line in there)
    session.file.write_text(lines, encoding="utf-8")
    plan = Planned(variant="layerwise")
    assert [attempt for attempt in range(3) if session.missing([plan], attempt)] == missing


def test_medians_skip_disturbed_runs():
    runs = [
        run("resident"),
        run(steps=(2.0, 1.0, 3.2, 1.0)),
        run(steps=(2.0, 1.1, 3.4, 1.0), repetition=1),
        run(steps=(9.0, 9.0, 9.0, 9.0), repetition=2, disturbed=True),
    ]
    row = summarise(runs)["layerwise"]
    assert row["step_s"] == [2.0, 1.05, 3.3, 1.0]
    assert (row["runs"], row["disturbed_runs"], row["calm"]) == (2, 1, True)
    assert row["steps_to_resident"] == pytest.approx(7.35 / 7, abs=1e-3)
    assert row["switch_to_median"] == pytest.approx(3.3 / 1.525, abs=1e-3)
    assert row["equal_to_resident"]
    assert row["rss_above_imports_gb"] == 0.5
    # They count if there is no other run.
    only = summarise([run("resident", disturbed=True), run(disturbed=True)])["layerwise"]
    assert (only["calm"], only["step_s"]) == (False, [2.0, 1.0, 3.0, 1.0])


def test_prediction_is_compared_with_its_own_run():
    """Machines are measured before each round, so a busy one spoils only one round."""
    lines = []
    for repetition, (speed, expected_s) in enumerate([(1.0, 0.9), (2.0, 2.0), (1.0, 7.0)]):
        line = run(steps=(speed,) * 4, repetition=repetition)
        steps = [{"stall_s": 0.0, "wall_s": expected_s}] * 4
        timeline = {"steps": steps, "non_block_bytes": 0}
        line["report"] |= {"timeline": timeline, "predicted": {"steps": steps}}
        line["report"]["step_bytes"] = [1] * 4
        lines.append(line)
    row = summarise(lines)["layerwise"]
    assert row["predicted_to_executed"] == [1.0] * 4
    assert row["predicted_step_s"] == [2.0] * 4


def test_run_without_a_report_is_a_row_with_its_reason():
    killed = run("swap", report=None, limited=True, reason="killed: out of memory")
    row = {"runs": 1, "ended_after_s": 9.0, "peak_anonymous_gb": 0.6, "why": killed["reason"]}
    assert summarise([run("resident"), killed])["swap (limited)"] == row


def test_weights_are_written_once_and_are_those_of_the_shape(tmp_path):
    shape = SHAPES["tiny"]
    files = weight_files(expert_folders(tmp_path, shape)["high"])
    assert len(files) == shape.shards
    assert sum(file.stat().st_size for file in files) == pytest.approx(shape.expert_bytes, rel=1e-2)
    written = [file.stat().st_mtime_ns for file in files]
    expert_folders(tmp_path, shape)
    assert [file.stat().st_mtime_ns for file in files] == written


def run_case(*arguments: object) -> None:
    """Run a case, whose runs are separate processes."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        main([*map(str, arguments)])
    finally:
        signal.signal(signal.SIGTERM, handler)


def forked(task):
    """Return a report from a forked process, which need not import torch and diffusers again."""
    for wanted in ("files", "run") if task.case_variant.prepares else ("run",):
        given = (replace(task, wanted=wanted),)
        process = get_context("fork").Process(target=child.run, args=given)
        process.start()
        process.join(300)
        assert process.exitcode == 0, task.variant
    return json.loads(Path(task.report).read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="runs are forked, and measured in /proc")
def test_one_tiny_run_of_each_kind(tmp_path):
    """Two run in separate processes, as in the benchmark."""
    whole = ("resident", "layerwise")
    tiny = ("--shape", "tiny", "--retries", 0, "--threads", 1, "--only", *whole)
    run_case("quick", tmp_path, *tiny)
    sessions = tmp_path / "sessions"
    lines = [json.loads(line) for line in (sessions / "quick.jsonl").read_text().splitlines()]
    assert {line["variant"] for line in lines} == {*whole}
    assert all(line["cached_before_bytes"] == 0 for line in lines)
    task = Task(variant="half", shape="tiny", work=str(tmp_path), report="", threads=1)
    task = replace(task, machine=str(sessions / "quick" / "machine-0.json"))
    for name in (*OURS[1:], *PEERS[:-1], "group-block-record"):
        one = replace(task, variant=name, report=str(tmp_path / f"{name}.json"))
        lines.append(run(name, report=forked(one), latents=str(one.latents)))
    reports = {line["variant"]: RunReport.from_dict(line["report"]) for line in lines}
    rows = summarise(lines)
    # Other roundings than diffusers', in bf16 on some processors.
    assert all(rows[name]["relative_l2"] < 0.05 for name in OURS)
    for name, report in reports.items():
        assert len(report.step_s) == 4, name
        assert report.total_s >= report.load_s + sum(report.step_s) - 1e-6, name
        assert report.peak_rss_bytes > report.import_rss_bytes > 0, name
        alike = reports["wanstream-resident" if name in OURS else "resident"]
        assert report.checksum == alike.checksum, name
    streamed = SHAPES["tiny"].streamed_bytes
    for name in ("layerwise", "layerwise-buffered", "pinned"):
        assert reports[name].step_bytes == [streamed] * 4, name
        assert reports[name].timeline is not None
    assert reports["half"].step_bytes == [streamed, streamed // 2] * 2
    assert reports["wanstream-resident"].step_bytes == [streamed, 0] * 2
    # Each step reads the disk again.
    assert reports["layerwise"].read_bytes > reports["layerwise-buffered"].read_bytes


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_gpu_part_on_the_cpu(tmp_path):
    """Programs in the GPU case, on a tiny pair: capped and free runs, and their merged result."""
    tiny = ("--device", "cpu", "--threads", 1, "--results", tmp_path)
    run_case("gpu", tmp_path, "smoke", *tiny, "--only", "resident", "pinned")
    run_case("gpu", tmp_path, "merge", *tiny)
    (file,) = tmp_path.glob("offload-gpu_*.json")
    figures = json.loads(file.read_text(encoding="utf-8"))["figures"]["parts"]["smoke"]
    variants = figures["variants"]
    longer = figures["simulated_40_blocks"]["pinned"]["step_s"]
    assert variants.keys() == {"resident", "pinned"}
    # Other roundings than diffusers', in bf16 on some processors.
    assert variants["pinned"]["relative_l2"] < 0.05
    assert len(longer) == 4
    assert sum(longer) > sum(variants["pinned"]["step_s"])
