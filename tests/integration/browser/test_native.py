"""ComfyUI's own samplers with a streamed native model, in the page: the overlay is at the sampler.

`WANSTREAM_IMAGES` names a folder for the documentation's pictures. Without it none are kept.
"""

from __future__ import annotations

import io
import itertools
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image

from wanstream.tools.comfyui import NoComfyUIError, Server, find_comfyui, populate, running_server
from wanstream.tools.frontend import CLASSIC, GRAPH, NODES_2, SharedFrontends

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.comfy, pytest.mark.browser, pytest.mark.timeout(600)]

COMFY_TESTS = Path(__file__).parents[1] / "comfy"
STEPS = 6
SEEDS = itertools.count(7)
"""Unused seeds: the server would not run the sampler again with the same one."""
SHOWN = f"""type => {{
    const node = {GRAPH}.nodes.find(node => node.type === type)
    const root = node?.widgets?.find(widget => widget.name === 'wanstream_run')?.element
    if (!root) return null
    return {{
        ...root.dataset,
        bars: root.querySelectorAll('.wanstream-bar[data-wall]').length,
        line: root.querySelector('.wanstream-line-text').textContent,
        numbers: root.querySelector('.wanstream-numbers').textContent,
        width: root.getBoundingClientRect().width,
    }}
}}"""
ENDED = f"type => ({SHOWN})(type)?.numbers.startsWith('Queue to file')"
QUEUE_TO_FILE = r"Queue to file (\S+) s: (\S+) s before the steps, (\S+) s in them, (\S+) s after"


def k_sampler(model: str, family: str, seed: int) -> dict[str, Any]:
    """Return the API graph for a model and ComfyUI's sampler node."""
    return {
        "1": {
            "class_type": "WanStreamLoadDiffusionModel",
            "inputs": {"unet_name": model, "weight_dtype": "default"},
        },
        "2": {"class_type": "TestFamily", "inputs": {"family": family}},
        "3": {
            "class_type": "KSampler",
            "inputs": {
                "model": ["1", 0],
                "positive": ["2", 0],
                "negative": ["2", 1],
                "latent_image": ["2", 2],
                "seed": seed,
                "steps": STEPS,
                "cfg": 3.0,
                "sampler_name": "euler",
                "scheduler": "simple",
                "denoise": 1.0,
            },
        },
        "4": {"class_type": "TestDigest", "inputs": {"latent": ["3", 0]}},
    }


def custom_sampler(model: str, family: str, seed: int) -> dict[str, Any]:
    """Return the same with a sampler's parts as nodes."""
    parts = {"noise": "5", "guider": "6", "sampler": "7", "sigmas": "8", "latent_image": "2"}
    inputs = {name: [node_id, 2 if node_id == "2" else 0] for name, node_id in parts.items()}
    guided = {"model": ["1", 0], "positive": ["2", 0], "negative": ["2", 1], "cfg": 3.0}
    scheduled = {"model": ["1", 0], "scheduler": "simple", "steps": STEPS, "denoise": 1.0}
    return {
        **k_sampler(model, family, seed),
        "3": {"class_type": "SamplerCustomAdvanced", "inputs": inputs},
        "5": {"class_type": "RandomNoise", "inputs": {"noise_seed": seed}},
        "6": {"class_type": "CFGGuider", "inputs": guided},
        "7": {"class_type": "KSamplerSelect", "inputs": {"sampler_name": "euler"}},
        "8": {"class_type": "BasicScheduler", "inputs": scheduled},
    }


