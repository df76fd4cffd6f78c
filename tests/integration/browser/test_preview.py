"""Moving previews on the sampler, in ComfyUI's own frontend, during a run on the test model."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from wanstream.tests.integration.browser.test_overlay import (
    FIND,
    SAMPLER,
    WAIT_MS,
    Page,
    page,
    renderer,
)

pytestmark = [pytest.mark.comfy, pytest.mark.browser, pytest.mark.timeout(600)]

__all__ = ["page", "renderer"]  # fixtures

# The browser has decoded the picture and gives it room.
SHOWN = f"""title => {{ {FIND}
    const image = overlay(title).querySelector('.wanstream-preview')
    const box = image.getBoundingClientRect()
    return {{ src: image.src, alt: image.alt,
        width: image.naturalWidth, height: image.naturalHeight, hidden: image.hidden,
        visible: !image.hidden && image.complete && image.naturalWidth > 0 && box.height > 50,
        ended: overlay(title).dataset.ended === 'true', ofComfyui: find(title).imgs?.length ?? 0,
        box: {{ x: box.x, y: box.y, width: box.width, height: box.height }} }}
}}"""


def colours(page: Page, box: dict[str, float]) -> bytes:
    """The preview's pixels on the screen."""
    with Image.open(io.BytesIO(page.page.screenshot(clip=box))) as picture:
        return picture.convert("RGB").tobytes()


def test_frames_move_on_the_sampler_and_stay_afterwards(page, renderer):
    page.load("draft", steps=20)
    page.set("WanStreamEmptyLatent", width=128, height=80, frames=17)
    page.set("WanStreamPreview", frames=17, every_s=0.0)
    page.look_at(SAMPLER, zoom=0.9)
    assert page.page.evaluate(SHOWN, SAMPLER)["hidden"], "there was no run"
    page.queue()
    page.page.wait_for_function(f"title => ({SHOWN})(title).visible", arg=SAMPLER, timeout=WAIT_MS)
    live = page.page.evaluate(SHOWN, SAMPLER)
    assert not live["ended"]
    page.page.wait_for_function(f"title => ({SHOWN})(title).ended", arg=SAMPLER, timeout=WAIT_MS)
    page.page.wait_for_timeout(500)
    shown = page.page.evaluate(SHOWN, SAMPLER)
    for found in (live, shown):
        assert found["src"].startswith("data:image/webp;base64,")
        assert (found["width"], found["height"]) == (128, 80)
        assert found["alt"].startswith("The first frames of the video, as estimated in step ")
    assert int(shown["alt"].split()[-1]) >= int(live["alt"].split()[-1]) >= 1
    assert not shown["ofComfyui"], "ComfyUI's own preview is not shown as well"
    seen = set()
    for _ in range(8):
        page.page.wait_for_timeout(130)
        seen.add(colours(page, shown["box"]))
    assert len(seen) > 1, "the picture moves"
    assert page.frontend.complaints() == []
    page.picture(f"preview_{renderer}", height=1000)
