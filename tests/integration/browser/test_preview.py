"""Moving previews on the sampler, in ComfyUI's own frontend, during a run on the test model.

`WANSTREAM_IMAGES` names a folder for the documentation's pictures. Without it none are kept.
"""

from __future__ import annotations

import io
import os
import uuid
from pathlib import Path

import pytest
from PIL import Image

from wanstream.tools.comfyui import Server, find_comfyui
from wanstream.tools.frontend import CLASSIC, GRAPH, NODES_2, Frontend, SharedFrontends
from wanstream.tools.templates import template

pytestmark = [pytest.mark.comfy, pytest.mark.browser, pytest.mark.timeout(600)]

RENDERERS = {"classic": CLASSIC, "nodes-2": NODES_2}
WAIT_MS = 120_000
SMALL = {
    "WanStreamEmptyLatent": {"width": 128, "height": 80, "frames": 17},
    "WanStreamExperts": {"compute_dtype": "fp32"},
    "WanStreamPreview": {"frames": 17, "every_s": 0.0},
    "WanStreamSampler": {"steps": 20, "seed": 77},
}

SET = f"""values => {{
    for (const node of {GRAPH}.nodes)
        for (const [name, value] of Object.entries(values[node.type] ?? {{}}))
            node.widgets.find(widget => widget.name === name).value = value
}}"""
LOOK = f"""zoom => {{
    const node = {GRAPH}.nodes.find(node => node.type === 'WanStreamSampler')
    const {{ ds }} = window.app.canvas
    ds.scale = zoom
    ds.offset[0] = 450 / zoom - node.pos[0]; ds.offset[1] = 120 / zoom - node.pos[1]
    window.app.canvas.setDirty(true, true)
}}"""
IMAGE = f"""{GRAPH}.nodes.find(node => node.type === 'WanStreamSampler')
    .widgets.find(widget => widget.name === 'wanstream_run')
    .element.querySelector('.wanstream-preview')"""
# The browser has decoded the picture and gives it room.
VISIBLE = f"""() => {{
    const image = {IMAGE}
    return !image.hidden && image.complete && image.naturalWidth > 0
        && image.getBoundingClientRect().height > 50
}}"""
SHOWN = f"""() => {{
    const image = {IMAGE}, box = image.getBoundingClientRect()
    return {{ src: image.src, alt: image.alt,
        width: image.naturalWidth, height: image.naturalHeight,
        ended: image.parentElement.dataset.ended,
        box: {{ x: box.x, y: box.y, width: box.width, height: box.height }} }}
}}"""
ENDED = f"() => ({IMAGE}).parentElement.dataset.ended === 'true'"
NODE_PREVIEWS = (
    f"() => {GRAPH}.nodes.find(node => node.type === 'WanStreamSampler').imgs?.length ?? 0"
)


def colours(frontend: Frontend, box: dict[str, float]) -> bytes:
    """The preview's pixels on the screen."""
    with Image.open(io.BytesIO(frontend.page.screenshot(clip=box))) as picture:
        return picture.convert("RGB").tobytes()


@pytest.mark.parametrize("renderer", RENDERERS)
def test_frames_move_on_the_sampler_while_it_runs_and_stay_afterwards(
    frontends: SharedFrontends, server: Server, renderer: str
) -> None:
    if renderer == "nodes-2" and find_comfyui().version() < (0, 4):
        pytest.skip("the Nodes 2.0 of this ComfyUI is a trial that shows no widgets of others")
    workflow = {**template("draft"), "id": str(uuid.uuid4())}  # without runs
    settings = {
        **SMALL,
        "WanStreamSampler": {"steps": 20, "seed": 77 + [*RENDERERS].index(renderer)},
    }
    frontend = frontends.get(height=1080, settings=RENDERERS[renderer])
    page = frontend.page
    frontend.load_workflow(workflow)
    page.evaluate(SET, settings)
    page.evaluate(LOOK, 0.9)
    assert page.evaluate(f"() => ({IMAGE}).hidden"), "there was no run"
    page.evaluate("() => window.app.queuePrompt(0)")
    page.wait_for_function(VISIBLE, timeout=WAIT_MS)
    live = page.evaluate(SHOWN)
    assert live["ended"] == "false"
    page.wait_for_function(ENDED, timeout=WAIT_MS)
    page.wait_for_timeout(500)
    shown = page.evaluate(SHOWN)
    for found in (live, shown):
        assert found["src"].startswith("data:image/webp;base64,")
        assert (found["width"], found["height"]) == (128, 80)
        assert found["alt"].startswith("The first frames of the video, as estimated in step ")
    assert int(shown["alt"].split()[-1]) >= int(live["alt"].split()[-1]) >= 1
    assert not page.evaluate(NODE_PREVIEWS), "ComfyUI's own preview is not shown as well"
    seen = {colours(frontend, shown["box"]) for _ in range(8) if page.wait_for_timeout(130) is None}
    assert len(seen) > 1, "the picture moves"
    assert frontend.complaints() == []
    if folder := os.environ.get("WANSTREAM_IMAGES"):
        clip = {"x": 380, "y": 60, "width": 720, "height": 1000}
        with Image.open(io.BytesIO(page.screenshot(clip=clip))) as picture:
            picture.convert("RGB").save(Path(folder) / f"preview_{renderer}.png", optimize=True)
