"""ComfyUI's own samplers with a streamed native model: the overlay is at the sampler."""

import re
import uuid

import pytest

from wanstream.tests.support.host.shipped import node
from wanstream.tools.frontend import CLASSIC, GRAPH, NODES_2, SharedFrontends

from .overlay_page import FIND, SEEDS, SHOWN, Page, need_frontend_of_0_4, serve

pytestmark = [pytest.mark.comfy, pytest.mark.browser, pytest.mark.timeout(600)]

STEPS = 6
ENDED = f"type => ({SHOWN})(type)?.numbers.startsWith('Queue to file')"
QUEUE_TO_FILE = r"Queue to file (\S+) s: (\S+) s before the steps, (\S+) s in them, (\S+) s after"


def k_sampler(model, family, seed):
    """Return the API graph for a model and ComfyUI's sampler node."""
    links = {"positive": ["2", 0], "negative": ["2", 1], "latent_image": ["2", 2]}
    settings = {"sampler_name": "euler", "scheduler": "simple", "denoise": 1.0, "cfg": 3.0}
    return {
        "1": node("WanStreamLoadDiffusionModel", unet_name=model, weight_dtype="default"),
        "2": node("TestFamily", family=family),
        "3": node("KSampler", model=["1", 0], seed=seed, steps=STEPS, **links, **settings),
        "4": node("TestDigest", latent=["3", 0]),
    }


def custom_sampler(model, family, seed):
    """Return the same with a sampler's parts as nodes."""
    parts = {"noise": ["5", 0], "guider": ["6", 0], "sampler": ["7", 0], "sigmas": ["8", 0]}
    guided = {"model": ["1", 0], "positive": ["2", 0], "negative": ["2", 1], "cfg": 3.0}
    scheduled = {"model": ["1", 0], "scheduler": "simple", "steps": STEPS, "denoise": 1.0}
    return {
        **k_sampler(model, family, seed),
        "3": node("SamplerCustomAdvanced", **parts, latent_image=["2", 2]),
        "5": node("RandomNoise", noise_seed=seed),
        "6": node("CFGGuider", **guided),
        "7": node("KSamplerSelect", sampler_name="euler"),
        "8": node("BasicScheduler", **scheduled),
    }


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    yield from serve(tmp_path_factory.mktemp("native"), "native.py", "clip.py")


@pytest.fixture(scope="module")
def frontends(browser, server):
    with SharedFrontends(browser, server) as frontends:
        yield frontends


@pytest.mark.parametrize(
    ("sampler", "graph", "renderer"),
    [
        pytest.param("KSampler", k_sampler, CLASSIC, id="k-classic"),
        pytest.param("SamplerCustomAdvanced", custom_sampler, NODES_2, id="custom-nodes-2"),
    ],
)
def test_overlay_appears_at_a_sampler_of_comfyui(frontends, server, sampler, graph, renderer):
    if renderer == NODES_2:
        need_frontend_of_0_4("this Nodes 2.0 is a trial that shows no widgets of others")
    page = Page(frontends.get(settings=renderer), server)
    loaded = graph("tiny_wan_t2v.safetensors", "wan_t2v", next(SEEDS))
    page.page.evaluate("graph => window.app.loadApiJson(graph, 'native.json')", loaded)
    page.page.wait_for_timeout(500)
    assert page.shown(sampler) is None, "a sampler without a streamed run has no overlay"
    page.queue()
    page.wait(ENDED, sampler)
    page.page.wait_for_timeout(700)
    shown = page.shown(sampler)
    assert (shown["ended"], len(shown["bars"])) == ("true", STEPS)
    assert shown["box"]["width"] > 100
    queue_to_file = re.match(QUEUE_TO_FILE, shown["numbers"])
    assert queue_to_file is not None, shown["numbers"]
    total, *phases = map(float, queue_to_file.groups())
    assert min(phases) >= 0 < phases[1]
    assert sum(phases) == pytest.approx(total, abs=0.1), "rounded"
    saved = page.frontend.export().workflow["nodes"]
    (values,) = (each.get("widgets_values", ()) for each in saved if each["type"] == sampler)
    assert len(values) == (7 if sampler == "KSampler" else 0), "the overlay is not saved"
    page.picture(f"native_{sampler.lower()}", x=80, y=78, width=800, height=640)


EXCHANGED = {"UNETLoader": "WanStreamLoadDiffusionModel", "CLIPLoader": "TestClip"}
"""Our loader for ComfyUI's. The sample text encoder needs another loader with the same inputs."""
VALUES = {"PrimitiveBoolean": [True], "EmptyHunyuanLatentVideo": [64, 48, 9, 1]}


def template(server):
    """Return ComfyUI's own Wan2.2 T2V template with two experts and LoRAs.

    The loaders are exchanged, and it is small and has 4 steps. Newer templates have everything in a
    subgraph, with a switch for 4 steps and the duration in seconds.
    """
    workflow = server.get("/templates/video_wan2_2_14B_t2v.json")
    graphs = [workflow, *workflow.get("definitions", {}).get("subgraphs", ())]
    for each in (each for graph in graphs for each in graph["nodes"]):
        if each["type"] in VALUES:
            each["widgets_values"] = VALUES[each["type"]]
        if each["type"] == "PrimitiveFloat" and each["widgets_values"] == [5]:
            each["widgets_values"] = [0.5]
        if each["type"] == "KSamplerAdvanced":
            each["widgets_values"][1] = next(SEEDS)
        each["type"] = EXCHANGED.get(each["type"], each["type"])
        if "Node name for S&R" in each.get("properties", {}):
            each["properties"]["Node name for S&R"] = each["type"]
    workflow["id"] = str(uuid.uuid4())
    return workflow


# Bar counts at each sampler, in runs that have ended.
BARS = f"""() => {{ {FIND}
    const samplers = [...every({GRAPH})].filter(node => node.type === 'KSamplerAdvanced')
    return samplers.filter(node => node.mode === 0)
        .map(node => node.widgets.find(widget => widget.name === 'wanstream_run')?.element)
        .filter(root => root?.dataset.ended === 'true').map(root => bars(root).length)
}}"""
INTO_THE_SUBGRAPH = f"""() => {{
    const outer = {GRAPH}.nodes.find(node => node.subgraph)
    if (outer) window.app.canvas.openSubgraph(outer.subgraph, outer)
}}"""


def test_template_of_comfyui_runs_with_loaders_exchanged(frontends, server):
    need_frontend_of_0_4("this ComfyUI reads no VAE with the widths of the test model")
    frontend = frontends.get(settings=NODES_2)
    page = frontend.page
    frontend.load_workflow(template(server))
    page.wait_for_timeout(500)
    page.evaluate(INTO_THE_SUBGRAPH)
    page.wait_for_timeout(500)
    page.evaluate("() => window.app.queuePrompt(0)")
    page.wait_for_function(f"() => ({BARS})().length === 2", timeout=240_000)
    page.wait_for_timeout(700)
    assert page.evaluate(BARS) == [2, 2]
