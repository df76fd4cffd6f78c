"""The overlay in ComfyUI's frontend, classic canvas and Nodes 2.0, in runs on the test model."""

import csv
import io
import json
import re
import uuid
from pathlib import Path

import pytest
from PIL import Image

from wanstream.schema.records.timeline import Timeline
from wanstream.schema.text.numbers import format_rate, format_seconds, format_size
from wanstream.tests.support.host.shipped import node
from wanstream.tools.build_workflows import SHOW
from wanstream.tools.frontend import GRAPH, opened_frontend

from .conftest import RENDERERS
from .overlay_page import FIND, HEIGHT, SAMPLER, SEEDS, WAIT_MS, Page, last_history

pytestmark = [pytest.mark.comfy, pytest.mark.browser, pytest.mark.timeout(600)]

EXECUTE = "name => window.app.extensionManager.command.execute(name)"


def timeline_of(server, title=SAMPLER):
    """The timeline in the last queue item's history.

    It belongs to the node with this title, or else this class.
    """
    history = last_history(server)
    prompt = history["prompt"][2]
    titled = [node_id for node_id, node in prompt.items() if node["_meta"]["title"] == title]
    of_class = [node_id for node_id, node in prompt.items() if node["class_type"] == title]
    (node_id, *_) = titled or of_class
    return Timeline.from_dict(history["outputs"][node_id]["wanstream_timeline"][0])


def assert_shows(shown, timeline):
    """The bars are the timeline's steps, to the last bit."""
    steps = [(step.compute_s, step.stall_s, step.wall_s) for step in timeline.steps]
    names = ("compute", "stall", "wall")
    assert [tuple(float(bar[name]) for name in names) for bar in shown["bars"]] == steps
    seconds = timeline.wall_s
    took = f"{format_seconds(seconds)} s" if seconds < 60 else f"{seconds // 60:.0f}:"
    assert shown["line"].startswith(f"{len(steps)} steps in {took}")
    assert " s/step · " in shown["line"]
    shown_stall = f"stall {format_seconds(timeline.stall_s)} s" in shown["line"]
    assert shown_stall == (timeline.stall_s > 0.005 * timeline.wall_s)
    assert re.search(r"[\d.]+( [MG]B)? of [\d.]+ GB RAM$", shown["line"])
    experts = [step.expert for step in timeline.steps]
    assert shown["marked"] == str(experts.index("low"))
    assert int(shown["peak"]) == max(step.memory.rss_bytes or 0 for step in timeline.steps)


def test_run_is_shown_live_and_after_a_reload(page, renderer):
    workflow_id = page.load(steps=60)
    assert page.shown()["run"] == ""
    page.queue()
    page.until_under_way()
    live = page.shown()
    assert 1 < len(live["bars"]) < 60 == live["columns"]
    assert re.match(r"step \d+/60 · [\d.]+ s/step · \d+:\d\d left · ", live["line"]), live["line"]
    sampler = page.id_of(SAMPLER)
    assert re.fullmatch(r"[\d.]+ s · [\d.]+ [MG]B RAM", page.badges()[sampler])
    page.picture(f"overlay_live_{renderer}")
    page.until_ended()
    timeline = timeline_of(page.server)
    ended = page.shown()
    assert_shows(ended, timeline)
    steps = [(step.start_s, step.start_s + step.wall_s) for step in timeline.steps]
    # The chart does not show samples between two steps.
    times = [sample.at_s for sample in timeline.memory]
    assert ended["samples"] == sum(began <= at < end for began, end in steps for at in times) > 0
    assert ended["bars"][: len(live["bars"])] == live["bars"]
    badges = page.badges()
    history = last_history(page.server)
    assert badges.keys() == history["prompt"][2].keys(), "a badge on every node of the graph"
    assert {*badges.values()} - {"cached", "not run"}
    began, *_, over = (data["timestamp"] / 1000 for _, data in history["status"]["messages"])
    # A busy page gets the events of a node's start and end late.
    assert timeline.wall_s / 2 < float(badges[sampler].split()[0]) < 2 * (over - began)
    page.look_at(SAMPLER, zoom=0.85)
    page.picture(f"overlay_{renderer}")

    page.reload()
    page.load(steps=60, workflow_id=workflow_id)
    page.until_ended()
    again = page.shown()
    assert_shows(again, timeline)
    assert (again["run"], again["line"]) == (ended["run"], ended["line"])
    assert page.badges() == {}, "this page has not followed the run"


