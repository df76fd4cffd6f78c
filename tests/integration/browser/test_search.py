"""Common search words for our nodes, in ComfyUI's own frontend search."""

import pytest

pytestmark = [pytest.mark.comfy, pytest.mark.browser]

WORDS = {
    "WanStreamBlockSwap": "block swap",
    "WanStreamLayerwise": "low vram",
    "WanStreamAutoOffload": "offload, oom, cpu",
    "WanStreamExperts": "moe, high noise, gguf, fp8, load diffusion, sage attention, torch compile",
    "WanStreamOneExpert": "unet",
    "WanStreamWorkers": "multigpu",
    "WanStreamImageToVideo": "i2v, flf2v",
    "WanStreamGuidance": "nag",
    "WanStreamLora": "lightning, 4 steps",
    "WanStreamTextEncode": "t5",
    "WanStreamSaveVideo": "mp4",
    "WanStreamContextWindows": "long video",
    "WanStreamLaneSampler": "batch",
    "WanStreamBenchmark": "benchmark",
    "WanStreamLoadDiffusionModel": "unet loader, vace, flux, out of memory, distorch",
    "WanStreamStreamModel": "load checkpoint",
}

# Search results in the "Add node" dialog, best first.
SEARCH = """words => {
    const pinia = document.querySelector('#vue-app').__vue_app__.config.globalProperties.$pinia
    const search = word =>
        pinia._s.get('nodeDef').nodeSearchService.searchNode(word, [], { limit: 64 })
    return Object.fromEntries(words.map(word => [word, search(word).map(def => def.name)]))
}"""


def test_each_word_finds_a_node(frontend, server):
    if "search_aliases" not in server.get("/object_info/KSampler")["KSampler"]:
        pytest.skip("this ComfyUI knows no other words for a node than its name")
    words = {word: name for name, words in WORDS.items() for word in words.split(", ")}
    found = frontend.page.evaluate(SEARCH, list(words))
    missed = {word: found[word][:5] for word, name in words.items() if name not in found[word]}
    assert not missed
