"""Notices on nodes, and a run's first step, in ComfyUI's own frontend with both renderers."""

from __future__ import annotations

import re
from typing import Any

import pytest

from wanstream.tests.integration.browser.test_overlay import (
    ENDED,
    FIND,
    SAMPLER,
    WAIT_MS,
    Page,
    classic,
    page,
    renderer,
)
from wanstream.tools.frontend import READY

pytestmark = [pytest.mark.comfy, pytest.mark.browser, pytest.mark.timeout(600)]

__all__ = ["classic", "page", "renderer"]  # fixtures

LOADER = "WanStreamExperts"
HIGH, LOW = (f"wan2.2_t2v_{place}_noise_14B_fp8_scaled.safetensors" for place in ("high", "low"))

STRIP = f"""title => {{ {FIND}
    const strip = find(title).widgets.find(widget => widget.name === 'wanstream_notices')?.element
    return strip && {{
        ...strip.dataset,
        texts: [...strip.querySelectorAll('.wanstream-notice-text')].map(text => text.textContent),
        buttons: [...strip.querySelectorAll('.wanstream-button')].map(button => button.textContent),
        box: strip.getBoundingClientRect().toJSON(),
    }}
}}"""
GONE = f"title => !({STRIP})(title)"
VALUES = f"title => {{ {FIND}; return find(title).widgets.map(widget => widget.value) }}"

# Widget elements that overlap, or reach out of the node.
COVERED = f"""title => {{ {FIND}
    const {{ ds, canvas }} = window.app.canvas
    const place = canvas.getBoundingClientRect(), node = find(title)
    const elements = node.widgets.map(widget => widget.element)
        .filter(element => element?.isConnected)
    const boxes = elements.map(element => element.getBoundingClientRect())
    const bottom = place.top + (node.pos[1] + node.size[1] + ds.offset[1]) * ds.scale
    const over = boxes.flatMap((one, at) => boxes.slice(at + 1).filter(other =>
        Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top) > 1))
    const out = boxes.filter(box => box.bottom > bottom + 1)
    return [...over.map(box => `over ${{box.top}}`), ...out.map(box => `out ${{box.bottom}}`)]
}}"""


def shown(page: Page, title: str) -> dict[str, Any]:
    page.page.wait_for_function(f"title => Boolean(({STRIP})(title))", arg=title, timeout=WAIT_MS)
    page.page.wait_for_timeout(500)
    found: dict[str, Any] = page.page.evaluate(STRIP, title)
    return found


def test_swapped_experts_are_shown_until_they_are_exchanged(page, renderer):
    workflow_id = page.load(steps=2)
    page.set(LOADER, high_noise=LOW, low_noise=HIGH)
    page.look_at(LOADER)
    page.queue()
    strip = shown(page, LOADER)
    assert (strip["level"], strip["buttons"]) == ("wrong", ["Exchange"])
    assert strip["texts"][0].startswith(f"the experts look swapped: {LOW} is chosen as high_noise")
    assert strip["box"]["width"] > 300
    page.page.wait_for_function(ENDED, arg=[SAMPLER, ""], timeout=WAIT_MS)
    page.idle()
    assert page.page.evaluate(STRIP, LOADER)["texts"] == strip["texts"], "after the run"
    page.picture(f"overlay_notice_{renderer}")
    page.page.evaluate(
        f"title => {{ {FIND}; find(title).widgets.at(-1).element.querySelector('button').click() "
        f"}}",
        LOADER,
    )
    page.page.wait_for_timeout(500)
    opened = page.page.evaluate(STRIP, LOADER)
    assert opened["box"]["height"] > strip["box"]["height"], "the whole text"
    assert page.page.evaluate(COVERED, LOADER) == []

    page.page.reload()
    page.page.wait_for_function(READY, timeout=WAIT_MS)
    page.load(steps=2, workflow_id=workflow_id)
    page.set(
        LOADER, high_noise=HIGH, low_noise=LOW
    )  # 0.18.1 opens a graph with a known id in its last state
    page.look_at(LOADER)
    page.page.wait_for_timeout(1000)
    assert page.page.evaluate(STRIP, LOADER) is None, "the files are in their places"
    page.set(LOADER, high_noise=LOW, low_noise=HIGH)
    assert shown(page, LOADER)["texts"] == strip["texts"]
    page.page.locator(".wanstream-notices .wanstream-button").click()
    page.page.wait_for_function(GONE, arg=LOADER, timeout=WAIT_MS)
    assert page.page.evaluate(VALUES, LOADER)[:2] == [HIGH, LOW]
    assert (
        next(iter(page.frontend.export().prompt.values()))["inputs"]
        .keys()
        .isdisjoint({"wanstream_notices"})
    )