def test_run_in_a_subgraph_is_shown_inside_and_outside(page, renderer):
    page.load()
    page.js(f"{GRAPH}.convertToSubgraph(new Set([find(title)])).node.title = 'Inside'")
    page.queue()
    page.until_ended()
    outside = page.badges()
    inside_id = page.id_of("Inside")
    assert inside_id in outside
    page.js("window.app.canvas.openSubgraph(find(title).subgraph, find(title))", "Inside")
    page.page.wait_for_timeout(500)
    page.look_at(SAMPLER, zoom=0.85)
    shown = page.shown()
    assert shown["box"]["width"] > 0, "it is to be seen inside"
    assert_shows(shown, timeline_of(page.server))
    assert list(page.badges().values()) == [outside[inside_id]]
    page.picture(f"overlay_subgraph_{renderer}")


def test_older_answer_does_not_end_a_new_run(classic):
    held = []
    classic.load()
    classic.page.route("**/wanstream/runs", lambda route: held.append((route, route.fetch())))
    classic.reload()
    classic.load(steps=500)
    classic.queue()
    classic.until_under_way()
    assert held
    for route, answer in held:
        route.fulfill(response=answer)
    classic.page.wait_for_timeout(500)
    shown = classic.shown()
    assert shown["ended"] == "false"
    assert shown["line"].startswith("step ")
    classic.server.post("/interrupt", {})
    classic.until_ended()
    shown = classic.shown()
    assert "of 500 steps: cancelled" in shown["line"]
    assert shown["bars"]
    badges = classic.badges()
    assert badges[classic.id_of(SAMPLER)].endswith(" RAM")
    assert "not run" in badges.values(), "what comes after it"


def test_overlays_of_graphs_that_are_gone_are_gone(unused):
    """ComfyUI does not notify nodes inside a subgraph when their graph is replaced.

    Every undo replaces it.
    """
    unused.load()
    unused.js(f"{GRAPH}.convertToSubgraph(new Set([find(title)]))")
    workflow = unused.frontend.export().workflow
    for _ in range(6):
        unused.js("(window.seen ??= []).push(new WeakRef(overlay(title)))")
        unused.frontend.load_workflow(workflow)
        unused.page.wait_for_timeout(200)
    unused.page.context.new_cdp_session(unused.page).send("HeapProfiler.collectGarbage")
    assert unused.page.evaluate("window.seen.filter(each => each.deref()).length") <= 2


def test_the_overlay_speaks_chinese_where_comfyui_does(frontends, server):
    page = Page(frontends.get(height=HEIGHT, settings={"Comfy.Locale": "zh"}), server)
    page.load(steps=4)
    assert page.shown()["line"] == "WanStream：尚无运行"
    shown = page.run()
    timeline = timeline_of(server)
    assert shown["line"].startswith(f"4 步，用时 {format_seconds(timeline.wall_s)} s · ")
    assert "内存" in shown["line"]
    assert "指向一个条形" in shown["numbers"]
    assert any("内存" in text for text in page.badges().values())
    page.js("overlay(title).querySelector('.wanstream-plot').focus()")
    page.page.keyboard.press("ArrowRight")
    assert page.shown()["numbers"].startswith("步 0（高噪）")
    open_table(page)
    heads = page.page.locator(".wanstream-table th").all_inner_texts()
    assert heads[1:5] == ["时间", "节点", "尺寸", "精度"]
    assert page.page.get_by_text("WanStream 运行记录").count() > 0
    # The CSV keeps English names, because other programs read it.
    assert "wall" in download(page, "CSV").splitlines()[0]


