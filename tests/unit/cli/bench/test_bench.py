"""`wanstream bench`: cases, report and files."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from wanstream.bench import Result, TrialTimes
from wanstream.bench.trial_matrix import TrialMatrix
from wanstream.cli import main
from wanstream.cli.bench import cases as bench
from wanstream.cli.bench.report import figures, page
from wanstream.distributed.transport.in_process import InProcessPool
from wanstream.schema import Mesh, MeshError, OffloadPolicy
from wanstream.schema.records import MemorySample, StepRecord, Timeline
from wanstream.schema.refs import WorkersRef
from wanstream.shapes import HEAD_DIM, ExpertShape, RunShape, StepShape, VideoShape
from wanstream.tests.support.plan_fixtures import run_shape

SHAPE = ExpertShape(width=4 * HEAD_DIM, blocks=8)
RUN = run_shape(1, 0, expert=SHAPE, tokens=1600, sides={"high": 2, "low": 2})
LAYERWISE = OffloadPolicy.layerwise()
TINY = ["--size", "32x32x5", "--steps", "2", "--repeats", "2", "--warmup", "0"]


def settings(policies="layerwise", steps="4"):
    return TrialMatrix.parse(policies, "", steps).settings(LAYERWISE)


def run_of(videos: int, *, guided: bool = True) -> RunShape:
    return replace(RUN, samples=videos, sides=dict.fromkeys(("high", "low"), 1 + guided))


def names(cases):
    return [case.name for case in cases if not case.failed]


@pytest.mark.parametrize(
    ("videos", "guided", "expected"),
    [
        (1, True, ["cfg 2", "cfg 2 x ulysses 2"]),
        (1, False, ["ulysses 2", "ulysses 4"]),
        (4, True, ["cfg 2", "data 2", "stage 2", "cfg 2 x ulysses 2", "data 4", "stage 4"]),
    ],
)
def test_usual_layouts_share_one_video_and_spread_several(videos, guided, expected):
    cases = bench.bench_cases((1, 2, 4), (), settings(), run_of(videos, guided=guided), videos)
    assert [str(case.mesh) for case in cases if not case.failed] == ["one worker", *expected]


def test_every_setting_is_measured_on_the_chosen_layouts():
    """A case may have more steps than a run whose steps differ.

    Videos of a cell are lanes that two sides share.
    """
    cases = bench.bench_cases((1, 2), [Mesh(cfg=2), Mesh(ulysses=2)], settings(), RUN, 1)
    workers = ("1 worker", "2 workers (cfg 2)", "2 workers (ulysses 2)")
    assert names(cases) == [f"4 steps, {each}, layerwise, 1 ahead" for each in workers]
    steps = (StepShape(expert="high"), StepShape(expert="low", sides=1, patch=1))
    run = replace(RUN, steps=steps)
    cases = bench.bench_cases((1, 2), [Mesh(cfg=2)], settings(steps="1, 4"), run, 1)
    assert [case.failed for case in cases] == [""] * 4
    layouts = [Mesh(cfg=2), Mesh(data=2, cfg=2), Mesh(data=4, cfg=2)]
    *fitting, refused = bench.bench_cases(
        (2, 4, 8), layouts, settings(), run_of(4, guided=False), 4
    )
    assert [(case.mesh, case.failed) for case in fitting] == [(each, "") for each in layouts[:2]]
    assert "guidance is 1" in refused.failed


def test_impossible_cases_are_left_out_with_their_reasons():
    policies = settings("layerwise, block_swap 9", "1, 4")
    cases = bench.bench_cases((1, 2), [Mesh(stage=2), Mesh(ulysses=8)], policies, RUN, 1)
    fitting = ("1 steps, 1 worker", "4 steps, 1 worker", "4 steps, 2 workers (stage 2)")
    assert names(cases) == [f"{each}, layerwise, 1 ahead" for each in fitting]
    reasons = {case.name: case.failed for case in cases}
    assert "stage 2 for 1 step: " in reasons["1 steps, 2 workers (stage 2), layerwise, 1 ahead"]
    assert "only 8 blocks" in reasons["4 steps, 1 worker, block_swap 9, 1 ahead"]


@pytest.mark.parametrize(
    "words", ["cfg", "cfg 2 2", "cfg two", "depth 2", "cfg 2 x cfg 2", "cfg 2, data 2", ""]
)
def test_words_that_are_no_layout(words):
    assert bench.parse_mesh("data 2 x cfg 2") == Mesh(data=2, cfg=2)
    with pytest.raises(MeshError):
        bench.parse_mesh(words)


def timeline(seconds: float, rss: int) -> Timeline:
    figures = {"wall_s": seconds, "compute_s": seconds, "stall_s": 0, "bytes_moved": 10}
    experts = enumerate(("high", "high", "low"))
    figures |= {"sigma": 0.5, "rss_bytes": rss}
    steps = tuple(StepRecord.of(index=at, expert=expert, **figures) for at, expert in experts)
    unknown = {"device_bytes": None, "device_used_bytes": None}
    memory = tuple(MemorySample(at_s=at, rss_bytes=rss - 50 * at, **unknown) for at in (0, 1))
    return Timeline(steps=steps, kind="measured", first_block_s=0.25, memory=memory)


def case_runs(mesh: Mesh, *seconds: float, latents: str = "same") -> bench.BenchCase:
    """Return a case with a warm-up of 99 s, and runs."""
    trials = []
    for wall_s in (99.0, *seconds):
        ranks = {rank: timeline(wall_s / 3, 100 + rank) for rank in range(mesh.size)}
        given = {"wall_s": wall_s, "latents": latents, "gathered_bytes": 7}
        trials.append(bench.BenchRun(timeline=ranks[0], ranks=ranks, warmup=not trials, **given))
    return replace(bench.BenchCase.of(mesh, LAYERWISE, 3), start_s=3.0, trials=tuple(trials))


def test_figures_are_compared_with_one_worker():
    two = case_runs(Mesh(cfg=2), 6, 5, 5.5, latents="other")
    failed = replace(bench.BenchCase.of(Mesh(), LAYERWISE, 3), failed="no room")
    one_figures, two_figures = figures([case_runs(Mesh(), 10, 12, 11), two])
    names = ("speedup", "efficiency", "same_latents")
    assert [one_figures[name] for name in names] == [1.0, 1.0, True]
    assert [two_figures[name] for name in names] == [2.0, 1.0, False]
    assert two_figures["generation_s"] == {"median": 5.5, "least": 5, "most": 6}
    assert (two_figures["load_s"], two_figures["total_s"]) == (0.25, 3.0 + 99.0)
    memory = [(each["peak"], each["average"]) for each in two_figures["memory"].values()]
    assert memory == [(100, 75), (101, 76)]
    assert two_figures["moved_bytes"] == 2 * 3 * 10
    assert two_figures["step_s"] == [5.5 / 3] * 3
    # Without one worker there is no speedup, and a case without runs has no figures.
    (lone,) = figures([two, failed])
    assert [lone[name] for name in names] == [None, None, None]


def test_idle_worker_has_the_memory_of_its_other_runs():
    """The faster cell in a stage may take every video in a run."""
    runs = case_runs(Mesh(data=2, stage=2), 6, 6, 6)
    kept = (range(4), (0, 1), (0, 1, 3), (0, 1))
    pairs = zip(runs.trials, kept, strict=True)
    idle = (replace(run, ranks={rank: run.ranks[rank] for rank in ranks}) for run, ranks in pairs)
    (case,) = figures([replace(runs, trials=tuple(idle))])
    peaks = {rank: memory["peak"] for rank, memory in case["memory"].items()}
    assert peaks == {0: 100, 1: 101, 3: 103}


@pytest.mark.slow
def test_worker_that_died_in_one_case_is_replaced_for_the_next(tmp_path):
    shape = VideoShape(width=32, height=32, frames=5)
    request = bench.bench_request(shape, videos=1, guidance=1.0, in_channels=16)
    ref = WorkersRef(count=1, address="in-process", max_restarts=0)
    given = {"times": TrialTimes(repeats=1, warmup=0), "device": torch.device("cpu")}
    measured = bench.Bench(
        experts=bench.small_experts(tmp_path), request=request, workers=ref, **given
    )
    pool = InProcessPool("cpu")
    cases = [bench.BenchCase.of(Mesh(), LAYERWISE, steps) for steps in (1, 2)]
    pools = iter((pool, InProcessPool("cpu")))
    runs = bench.run_cases(measured, cases, lambda line: None, lambda ref, device: next(pools))
    assert not next(runs).failed
    pool.workers[0].kill()
    (after,) = runs
    assert (after.failed, len(after.trials)) == ("", 1)


def test_page_has_a_row_for_every_case_worker_and_step():
    cases = [case_runs(Mesh(), 10, 12), case_runs(Mesh(cfg=2), 6, 6)]
    missing = [{"case": "8 workers", "because": "too many"}]
    found = {"cases": figures(cases), "not_measured": missing}
    machine = {"hardware": {"name": "a machine"}, "versions": {}}
    result = Result(case="workers", method="by hand", figures=found, **machine)
    text = page(result, cases, {"Device": "CPU"})
    assert text.startswith("# Workers on a machine\n\nMethod: by hand  \nDevice: CPU\n")
    tables = {part.splitlines()[0]: part.splitlines()[4:] for part in text.split("\n## ")[1:]}
    one, two = tables["Loading and generation"][:2]
    start = "| 3 steps, 1 worker, layerwise, 1 ahead | 3.00 | 0.250 | 11.00 s (10.00 to 12.00) |"
    assert one.startswith(start)
    assert two.endswith("| 6.00 s (6.00 to 6.00) | 102.0 | 1.83x | 92 % | equal | 60 B | 7 B |")
    case = "3 steps, 2 workers (cfg 2), layerwise, 1 ahead"
    memory = tables["Workers, their steps and their memory"]
    assert memory[2] == f"| {case} | 1 | 1-3 | 101 B | 76 B |"
    assert tables["Not measured"][:1] == ["| 8 workers | too many |"]
    (latents,) = (each for each in tables["Head to head, ratios to the first"] if "Latents" in each)
    assert "| equal to the bit |" in latents
    steps = tables[f"Per-step timing: {case}"]
    assert [row.split(" | ")[1].strip("*") for row in steps[:3]] == ["high", "high", "low"]


@pytest.mark.slow
def test_it_measures_in_this_process_and_writes_both_files(tmp_path, capsys):
    assert main(["bench", *TINY, "--policies", "layerwise, resident", "--out", str(tmp_path)]) == 0
    data, page = map(Path, capsys.readouterr().out.split())
    result = json.loads(data.read_text())
    cases = result["figures"]["cases"]
    assert [case["mode"] for case in cases] == ["layerwise, 1 ahead", "resident"]
    assert len({case["latents"] for case in cases}) == 1
    assert all(len(case["step_s"]) == 2 and case["load_s"] > 0 for case in cases)
    assert result["method"].startswith("two random experts")
    assert result["versions"]["commit"]
    assert page.read_text().startswith("# Workers on ")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--distributed", "--workers", "1,two"], "'two' is not a number"),
        (["--distributed", "--workers", "65"], "65 workers: give 1 to 64"),
        (["--distributed", "--cluster", "10.0.0.7:1"], "the cluster is '10.0.0.7:1', and there"),
        (["--layouts", "cfg two"], "is not a layout"),
        (["--policies", "auto"], "name fixed policies"),
        (["--steps", "0"], "steps"),
        (["--repeats", "0"], "measure nothing"),
        (["--size", "30x30"], "--size 30x30"),
        (["--experts", "/nowhere/high", "/nowhere/low"], "/nowhere/high"),
        ([*TINY, "--policies", "block_swap 9"], "only 8 blocks.*no case is left to measure"),
    ],
)
def test_impossible_options_are_refused_before_anything_runs(options, said, tmp_path, refusal):
    told = refusal("bench", *options, "--out", str(tmp_path / "out"))
    assert re.search(said, told, re.DOTALL)
    assert not [*tmp_path.rglob("*.*")]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_workers_behind_ray_are_held_against_one(tmp_path, tiny_expert_folder, capsys):
    pytest.importorskip("ray")
    experts = [str(tiny_expert_folder(seed=seed)) for seed in (1, 2)]
    workers = ["--distributed", "--workers", "1,2", "--device", "cpu", "--layouts", "cfg 2"]
    command = ["bench", *TINY, *workers, "--experts", *experts, "--out", str(tmp_path)]
    assert main(command) == 0
    data, _ = map(Path, capsys.readouterr().out.split())
    one, two = json.loads(data.read_text())["figures"]["cases"]
    assert (one["workers"], two["workers"], two["layout"]) == (1, 2, "cfg 2")
    assert two["same_latents"] is True
    assert two["gathered_bytes"] > 0
    assert sorted(two["memory"]) == ["0", "1"]
    assert two["start_s"] > 0
