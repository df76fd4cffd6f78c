"""Simulated run in the frontend: events, notices, previews and results, processed as in a real run.

The builder reserves space for node outputs with it, and tests check that no widget is covered after
a run.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from ..host import NOTICES_EVENT, RunEvents
from ..nodes.runs import PREVIEW_PIXELS, write_video
from ..schema.records import Notice, StepRecord, Timeline
from .frontend import Frontend

STEPS = 20
VIDEO = "shown.mp4"
VIDEO_SIZE = (832, 480)

OVERLAYS = {"WanStreamSampler", "WanStreamLaneSampler", "WanStreamGuider", "WanStreamBenchmark"}
STREAMED = {"WanStreamLoadDiffusionModel", "WanStreamStreamModel", "WanStreamJoinExperts"}
"""Loaders for models with a run display at ComfyUI's own samplers."""
CORE_SAMPLERS = {"KSampler", "KSamplerAdvanced", "SamplerCustomAdvanced"}
NOTICED = {
    "WanStreamExperts",
    "WanStreamOneExpert",
    "WanStreamLora",
    "WanStreamSampler",
    "WanStreamLaneSampler",
    "WanStreamGuider",
    "WanStreamVAEDecode",
    "WanStreamDecodeVideo",
    "WanStreamSaveLatent",
    "WanStreamLoadLatent",
}
"""Nodes with notices."""
PREVIEWS = {"WanStreamSampler", "WanStreamLaneSampler", *CORE_SAMPLERS}
MOVING = "WanStreamPreview"
"""With this node, previews come with the run events."""
VIDEOS = {"WanStreamSaveVideo", "WanStreamDecodeVideo", "SaveVideo"}
IMAGES = {"WanStreamBenchmark"}

# Dispatches events as ComfyUI's websocket client does. A preview is a picture with this size.
DISPATCH = """async ([events, previews, [width, height]]) => {
    const { api } = window.comfyAPI.api
    for (const [event, payload] of events) api.dispatchCustomEvent(event, payload)
    const canvas = document.createElement('canvas')
    canvas.width = width
    canvas.height = height
    canvas.getContext('2d').fillRect(0, 0, width, height)
    const blob = await new Promise(done => canvas.toBlob(done, 'image/jpeg'))
    for (const id of previews) {
        const ids = { nodeId: id, displayNodeId: id, parentNodeId: id, realNodeId: id,
            jobId: 'shown', promptId: 'shown' }
        api.dispatchCustomEvent('b_preview_with_metadata', { blob, ...ids })
    }
    window.app.canvas.setDirty(true, true)
}"""
SHOWN_MS = 1500


def charted_classes(classes: Collection[str]) -> set[str]:
    """Return a graph's classes with a chart on their nodes."""
    return set(classes) & (OVERLAYS | (CORE_SAMPLERS if STREAMED & set(classes) else set()))


def populate_results(base: Path) -> None:
    """Write a video into a base directory's output folder, for nodes to show."""
    width, height = VIDEO_SIZE
    write_video(
        base / "output" / VIDEO, [torch.zeros(height, width, 3)], fps=16, crf=30, metadata={}
    )


def show_run(frontend: Frontend, classes: Mapping[str, str]) -> None:
    """Send run events for the open graph to the page. `classes` has each node's class by id."""
    moving = MOVING in classes.values()
    charted = charted_classes(list(classes.values()))
    samplers = [node_id for node_id, kind in classes.items() if kind in charted]
    noticed = [
        node_id for node_id, kind in classes.items() if kind in NOTICED or node_id in samplers
    ]
    events = [event for node_id in samplers for event in _run_events(node_id, moving=moving)]
    events += [_notices(node_id) for node_id in noticed]
    for node_id, kind in classes.items():
        if kind in VIDEOS:
            events.append(_executed(node_id, {"images": [_file(VIDEO)], "animated": [True]}))
        elif kind in IMAGES:
            events.append(
                _executed(
                    node_id, {"images": [_file("example.png", "input")], "text": ["a report"]}
                )
            )
    previews = [node_id for node_id, kind in classes.items() if kind in PREVIEWS and not moving]
    frontend.page.evaluate(DISPATCH, [events, previews, list(VIDEO_SIZE)])
    # Pictures load asynchronously and then resize their nodes.
    frontend.page.wait_for_timeout(SHOWN_MS)


def _run_events(node_id: str, *, moving: bool) -> list[tuple[str, dict[str, Any]]]:
    """Return the events sent by a host for a run at this node."""
    found: list[tuple[str, dict[str, Any]]] = []
    experts = ["high"] * (STEPS // 2) + ["low"] * (STEPS // 2)
    steps = tuple(
        StepRecord.of(
            index=index,
            expert=expert,
            sigma=None,
            wall_s=12.4,
            compute_s=11.0,
            stall_s=1.0,
            bytes_moved=28_000_000_000,
            device_bytes=6_930_000_000,
        )
        for index, expert in enumerate(experts)
    )

    def announce(event: str, payload: Mapping[str, Any]) -> None:
        found.append(
            (
                event,
                {**payload, "workflow": None, "title": None}
                if event.endswith("begin")
                else {**payload},
            )
        )

    # The product's own class makes the events, so the page gets their real form.
    with RunEvents(announce, prompt_id="shown", node_id=node_id, experts=experts) as run:
        for step in steps:
            run.step(step)
        if moving:
            run.preview(STEPS, _picture())
        run.ended(Timeline(steps=steps, kind="measured"))
    return found


def _notices(node_id: str) -> tuple[str, dict[str, Any]]:
    """Return a notices event for this node, with enough text to fill the closed strip."""
    notices = [
        asdict(Notice(text="a warning " * 40, level="warning")),
        asdict(Notice(text="a note")),
    ]
    return NOTICES_EVENT, {
        "node": node_id,
        "workflow": None,
        "prompt_id": "shown",
        "notices": notices,
    }


def _picture() -> bytes:
    """Return a picture in preview size."""
    width, height = VIDEO_SIZE
    file = io.BytesIO()
    Image.new("RGB", (PREVIEW_PIXELS, PREVIEW_PIXELS * height // width)).save(file, "WEBP")
    return file.getvalue()


def _executed(node_id: str, output: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    return "executed", {
        "node": node_id,
        "display_node": node_id,
        "output": output,
        "prompt_id": "shown",
    }


def _file(name: str, folder: str = "output") -> dict[str, str]:
    return {"filename": name, "subfolder": "", "type": folder}
