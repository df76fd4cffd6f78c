"""Common search words for our nodes, in ComfyUI's own frontend search."""

from __future__ import annotations

import asyncio

import pytest

from wanstream.nodes import WanStreamExtension

pytestmark = [pytest.mark.comfy, pytest.mark.browser]

NODES = {node.define_schema().node_id for node in asyncio.run(WanStreamExtension().get_node_list())}
WORDS = {
    "block swap": "WanStreamBlockSwap",
    "low vram": "WanStreamLayerwise",
    "offload": "WanStreamAutoOffload",
    "moe": "WanStreamExperts",
    "high noise": "WanStreamExperts",
    "multigpu": "WanStreamWorkers",
    "i2v": "WanStreamImageToVideo",
    "flf2v": "WanStreamImageToVideo",
    "nag": "WanStreamGuidance",
    "gguf": "WanStreamExperts",
    "fp8": "WanStreamExperts",
    "lightning": "WanStreamLora",
    "4 steps": "WanStreamLora",
    "t5": "WanStreamTextEncode",
    "mp4": "WanStreamSaveVideo",
    "long video": "WanStreamContextWindows",
    "batch": "WanStreamLaneSampler",
    "benchmark": "WanStreamBenchmark",
    "load diffusion": "WanStreamExperts",
    "unet": "WanStreamOneExpert",
    "unet loader": "WanStreamLoadDiffusionModel",
    "vace": "WanStreamLoadDiffusionModel",
    "flux": "WanStreamLoadDiffusionModel",
    "load checkpoint": "WanStreamStreamModel",
    "out of memory": "WanStreamLoadDiffusionModel",
    "oom": "WanStreamAutoOffload",
    "distorch": "WanStreamLoadDiffusionModel",
    "cpu": "WanStreamAutoOffload",
    "sage attention": "WanStreamExperts",
    "torch compile": "WanStreamExperts",
}

# Search results in the "Add node" dialog, best first.
SEARCH = """words => {
    const pinia = document.querySelector('#vue-app').__vue_app__.config.globalProperties.$pinia
    const search = word =>
        pinia._s.get('nodeDef').nodeSearchService.searchNode(word, [], { limit: 64 })
    return Object.fromEntries(words.map(word => [word, search(word).map(def => def.name)]))
}"""


def test_each_word_finds_a_node(frontend, server):
    nodes = server.get("/object_info")
    if "search_aliases" not in nodes["KSampler"]:
        pytest.skip("this ComfyUI knows no other words for a node than its name")
    found: dict[str, list[str]] = frontend.page.evaluate(SEARCH, list(WORDS))
    missed = {word: found[word][:5] for word, node in WORDS.items() if node not in found[word]}
    assert not missed
    ours = {name for name, node in nodes.items() if node["category"].startswith("WanStream/")}
    assert ours == NODES
    assert {nodes[name]["category"].removeprefix("WanStream/") for name in ours} == {
        *("loaders", "offload", "sampling", "video", "benchmark"),
    }
