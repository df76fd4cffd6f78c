"""Offload case: run plan, summary, and one tiny run for each kind."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import pytest

from wanstream.benchmarks.offload_case import child
from wanstream.benchmarks.offload_case.cpu_case import planned_rounds
from wanstream.benchmarks.offload_case.gpu_case import PARTS
from wanstream.benchmarks.offload_case.model_files import expert_folders, weight_files
from wanstream.benchmarks.offload_case.session import Planned, Session, Settings
from wanstream.benchmarks.offload_case.shapes import SHAPES
from wanstream.benchmarks.offload_case.summary import summarise
from wanstream.benchmarks.offload_case.task import RunReport, Task
from wanstream.benchmarks.offload_case.variants import all_variants

PROGRAM = Path(__file__).parents[3] / "benchmarks" / "offload.py"
OURS = ("layerwise", "layerwise-buffered", "half", "pinned", "wanstream-resident")
PEERS = ("mmap", "swap", "cpu-offload", "disk-offload", "group-leaf-disk", "group-block-disk")


def run(
    variant: str = "layerwise",
    *,
    steps: tuple[float, ...] = (2.0, 1.0, 3.0, 1.0),
    checksum: str = "same",
    repetition: int = 0,
    **changed: Any,
) -> dict[str, Any]:
    """Return one line for a session."""
    report = {
        "import_rss_bytes": 4e8,
        "load_s": 0.5,
        "step_s": list(steps),
        "total_s": 0.5 + sum(steps),
        "peak_rss_bytes": 9e8,
        "read_bytes": 10**9,
        "user_s": 8.0,
        "system_s": 1.0,
        "checksum": checksum,
        "step_bytes": None,
        "device_peak_bytes": None,
        "device_weight_bytes": None,
        "host_weight_bytes": None,
        "timeline": None,
        "predicted": None,
    }
    watched = {
        "wall_s": 9.0,
        "anonymous_peak_bytes": 6e8,
        "others_s": 0.2,
        "stolen_s": 0.0,
        "exit_code": 0,
    }
    line = {
        "variant": variant,
        "repetition": repetition,
        "limited": False,
        "attempt": 0,
        "disturbed": False,
    }
    line |= {
        "report": report,
        "watched": watched,
        "group_bytes": None,
        "reason": None,
        "latents": "",
        **changed,
    }
    return line


def test_every_round_holds_the_main_variants_and_a_share_of_the_others() -> None:
    rounds = planned_rounds(blocks=30, repetitions=3, limited=False)
    names = [[plan.variant for plan in planned] for planned in rounds]
    assert [planned[:4] for planned in names] == [
        ["resident", "resident-kept", "layerwise", "half"]
    ] * 3
    others = [name for planned in names for name in planned[4:]]
    assert len(others) == len(set(others))
    assert {*OURS, *PEERS} <= {*others, *names[0]}
    assert {plan.repetition for plan in rounds[2][:4]} == {2}


def test_inside_a_limit_the_resident_model_also_runs_free() -> None:
    rounds = planned_rounds(blocks=30, repetitions=2, limited=True)
    first = [(plan.variant, plan.limited) for plan in rounds[0]]
    assert first[:2] == [("resident", False), ("layerwise", True)]
    every = [(plan.variant, plan.limited) for planned in rounds for plan in planned]
    assert ("resident", True) in every, "that it does not survive is a result"
    assert ("group-block-disk-heap", True) in every


@pytest.mark.parametrize(
    ("there", "missing"),
    [
        ([], [0, 1, 2]),
        ([{}], []),
        ([{"disturbed": True}], [1, 2]),
        ([{"disturbed": True}, {"disturbed": True, "attempt": 1}], [2]),
        ([{"report": None}], [0, 1, 2]),
        ([{"report": None, "group_bytes": {"limit": 1, "peak": 1, "kills": 1}}], []),
    ],
    ids=["nothing", "done", "disturbed", "disturbed twice", "failed", "out of memory"],
)
def test_disturbed_runs_are_repeated(
    tmp_path: Path, there: list[dict[str, Any]], missing: list[int]
) -> None:
    session = Session(tmp_path / "lines.jsonl", Settings(shape="tiny", work=tmp_path))
    session.file.write_text(
        "".join(json.dumps(run(**line)) + "\n" for line in there), encoding="utf-8"
    )
    plan = Planned(variant="layerwise")
    assert [attempt for attempt in range(3) if session.missing([plan], attempt)] == missing


def test_medians_skip_disturbed_runs() -> None:
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


def test_only_disturbed_runs_count_but_are_marked() -> None:
    row = summarise([run("resident", disturbed=True), run(disturbed=True)])["layerwise"]
    assert not row["calm"]
    assert row["step_s"] == [2.0, 1.0, 3.0, 1.0]


def test_a_prediction_is_compared_with_its_own_run() -> None:
    """Machines are measured before each round, so a busy one spoils only one round."""
    lines = []
    for repetition, (speed, expected_s) in enumerate([(1.0, 0.9), (2.0, 2.0), (1.0, 7.0)]):
        line = run(steps=(speed,) * 4, repetition=repetition)
        step = {"stall_s": 0.0, "wall_s": expected_s}
        line["report"] |= {
            "timeline": {"steps": [step] * 4, "non_block_bytes": 0},
            "predicted": {"steps": [step] * 4},
        }
        lines.append({**line, "report": {**line["report"], "step_bytes": [1] * 4}})
    row = summarise(lines)["layerwise"]
    assert row["predicted_to_executed"] == [1.0] * 4
    assert row["predicted_step_s"] == [2.0] * 4


def test_a_run_without_a_report_is_a_row_with_its_reason() -> None:
    killed = run("swap", report=None, limited=True, reason="killed: out of memory")
    assert summarise([run("resident"), killed])["swap (limited)"] == {
        "runs": 1,
        "ended_after_s": 9.0,
        "peak_anonymous_gb": 0.6,
        "why": "killed: out of memory",
    }


def test_weights_are_written_once_and_are_those_of_the_shape(tmp_path: Path) -> None:
    shape = SHAPES["tiny"]
    folders = expert_folders(tmp_path, shape)
    files = weight_files(folders["high"])
    assert len(files) == shape.shards
    assert sum(file.stat().st_size for file in files) == pytest.approx(shape.expert_bytes, rel=1e-2)
    written = [file.stat().st_mtime_ns for file in files]
    expert_folders(tmp_path, shape)
    assert [file.stat().st_mtime_ns for file in files] == written


@pytest.mark.parametrize("name", ["cpu", "480p", "720p"])
def test_token_counts(name: str) -> None:
    assert SHAPES[name].tokens == {"cpu": 980, "480p": 32760, "720p": 75600}[name]


def test_every_part_of_the_gpu_case_runs_ways_and_shapes_that_there_are() -> None:
    for part in PARTS.values():
        assert {*part.capped, *part.free} <= all_variants(SHAPES[part.shape].expert.layers).keys()
    assert {part.vram_gb for part in PARTS.values()} == {8, 12, 24}


def test_every_variant_has_a_name_and_a_title_of_its_own() -> None:
    variants = all_variants(30)
    assert len({variant.title for variant in variants.values()}) == len(variants)
    assert {*OURS, *PEERS, "group-block-disk-heap", "layerwise-fp8"} <= variants.keys()


def test_a_task_travels_as_json(tmp_path: Path) -> None:
    task = Task(variant="half", shape="tiny", work=str(tmp_path), report=str(tmp_path / "r.json"))
    assert Task.from_json(task.to_json()) == task
    assert task.case_variant.policy is not None
    assert task.case_variant.policy.blocks_to_swap == 2


def forked(task: Task) -> dict[str, Any]:
    """Return a report from a forked process, which need not import torch and diffusers again."""
    wanted: Literal["files", "run"]
    for wanted in ("files", "run") if task.case_variant.prepares else ("run",):
        process = get_context("fork").Process(
            target=child.run, args=(replace(task, wanted=wanted),)
        )
        process.start()
        process.join(300)
        assert process.exitcode == 0, task.variant
    report: dict[str, Any] = json.loads(Path(task.report).read_text(encoding="utf-8"))
    return report


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="runs are forked, and measured in /proc")
def test_one_tiny_run_of_each_kind(tmp_path: Path) -> None:
    """Two run in separate processes, as in the benchmark."""
    whole = ("resident", "layerwise")
    command = [
        sys.executable,
        str(PROGRAM),
        "quick",
        str(tmp_path),
        "--shape",
        "tiny",
        "--retries",
        "0",
        "--threads",
        "1",
    ]
    subprocess.run([*command, "--only", *whole], check=True, timeout=590)
    sessions = tmp_path / "sessions"
    lines = [json.loads(line) for line in (sessions / "quick.jsonl").read_text().splitlines()]
    assert {line["variant"] for line in lines} == {*whole}
    assert all(line["cached_before_bytes"] == 0 for line in lines)
    for name in (*OURS[1:], *PEERS[:-1], "group-block-record"):
        task = Task(
            variant=name,
            shape="tiny",
            work=str(tmp_path),
            report=str(tmp_path / f"{name}.json"),
            threads=1,
            machine=str(sessions / "quick" / "machine-0.json"),
        )
        lines.append(run(name, report=forked(task), latents=str(task.latents)))
    reports = {line["variant"]: RunReport.from_dict(line["report"]) for line in lines}
    rows = summarise(lines)
    assert all(rows[name]["relative_l2"] < 0.05 for name in OURS), (
        "other roundings than diffusers', in bf16 on some processors"
    )
    for name, report in reports.items():
        assert len(report.step_s) == 4, name
        assert report.total_s >= report.load_s + sum(report.step_s) - 1e-6, name
        assert report.peak_rss_bytes > report.import_rss_bytes > 0, name
        assert (
            report.checksum
            == reports["wanstream-resident" if name in OURS else "resident"].checksum
        ), name
    streamed = SHAPES["tiny"].streamed_bytes
    for name in ("layerwise", "layerwise-buffered", "pinned"):
        assert reports[name].step_bytes == [streamed] * 4, name
        assert reports[name].timeline is not None
    assert reports["half"].step_bytes == [streamed, streamed // 2] * 2
    assert reports["wanstream-resident"].step_bytes == [streamed, 0] * 2
    assert reports["layerwise"].read_bytes > reports["layerwise-buffered"].read_bytes, (
        "each step reads the disk again"
    )


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_gpu_part_on_the_cpu(tmp_path: Path) -> None:
    """Programs in the GPU case, on a tiny pair: capped and free runs, and their merged result."""
    gpu = [sys.executable, str(PROGRAM), "gpu", str(tmp_path)]
    tiny = ["--device", "cpu", "--threads", "1", "--results", str(tmp_path)]
    only = ["--only", "resident", "pinned"]
    subprocess.run([*gpu, "smoke", *tiny, *only], check=True, timeout=390)
    subprocess.run([*gpu, "merge", *tiny], check=True, timeout=60)
    (file,) = tmp_path.glob("offload-gpu_*.json")
    part = json.loads(file.read_text(encoding="utf-8"))["figures"]["parts"]["smoke"]
    assert part["variants"].keys() == {"resident", "pinned"}
    assert part["variants"]["pinned"]["relative_l2"] < 0.05, (
        "other roundings than diffusers', in bf16 on some processors"
    )
    assert len(part["simulated_40_blocks"]["pinned"]["step_s"]) == 4
    longer = sum(part["simulated_40_blocks"]["pinned"]["step_s"])
    assert longer > sum(part["variants"]["pinned"]["step_s"])
