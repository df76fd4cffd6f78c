"""A benchmark's bars on the node, and their buttons, with both renderers."""

import time

import pytest

from wanstream.tools.comfyui import PACK
from wanstream.tools.frontend import GRAPH

from .overlay_page import FIND, SAMPLER, WAIT_MS, last_history

pytestmark = [pytest.mark.comfy, pytest.mark.browser, pytest.mark.timeout(600)]

BENCHMARK = "Benchmark"
RANKING = f"""title => {{ {FIND}
    const root = find(title).widgets.find(each => each.name === 'wanstream_ranking')?.element
    return root && [...root.children].map(row => ({{
        name: row.querySelector('.wanstream-rank-name').textContent,
        text: row.querySelector('.wanstream-rank-text').textContent,
        width: row.querySelector('.wanstream-rank-bar').getBoundingClientRect().width
            / row.querySelector('.wanstream-rank-room').getBoundingClientRect().width,
        fastest: row.dataset.fastest,
        action: row.querySelector('.wanstream-rank-action').textContent,
    }}))
}}"""


def ranking(page):
    page.wait(f"title => ({RANKING})(title)?.length", BENCHMARK)
    page.page.wait_for_timeout(300)
    return page.page.evaluate(RANKING, BENCHMARK)


def policy(page):
    """Return the node at the sampler's policy input in the exported graph."""
    prompt = page.frontend.export().prompt
    sampler = next(node for node in prompt.values() if node["class_type"] == "WanStreamSampler")
    return dict(prompt[sampler["inputs"]["policy"][0]])


def undo(page, expected):
    """Take the last step back, and wait until the sampler has the policy before it."""
    page.page.keyboard.press("Control+z")
    deadline = time.monotonic() + WAIT_MS / 1000
    while policy(page) != expected and time.monotonic() < deadline:
        page.page.wait_for_timeout(200)
    assert policy(page) == expected


@pytest.mark.parametrize("renderer", ["nodes-2"], indirect=True)
def test_click_on_a_variant_gives_the_sampler_its_policy(page, renderer):
    workflow_id = page.load(steps=2)
    page.add_benchmark(right=1000, down=0)
    page.set(BENCHMARK, policies="layerwise, block_swap 3, resident", prefetch="2")
    page.look_at(BENCHMARK)
    before = policy(page)
    page.queue()
    rows = ranking(page)
    page.idle()
    outputs = last_history(page.server)["outputs"].values()
    (variants,) = [each["wanstream_ranking"] for each in outputs if "wanstream_ranking" in each]
    names = [variant["name"] for variant in variants]
    assert [row["name"] for row in rows] == [f"✓ {names[0]}", *names[1:]]
    medians = [variant["step_s"] for variant in variants]
    assert medians == sorted(medians)
    widths = [median / medians[-1] for median in medians]
    assert [row["width"] for row in rows] == pytest.approx(widths, abs=0.02)
    assert [row["fastest"] for row in rows] == ["true", "false", "false"]
    assert rows[1]["text"].count(" × · RAM") == 1
    actions = dict(zip(names, (row["action"] for row in rows), strict=True))
    assert actions == {"layerwise, 2 ahead": "Use", "block_swap 3, 2 ahead": "Use", "resident": ""}
    used = [before]
    page.picture(f"benchmark_ranking_{renderer}", x=440, width=300, y=100, height=760)
    for kind, name, widgets in (
        ("WanStreamLayerwise", "layerwise, 2 ahead", {}),
        ("WanStreamBlockSwap", "block_swap 3, 2 ahead", {"blocks_to_swap": 3}),
    ):
        row = page.page.locator(".wanstream-rank", has_text=name)
        row.get_by_role("button").click()
        row.get_by_text("in use").wait_for(timeout=WAIT_MS)
        used.append(policy(page))
        assert used[-1]["class_type"] == kind
        assert used[-1]["inputs"].items() >= {"prefetch_blocks": 2, **widgets}.items()
    height = page.js("return find(title).size[1]", BENCHMARK)
    for expected in (used[1], before):
        undo(page, expected)
        ranking(page)
        assert page.js("return find(title).size[1]", BENCHMARK) == height
    page.reload()
    page.load(steps=2, workflow_id=workflow_id)
    page.add_benchmark(right=1000, down=0)
    assert [row["text"] for row in ranking(page)] == [row["text"] for row in rows]