@pytest.mark.parametrize("renderer", ["nodes-2"], indirect=True)
def test_prediction_is_drawn_as_an_outline(page, renderer):
    page.load(steps=4)
    # Choosing a policy measures an unknown machine. From then on every run is predicted.
    page.js(
        f"const policy = window.LiteGraph.createNode('WanStreamAutoOffload'); {GRAPH}.add(policy);"
        "policy.connect(0, find(title), 'policy')"
    )
    page.run()
    page.load(steps=16)
    shown = page.run()
    assert_shows(shown, timeline_of(page.server))
    runs = page.server.get("/wanstream/runs")["runs"]
    (run,) = (run for run in runs if run["run"] == shown["run"])
    assert shown["predicted"] == [step["wall_s"] for step in run["predicted"]["steps"]]
    assert len(shown["predicted"]) == 16
    page.look_at(SAMPLER, zoom=0.85)
    page.picture(f"overlay_predicted_{renderer}")


# The copy has the same inputs.
PASTE = """const { canvas } = window.app
    canvas.copyToClipboard([find(title)])
    canvas.pasteFromClipboard({ connectInputs: true })"""


def test_two_samplers_show_a_run_each(classic):
    classic.load(steps=8)
    classic.js(f"{PASTE}; {GRAPH}.nodes.at(-1).title = 'Second'")
    classic.set("Second", steps=6, seed=next(SEEDS))
    classic.add_benchmark("Second", right=340, down=0)
    before = {title: classic.shown(title)["run"] for title in (SAMPLER, "Second")}
    classic.queue()
    for title, run in before.items():
        classic.until_ended(title, run)
    for title, steps in ((SAMPLER, 8), ("Second", 6)):
        classic.look_at(title)
        shown = classic.shown(title)
        assert len(shown["bars"]) == steps
        assert_shows(shown, timeline_of(classic.server, title))


def test_second_window_sees_what_the_first_one_runs(browser, classic):
    workflow_id = classic.load(steps=40)
    with opened_frontend(browser, classic.server) as frontend:
        other = Page(frontend, classic.server)
        other.load(steps=40, workflow_id=workflow_id)
        classic.queue()
        other.until_under_way()
        for each in (other, classic):
            each.until_ended()
        assert other.shown()["bars"] == classic.shown()["bars"]
        assert len(classic.badges()) == 7
        # ComfyUI sends the events of nodes to the page that queued them.
        assert other.badges() == {}


def test_run_is_shown_after_another_tab_was_open(classic):
    classic.load(steps=40)
    classic.queue()
    classic.until_under_way()
    classic.page.evaluate(EXECUTE, "Comfy.NewBlankWorkflow")
    classic.page.wait_for_function(f"() => {GRAPH}.nodes.length === 0")
    assert classic.badges() == {}
    classic.idle()
    classic.page.evaluate(EXECUTE, "Workspace.PreviousOpenedWorkflow")
    classic.page.wait_for_function(f"() => {GRAPH}.nodes.length > 0")
    classic.until_ended()
    classic.look_at(SAMPLER)
    assert_shows(classic.shown(), timeline_of(classic.server))
    assert len(classic.badges()) == 7


def test_reload_during_a_run_shows_no_guessed_times(classic):
    # Enough for a slow page to come back within the run.
    workflow_id = classic.load(steps=1000)
    classic.queue()
    classic.until_under_way()
    classic.reload()
    classic.load(steps=1000, workflow_id=workflow_id)
    classic.until_under_way()
    classic.server.post("/interrupt", {})
    classic.until_ended()
    assert classic.badges() == {}
    classic.set(SAMPLER, steps=1)
    classic.run()
    assert len(classic.badges()) == 7


