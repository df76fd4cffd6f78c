"""The benchmark node behind the sampler, in the embedded host, on the test model."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from wanstream.host import io
from wanstream.host.embedded.run import NodeFailedError
from wanstream.host.embedded.workflow.validate import InvalidWorkflowError
from wanstream.schema import Cancelled
from wanstream.schema.records import Timeline
from wanstream.schema.text.numbers import format_seconds
from wanstream.tests.support.host.embedded import embedded_host
from wanstream.tests.support.host.given_nodes import constant
from wanstream.tests.support.host.shipped import node, shipped
from wanstream.wan.latents import tensor_digest

TIMELINE = "wanstream_timeline"
UNVARIED = {"policies": "", "prefetch": "", "steps": ""}
PLAIN = {"warmup": 0, "repeats": 1, "cooldown_s": 0.0, "filename_prefix": "figures/run"}
FILES = [f"run_00001_.{suffix}" for suffix in ("csv", "html", "json", "png")]
ONLY = {"only": ["sampler", "benchmark"]}


def workflow(**changes):
    """Text to video in three steps, measured; `changes` sets benchmark inputs."""
    sampler = {"steps": 3, "switch_step": 2}
    inputs = {"run": ["sampler", 1], **PLAIN, **UNVARIED, **changes}
    nodes = shipped(sampler=sampler, benchmark=node("WanStreamBenchmark", **inputs))
    del nodes["frames"], nodes["save"]
    return nodes


def written(output, number=1):
    """Return the JSON report."""
    return json.loads((output / "figures" / f"run_{number:05}_.json").read_text(encoding="utf-8"))


def names(output):
    return sorted(path.name for path in (output / "figures").iterdir())


def digests(report):
    return {trial["latents"] for variant in report["variants"] for trial in variant["trials"]}


def test_run_is_reported_with_the_samplers_timeline(run, output):
    """Sampler, benchmark, JSON, summary and page show one timeline."""
    history = run(workflow(), **ONLY)
    folder = output / "figures"
    assert names(output) == FILES
    chart, summary = history.results["benchmark"]
    with Image.open(folder / "run_00001_.png") as picture:
        assert np.array_equal((chart[0] * 255).round().to(torch.uint8).numpy(), np.asarray(picture))
        assert chart.shape == (1, picture.height, picture.width, 3)
    assert len(chart[0, ::8, ::8].reshape(-1, 3).unique(dim=0)) > 8, "something is drawn"
    shown = history.outputs["benchmark"]
    place = {"filename": "run_00001_.png", "subfolder": "figures", "type": "output"}
    assert (shown["text"], shown["images"]) == ([summary], [place])

    (kept,) = history.outputs["sampler"][TIMELINE]
    report = written(output)
    ((trial,),) = (variant["trials"] for variant in report["variants"])
    assert trial["timeline"] == kept
    assert shown[TIMELINE] == [{**kept, "memory": []}]
    whole = f"{format_seconds(Timeline.from_dict(kept).wall_s)} s (1 run)"
    for text in (summary, (folder / "run_00001_.html").read_text(encoding="utf-8")):
        assert whole in text
    assert {"text", "high", "low"} <= {phase["name"] for phase in report["phases"]}


@pytest.mark.slow  # runs whole workflows
def test_matrix_changes_the_transfers_and_no_result(run, output):
    matrix = workflow(policies="layerwise, block_swap 2, resident", prefetch="1, 2", trace=True)
    history = run(matrix, **ONLY)
    report = written(output)
    shown = history.outputs["benchmark"]
    swaps = ["block_swap 2, 1 ahead", "block_swap 2, 2 ahead"]
    variants = ["layerwise, 1 ahead", "layerwise, 2 ahead", *swaps, "resident"]
    assert [variant["name"] for variant in report["variants"]] == variants
    timelines = [variant["trials"][0]["timeline"] for variant in report["variants"]]
    moved = [Timeline.from_dict(timeline).bytes_moved for timeline in timelines]
    assert moved[0] == moved[1] > moved[2] > moved[4]
    assert digests(report) == {tensor_digest(history.results["sampler"][1].result.latents)}
    assert history.results["benchmark"][1].count("| equal to the bit |") == 4
    assert len(shown[TIMELINE]) == 5
    traces = [*(output / "figures" / "run_00001_traces").iterdir()]
    assert len(traces) == 5
    assert all(json.loads(trace.read_text(encoding="utf-8"))["traceEvents"] for trace in traces)
    policies = {row["name"]: row["policy"] for row in shown["wanstream_ranking"]}
    assert policies.keys() == {*variants}
    assert policies["resident"] is None
    swap = policies["block_swap 2, 1 ahead"]
    values = (swap["values"]["blocks_to_swap"], swap["values"]["prefetch_blocks"])
    assert (swap["type"], values) == ("WanStreamBlockSwap", (2, 1))


def test_samplers_are_compared_under_their_titles(run, output):
    """Titles are not inputs: hosts do not validate them."""
    metas = {"run_b": {"title": "=1+1\n<script> \ud83d"}, "run_c": {"title": 7}, "run_d": None}
    nodes = workflow(**{name: [name, 1] for name in metas})
    for seed, (name, meta) in enumerate(metas.items()):
        inputs = {**nodes["sampler"]["inputs"], "seed": seed}
        nodes[name] = {**nodes["sampler"], "inputs": inputs, "_meta": meta}
    history = run(nodes, **ONLY)
    titles = ["Wan Sampler (streamed)", "=1+1 <script> ?", "run_c", "run_d"]
    assert [variant["name"] for variant in written(output)["variants"]] == titles
    _, summary = history.results["benchmark"]
    assert f"| Metric | {' | '.join(titles)} |" in summary
    assert "equal to the bit" not in summary


def test_unusable_settings_are_refused_before_a_run(run, output):
    for changes, words in (
        ({"repeats": 0}, "0 repeats measure nothing: give 1 to 100"),
        ({"policies": "layerwise, fsdp"}, "'fsdp' names no policy"),
        ({"filename_prefix": "../outside"}, "leaves the folder"),
    ):
        with pytest.raises(InvalidWorkflowError) as refused:
            run(workflow(**changes), **ONLY)
        fault, *_ = refused.value.verdict.node_errors["benchmark"]["errors"]
        assert words in f"{fault['message']} {fault['details']}", changes
        assert not output.exists()


@pytest.mark.slow  # runs whole workflows
def test_stop_leaves_what_was_measured(run, output):
    """Two runs of three steps finish, and the third stops in the first step."""

    def stop_in_the_third_run(progress):
        if progress.node_id == "benchmark" and (progress.done, progress.total) == (7, 15):
            embedded_host.stop()

    with pytest.raises(Cancelled):
        run(workflow(repeats=5), on_progress=stop_in_the_third_run, **ONLY)
    assert names(output) == FILES
    report = written(output)
    assert (report["finished"], report["done"], report["planned"]) == (False, 2, 5)
    run(workflow(repeats=2), **ONLY)
    assert written(output, 2)["finished"]


def test_linked_name_is_checked_before_a_run_is_repeated(run, output):
    text = constant("Text", io.String.Output(), "../outside")
    nodes = workflow(filename_prefix=["text of another node", 0], repeats=2)
    nodes["text of another node"] = node("Text")
    seen = []
    with pytest.raises(NodeFailedError, match="leaves the folder"):
        run(nodes, more_nodes=[text], only=["benchmark"], on_progress=seen.append)
    assert {(step.done, step.total) for step in seen if step.node_id == "benchmark"} == {(0, 1)}
    assert not output.exists()


def test_gpu_report_has_its_memory_and_equal_latents(gpu, run, output):
    nodes = workflow(policies="layerwise, block_swap 2, resident", repeats=2)
    history = run(nodes, device=gpu.device, **ONLY)
    report = written(output)
    assert gpu.runtime.name() in report["machine"]["Device"]
    assert len(digests(report)) == 1
    figures = [report["figures"][variant["name"]] for variant in report["variants"]]
    peaks = [each["Peak VRAM, allocated"]["median"] for each in figures]
    assert peaks == sorted(peaks)
    assert "| VRAM peak |" in history.results["benchmark"][1]
