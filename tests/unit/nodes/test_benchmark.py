"""The benchmark node behind the sampler, in the embedded host, on the test model."""

from __future__ import annotations

import asyncio
import csv
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from wanstream.host.embedded.events import NodeProgress
from wanstream.host.embedded.run import History, NodeFailedError
from wanstream.host.embedded.workflow.validate import InvalidWorkflowError
from wanstream.nodes import WanStreamExtension
from wanstream.schema import Cancelled
from wanstream.schema.records import Timeline
from wanstream.schema.text.numbers import format_seconds
from wanstream.tests.support.accelerator import Accelerator
from wanstream.tests.support.embedded import embedded_host, run_workflow
from wanstream.wan.latents import tensor_digest

WORKFLOWS = Path(__file__).parents[3] / "workflows" / "api"
NODES = asyncio.run(WanStreamExtension().get_node_list())
TIMELINE = "wanstream_timeline"

UNVARIED = {"policies": "", "prefetch": "", "steps": ""}
PLAIN = {
    "run": ["sampler", 1],
    "warmup": 0,
    "repeats": 1,
    "cooldown_s": 0.0,
    "filename_prefix": "figures/run",
}

Workflow = dict[str, dict[str, Any]]
Run = Callable[..., History]


def workflow(changes: Mapping[str, Any] = {}, *, sampler: Mapping[str, Any] = {}) -> Workflow:
    """Text to video in three small steps, measured; `changes` sets benchmark inputs."""
    nodes: Workflow = json.loads((WORKFLOWS / "t2v.json").read_text(encoding="utf-8"))
    for node_id in ("frames", "save"):
        del nodes[node_id]
    nodes["latent"]["inputs"] |= {"width": 32, "height": 32, "frames": 5}
    nodes["sampler"]["inputs"] |= {"steps": 3, "switch_step": 2, **sampler}
    nodes["benchmark"] = {
        "class_type": "WanStreamBenchmark",
        "inputs": {**PLAIN, **UNVARIED, **changes},
    }
    return nodes


@pytest.fixture
def folders(tmp_path: Path, sample_models: Path) -> dict[str, Path]:
    return {"models": sample_models, "output": tmp_path / "output", "input_dir": tmp_path}


@pytest.fixture
def run(folders: dict[str, Path]) -> Iterator[Run]:
    """Return a function to run a workflow on the test model; close the experts at the end."""

    def run(nodes: Workflow, **options: Any) -> History:
        return run_workflow(nodes, nodes=NODES, only=["sampler", "benchmark"], **folders, **options)

    yield run
    embedded_host.free_experts()


def written(folders: dict[str, Path], number: int = 1) -> dict[str, Any]:
    """Return the JSON report."""
    path = folders["output"] / "figures" / f"run_{number:05}_.json"
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return report


def names(folders: dict[str, Path]) -> list[str]:
    return sorted(path.name for path in (folders["output"] / "figures").iterdir())


def test_a_run_is_reported_in_four_files_an_image_and_a_text(
    run: Run, folders: dict[str, Path]
) -> None:
    history = run(workflow())
    assert names(folders) == [
        f"run_00001_{suffix}" for suffix in (".csv", ".html", ".json", ".png")
    ]
    chart, summary = history.results["benchmark"]
    assert chart.dtype == torch.float32
    with Image.open(folders["output"] / "figures" / "run_00001_.png") as picture:
        assert np.array_equal((chart[0] * 255).round().to(torch.uint8).numpy(), np.asarray(picture))
        assert chart.shape == (1, picture.height, picture.width, 3)
    assert len(chart[0, ::8, ::8].reshape(-1, 3).unique(dim=0)) > 8, "something is drawn"
    shown = history.outputs["benchmark"]
    assert shown["text"] == [summary]
    assert shown["images"] == [
        {"filename": "run_00001_.png", "subfolder": "figures", "type": "output"}
    ]


def test_every_place_shows_the_numbers_of_the_samplers_timeline(
    run: Run, folders: dict[str, Path]
) -> None:
    """Sampler, benchmark, JSON, CSV, summary and page show one timeline."""
    history = run(workflow())
    (said,) = history.outputs["sampler"][TIMELINE]
    timeline = Timeline.from_dict(said)
    (variant,) = written(folders)["variants"]
    (trial,) = variant["trials"]
    assert trial["timeline"] == said
    (shown,) = history.outputs["benchmark"][TIMELINE]
    assert shown == {**said, "memory": []}
    with (folders["output"] / "figures" / "run_00001_.csv").open(
        encoding="utf-8", newline=""
    ) as file:
        lines = [*csv.DictReader(file)]
    assert [float(line["wall_s"]) for line in lines] == [step.wall_s for step in timeline.steps]
    assert [int(line["bytes_moved"]) for line in lines] == [
        step.bytes_moved for step in timeline.steps
    ]
    _, summary = history.results["benchmark"]
    page = (folders["output"] / "figures" / "run_00001_.html").read_text(encoding="utf-8")
    for text in (summary, page):
        assert f"{format_seconds(timeline.wall_s)} s (1 run)" in text
        assert f"{format_seconds(timeline.first_block_s or 0)} s (1 run)" in text