def keep_picture(page: Page, name: str) -> None:
    """Save a screenshot of the canvas, upper left part, if pictures are enabled."""
    if folder := os.environ.get("WANSTREAM_IMAGES"):
        page.wait_for_timeout(1000)  # until the view has moved
        clip = {"x": 80, "y": 78, "width": 800, "height": 640}
        with Image.open(io.BytesIO(page.screenshot(clip=clip))) as picture:
            picture.convert("RGB").quantize(256).save(Path(folder) / f"{name}.png", optimize=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    try:
        comfyui = find_comfyui()
    except NoComfyUIError as err:
        pytest.skip(str(err))
    base = tmp_path_factory.mktemp("native")
    populate(base)
    for name in ("native.py", "clip.py"):
        (base / "custom_nodes" / name).symlink_to(COMFY_TESTS / "custom_nodes" / name)
    with running_server(comfyui, base) as server:
        yield server


@pytest.fixture(scope="module")
def frontends(browser: Browser, server: Server) -> Iterator[SharedFrontends]:
    with SharedFrontends(browser, server) as frontends:
        yield frontends


@pytest.mark.parametrize(
    ("sampler", "graph", "renderer"),
    [
        pytest.param("KSampler", k_sampler, CLASSIC, id="k-classic"),
        pytest.param("SamplerCustomAdvanced", custom_sampler, NODES_2, id="custom-nodes-2"),
    ],
)
def test_overlay_appears_at_a_sampler_of_comfyui(frontends, sampler, graph, renderer):
    frontend = frontends.get(settings=renderer)
    page = frontend.page
    loaded = graph("tiny_wan_t2v.safetensors", "wan_t2v", next(SEEDS))
    page.evaluate("graph => window.app.loadApiJson(graph, 'native.json')", loaded)
    page.wait_for_timeout(500)
    assert page.evaluate(SHOWN, sampler) is None, "a sampler without a streamed run has no overlay"
    page.evaluate("() => window.app.queuePrompt(0)")
    page.wait_for_function(ENDED, arg=sampler, timeout=120_000)
    page.wait_for_timeout(700)
    shown = page.evaluate(SHOWN, sampler)
    assert (shown["ended"], shown["bars"]) == ("true", STEPS)
    assert shown["width"] > 100
    queue_to_file = re.match(QUEUE_TO_FILE, shown["numbers"])
    assert queue_to_file is not None, shown["numbers"]
    total, *phases = map(float, queue_to_file.groups())
    assert min(phases) >= 0 < phases[1]
    assert sum(phases) == pytest.approx(total, abs=0.1), "rounded"
    widgets = (
        f"type => {GRAPH}.nodes.find(node => node.type === "
        "type).serialize().widgets_values?.length ?? 0"
    )
    assert page.evaluate(widgets, sampler) == (7 if sampler == "KSampler" else 0), (
        "the overlay is not saved"
    )
    keep_picture(page, f"native_{sampler.lower()}")


EXCHANGED = {"UNETLoader": "WanStreamLoadDiffusionModel", "CLIPLoader": "TestClip"}
"""Our loader for ComfyUI's. The sample text encoder needs another loader with the same inputs."""
SIZE = [64, 48, 9, 1]


def template(server: Server) -> dict[str, Any]:
    """Return ComfyUI's own Wan2.2 T2V template with two experts and LoRAs.

    The loaders are exchanged, and it is small and has 4 steps. Newer templates have everything in a
    subgraph, with a switch for 4 steps and the duration in seconds.
    """
    workflow: dict[str, Any] = server.get("/templates/video_wan2_2_14B_t2v.json")
    inner = [
        node
        for graph in workflow.get("definitions", {}).get("subgraphs", ())
        for node in graph["nodes"]
    ]
    for node in [*workflow["nodes"], *inner]:
        if node["type"] == "PrimitiveBoolean":
            node["widgets_values"] = [True]
        if node["type"] == "PrimitiveFloat" and node["widgets_values"] == [5]:
            node["widgets_values"] = [0.5]
        node["type"] = EXCHANGED.get(node["type"], node["type"])
        if node["type"] == "EmptyHunyuanLatentVideo":
            node["widgets_values"] = SIZE
        if node["type"] == "KSamplerAdvanced":
            node["widgets_values"][1] = next(SEEDS)
        if "Node name for S&R" in node.get("properties", {}):
            node["properties"]["Node name for S&R"] = node["type"]
    workflow["id"] = str(uuid.uuid4())
    return workflow


NODES = f"{GRAPH}.nodes.flatMap(node => node.subgraph?.nodes ?? [node])"
ACTIVE = f"""() => {NODES}.filter(node => node.type === 'KSamplerAdvanced' && node.mode === 0)
.map(node => {{
    const root = node.widgets.find(widget => widget.name === 'wanstream_run')?.element
    if (!root) return null
    return {{ ...root.dataset, bars: root.querySelectorAll('.wanstream-bar[data-wall]').length }}
}})"""
INTO_THE_SUBGRAPH = f"""() => {{
    const outer = {GRAPH}.nodes.find(node => node.subgraph)
    if (outer) window.app.canvas.openSubgraph(outer.subgraph, outer)
}}"""
BOTH_ENDED = f"() => ({ACTIVE})().filter(shown => shown?.ended === 'true').length === 2"


def test_template_of_comfyui_runs_with_loaders_exchanged(frontends, server):
    frontend = frontends.get(settings=NODES_2)
    page = frontend.page
    frontend.load_workflow(template(server))
    page.wait_for_timeout(500)
    page.evaluate(INTO_THE_SUBGRAPH)
    page.wait_for_timeout(500)
    page.evaluate("() => window.app.queuePrompt(0)")
    page.wait_for_function(BOTH_ENDED, timeout=240_000)
    page.wait_for_timeout(700)
    assert [shown["bars"] for shown in page.evaluate(ACTIVE)] == [2, 2]