def test_nodes_of_other_packs_have_badges_without_memory(classic):
    value = node("PrimitiveString", value=str(uuid.uuid4()))
    classic.frontend.load_prompt({"1": value, "2": node("PreviewAny", source=["1", 0])})
    classic.queue()
    classic.wait("() => document.querySelectorAll('.wanstream-badge').length === 2")
    classic.idle()
    assert classic.badges() == {"1": "< 0.1 s", "2": "< 0.1 s"}
    classic.queue()
    classic.wait("() => document.querySelector('.wanstream-badge').textContent === 'cached'")


def test_overlay_opens_and_closes_by_keyboard(page):
    page.load(steps=6)
    page.run()
    before = page.frontend.export().prompt
    full = page.shown()["box"]["height"]
    page.js("overlay(title).querySelector('button').focus()")
    page.page.keyboard.press("Enter")
    page.page.wait_for_timeout(500)
    closed = page.shown()
    assert (closed["open"], closed["box"]["height"] < full / 2) == ("false", True)
    after = page.frontend.export()
    for each in (*before.values(), *after.prompt.values()):
        # ComfyUI adds a widget when the browser has loaded a video.
        each["inputs"].pop("video-preview", None)
        assert "wanstream_run" not in each["inputs"]
    assert after.prompt == before
    (node,) = (node for node in after.workflow["nodes"] if node["type"] == "WanStreamSampler")
    assert node["properties"]["wanstream_overlay"] == "closed"
    assert page.run()["bars"] == closed["bars"], "nothing is drawn while it is closed"
    page.page.keyboard.press("Enter")
    page.page.wait_for_timeout(500)
    assert_shows(page.shown(), timeline_of(page.server))


def test_arrow_keys_and_mouse_show_numbers_of_steps(page):
    page.load(steps=4)
    page.run()
    page.look_at(SAMPLER, zoom=0.9)
    plot = "overlay(title).querySelector('.wanstream-plot')"
    page.js(f"{plot}.focus()")
    for step in timeline_of(page.server).steps:
        page.page.keyboard.press("ArrowRight")
        text = page.shown()["numbers"]
        assert f"step {step.index} ({step.expert})" in text
        seconds = [format_seconds(value) for value in (step.wall_s, step.compute_s, step.stall_s)]
        assert "{} s = compute {} s".format(*seconds) in text
        assert f"stall {seconds[2]} s" in text
        assert f"{format_size(step.bytes_moved)} moved" in text
        moved = step.transfers
        if moved.read_bytes_per_s is not None:
            read = f"{format_size(moved.read_bytes)} read at {format_rate(moved.read_bytes_per_s)}"
            assert read in text
    page.page.keyboard.press("Escape")
    assert "Point at a bar" in page.shown()["numbers"]
    box = page.js(f"return {plot}.getBoundingClientRect().toJSON()")
    page.page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] * 0.5)
    page.page.wait_for_timeout(200)
    assert "step 2 " in page.shown()["numbers"]


def test_all_views_have_the_numbers_of_the_timeline(classic):
    classic.load(steps=6)
    classic.add_benchmark(right=330, down=480)
    classic.run()
    timeline = timeline_of(classic.server)
    assert_shows(classic.shown(), timeline)
    assert_shows(classic.shown("Benchmark"), timeline)

    written = sorted((classic.server.base / "output" / "benchmark").glob("*.json"))[-1]
    (variant,) = json.loads(written.read_text(encoding="utf-8"))["variants"]
    (trial,) = variant["trials"]
    assert Timeline.from_dict(trial["timeline"]).steps == timeline.steps

    open_table(classic)
    row = classic.page.locator(".wanstream-table tbody tr[data-run]").first
    found = row.locator("td[data-figure]").all()
    cells = {cell.get_attribute("data-figure"): cell.inner_text() for cell in found}
    assert cells["wall"] == f"{format_seconds(timeline.wall_s)} s"
    assert cells["stall"] == f"{format_seconds(timeline.stall_s)} s"
    assert cells["moved"] == format_size(timeline.bytes_moved)
    assert cells["read"] == format_size(timeline.transfers.read_bytes)

    run = classic.shown()["run"]
    runs = json.loads(download(classic, "JSON"))["runs"]
    (exported,) = (each for each in runs if each["run"] == run)
    assert Timeline.from_dict(exported["timeline"]).steps == timeline.steps
    lines = csv.DictReader(io.StringIO(download(classic, "CSV")))
    (line,) = (line for line in lines if line["run"] == run)
    assert float(line["wall"]) == timeline.wall_s
    assert float(line["moved"]) == timeline.bytes_moved


