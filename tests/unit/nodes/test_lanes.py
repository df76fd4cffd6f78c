"""Lanes in the embedded host: videos equal separate runs, and weights move once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from wanstream.batch.rows.lanes import merge_lanes
from wanstream.host import io
from wanstream.host.embedded.run import History, NodeFailedError
from wanstream.host.embedded.workflow.validate import InvalidWorkflowError
from wanstream.host.models import LoadedExperts
from wanstream.nodes import WanStreamExtension
from wanstream.nodes.batch_sampler import WanStreamLaneLatent
from wanstream.sampling import working_bytes as needed
from wanstream.sampling.steps import RequestError
from wanstream.schema import OffloadPolicy
from wanstream.schema.records import Timeline
from wanstream.schema.refs.experts import ExpertsRef
from wanstream.tests.support.embedded import embedded_host, run_workflow

WORKFLOWS = Path(__file__).parents[3] / "workflows" / "api"
NODES = asyncio.run(WanStreamExtension().get_node_list())
SMALL = {"width": 32, "height": 32, "frames": 5}
COLOURS = ("red", "green", "blue", "grey")

Workflow = dict[str, dict[str, Any]]
Run = Callable[..., History]


class TextOfLength(io.ComfyNode):
    """Conditioning as long as the text, as from CLIPTextEncode."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.Int.Input("tokens", default=1)]
        return io.Schema(node_id="TextOfLength", inputs=inputs, outputs=[io.Conditioning.Output()])

    @classmethod
    def execute(cls, tokens: int) -> io.NodeOutput:
        return io.NodeOutput(
            [[torch.randn(1, tokens, 4096, generator=torch.Generator().manual_seed(tokens)), {}]]
        )


@pytest.fixture
def run(tmp_path: Path, sample_models: Path) -> Iterator[Run]:
    """`run(workflow)` frees the experts, then runs it on the test model."""
    (tmp_path / "input").mkdir()
    for colour in COLOURS:
        Image.new("RGB", (48, 48), colour).save(tmp_path / "input" / f"{colour}.png")
    folders = {
        "models": sample_models,
        "output": tmp_path / "output",
        "input_dir": tmp_path / "input",
    }

    def run(
        nodes: Mapping[str, Any], *, more_nodes: Sequence[type[io.ComfyNode]] = (), **options: Any
    ) -> History:
        embedded_host.free_experts()
        return run_workflow(nodes, nodes=[*NODES, TextOfLength, *more_nodes], **folders, **options)

    yield run
    embedded_host.free_experts()


def row(name: str, **changes: Any) -> Workflow:
    """The shipped workflow `name`, small, with changes, each as `node__input=value`."""
    nodes: Workflow = json.loads((WORKFLOWS / f"{name}.json").read_text(encoding="utf-8"))
    for node in nodes.values():
        node["inputs"] |= {
            key: value for key, value in {**SMALL, "steps": 4}.items() if key in node["inputs"]
        }
    for change, value in changes.items():
        node_id, socket = change.split("__")
        nodes[node_id]["inputs"][socket] = value
    return nodes


def latent(history: History, node_id: str) -> torch.Tensor:
    samples: torch.Tensor = history.results[node_id][0]["samples"]
    return samples


def timeline(history: History) -> Timeline:
    return Timeline.from_dict(history.outputs["sampler"]["wanstream_timeline"][0])


def check_lanes(run: Run, rows: Sequence[Workflow]) -> list[torch.Tensor]:
    """Compare lanes with separate runs: bit-equal latents, total bytes. Return the latents."""
    merged, _ = merge_lanes(rows)
    lanes = [f"lane{number}_sampler" for number in range(1, len(rows) + 1)]
    together = run(merged, keep=lanes)
    alone = [run(nodes, only=["sampler"]) for nodes in rows]
    latents = [latent(together, lane) for lane in lanes]
    for own, single in zip(latents, alone, strict=True):
        assert torch.equal(own, latent(single, "sampler"))
    for count in ("bytes_moved", "read_bytes"):
        every = [getattr(timeline(single).transfers, count) for single in alone]
        assert len(rows) * getattr(timeline(together).transfers, count) == sum(every) > 0, count
    assert [step.bytes_moved for step in timeline(together).steps] == [
        step.bytes_moved for step in timeline(alone[0]).steps
    ]
    return latents