WAITING_RUN = """([node, workflow, advice]) => {
    const step = index => ({ index, expert: 'low', wall_s: 4, compute_s: 1, stall_s: 3,
        stall_on_read_s: 3, bytes_moved: 1, read_bytes: 1, copy_s: 1, read_s: 3, rss_bytes: 5 })
    const run = { run: 'waits', prompt_id: 'p', node, shown_at: node, workflow, steps: 2,
        experts: ['low', 'low'], switch_step: null, predicted: null, at: 1e12 }
    const timeline = { steps: [step(0), step(1)], changes: [], memory: [] }
    window.app.api.dispatchCustomEvent('wanstream.begin', run)
    window.app.api.dispatchCustomEvent('wanstream.end', { ...run, timeline, advice, error: null })
}"""


def test_waiting_run_gets_the_automatic_policy_by_a_click(classic):
    workflow_id = classic.load(steps=2)
    verdict = classic.page.locator(".wanstream-verdict")
    advice = {"policy": "26 of 40 stream, 2 ahead, all in RAM", "gain": 2.1}
    for said, gain, shown in (
        ({**advice, "gain": 1.0}, "In the free memory no policy is faster.", 0),
        (None, "More blocks in RAM: up to 4.0 × as fast.", 1),
        (advice, "Auto policy: 2.1 × as fast, simulated.", 1),
    ):
        classic.page.evaluate(WAITING_RUN, [classic.id_of(SAMPLER), workflow_id, said])
        verdict.get_by_text(f"Waits 75 % for the disk. {gain}").wait_for(timeout=WAIT_MS)
        assert verdict.get_by_role("button").count() == shown
    remedy = verdict.get_by_role("button", name="Auto policy")
    assert advice["policy"] in remedy.get_attribute("title")
    before = policy(classic)
    assert before["class_type"] == "WanStreamLayerwise"
    remedy.press("Enter")
    verdict.get_by_role("button").wait_for(state="hidden", timeout=WAIT_MS)
    assert policy(classic)["class_type"] == "WanStreamAutoOffload"
    undo(classic, before)


GIVE = f"""async ([policy, change]) => {{
    const {{ givePolicy, hasPolicy, takesPolicy }} =
        await import('/extensions/{PACK}/overlay/policy_nodes.mjs')
    const nodes = {GRAPH}.nodes, sampler = nodes.find(node => node.type === 'WanStreamSampler')
    const source = nodes.find(node => node.type === 'WanStreamLayerwise')
    if (change === 'mute') source.mode = 2
    if (change === 'share') {{
        const other = window.LiteGraph.createNode('WanStreamGuider');
        {GRAPH}.add(other)
        source.connect(0, other, 'policy')
    }}
    if (change === 'inside') {{
        const {{ subgraph }} = {GRAPH}.convertToSubgraph(new Set([sampler]))
        return [takesPolicy(subgraph.nodes.find(node => node.type === 'WanStreamSampler'))]
    }}
    const had = hasPolicy(sampler, policy)
    givePolicy(sampler, policy)
    return [takesPolicy(sampler), had, hasPolicy(sampler, policy), {GRAPH}.nodes.includes(source)]
}}"""


def test_only_a_policy_node_of_its_own_is_changed(classic):
    same = {"type": "WanStreamLayerwise", "values": {"prefetch_blocks": 1}}
    for change, expected in (
        ("none", [True, True, True, True]),
        ("mute", [True, False, True, False]),
        # The policy comes from outside the sampler's subgraph, and is left alone.
        ("inside", [False]),
        ("share", [True, True, True, True]),
    ):
        classic.load(steps=2)
        assert classic.page.evaluate(GIVE, [same, change]) == expected
    other = {"type": "WanStreamLayerwise", "values": {"prefetch_blocks": 3}}
    assert classic.page.evaluate(GIVE, [other, "none"]) == [True, False, True, True]