def open_table(page):
    page.page.evaluate(EXECUTE, "Workspace.ToggleBottomPanelTab.wanstream-runs")
    page.page.locator(".wanstream-table").first.wait_for(timeout=WAIT_MS)


def download(page, kind):
    with page.page.expect_download() as waiting:
        page.page.locator(".wanstream-button", has_text=kind).click()
    return Path(waiting.value.path()).read_text(encoding="utf-8")


def test_ticked_runs_are_compared_and_exported_alone(unused):
    unused.load(steps=4)
    unused.run()
    unused.set(SAMPLER, steps=6)
    unused.run()
    open_table(unused)
    for number in range(2):
        unused.page.locator(".wanstream-table tbody tr[data-run] input").nth(number).focus()
        unused.page.keyboard.press("Space")
    right = "element => element.getBoundingClientRect().right"
    edge = unused.page.locator(".wanstream-panel").first.evaluate(right)
    for name in ("overlap", "moved", "read", "RAM"):  # the page is 1600 pixels wide
        cell = unused.page.locator(f'tr[data-run] td[data-figure="{name}"]').first
        assert cell.evaluate(right) <= edge, name
    rows = ".wanstream-table:not(.wanstream-comparison) tr[data-run]"
    settings = unused.page.locator(f"{rows} td[data-setting]")
    assert settings.all_inner_texts()[:3] == ["64x48x9", "fp32", "layerwise, 1 ahead"]
    row = unused.page.locator('.wanstream-comparison tr[data-figure="steps"] td')
    assert [cell.inner_text() for cell in row.all()] == ["4", "6 (1.50 x)"]
    assert [run["steps"] for run in json.loads(download(unused, "JSON"))["runs"]] == [4, 6]
    unused.picture("runs_table", x=60, y=680, width=1540, height=400)


PLANTED = ["img", {"src": "x", "onerror": "window.ran = true"}]
MARKUP = '<img src=x onerror="window.ran = true">'


def prefixed(prompt, prefix):
    """The same graph with this before every id."""
    changed = {}
    for node_id, each in prompt.items():
        for name, value in each["inputs"].items():
            if isinstance(value, list):
                each["inputs"][name] = [f"{prefix}{value[0]}", value[1]]
        changed[f"{prefix}{node_id}"] = each
    return changed


def test_nothing_of_a_posted_prompt_runs_in_the_page(unused):
    """A user who posts a prompt cannot run a script in the page of a user who opens the table."""
    workflow_id = unused.load(steps=1)
    unused.page.evaluate("() => { window.ran = false }")
    here = {"id": workflow_id}
    posted = [("", {"id": PLANTED}, PLANTED), ("", here, MARKUP), (MARKUP, PLANTED, PLANTED)]
    for prefix, canvas, title in posted:
        prompt = prefixed(unused.frontend.export().prompt, prefix)
        for each in prompt.values():
            each["_meta"] = {"title": title}
        (sampler,) = (each for each in prompt.values() if each["class_type"] == SAMPLER)
        sampler["inputs"]["seed"] = next(SEEDS)
        unused.server.run(prompt, extra_pnginfo={"workflow": canvas})
    open_table(unused)
    for tick in unused.page.locator(".wanstream-table tbody tr[data-run] input").all()[:2]:
        tick.check()
    unused.page.locator(".wanstream-comparison").wait_for(timeout=WAIT_MS)
    titles = unused.page.locator(".wanstream-table tbody tr[data-run] td:nth-child(3)")
    assert titles.all_inner_texts()[:3] == [f"node {MARKUP}5", MARKUP, "node 5"]
    unused.page.wait_for_timeout(500)
    assert unused.page.evaluate("() => window.ran") is False
    # A run has one picture, the moving preview, hidden without a preview.
    places = (".wanstream-panel", ".wanstream-run", ".wanstream-badges")
    pictures = ", ".join(f"{place} img:not(.wanstream-preview)" for place in places)
    assert unused.page.locator(pictures).count() == 0


