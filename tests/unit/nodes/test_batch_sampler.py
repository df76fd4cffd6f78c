"""Lanes in the embedded host: videos equal separate runs, and weights move once."""

import pytest
import torch

from wanstream.batch.rows.lanes import merge_lanes
from wanstream.host import io
from wanstream.host.embedded.run import NodeFailedError
from wanstream.host.embedded.workflow.validate import InvalidWorkflowError
from wanstream.nodes.batch_sampler import WanStreamLaneLatent
from wanstream.sampling.steps import RequestError
from wanstream.tests.support.host.embedded import embedded_host
from wanstream.tests.support.host.given_nodes import constant
from wanstream.tests.support.host.shipped import latent, node, shipped, timeline


def seeded(seed, **changes):
    return shipped(sampler={"seed": seed, "steps": 2, "switch_step": 1}, **changes)


def test_videos_are_separate_runs_and_move_the_bytes_of_one(run, output):
    saves = [{"filename_prefix": f"v{n}"} for n in range(2)]
    rows = [seeded(n, text={"positive": f"boat {n}"}, save=save) for n, save in enumerate(saves)]
    lanes = ["lane1_sampler", "lane2_sampler"]
    together = run(merge_lanes(rows)[0], keep=lanes)
    assert sorted(path.name for path in output.iterdir()) == ["v0_00001_.mp4", "v1_00001_.mp4"]
    alone = []
    for nodes in rows:
        embedded_host.free_experts()
        alone.append(run(nodes, only=["sampler"]))
    first, second = (latent(each) for each in alone)
    assert not torch.equal(first, second)
    assert torch.equal(latent(together, lanes[0]), first)
    assert torch.equal(latent(together, lanes[1]), second)
    for name in ("bytes_moved", "read_bytes"):
        moved, *each = (getattr(timeline(one).transfers, name) for one in (together, *alone))
        assert [moved, moved] == each, name
        assert moved > 0


def lanes(second=None, **sampler):
    """Return two lanes, with other inputs for the second and other settings."""
    nodes = shipped()
    inputs = nodes["sampler"]["inputs"]
    own = {name: inputs.pop(name) for name in ("positive", "negative", "latent", "seed")}
    inputs |= {"lanes": ["second", 0], **sampler}
    nodes["sampler"] = node("WanStreamLaneSampler", **inputs)
    nodes["first"] = node("WanStreamLane", **own)
    nodes["second"] = node("WanStreamLane", **{**own, "lanes": ["first", 0], **(second or {})})
    nodes["taken"] = node("WanStreamLaneLatent", latents=["sampler", 0], index=1)
    for node_id in ("frames", "save"):
        nodes[node_id]["inputs"]["latent"] = ["taken", 0]
    return nodes


def test_unsuitable_lane_is_refused_with_its_number(run):
    wide = lanes({"latent": ["wide", 0]})
    wide["wide"] = {**wide["latent"], "inputs": {**wide["latent"]["inputs"], "width": 48}}
    several = lanes({"positive": ["two", 0]})
    several["two"] = node("Texts")
    texts = constant("Texts", io.Conditioning.Output(), [[torch.zeros(1, 1, 4096), {}]] * 2)
    for nodes, reason in (
        (wide, "lane 2 does not fit lane 1: size 48 x 32 pixels and 5 frames, in lane 1 32 x 32"),
        (several, "lane 2: positive has 2 entries, only one can be used"),
    ):
        with pytest.raises(NodeFailedError, match=reason) as failed:
            run(nodes, more_nodes=[texts])
        assert failed.value.node_id == "sampler"
    with pytest.raises(RequestError, match="lane 2 of 2 lanes: give 0 to 1"):
        WanStreamLaneLatent.execute([{}, {}], 2)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"start_step": 4, "end_step": 2}, "step 4 of 4 steps: give 0 to 1, below end_step 2"),
        ({"guidance_high": 0.0}, "guidance_high is 0: give 1 for no guidance, or up to 100"),
        ({"guidance_low": float("nan")}, "guidance_low is nan: give 1 for no guidance"),
        ({"lanes": ["sampler", 0]}, "return_type_mismatch|Return type mismatch"),
    ],
)
def test_settings_are_refused_before_anything_runs(run, settings, reason):
    with pytest.raises(InvalidWorkflowError, match=reason):
        run(lanes(**settings))