def test_videos_of_text_are_separate_runs_to_the_bit_and_move_the_bytes_of_one(
    run: Run, tmp_path: Path
) -> None:
    rows = [
        row("t2v", sampler__seed=n, text__positive=f"boat {n}", save__filename_prefix=f"v{n}")
        for n in range(2)
    ]
    first, second = check_lanes(run, rows)
    assert not torch.equal(first, second)
    assert sorted(path.name for path in (tmp_path / "output").iterdir()) == [
        "v0_00001_.mp4",
        "v1_00001_.mp4",
    ]


@pytest.mark.slow
def test_videos_of_different_images_are_single_runs_to_the_bit(run: Run) -> None:
    check_lanes(
        run,
        [
            row("i2v", sampler__seed=n, image__image=f"{name}.png")
            for n, name in enumerate(COLOURS[:3])
        ],
    )


@pytest.mark.slow
def test_with_loras_and_without_guidance(run: Run) -> None:
    check_lanes(
        run, [row("t2v_lightning", sampler__seed=n, text__positive=f"boat {n}") for n in (1, 2)]
    )


@pytest.mark.slow
def test_texts_of_different_lengths_are_single_runs_to_the_bit(run: Run) -> None:
    def of_length(positive: int, negative: int) -> Workflow:
        nodes = row("t2v")
        del nodes["text"]
        for name, tokens in (("positive", positive), ("negative", negative)):
            nodes[name] = {"class_type": "TextOfLength", "inputs": {"tokens": tokens}}
            nodes["sampler"]["inputs"][name] = [name, 0]
        return nodes

    check_lanes(run, [of_length(3, 9), of_length(77, 9), of_length(9, 1), of_length(512, 226)])


@pytest.mark.slow
def test_a_run_in_two_parts_hands_each_lane_its_own_noise(run: Run) -> None:
    def in_two(seed: int) -> Workflow:
        nodes = row("t2v", sampler__seed=seed)
        first = {**nodes["sampler"]["inputs"], "end_step": 2, "leftover_noise": True}
        nodes["sampler"]["inputs"] |= {"latent": ["first", 0], "start_step": 2, "add_noise": False}
        return {**nodes, "first": {**nodes["sampler"], "inputs": first}}

    check_lanes(run, [in_two(1), in_two(2)])


@pytest.mark.slow
def test_a_batch_and_a_single_video_share_a_run(run: Run) -> None:
    one, two = check_lanes(run, [row("t2v"), row("t2v", latent__batch_size=2, sampler__seed=3)])
    assert (len(one), len(two)) == (1, 2)


def test_the_lane_sampler_tells_its_run_as_the_sampler_does(run: Run) -> None:
    merged, _ = merge_lanes([row("t2v", sampler__seed=seed) for seed in (1, 2)])
    sampler_run = run(merged, only=["sampler"]).results["sampler"][1]
    assert sampler_run.node_id == "sampler"
    assert sampler_run.request.batch == 2
    assert sampler_run.timeline.steps


