"""Caches and their calibration in the embedded host: from the widgets to skipped steps."""

import json

import pytest

from wanstream.host.embedded.run import NodeFailedError
from wanstream.host.embedded.workflow.validate import InvalidWorkflowError
from wanstream.nodes.cache import WanStreamCache
from wanstream.sampling.cache.settings import PRESETS, EasyCache, FirstBlockCache
from wanstream.tests.support.host.shipped import node, shipped, timeline

CACHE = {"kind": "first_block_cache", "preset": "usual", "threshold": 0.05}
LAYERS = 4
STEPS = 4


def workflow(cache=None, **settings):
    """Text to video in 4 steps, 2 of them high-noise."""
    nodes = shipped(sampler={"switch_step": 2, **settings})
    if cache is not None:
        nodes["cache"] = node("WanStreamCache", **CACHE | cache)
        nodes["sampler"]["inputs"]["cache"] = ["cache", 0]
    return nodes


def calibrated(prefix="calibration/one", **settings):
    nodes = workflow({"preset": "fastest"}, **settings)
    del nodes["save"]
    inputs = {"run": ["sampler", 1], "filename_prefix": prefix}
    return {**nodes, "calibration": node("WanStreamCacheCalibration", **inputs)}


def skipped(run, nodes):
    return [step.skipped_visits for step in timeline(run(nodes)).steps]


def test_skipped_step_is_in_the_timeline(run):
    found = skipped(run, workflow({"preset": "own threshold", "threshold": 2.0}))
    assert found == [0, LAYERS - 1] * 2


@pytest.mark.slow  # runs whole workflows
def test_calibration_of_a_run_is_used(run, output):
    (name,) = run(calibrated(), keep=["calibration"]).results["calibration"]
    assert name == "calibration/one_00001_.json"
    table = json.loads((output / name).read_text(encoding="utf-8"))
    assert "4 steps" in table["source"]
    assert len(table["ratios"]) == 2
    given = {"kind": "magcache", "threshold": 2.0, "calibration": name, "retention": 0.0}
    assert skipped(run, workflow(given)) == [0, LAYERS, 0, LAYERS]


CALIBRATIONS: dict[str, tuple[bytes | None, str]] = {
    "": (None, "needs a calibration: run Wan Cache Calibration once"),
    "nothing.json": (None, r"nothing\.json could not be read: No such file"),
    "../outside.json": (b"{}", "leaves the folder"),
    "text.json": (b"calibrated", "text.json is not a calibration: it is not JSON"),
    "bytes.json": (b"\xff\xfe\x00", "bytes.json is not a calibration"),
    "other.json": (b'{"format": "another"}', "this file is not a table of magnitude ratios"),
    "deep.json": (b"[" * 100_000, "not a calibration"),
}


@pytest.mark.parametrize("name", CALIBRATIONS)
def test_file_that_is_no_calibration_is_refused(name, run, output):
    content, message = CALIBRATIONS[name]
    output.mkdir()
    if content is not None:
        (output / name).write_bytes(content)
    with pytest.raises(NodeFailedError, match=message):
        run(workflow({"kind": "magcache", "calibration": name}))


def test_calibration_needs_a_name_in_the_folder_and_all_steps(run):
    with pytest.raises(InvalidWorkflowError, match="leaves the folder"):
        run(calibrated("../calibration"))
    part = "takes steps 1 to 4 of 4, and a table needs all of them"
    with pytest.raises(NodeFailedError, match=part):
        run(calibrated(start_step=1))


def test_widgets_become_a_cache():
    for preset, threshold in [*PRESETS.items(), ("own threshold", 0.7)]:
        made = WanStreamCache.execute(kind="first_block_cache", preset=preset, threshold=0.7)
        assert made.args == (FirstBlockCache(threshold=threshold),)
    for retention in ({}, {"retention": 0.3}):
        made = WanStreamCache.execute(kind="easycache", preset="usual", threshold=0.1, **retention)
        assert made.args == (EasyCache(threshold=0.1, **retention),)
