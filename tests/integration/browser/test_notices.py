"""Notices on nodes, and a run's first step, in ComfyUI's own frontend with both renderers."""

import re

import pytest

from wanstream.tools.frontend import GRAPH

from .overlay_page import FIND, SAMPLER, WAIT_MS

pytestmark = [pytest.mark.comfy, pytest.mark.browser, pytest.mark.timeout(600)]

LOADER = "WanStreamExperts"
LORA = "wan2.2_t2v_lightx2v_4steps_lora_v1.1_high_noise.safetensors"
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
LINE = f"""title => {{ {FIND}
    return overlay(title).querySelector('.wanstream-line-text').textContent
}}"""

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


def shown(page, title):
    page.wait(f"title => Boolean(({STRIP})(title))", title)
    page.page.wait_for_timeout(500)
    return page.page.evaluate(STRIP, title)


def test_swapped_experts_are_shown_until_they_are_exchanged(page, renderer):
    workflow_id = page.load(steps=2)
    page.set(LOADER, high_noise=LOW, low_noise=HIGH)
    page.look_at(LOADER)
    page.queue()
    strip = shown(page, LOADER)
    assert (strip["level"], strip["buttons"]) == ("wrong", ["Exchange"])
    assert strip["texts"][0].startswith(f"the experts look swapped: {LOW} is chosen as high_noise")
    assert strip["box"]["width"] > 300
    page.until_ended()
    assert page.page.evaluate(STRIP, LOADER)["texts"] == strip["texts"], "after the run"
    page.picture(f"overlay_notice_{renderer}")
    page.js("find(title).widgets.at(-1).element.querySelector('button').click()", LOADER)
    page.page.wait_for_timeout(500)
    opened = page.page.evaluate(STRIP, LOADER)
    assert opened["box"]["height"] > strip["box"]["height"], "the whole text"
    assert page.page.evaluate(COVERED, LOADER) == []

    page.reload()
    page.load(steps=2, workflow_id=workflow_id)
    # 0.18.1 opens a graph with a known id in its last state.
    page.set(LOADER, high_noise=HIGH, low_noise=LOW)
    page.look_at(LOADER)
    page.page.wait_for_timeout(1000)
    assert page.page.evaluate(STRIP, LOADER) is None, "the files are in their places"
    page.set(LOADER, high_noise=LOW, low_noise=HIGH)
    assert shown(page, LOADER)["texts"] == strip["texts"]
    page.page.locator(".wanstream-notices .wanstream-button").click()
    page.wait(GONE, LOADER)
    values = page.js("return find(title).widgets.map(widget => widget.value)", LOADER)
    assert values[:2] == [HIGH, LOW]
    assert "wanstream_notices" not in next(iter(page.frontend.export().prompt.values()))["inputs"]


def test_what_makes_the_video_wrong_is_a_message_too(classic):
    classic.load(steps=1)
    classic.set(LOADER, high_noise=HIGH, low_noise=HIGH)
    classic.queue()
    classic.page.locator(".p-toast-message", has_text="is both experts").wait_for(timeout=WAIT_MS)
    classic.idle()


def test_guidance_with_a_lora_for_few_steps_is_noticed(classic):
    classic.load(steps=1)
    with_lora = f"""const graph = {GRAPH}
        const lora = window.LiteGraph.createNode('WanStreamLora')
        graph.add(lora)
        find('{LOADER}').connect(0, lora, 'experts')
        lora.connect(0, find(title), 'experts')
        lora.widgets.find(widget => widget.name === 'high_noise').value = '{LORA}'"""
    record_messages = """window.messages = []
        const { toast } = window.app.extensionManager
        const { add } = toast
        toast.add = message => {
            window.messages.push(message.detail)
            return add.call(toast, message)
        }"""
    classic.js(with_lora)
    classic.js(record_messages)
    classic.look_at(SAMPLER, zoom=0.8)
    classic.run()
    classic.set(SAMPLER, seed=2)
    classic.run()
    messages = classic.page.evaluate("window.messages")
    assert ["guidance_high is 4" in text for text in messages].count(True) == 1, "once for a queue"
    strip = shown(classic, SAMPLER)
    assert "guidance_high is 4: set it to 1" in strip["texts"][0]
    assert classic.page.evaluate(COVERED, SAMPLER) == []
    classic.set(SAMPLER, guidance_high=1.0)
    classic.wait(GONE)


def test_first_step_shows_its_blocks_and_its_time(classic):
    classic.load(steps=2)
    classic.set("WanStreamEmptyLatent", width=640, height=480, frames=9)
    kept = """() => {
        window.shares = []
        window.app.api.addEventListener('progress_state', ({ detail }) => window.shares.push(
            ...Object.values(detail.nodes).filter(each => each.max === 2).map(each => each.value)))
    }"""
    classic.page.evaluate(kept)
    classic.queue()
    classic.wait(f"title => /^block [1-9]/.test(({LINE})(title))")
    text = classic.page.evaluate(LINE, SAMPLER)
    # The time left is known if an earlier run in this server has measured the machine.
    words = r"block \d+/4 · (0:\d\d left · )?0:\d\d elapsed · first step reads the weights"
    assert re.match(words, text), text
    share = classic.js("return overlay(title).querySelector('.wanstream-share').style.width")
    assert 0 < float(share.removesuffix("%")) <= 100
    classic.until_ended()
    # ComfyUI's own bar.
    assert classic.page.evaluate("() => window.shares.some(share => share > 0 && share < 1)")
    assert " elapsed" not in classic.shown()["line"]