@pytest.mark.slow  # runs whole workflows
def test_runs_that_are_repeated_give_the_samplers_latents(
    run: Run, folders: dict[str, Path]
) -> None:
    history = run(workflow({"warmup": 1, "repeats": 2}))
    _, made = history.results["sampler"]
    (variant,) = written(folders)["variants"]
    assert [trial["warmup"] for trial in variant["trials"]] == [True, False, False]
    assert {trial["latents"] for trial in variant["trials"]} == {tensor_digest(made.result.latents)}
    walls = {
        tuple(step["wall_s"] for step in trial["timeline"]["steps"]) for trial in variant["trials"]
    }
    assert len(walls | {tuple(step.wall_s for step in made.timeline.steps)}) == 4, (
        "every run was computed"
    )


@pytest.mark.slow  # runs whole workflows
def test_a_matrix_changes_the_transfers_and_not_a_bit_of_the_result(
    run: Run, folders: dict[str, Path]
) -> None:
    history = run(workflow({"policies": "layerwise, block_swap 2, resident", "prefetch": "1, 2"}))
    _, made = history.results["sampler"]
    report = written(folders)
    assert [variant["name"] for variant in report["variants"]] == [
        *(
            "layerwise, 1 ahead",
            "layerwise, 2 ahead",
            "block_swap 2, 1 ahead",
            "block_swap 2, 2 ahead",
            "resident",
        ),
    ]
    timelines = [
        Timeline.from_dict(variant["trials"][0]["timeline"]) for variant in report["variants"]
    ]
    moved = [timeline.bytes_moved for timeline in timelines]
    assert moved[0] == moved[1] > moved[2] > moved[4]
    digests = {trial["latents"] for variant in report["variants"] for trial in variant["trials"]}
    assert digests == {tensor_digest(made.result.latents)}
    _, summary = history.results["benchmark"]
    assert summary.count("| equal to the bit |") == 4
    assert len(history.outputs["benchmark"][TIMELINE]) == 5
    nodes = {
        row["name"]: row["policy"] and (row["policy"]["type"], row["policy"]["values"])
        for row in history.outputs["benchmark"]["wanstream_ranking"]
    }
    assert nodes.keys() == {variant["name"] for variant in report["variants"]}
    assert nodes["resident"] is None
    kind, values = nodes["block_swap 2, 1 ahead"]
    assert kind == "WanStreamBlockSwap"
    assert (values["blocks_to_swap"], values["prefetch_blocks"]) == (2, 1)


@pytest.mark.slow  # runs whole workflows
def test_steps_are_varied_and_the_switch_stays(run: Run, folders: dict[str, Path]) -> None:
    run(workflow({"steps": "2, 4"}, sampler={"switch_step": 1}))
    experts = [
        [step["expert"] for step in variant["trials"][0]["timeline"]["steps"]]
        for variant in written(folders)["variants"]
    ]
    assert experts == [["high", "low"], ["high", "low", "low", "low"]]


def test_two_samplers_stand_head_to_head_under_their_titles(
    run: Run, folders: dict[str, Path]
) -> None:
    nodes = workflow({"run_b": ["other", 1]})
    nodes["other"] = json.loads(json.dumps(nodes["sampler"]))
    nodes["other"]["_meta"] = {"title": "Another seed"}
    nodes["other"]["inputs"]["seed"] = 7
    history = run(nodes)
    assert [variant["name"] for variant in written(folders)["variants"]] == [
        "Wan Sampler (streamed)",
        "Another seed",
    ]
    _, summary = history.results["benchmark"]
    assert "| Metric | Wan Sampler (streamed) | Another seed |" in summary
    assert "equal to the bit" not in summary


@pytest.mark.parametrize(
    ("title", "shown"), [("=1+1\n<script> \ud83d", "=1+1 <script> ?"), (7, "run"), (None, "run")]
)
def test_any_title_gives_a_report(
    title: Any, shown: str, run: Run, folders: dict[str, Path]
) -> None:
    """Titles are not inputs: hosts do not validate them."""
    nodes = workflow()
    nodes["sampler"]["_meta"] = {"title": title}
    nodes["latent"]["_meta"] = None
    run(nodes)
    assert names(folders) == [
        f"run_00001_{suffix}" for suffix in (".csv", ".html", ".json", ".png")
    ]
    (variant,) = written(folders)["variants"]
    assert variant["name"] == shown