def test_what_makes_the_video_wrong_is_a_message_too(classic):
    classic.load(steps=1)
    classic.set(LOADER, high_noise=HIGH, low_noise=HIGH)
    classic.queue()
    toast = classic.page.locator(".p-toast-message", has_text="is both experts")
    toast.wait_for(timeout=WAIT_MS)
    classic.idle()


def test_guidance_with_a_lora_for_few_steps_is_noticed(classic):
    classic.load(steps=1)
    classic.page.evaluate(
        f"""title => {{ {FIND}
            const lora = window.LiteGraph.createNode('WanStreamLora'), sampler = find(title);
            window.app.rootGraph.add(lora)
            find('{LOADER}').connect(0, lora, 'experts')
            lora.connect(0, sampler, 'experts')
            lora.widgets.find(widget => widget.name === 'high_noise').value =
                'wan2.2_t2v_lightx2v_4steps_lora_v1.1_high_noise.safetensors'
        }}""",
        SAMPLER,
    )
    classic.look_at(SAMPLER, zoom=0.8)
    classic.page.evaluate(
        """() => {
            window.messages = []
            const { toast } = window.app.extensionManager, { add } = toast
            toast.add = (message) => {
                window.messages.push(message.detail)
                return add.call(toast, message)
            }
        }"""
    )
    classic.run()
    classic.set(SAMPLER, seed=2)
    classic.run()
    about = [
        text for text in classic.page.evaluate("window.messages") if "guidance_high is 4" in text
    ]
    assert len(about) == 1, "once for a queue of runs"
    strip = shown(classic, SAMPLER)
    assert "guidance_high is 4: set it to 1" in strip["texts"][0]
    assert classic.page.evaluate(COVERED, SAMPLER) == []
    classic.set(SAMPLER, guidance_high=1.0)
    classic.page.wait_for_function(GONE, arg=SAMPLER, timeout=WAIT_MS)


def test_first_step_shows_its_blocks_and_its_time(classic):
    classic.load(steps=2)
    classic.set("WanStreamEmptyLatent", width=640, height=480, frames=9)
    classic.page.evaluate(
        """() => {
            window.shares = []
            window.app.api.addEventListener('progress_state', ({ detail }) => {
                for (const node of Object.values(detail.nodes))
                    if (node.max === 2) window.shares.push(node.value)
            })
        }"""
    )
    classic.queue()
    line = (
        f"title => {{ {FIND}; return "
        f"overlay(title).querySelector('.wanstream-line-text').textContent }}"
    )
    classic.page.wait_for_function(
        f"title => /^block [1-9]/.test(({line})(title))", arg=SAMPLER, timeout=WAIT_MS
    )
    text = classic.page.evaluate(line, SAMPLER)
    assert re.match(r"block \d+/4 · 0:\d\d elapsed · first step reads the weights", text), text
    share = (
        f"title => {{ {FIND}; return overlay(title).querySelector('.wanstream-share').style.width "
        f"}}"
    )
    assert 0 < float(classic.page.evaluate(share, SAMPLER).removesuffix("%")) <= 100
    classic.page.wait_for_function(ENDED, arg=[SAMPLER, ""], timeout=WAIT_MS)
    assert classic.page.evaluate("() => window.shares.some(share => share > 0 && share < 1)"), (
        "ComfyUI's own bar"
    )
    assert " elapsed" not in classic.shown()["line"]