@pytest.mark.slow  # runs whole workflows
def test_the_host_is_asked_for_what_all_lanes_compute_in(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []

    def load_experts(
        ref: ExpertsRef, policy: OffloadPolicy, *, working_bytes: int
    ) -> LoadedExperts:
        pair = embedded_host.models.experts(ref)
        one, four = (needed(pair, (lanes, 16, 2, 4, 4), sides=(0, 0)) for lanes in (1, 4))
        assert one < four
        asked.append((working_bytes, four))
        return LoadedExperts(pair=pair, policy=policy, device=torch.device("cpu"))

    monkeypatch.setattr(embedded_host.models, "load_experts", load_experts)
    run(merge_lanes([row("t2v", sampler__seed=seed) for seed in range(4)])[0])
    ((given, expected),) = asked
    assert given == expected


def lanes(second: Mapping[str, Any] = {}, **sampler: Any) -> Workflow:
    """Return two lanes, with other inputs for the second and other settings."""
    nodes = row("t2v")
    inputs = nodes["sampler"]["inputs"]
    own = {name: inputs.pop(name) for name in ("positive", "negative", "latent", "seed")}
    nodes["sampler"] = {
        "class_type": "WanStreamLaneSampler",
        "inputs": {**inputs, "lanes": ["second", 0], **sampler},
    }
    nodes["first"] = {"class_type": "WanStreamLane", "inputs": own}
    nodes["second"] = {
        "class_type": "WanStreamLane",
        "inputs": {**own, "lanes": ["first", 0], **second},
    }
    nodes["taken"] = {
        "class_type": "WanStreamLaneLatent",
        "inputs": {"latents": ["sampler", 0], "index": 1},
    }
    for node_id in ("frames", "save"):
        nodes[node_id]["inputs"]["latent"] = ["taken", 0]
    return nodes


@pytest.mark.slow  # runs whole workflows
def test_lanes_of_one_seed_are_the_same_video(run: Run) -> None:
    history = run(lanes(), only=["taken"])
    assert torch.equal(
        latent(history, "taken"), latent(run(row("t2v"), only=["sampler"]), "sampler")
    )


def test_lanes_of_different_sizes_are_refused_with_both(run: Run) -> None:
    nodes = lanes({"latent": ["wide", 0]})
    nodes["wide"] = {**nodes["latent"], "inputs": {**nodes["latent"]["inputs"], "width": 48}}
    with pytest.raises(
        NodeFailedError,
        match="lane 2 does not fit lane 1: size 48 x 32 pixels and 5 frames, in lane 1 32 x 32",
    ) as failed:
        run(nodes)
    assert failed.value.node_id == "sampler"


def test_what_one_lane_cannot_be_is_told_with_its_number(run: Run) -> None:
    nodes = lanes({"positive": ["two", 0]})
    nodes["two"] = {"class_type": "TwoTexts", "inputs": {}}

    class TwoTexts(TextOfLength):
        @classmethod
        def define_schema(cls) -> io.Schema:
            return io.Schema(node_id="TwoTexts", outputs=[io.Conditioning.Output()])

        @classmethod
        def execute(cls) -> io.NodeOutput:  # type: ignore[override]
            return io.NodeOutput([[torch.zeros(1, 1, 4096), {}]] * 2)

    with pytest.raises(
        NodeFailedError, match="lane 2: positive has 2 entries, only one can be used"
    ):
        run(nodes, more_nodes=[TwoTexts])


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"steps": 0}, "0 steps: give 1 to 1000"),
        ({"switch_step": 5}, "switch step 5 of 4 steps: give 0 to 4"),
        ({"start_step": 4}, "start step 4 of 4 steps: give 0 to 3"),
        (
            {"start_step": 4, "end_step": 2},
            "start step 4 of 4 steps: give 0 to 1, below end_step 2",
        ),
        ({"start_step": 2, "end_step": 1}, "set start_step below 1, or end_step above 2"),
        ({"guidance_high": 0.0}, "guidance_high is 0: give 1 for no guidance, or up to 100"),
        ({"guidance_low": 100.5}, "guidance_low is 100.5: give 1 for no guidance"),
        ({"guidance_low": float("nan")}, "guidance_low is nan: give 1 for no guidance"),
        ({"lanes": ["sampler", 0]}, "return_type_mismatch|Return type mismatch"),
    ],
)
def test_settings_are_refused_before_anything_runs(
    run: Run, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidWorkflowError, match=reason):
        run(lanes(**settings))


def test_a_lane_that_is_not_there_is_refused_with_the_number() -> None:
    with pytest.raises(RequestError, match="lane 2 of 2 lanes: give 0 to 1"):
        WanStreamLaneLatent.execute([{}, {}], 2)
