"""`wanstream bench`: cases, report and files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from wanstream.bench import Result, TrialTimes
from wanstream.bench.trial_matrix import TrialMatrix
from wanstream.cli import main
from wanstream.cli.bench.cases import (
    Bench,
    BenchCase,
    BenchRun,
    bench_cases,
    bench_request,
    parse_mesh,
    run_cases,
    small_experts,
)
from wanstream.cli.bench.report import figures, page
from wanstream.distributed.transport.in_process import InProcessPool
from wanstream.schema import Mesh, MeshError, OffloadPolicy
from wanstream.schema.records import MemorySample, StepRecord, Timeline
from wanstream.schema.refs import WorkersRef
from wanstream.shapes import HEAD_DIM, ExpertShape, RunShape, StepShape, VideoShape
from wanstream.tests.support.plan_fixtures import run_shape

RUN = run_shape(
    1, 0, expert=ExpertShape(width=4 * HEAD_DIM, blocks=8), tokens=1600, sides={"high": 2, "low": 2}
)
LAYERWISE = OffloadPolicy.layerwise()
TINY = ["--size", "32x32x5", "--steps", "2", "--repeats", "2", "--warmup", "0"]


def settings(policies: str = "layerwise", steps: str = "4") -> Any:
    return TrialMatrix.parse(policies, "", steps).settings(LAYERWISE)


def run_of(videos: int, *, guided: bool) -> RunShape:
    return replace(RUN, samples=videos, sides=dict.fromkeys(("high", "low"), 1 + guided))


def meshes(videos: int = 1, *, guided: bool = True) -> list[str]:
    cases = bench_cases((1, 2, 4), (), settings(), run_of(videos, guided=guided), videos)
    return [str(case.mesh) for case in cases if not case.failed]


def test_the_usual_layouts_share_one_video_and_spread_several() -> None:
    assert meshes() == ["one worker", "cfg 2", "cfg 2 x ulysses 2"]
    assert meshes(guided=False) == ["one worker", "ulysses 2", "ulysses 4"]
    spread = [
        *("one worker", "cfg 2", "data 2", "stage 2"),
        *("cfg 2 x ulysses 2", "data 4", "stage 4"),
    ]
    assert meshes(videos=4) == spread


def test_every_setting_is_measured_on_the_chosen_layouts() -> None:
    layouts = [Mesh(cfg=2), Mesh(ulysses=2)]
    cases = bench_cases((1, 2), layouts, settings(), RUN, 1)
    assert [case.name for case in cases] == [
        "4 steps, 1 worker, layerwise, 1 ahead",
        "4 steps, 2 workers (cfg 2), layerwise, 1 ahead",
        "4 steps, 2 workers (ulysses 2), layerwise, 1 ahead",
    ]


def test_a_case_may_have_more_steps_than_a_run_whose_steps_differ() -> None:
    run = replace(RUN, steps=(StepShape(expert="high"), StepShape(expert="low", sides=1, patch=1)))
    assert [
        case.failed for case in bench_cases((1, 2), [Mesh(cfg=2)], settings(steps="1, 4"), run, 1)
    ] == [""] * 4


def test_videos_of_a_cell_are_lanes_that_two_sides_share() -> None:
    layouts = [Mesh(cfg=2), Mesh(data=2, cfg=2), Mesh(data=4, cfg=2)]
    *cases, refused = bench_cases((2, 4, 8), layouts, settings(), run_of(4, guided=False), 4)
    assert [(str(case.mesh), case.failed) for case in cases] == [
        ("cfg 2", ""),
        ("data 2 x cfg 2", ""),
    ]
    assert "guidance is 1" in refused.failed


def test_what_cannot_be_is_left_out_with_its_reason() -> None:
    policies = settings("layerwise, block_swap 9", "1, 4")
    cases = bench_cases((1, 2), [Mesh(stage=2), Mesh(ulysses=8)], policies, RUN, 1)
    reasons = {case.name: case.failed for case in cases}
    assert [name for name, why in reasons.items() if not why] == [
        "1 steps, 1 worker, layerwise, 1 ahead",
        "4 steps, 1 worker, layerwise, 1 ahead",
        "4 steps, 2 workers (stage 2), layerwise, 1 ahead",
    ]
    assert "stage 2 for 1 step: " in reasons["1 steps, 2 workers (stage 2), layerwise, 1 ahead"]
    assert "only 8 blocks" in reasons["4 steps, 1 worker, block_swap 9, 1 ahead"]


@pytest.mark.parametrize(
    "words", ["cfg", "cfg 2 2", "cfg two", "depth 2", "cfg 2 x cfg 2", "cfg 2, data 2", ""]
)
def test_words_that_are_no_layout(words: str) -> None:
    assert parse_mesh("data 2 x cfg 2") == Mesh(data=2, cfg=2)
    with pytest.raises(MeshError):
        parse_mesh(words)


def timeline(
    seconds: float, rss: int, experts: tuple[str, ...] = ("high", "high", "low")
) -> Timeline:
    steps = tuple(
        StepRecord.of(
            index=index,
            expert=expert,
            sigma=0.5,
            wall_s=seconds,
            compute_s=seconds,
            stall_s=0,
            bytes_moved=10,
            rss_bytes=rss,
        )
        for index, expert in enumerate(experts)
    )
    memory = tuple(
        MemorySample(at_s=at, device_bytes=None, device_used_bytes=None, rss_bytes=rss - 50 * at)
        for at in (0, 1)
    )
    return Timeline(steps=steps, kind="measured", first_block_s=0.25, memory=memory)


def case_runs(
    mesh: Mesh, *seconds: float, warm: float = 99.0, latents: str = "same", start_s: float = 3.0
) -> BenchCase:
    def run(wall_s: float, warmup: bool = False) -> BenchRun:
        ranks = {rank: timeline(wall_s / 3, 100 + rank) for rank in range(mesh.size)}
        return BenchRun(
            wall_s=wall_s,
            timeline=ranks[0],
            ranks=ranks,
            latents=latents,
            gathered_bytes=7,
            warmup=warmup,
        )

    runs = (run(warm, warmup=True), *map(run, seconds))
    return replace(BenchCase.of(mesh, LAYERWISE, 3), start_s=start_s, trials=runs)


def test_figures_are_of_runs_that_count_and_are_held_against_one_worker() -> None:
    one, two = figures(
        [case_runs(Mesh(), 10, 12, 11), case_runs(Mesh(cfg=2), 6, 5, 5.5, latents="other")]
    )
    assert two["generation_s"] == {"median": 5.5, "least": 5, "most": 6}
    assert (two["speedup"], two["efficiency"]) == (2.0, 1.0)
    assert (one["speedup"], one["same_latents"], two["same_latents"]) == (1.0, True, False)
    assert (two["load_s"], two["total_s"]) == (0.25, 3.0 + 99.0)
    assert [(memory["peak"], memory["average"]) for memory in two["memory"].values()] == [
        (100, 75),
        (101, 76),
    ]
    assert two["moved_bytes"] == 2 * 3 * 10
    assert two["step_s"] == [5.5 / 3] * 3


def test_without_one_worker_there_is_no_speedup_and_a_case_without_runs_has_no_figures() -> None:
    lone = figures(
        [case_runs(Mesh(cfg=2), 5), replace(BenchCase.of(Mesh(), LAYERWISE, 3), failed="no room")]
    )
    ((speedup, efficiency, same),) = [
        (each["speedup"], each["efficiency"], each["same_latents"]) for each in lone
    ]
    assert (speedup, efficiency, same) == (None, None, None)


def test_a_worker_that_did_nothing_in_one_run_has_the_memory_of_the_others() -> None:
    """The faster cell in a stage may take every video in a run."""
    runs = case_runs(Mesh(data=2, stage=2), 6, 6, 6)
    idle = [
        replace(run, ranks={rank: run.ranks[rank] for rank in kept})
        for run, kept in zip(runs.trials, (range(4), (0, 1), (0, 1, 3), (0, 1)), strict=True)
    ]
    (case,) = figures([replace(runs, trials=tuple(idle))])
    assert {rank: memory["peak"] for rank, memory in case["memory"].items()} == {
        0: 100,
        1: 101,
        3: 103,
    }


@pytest.mark.slow
def test_a_worker_that_died_in_one_case_is_replaced_for_the_next(tmp_path: Path) -> None:
    request = bench_request(
        VideoShape(width=32, height=32, frames=5), videos=1, guidance=1.0, in_channels=16
    )
    bench = Bench(
        experts=small_experts(tmp_path),
        request=request,
        times=TrialTimes(repeats=1, warmup=0),
        workers=WorkersRef(count=1, address="in-process", max_restarts=0),
        device=torch.device("cpu"),
    )
    cases = [BenchCase.of(Mesh(), LAYERWISE, steps) for steps in (1, 2)]
    pools: list[InProcessPool] = []

    def start(ref: WorkersRef, device: torch.device) -> InProcessPool:
        pools.append(InProcessPool(str(device)))
        return pools[-1]

    runs = run_cases(bench, cases, lambda line: None, start)
    assert not next(runs).failed
    pools[0].workers[0].kill()
    (after,) = runs
    assert (after.failed, len(after.trials)) == ("", 1)


def test_the_page_has_a_row_for_every_case_worker_and_step() -> None:
    cases = [case_runs(Mesh(), 10, 12), case_runs(Mesh(cfg=2), 6, 6)]
    found = {
        "cases": figures(cases),
        "not_measured": [{"case": "8 workers", "because": "too many"}],
    }
    result = Result(
        case="workers", method="by hand", figures=found, hardware={"name": "a machine"}, versions={}
    )
    text = page(result, cases, {"Device": "CPU"})
    assert text.startswith("# Workers on a machine\n\nMethod: by hand  \nDevice: CPU\n")
    tables = {part.splitlines()[0]: part.splitlines()[4:] for part in text.split("\n## ")[1:]}
    one, two = tables["Loading and generation"][:2]
    assert one.startswith(
        "| 3 steps, 1 worker, layerwise, 1 ahead | 3.00 | 0.250 | 11.00 s (10.00 to 12.00) |"
    )
    assert two.endswith("| 6.00 s (6.00 to 6.00) | 102.0 | 1.83x | 92 % | equal | 60 B | 7 B |")
    memory = tables["Workers, their steps and their memory"]
    assert (
        memory[2] == "| 3 steps, 2 workers (cfg 2), layerwise, 1 ahead | 1 | 1-3 | 101 B | 76 B |"
    )
    assert tables["Not measured"][:1] == ["| 8 workers | too many |"]
    latents = next(
        row for row in tables["Head to head, ratios to the first"] if row.startswith("| Latents")
    )
    assert "| equal to the bit |" in latents
    steps = tables["Per-step timing: 3 steps, 2 workers (cfg 2), layerwise, 1 ahead"]
    assert [row.split(" | ")[1].strip("*") for row in steps[:3]] == ["high", "high", "low"]


@pytest.mark.slow
def test_it_measures_in_this_process_and_writes_both_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *TINY, "--policies", "layerwise, resident", "--out", str(tmp_path)]) == 0
    data, page = map(Path, capsys.readouterr().out.split())
    result = json.loads(data.read_text())
    assert [case["mode"] for case in result["figures"]["cases"]] == [
        "layerwise, 1 ahead",
        "resident",
    ]
    assert {case["latents"] for case in result["figures"]["cases"]} == {
        result["figures"]["cases"][0]["latents"]
    }
    assert all(
        len(case["step_s"]) == 2 and case["load_s"] > 0 for case in result["figures"]["cases"]
    )
    assert result["method"].startswith("two random experts")
    assert result["versions"]["commit"]
    assert page.read_text().startswith("# Workers on ")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--distributed", "--workers", "1,two"], "'two' is not a number"),
        (["--distributed", "--workers", "65"], "65 workers: give 1 to 64"),
        (
            ["--distributed", "--cluster", "10.0.0.7:1"],
            "the cluster is '10.0.0.7:1', and there are local, in-process",
        ),
        (["--layouts", "cfg two"], "is not a layout"),
        (["--policies", "auto"], "name fixed policies"),
        (["--steps", "0"], "steps"),
        (["--repeats", "0"], "measure nothing"),
        (["--size", "30x30"], "--size 30x30"),
        (["--experts", "/nowhere/high", "/nowhere/low"], "/nowhere/high"),
    ],
)
def test_what_cannot_be_measured_is_said_before_anything_runs(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *options, "--out", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_where_every_case_is_refused_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--policies", "block_swap 9", "--out", str(tmp_path)]
    assert main(["bench", *TINY, *options]) == 2
    said = capsys.readouterr().err
    assert "only 8 blocks" in said
    assert "no case is left to measure" in said
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_workers_behind_ray_are_held_against_one(
    tmp_path: Path, tiny_expert_folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ray")
    options = [
        "--experts",
        *(str(tiny_expert_folder(seed=seed)) for seed in (1, 2)),
        "--distributed",
        "--workers",
        "1,2",
        "--device",
        "cpu",
        "--layouts",
        "cfg 2",
        "--out",
        str(tmp_path),
    ]
    assert main(["bench", *TINY, *options]) == 0
    data, _ = map(Path, capsys.readouterr().out.split())
    one, two = json.loads(data.read_text())["figures"]["cases"]
    assert (one["workers"], two["workers"], two["layout"]) == (1, 2, "cfg 2")
    assert two["same_latents"] is True
    assert two["gathered_bytes"] > 0
    assert sorted(two["memory"]) == ["0", "1"]
    assert two["start_s"] > 0