def test_what_is_no_benchmark_is_refused_before_anything_runs(
    run: Run, folders: dict[str, Path]
) -> None:
    for changes, words in (
        ({"repeats": 0}, "0 repeats measure nothing: give 1 to 100"),
        ({"repeats": 101}, "repeats is 101"),
        ({"warmup": -1}, "warmup is -1"),
        ({"cooldown_s": -1.0}, "cooldown_s is -1"),
        (
            {"policies": "layerwise, fsdp"},
            "'fsdp' names no policy: write layerwise, block_swap N, resident or auto",
        ),
        ({"prefetch": "one"}, "'one' is not a number"),
        ({"steps": "0"}, "'0' is not a number from 1 to 1000"),
        ({"policies": "resident", "prefetch": "1"}, "fetch nothing ahead"),
        ({"filename_prefix": "../outside"}, "leaves the folder"),
        ({"filename_prefix": "/outside"}, "leaves the folder"),
        ({"filename_prefix": ""}, "leaves the folder"),
        ({"run": ["sampler", 0]}, "LATENT"),
    ):
        with pytest.raises(InvalidWorkflowError) as refused:
            run(workflow(changes))
        fault, *_ = refused.value.verdict.node_errors["benchmark"]["errors"]
        assert words in f"{fault['message']} {fault['details']}", changes
        assert not folders["output"].exists()


def test_more_blocks_than_there_are_is_refused_before_a_run_is_repeated(
    run: Run, folders: dict[str, Path]
) -> None:
    with pytest.raises(
        NodeFailedError, match="blocks_to_swap is 20, but the high expert has only 4 blocks"
    ):
        run(workflow({"policies": "layerwise, block_swap 20"}))
    assert names(folders) == []


@pytest.mark.slow  # runs whole workflows
def test_a_stop_ends_the_benchmark_at_the_next_block_and_leaves_what_was_measured(
    run: Run, folders: dict[str, Path]
) -> None:
    """Two runs of three steps finish, and the third stops in the first step."""

    def stop_in_the_third_run(progress: NodeProgress) -> None:
        if progress.node_id == "benchmark" and (progress.done, progress.total) == (7, 15):
            embedded_host.stop()

    with pytest.raises(Cancelled):
        run(workflow({"repeats": 5}), on_progress=stop_in_the_third_run)
    assert names(folders) == [
        f"run_00001_{suffix}" for suffix in (".csv", ".html", ".json", ".png")
    ]
    report = written(folders)
    assert (report["finished"], report["done"], report["planned"]) == (False, 2, 5)
    page = (folders["output"] / "figures" / "run_00001_.html").read_text(encoding="utf-8")
    assert "Unfinished: 2 of 5 runs were made." in page
    run(workflow({"repeats": 2}))
    assert written(folders, 2)["finished"]


def test_a_stop_ends_a_pause(run: Run, folders: dict[str, Path]) -> None:
    def stop_soon(progress: NodeProgress) -> None:
        if progress.node_id == "benchmark":
            threading.Timer(0.5, embedded_host.stop).start()

    with pytest.raises(Cancelled):
        run(workflow({"repeats": 2, "cooldown_s": 3600.0}), on_progress=stop_soon)
    assert written(folders)["done"] == 0
    assert names(folders) == ["run_00001_.json"], "nothing was measured"


def test_a_name_that_comes_from_another_node_is_judged_before_a_run_is_made(
    run: Run, folders: dict[str, Path]
) -> None:
    """The prefix comes from a linked node, so it is known only at the run."""
    from wanstream.host import io

    class Text(io.ComfyNode):
        @classmethod
        def define_schema(cls) -> io.Schema:
            return io.Schema(node_id="Text", outputs=[io.String.Output()])

        @classmethod
        def execute(cls) -> io.NodeOutput:
            return io.NodeOutput("../outside")

    nodes = workflow({"filename_prefix": ["text of another node", 0], "repeats": 2})
    nodes["text of another node"] = {"class_type": "Text", "inputs": {}}
    told: list[NodeProgress] = []
    with pytest.raises(NodeFailedError, match="leaves the folder"):
        run_workflow(nodes, nodes=[*NODES, Text], on_progress=told.append, **folders)
    assert {(step.done, step.total) for step in told if step.node_id == "benchmark"} == {(0, 1)}
    assert not folders["output"].exists()


@pytest.mark.slow  # runs whole workflows
def test_a_trace_of_each_run_lies_beside_the_report(run: Run, folders: dict[str, Path]) -> None:
    run(workflow({"trace": True, "repeats": 2}))
    traces = sorted((folders["output"] / "figures" / "run_00001_traces").iterdir())
    assert len(traces) == 2
    for trace in traces:
        assert json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]


def test_the_phases_of_the_queue_item_are_in_the_report(run: Run, folders: dict[str, Path]) -> None:
    run(workflow())
    phases = [phase["name"] for phase in written(folders)["phases"]]
    assert {"text", "high", "low"} <= {*phases}


def test_on_a_gpu_the_report_has_its_memory_and_equal_latents(
    gpu: Accelerator, run: Run, folders: dict[str, Path]
) -> None:
    changes = {"policies": "layerwise, block_swap 2, resident", "repeats": 2}
    history = run(workflow(changes), device=gpu.device)
    report = written(folders)
    assert gpu.runtime.name() in report["machine"]["Device"]
    assert (
        len({trial["latents"] for variant in report["variants"] for trial in variant["trials"]})
        == 1
    )
    peaks = [
        report["figures"][variant["name"]]["Peak VRAM, allocated"]["median"]
        for variant in report["variants"]
    ]
    assert peaks == sorted(peaks)
    _, summary = history.results["benchmark"]
    assert "| VRAM peak |" in summary