def test_badges_can_be_switched_off_and_on(unused):
    switch = "on => window.app.extensionManager.setting.set('WanStream.Badges', on)"
    unused.page.evaluate(switch, False)
    assert unused.page.locator(".wanstream-badges").count() == 0
    unused.load(steps=1)
    unused.run()
    assert unused.badges() == {}
    unused.page.evaluate(switch, True)
    unused.run()
    assert len(unused.badges()) == 7


def test_badges_go_with_their_nodes(page):
    page.page.once("dialog", lambda dialog: dialog.accept())
    there = "count => document.querySelectorAll('.wanstream-badge').length === count"
    page.load(steps=1)
    page.run()
    page.wait(there, 7)
    page.js("window.app.canvas.selectNodes([find(title)])")
    page.page.locator("#graph-canvas").focus()
    page.page.keyboard.press("Delete")
    page.wait(there, 6)
    page.page.evaluate(EXECUTE, "Comfy.ClearWorkflow")
    page.wait(there, 0)


def test_cached_nodes_say_so_and_badges_cover_no_titles(page):
    page.load(steps=1)
    page.run()
    first = page.badges()
    page.run()
    second = page.badges()
    assert "cached" in second.values()
    for text in [*first.values(), *second.values()]:
        assert text != "not run"
        assert not text.startswith("0.0 s")
    for zoom in (1.0, 0.7, 0.5, 0.4):
        page.page.evaluate(SHOW, [zoom, 20 / zoom, 60 / zoom])
        page.page.wait_for_timeout(300)
        assert page.page.evaluate(ON_GROUP_TITLES) == [], zoom
        assert page.page.evaluate(ON_CORE_BADGES) == [], zoom


# All samplers' heights in the graph: with and without the chart.
HEIGHTS = f"""() => {{ {FIND}
    return [...every({GRAPH})].filter(n => n.type === '{SAMPLER}').map(n => n.size[1])
}}"""
STATES = {
    "selected": "canvas.selectNodes([node])",
    "bypassed": "canvas.selectNodes([]); node.mode = 4",
    "collapsed": "node.mode = 0; node.collapse(true)",
}
STATE = """const {{ canvas }} = window.app, {{ ds }} = canvas, node = find(title)
    {state}
    canvas.draw(true, true)
    return new Promise(done => setTimeout(() => {{
        const view = document.querySelector(`[data-node='${{node.id}}']`)
        const {{ left, top, bottom }} = view.getBoundingClientRect()
        const place = canvas.canvas.getBoundingClientRect()
        const [x, y] = node.pos.map((at, axis) => (at + ds.offset[axis]) * ds.scale)
        const toolbox = document.querySelector('.selection-toolbox')?.getBoundingClientRect()
        done({{
            left: left - place.left - x, above: y + place.top - bottom,
            below: top - place.top - y - node.size[1] * ds.scale,
            covered: Boolean(toolbox) && top < toolbox.bottom, off: overlay(title).dataset.off,
            opacity: +getComputedStyle(overlay(title)).opacity,
        }})
    }}, 1000))"""


