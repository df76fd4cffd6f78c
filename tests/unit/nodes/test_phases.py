"""Phases in a whole workflow, from the sampler and from other nodes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest

from wanstream.host import current_host, io
from wanstream.nodes import WanStreamExtension
from wanstream.schema.records import Timeline
from wanstream.telemetry.phases import QueueItemPhases
from wanstream.tests.support.embedded import embedded_host, run_workflow

WORKFLOWS = Path(__file__).parents[3] / "workflows" / "api"
NODES = asyncio.run(WanStreamExtension().get_node_list())
OF_THE_RUN = ["open", "text", "first block", "high", "switch", "low"]


class Peek(io.ComfyNode):
    """Node to store the ledger of the current queue item."""

    seen: ClassVar[list[tuple[str | None, QueueItemPhases]]] = []

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(node_id="Peek", inputs=[io.Latent.Input("latent")], is_output_node=True)

    @classmethod
    def execute(cls, latent: dict[str, Any]) -> io.NodeOutput:
        cls.seen.append(
            (current_host().events.executing().prompt_id, current_host().events.ledger())
        )
        return io.NodeOutput()


@pytest.fixture
def prompt(tmp_path: Path) -> Iterator[dict[str, Any]]:
    nodes: dict[str, Any] = json.loads((WORKFLOWS / "t2v.json").read_text(encoding="utf-8"))
    nodes["latent"]["inputs"] |= {"width": 32, "height": 32, "frames": 5}
    nodes["sampler"]["inputs"] |= {"steps": 4}
    nodes["peek"] = {"class_type": "Peek", "inputs": {"latent": ["sampler", 0]}}
    Peek.seen.clear()
    yield nodes
    Peek.seen.clear()
    embedded_host.free_experts()


def test_a_queue_item_has_all_its_phases(
    prompt: dict[str, Any], sample_models: Path, tmp_path: Path
) -> None:
    places = {"models": sample_models, "output": tmp_path / "output", "input_dir": tmp_path}
    timelines = []
    for _ in range(2):
        history = run_workflow(prompt, nodes=[*NODES, Peek], **places)
        timelines.append(Timeline.from_dict(history.outputs["sampler"]["wanstream_timeline"][0]))
    for timeline in timelines:
        assert [phase.name for phase in timeline.phases] == OF_THE_RUN
        for before, phase in pairwise(timeline.phases):
            assert before.start_s + before.wall_s <= phase.start_s + 1e-9
        assert timeline.phases[1].start_s < 0 <= timeline.phases[2].start_s
    (first_id, first), (second_id, second) = Peek.seen
    assert first_id != second_id
    for ledger in (first, second):
        assert [phase.name for phase in ledger.phases()] == [*OF_THE_RUN, "decode", "save"]
    events = current_host().events
    assert (events.executing().prompt_id, events.ledger().phases()) == (None, ()), (
        "nothing runs any more"
    )
