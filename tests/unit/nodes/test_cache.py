"""Caches and their calibration in the embedded host: from the widgets to skipped steps."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from wanstream.host.embedded.run import History, NodeFailedError
from wanstream.host.embedded.workflow.validate import InvalidWorkflowError
from wanstream.nodes import WanStreamExtension
from wanstream.nodes.cache import WanStreamCache
from wanstream.sampling.cache.settings import PRESETS, EasyCache, FirstBlockCache, MagCache
from wanstream.tests.support.embedded import embedded_host, run_workflow

WORKFLOWS = Path(__file__).parents[3] / "workflows" / "api"
NODES = asyncio.run(WanStreamExtension().get_node_list())

CACHE = {"kind": "first_block_cache", "preset": "usual", "threshold": 0.05}
LAYERS, STEPS = 4, 4

Run = Callable[..., History]


def workflow(
    cache: dict[str, Any] | None = None, *, calibrates: bool = False, **settings: Any
) -> dict[str, Any]:
    """The shipped workflow, small, with 4 steps, 2 of them high-noise."""
    nodes: dict[str, Any] = json.loads((WORKFLOWS / "t2v.json").read_text(encoding="utf-8"))
    size = {"width": 32, "height": 32, "frames": 5, "steps": STEPS, "switch_step": 2}
    for node in nodes.values():
        node["inputs"] |= {key: value for key, value in size.items() if key in node["inputs"]}
    nodes["sampler"]["inputs"] |= settings
    if cache is not None:
        nodes["cache"] = {"class_type": "WanStreamCache", "inputs": CACHE | cache}
        nodes["sampler"]["inputs"]["cache"] = ["cache", 0]
    if calibrates:
        inputs = {"run": ["sampler", 1], "filename_prefix": "calibration/one"}
        nodes = {
            name: node for name, node in nodes.items() if node["class_type"] != "WanStreamSaveVideo"
        }
        nodes["calibration"] = {"class_type": "WanStreamCacheCalibration", "inputs": inputs}
    return nodes


@pytest.fixture
def run(tmp_path: Path, sample_models: Path) -> Iterator[Run]:
    def run(nodes: dict[str, Any]) -> History:
        folders = {
            "models": sample_models,
            "output": tmp_path / "output",
            "input_dir": tmp_path / "input",
        }
        return run_workflow(nodes, nodes=NODES, keep=["sampler", "calibration"], **folders)

    yield run
    embedded_host.free_experts()


def latent(history: History) -> torch.Tensor:
    samples: torch.Tensor = history.results["sampler"][0]["samples"]
    return samples


def skipped(history: History) -> list[int]:
    return [
        step["skipped_visits"]
        for step in history.outputs["sampler"]["wanstream_timeline"][0]["steps"]
    ]


@pytest.mark.slow  # runs whole workflows
def test_a_threshold_of_0_is_no_cache(run: Run) -> None:
    plain = run(workflow())
    cached = run(workflow({"preset": "own threshold", "threshold": 0.0}))
    assert torch.equal(latent(cached), latent(plain))
    assert skipped(cached) == skipped(plain) == [0] * STEPS


def test_a_step_that_is_left_out_is_told(run: Run) -> None:
    cached = run(workflow({"preset": "own threshold", "threshold": 2.0}))
    assert skipped(cached) == [0, LAYERS - 1, 0, LAYERS - 1]


@pytest.mark.slow  # runs whole workflows
def test_a_run_is_calibrated_and_its_table_is_used(run: Run, tmp_path: Path) -> None:
    history = run(workflow({"preset": "fastest"}, calibrates=True))
    (name,) = history.results["calibration"]
    assert name == "calibration/one_00001_.json"
    table = json.loads((tmp_path / "output" / name).read_text(encoding="utf-8"))
    assert "4 steps" in table["source"]
    assert len(table["ratios"]) == 2
    given = {"kind": "magcache", "threshold": 2.0, "calibration": name, "retention": 0.0}
    assert skipped(run(workflow(given))) == [0, LAYERS, 0, LAYERS]
    with pytest.raises(NodeFailedError, match="calibrated for 4 steps, this run has 5"):
        run(workflow(given, steps=5))


@pytest.mark.parametrize(
    ("calibration", "message"),
    [
        ("", "needs a calibration: run Wan Cache Calibration once"),
        ("nothing.json", r"nothing\.json could not be read: No such file"),
        ("../outside.json", "leaves the folder"),
        ("text.json", "text.json is not a calibration: it is not JSON"),
        ("bytes.json", "bytes.json is not a calibration"),
        ("other.json", "this file is not a table of magnitude ratios"),
        ("deep.json", "not a calibration"),
    ],
)
def test_what_is_no_calibration_is_refused(
    calibration: str, message: str, run: Run, tmp_path: Path
) -> None:
    output = tmp_path / "output"
    output.mkdir()
    (tmp_path / "outside.json").write_text("{}")
    (output / "text.json").write_text("calibrated")
    (output / "bytes.json").write_bytes(b"\xff\xfe\x00")
    (output / "other.json").write_text('{"format": "another"}')
    (output / "deep.json").write_text("[" * 100_000)
    with pytest.raises(NodeFailedError, match=message):
        run(workflow({"kind": "magcache", "calibration": calibration}))


def test_a_calibration_stays_in_the_output_folder(run: Run) -> None:
    nodes = workflow(calibrates=True)
    nodes["calibration"]["inputs"]["filename_prefix"] = "../calibration"
    with pytest.raises(InvalidWorkflowError) as refused:
        run(nodes)
    (fault,) = refused.value.verdict.node_errors["calibration"]["errors"]
    assert "leaves the folder" in f"{fault['message']} {fault['details']}"


def test_a_part_of_a_schedule_is_not_calibrated(run: Run) -> None:
    with pytest.raises(
        NodeFailedError, match="takes steps 1 to 4 of 4, and a table needs all of them"
    ):
        run(workflow(calibrates=True, start_step=1))


@pytest.mark.parametrize(
    ("preset", "threshold"),
    [*PRESETS.items(), ("own threshold", 0.7)],
    ids=[*PRESETS, "own threshold"],
)
def test_presets_are_thresholds(preset: str, threshold: float) -> None:
    (cache,) = WanStreamCache.execute(kind="first_block_cache", preset=preset, threshold=0.7).args
    assert cache == FirstBlockCache(threshold=threshold)
    assert not isinstance(cache, MagCache)


def test_easycache_has_a_threshold_and_a_retention() -> None:
    (cache,) = WanStreamCache.execute(
        kind="easycache", preset="usual", threshold=0.1, retention=0.3
    ).args
    assert cache == EasyCache(threshold=0.1, retention=0.3)
    (cache,) = WanStreamCache.execute(kind="easycache", preset="usual", threshold=0.1).args
    assert cache == EasyCache(threshold=0.1)