def test_the_overlay_follows_its_node(page, renderer):
    page.load(steps=1, ids_from=1000)
    (before,) = page.page.evaluate(HEIGHTS)
    page.run()
    (with_chart,) = page.page.evaluate(HEIGHTS)
    page.js(PASTE)
    page.wait(f"wanted => ({HEIGHTS})().length === 2 && ({HEIGHTS})()[1] === wanted", before)
    assert page.page.evaluate(HEIGHTS) == [with_chart, before], "a copy has no run to show"
    found = {name: page.js(STATE.format(state=state)) for name, state in STATES.items()}
    assert (found["selected"]["covered"], found["selected"]["below"] > 0) == (False, True)
    assert [each["above"] > 0 for each in found.values()] == [False, True, True]
    # The browser may snap a badge to the screen grid: less than a pixel.
    assert found["collapsed"]["left"] > -1
    if renderer == "classic":  # Nodes 2.0 itself dims nodes
        assert [each["off"] for each in found.values()] == ["false", "true", "false"]
        assert [each["opacity"] < 1 for each in found.values()] == [False, True, False]


# Badges that overlap a group title, drawn at the group's upper left in the group's font size.
ON_GROUP_TITLES = f"""() => {{
    const {{ ds, canvas }} = window.app.canvas, found = [], place = canvas.getBoundingClientRect()
    const pen = document.createElement('canvas').getContext('2d')
    for (const group of {GRAPH}.groups) {{
        pen.font = `${{group.font_size}}px Inter, Arial`
        const width = pen.measureText(group.title).width + group.font_size
        const [left, top] = [0, 1].map(axis => (group.pos[axis] + ds.offset[axis]) * ds.scale)
        for (const badge of document.querySelectorAll('.wanstream-badge')) {{
            const box = badge.getBoundingClientRect()
            const [x, y] = [box.left - place.left, box.top - place.top]
            const beside = x >= left + width * ds.scale || x + box.width <= left
            const below = y >= top + group.font_size * 1.4 * ds.scale || y + box.height <= top
            if (!beside && !below) found.push(`${{group.title}}: ${{badge.textContent}}`)
        }}
    }}
    return found
}}"""


# Badges that overlap ComfyUI's own, drawn on the classic canvas at the upper right of nodes.
ON_CORE_BADGES = f"""() => {{
    if (window.LiteGraph.vueNodesMode) return []
    const {{ ds, canvas, ctx }} = window.app.canvas
    const place = canvas.getBoundingClientRect(), lefts = new Map()
    for (const node of {GRAPH}.nodes) {{
        node.drawBadges = function (...drawn) {{
            ctx.roundRect = function (x, ...box) {{
                lefts.set(node, Math.min(lefts.get(node) ?? Infinity, x))
                return Object.getPrototypeOf(this).roundRect.call(this, x, ...box)
            }}
            Object.getPrototypeOf(node).drawBadges.apply(node, drawn)
            delete ctx.roundRect
        }}
    }}
    window.app.canvas.draw(true, true)
    for (const node of {GRAPH}.nodes) delete node.drawBadges
    if (!lefts.size) return ds.scale >= 0.7 ? ['there are none'] : [] // too small to be drawn
    return [...lefts].filter(([node, left]) => {{
        const badge = document.querySelector(`.wanstream-badge[data-node='${{node.id}}']`)
        const edge = (node.pos[0] + left + ds.offset[0]) * ds.scale
        return badge && badge.getBoundingClientRect().right - place.left > edge + 1
    }}).map(([node]) => node.title)
}}"""


@pytest.mark.parametrize(
    ("palette", "renderer"), [("dark", "classic"), ("light", "nodes-2")], indirect=["renderer"]
)
def test_overlay_can_be_read_in_both_themes_at_half_size(frontends, server, palette, renderer):
    settings = {**RENDERERS[renderer], "Comfy.ColorPalette": palette}
    page = Page(frontends.get(height=HEIGHT, settings=settings), server)
    page.load(steps=8)
    page.run()
    page.look_at(SAMPLER, zoom=0.5)
    page.picture(f"overlay_half_{palette}_{renderer}", height=440)
    shown = page.shown()
    assert shown["far"] == "true"
    heights = """const letters = '.wanstream-text, .wanstream-line-text'
        return [...overlay(title).querySelectorAll(letters),
            ...document.querySelectorAll('.wanstream-badge')]
            .map(text => text.getBoundingClientRect().height)"""
    texts = page.js(heights)
    assert min(texts) >= 9, "lines of letters of 8 pixels and more"


CHIP = "() => document.querySelector('.wanstream-chip')?.innerText.replaceAll('\\n', ' · ') ?? ''"


def test_chip_shows_a_run_and_jumps_to_its_node(classic):
    """The running run in ComfyUI's top bar."""
    page = classic.page
    classic.load(steps=100)
    classic.js(f"{GRAPH}.convertToSubgraph(new Set([find(title)]))")
    assert page.evaluate(CHIP) == "", "nothing runs"
    classic.queue()
    classic.wait(f"() => ({CHIP})().includes(' s/step')")
    text = page.evaluate(CHIP)
    assert re.fullmatch(
        r"layerwise, 1 ahead · [\d.]+ of [\d.]+ GB RAM · [\d.]+ s/step · \d+:\d\d left", text
    )
    page.locator(".wanstream-chip").press("Enter")
    assert classic.js("return find(title).id in window.app.canvas.selected_nodes")
    assert page.evaluate(f"() => window.app.canvas.graph !== {GRAPH}"), "the subgraph is open"
    classic.wait(f"() => ({CHIP})() === ''")


# The browser has decoded the picture and gives it room.
PREVIEW = f"""title => {{ {FIND}
    const image = overlay(title).querySelector('.wanstream-preview')
    const box = image.getBoundingClientRect()
    return {{ src: image.src, alt: image.alt,
        width: image.naturalWidth, height: image.naturalHeight, hidden: image.hidden,
        visible: !image.hidden && image.complete && image.naturalWidth > 0 && box.height > 50,
        ended: overlay(title).dataset.ended === 'true', ofComfyui: find(title).imgs?.length ?? 0,
        box: {{ x: box.x, y: box.y, width: box.width, height: box.height }} }}
}}"""


def test_previewed_frames_move_on_the_sampler_and_stay_afterwards(page, renderer):
    page.load("draft", steps=20)
    page.set("WanStreamEmptyLatent", width=128, height=80, frames=17)
    page.set("WanStreamPreview", frames=17, every_s=0.0)
    page.look_at(SAMPLER, zoom=0.9)
    assert page.page.evaluate(PREVIEW, SAMPLER)["hidden"], "there was no run"
    page.queue()
    page.wait(f"title => ({PREVIEW})(title).visible")
    live = page.page.evaluate(PREVIEW, SAMPLER)
    assert not live["ended"]
    page.wait(f"title => ({PREVIEW})(title).ended")
    page.page.wait_for_timeout(500)
    shown = page.page.evaluate(PREVIEW, SAMPLER)
    for found in (live, shown):
        assert found["src"].startswith("data:image/webp;base64,")
        assert (found["width"], found["height"]) == (128, 80)
        assert found["alt"].startswith("The first frames of the video, as estimated in step ")
    assert int(shown["alt"].split()[-1]) >= int(live["alt"].split()[-1]) >= 1
    assert not shown["ofComfyui"], "ComfyUI's own preview is not shown as well"
    seen = set()
    for _ in range(8):
        page.page.wait_for_timeout(130)
        with Image.open(io.BytesIO(page.page.screenshot(clip=shown["box"]))) as picture:
            seen.add(picture.convert("RGB").tobytes())
    assert len(seen) > 1, "the picture moves"
    assert page.frontend.complaints() == []
    page.picture(f"preview_{renderer}", height=1000)
