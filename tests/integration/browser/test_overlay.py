"""The overlay in ComfyUI's own frontend, classic canvas and Nodes 2.0, in runs on the test model.

`WANSTREAM_IMAGES` names a folder for the documentation's pictures. Without it none are kept.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
import re
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image

from wanstream.schema.records.timeline import Timeline
from wanstream.schema.text.numbers import format_rate, format_seconds, format_size
from wanstream.tools.build_workflows import SHOW
from wanstream.tools.comfyui import PACK, Server, find_comfyui
from wanstream.tools.frontend import (
    CLASSIC,
    GRAPH,
    NODES_2,
    READY,
    Frontend,
    SharedFrontends,
    opened_frontend,
)
from wanstream.tools.graphs import numbered
from wanstream.tools.templates import template

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.comfy, pytest.mark.browser, pytest.mark.timeout(600)]

WORKFLOWS = Path(__file__).parents[3] / "workflows"
RENDERERS = {"classic": CLASSIC, "nodes-2": NODES_2}
SAMPLER = "WanStreamSampler"
WAIT_MS = 120_000
HEIGHT = 1080
"""Height of all pages in pixels. Pages of one height are shared."""

# Finds a node's widget by title or else by class, also in subgraphs, and reads the displayed
# values.
FIND = f"""
function* every(graph) {{
    for (const node of graph.nodes) {{ yield node; if (node.subgraph) yield* every(node.subgraph) }}
}}
const nodes = test => [...every({GRAPH})].find(test)
const find = name => nodes(node => node.title === name) ?? nodes(node => node.type === name)
const overlay = title => find(title).widgets.find(widget => widget.name === 'wanstream_run').element
const bars = root =>
    [...root.querySelectorAll('.wanstream-bar[data-wall]')].map(bar => ({{...bar.dataset}}))
"""
SHOWN = f"""title => {{ {FIND}
    const root = overlay(title)
    return {{
        ...root.dataset, bars: bars(root), columns: root.querySelectorAll('.wanstream-bar').length,
        line: root.querySelector('.wanstream-line-text').textContent,
        numbers: root.querySelector('.wanstream-numbers').textContent,
        predicted: [...root.querySelectorAll('[data-predicted]')]
            .map(box => +box.dataset.predicted),
        marked: root.querySelector('[data-switch]')?.dataset.switch ?? null,
        peak: root.querySelector('[data-peak]')?.dataset.peak ?? null,
        samples: +(root.querySelector('[data-samples]')?.dataset.samples ?? 0),
        box: root.getBoundingClientRect().toJSON(),
    }}
}}"""
ENDED = f"""([title, before]) => {{ {FIND}
    const {{ run, ended }} = overlay(title).dataset
    return run !== before && ended === 'true'
}}"""
UNDER_WAY = (
    f"title => {{ {FIND}; const r = overlay(title); return r.dataset.ended === 'false' && "
    f"bars(r).length > 1 }}"
)
SET = f"""([title, values]) => {{ {FIND}
    for (const [name, value] of Object.entries(values))
        find(title).widgets.find(w => w.name === name).value = value
}}"""
BADGES = (
    "() => [...document.querySelectorAll('.wanstream-badge')].map(b => [b.dataset.node, "
    "b.textContent])"
)

SEEDS = itertools.count(1000)
"""Unused seeds. The server caches a seed's result, so the sampler would not run again."""

SMALL = {
    "WanStreamEmptyLatent": {"width": 64, "height": 48, "frames": 9},
    # A CPU without units for bf16 multiplies it a hundred times slower.
    "WanStreamExperts": {"compute_dtype": "fp32"},
}


class Page:
    """User actions on the overlay, on one page."""

    def __init__(self, frontend: Frontend, server: Server) -> None:
        self.frontend, self.page, self.server = frontend, frontend.page, server

    def load(
        self,
        name: str = "t2v",
        *,
        steps: int = 12,
        workflow_id: str | None = None,
        ids_from: int = 0,
    ) -> str:
        """Open a shipped graph, sized for a CPU, under a new id, and return the id.

        A run by an API client without a graph is shown at nodes with the same ids. `ids_from` is
        added to all ids, so that no node has such a run.
        """
        workflow = template(name)
        workflow["id"] = workflow_id or str(uuid.uuid4())
        for node in workflow["nodes"]:
            node["id"] += ids_from
        for link in workflow["links"]:
            link[1] += ids_from
            link[3] += ids_from
        workflow["last_node_id"] += ids_from
        self.frontend.load_workflow(workflow)
        for title, values in {**SMALL, SAMPLER: {"steps": steps, "seed": next(SEEDS)}}.items():
            self.set(title, **values)
        self.look_at(SAMPLER)
        return str(workflow["id"])

    def set(self, title: str, **values: Any) -> None:
        """Change a node's widgets."""
        self.page.evaluate(SET, [title, values])

    def look_at(self, title: str, zoom: float = 1.0) -> None:
        """Put a node into the canvas, at the upper middle."""
        self.page.evaluate(
            f"""([title, zoom]) => {{ {FIND}
                const [x, y] = find(title).pos, {{ ds }} = window.app.canvas
                ds.scale = zoom; ds.offset[0] = 450 / zoom - x; ds.offset[1] = 120 / zoom - y
                window.app.canvas.setDirty(true, true)
            }}""",
            [title, zoom],
        )
        self.page.wait_for_timeout(300)

    def queue(self) -> None:
        self.page.evaluate("() => window.app.queuePrompt(0)")

    def run(self, title: str = SAMPLER) -> dict[str, Any]:
        """Run the graph with an unused seed until it ends, and return the overlay's content."""
        before = self.shown(title)["run"]
        self.set(SAMPLER, seed=next(SEEDS))
        self.queue()
        self.page.wait_for_function(ENDED, arg=[title, before], timeout=WAIT_MS)
        self.idle()
        return self.shown(title)

    def idle(self) -> None:
        """Wait until the server has nothing more to do and every badge shows it."""
        while self.server.get("/prompt")["exec_info"]["queue_remaining"]:
            self.page.wait_for_timeout(100)
        self.page.wait_for_timeout(500)

    def shown(self, title: str = SAMPLER) -> dict[str, Any]:
        found: dict[str, Any] = self.page.evaluate(SHOWN, title)
        return found

    def id_of(self, title: str) -> str:
        return str(self.page.evaluate(f"title => {{ {FIND}; return find(title).id }}", title))

    def badges(self) -> dict[str, str]:
        return dict(self.page.evaluate(BADGES))

    def picture(self, name: str, **part: int) -> None:
        """Save a screenshot of part of the page, if pictures are enabled."""
        folder = os.environ.get("WANSTREAM_IMAGES")
        if folder:
            clip = {"x": 380, "y": 60, "width": 720, "height": 850, **part}
            with Image.open(io.BytesIO(self.page.screenshot(clip=clip))) as picture:
                picture.convert("RGB").save(Path(folder) / f"{name}.png", optimize=True)


@pytest.fixture(params=RENDERERS)
def renderer(request: pytest.FixtureRequest, server: Server) -> str:
    """The renderer's name.

    `server` is requested first because it skips if a requirement is missing.
    """
    name: str = request.param
    if name == "nodes-2" and find_comfyui().version() < (0, 4):
        pytest.skip("the Nodes 2.0 of this ComfyUI is a trial that shows no widgets of others")
    return name


@pytest.fixture
def page(frontends: SharedFrontends, server: Server, renderer: str) -> Page:
    """For behaviour that depends on the renderer. Other tests use `classic`."""
    return Page(frontends.get(height=HEIGHT, settings=RENDERERS[renderer]), server)


@pytest.fixture
def classic(frontends: SharedFrontends, server: Server) -> Page:
    return Page(frontends.get(height=HEIGHT, settings=CLASSIC), server)


@pytest.fixture
def unused(browser: Browser, server: Server) -> Iterator[Page]:
    """A page of its own, whose table has no ticked runs, and whose settings a test may change."""
    with opened_frontend(browser, server, height=HEIGHT) as frontend:
        yield Page(frontend, server)


def last_history(server: Server) -> dict[str, Any]:
    (entry,) = server.get("/history?max_items=1").values()
    return dict(entry)


def timeline_of(server: Server, title: str = SAMPLER) -> Timeline:
    """The timeline in the last queue item's history.

    It belongs to the node with this title, or else this class.
    """
    history = last_history(server)
    prompt = history["prompt"][2]
    titled = [node_id for node_id, node in prompt.items() if node["_meta"]["title"] == title]
    of_class = [node_id for node_id, node in prompt.items() if node["class_type"] == title]
    (node_id, *_) = titled or of_class
    return Timeline.from_dict(history["outputs"][node_id]["wanstream_timeline"][0])


def assert_shows(shown: Mapping[str, Any], timeline: Timeline) -> None:
    """The bars are the timeline's steps, to the last bit."""
    fields = {"compute": "compute_s", "stall": "stall_s", "wall": "wall_s"}
    for name, field in fields.items():
        assert [float(bar[name]) for bar in shown["bars"]] == [
            getattr(step, field) for step in timeline.steps
        ]
    count = len(timeline.steps)
    took = (
        f"{format_seconds(timeline.wall_s)} s"
        if timeline.wall_s < 60
        else f"{timeline.wall_s // 60:.0f}:"
    )
    assert shown["line"].startswith(f"{count} steps in {took}")
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
    page.page.wait_for_function(UNDER_WAY, arg=SAMPLER, timeout=WAIT_MS)
    live = page.shown()
    assert 1 < len(live["bars"]) < 60 == live["columns"]
    assert re.match(r"step \d+/60 · [\d.]+ s/step · \d+:\d\d left · ", live["line"]), live["line"]
    sampler = page.id_of(SAMPLER)
    assert re.fullmatch(r"[\d.]+ s · [\d.]+ [MG]B RAM", page.badges()[sampler])
    page.picture(f"overlay_live_{renderer}")
    page.page.wait_for_function(ENDED, arg=[SAMPLER, ""], timeout=WAIT_MS)
    page.idle()
    timeline = timeline_of(page.server)
    ended = page.shown()
    assert_shows(ended, timeline)
    steps = [(step.start_s, step.start_s + step.wall_s) for step in timeline.steps]
    # The chart does not show samples between two steps.
    in_steps = [
        sum(began <= sample.at_s < end for began, end in steps) for sample in timeline.memory
    ]
    assert ended["samples"] == sum(in_steps) > 0
    assert ended["bars"][: len(live["bars"])] == live["bars"]
    badges = page.badges()
    assert badges.keys() == last_history(page.server)["prompt"][2].keys(), (
        "a badge on every node of the graph"
    )
    assert {text for text in badges.values() if text not in ("cached", "not run")}
    began, *_, over = (
        data["timestamp"] / 1000 for _, data in last_history(page.server)["status"]["messages"]
    )
    # A busy page gets the event of a node's start late.
    assert timeline.wall_s / 2 < float(badges[sampler].split()[0]) < over - began + 0.1
    page.look_at(SAMPLER, zoom=0.85)
    page.picture(f"overlay_{renderer}")

    page.page.reload()
    page.page.wait_for_function(READY, timeout=WAIT_MS)
    page.load(steps=60, workflow_id=workflow_id)
    page.page.wait_for_function(ENDED, arg=[SAMPLER, ""], timeout=WAIT_MS)
    again = page.shown()
    assert_shows(again, timeline)
    assert (again["run"], again["line"]) == (ended["run"], ended["line"])
    assert page.badges() == {}, "this page has not followed the run"


def test_run_in_a_subgraph_is_shown_inside_and_outside(page, renderer):
    page.load()
    page.page.evaluate(
        f"""title => {{ {FIND}
            const {{ node }} = {GRAPH}.convertToSubgraph(new Set([find(title)]))
            node.title = 'Inside'
        }}""",
        SAMPLER,
    )
    page.queue()
    page.page.wait_for_function(ENDED, arg=[SAMPLER, ""], timeout=WAIT_MS)
    page.idle()
    outside = page.badges()
    inside_id = page.id_of("Inside")
    assert inside_id in outside
    page.page.evaluate(
        f"() => {{ {FIND}; const node = find('Inside'); "
        f"window.app.canvas.openSubgraph(node.subgraph, node) }}"
    )
    page.page.wait_for_timeout(500)
    page.look_at(SAMPLER, zoom=0.85)
    shown = page.shown()
    assert shown["box"]["width"] > 0, "it is to be seen inside"
    assert_shows(shown, timeline_of(page.server))
    assert list(page.badges().values()) == [outside[inside_id]]
    page.picture(f"overlay_subgraph_{renderer}")


def test_older_answer_does_not_end_a_new_run(classic):
    held: list[Any] = []
    classic.load()
    classic.page.route("**/wanstream/runs", lambda route: held.append((route, route.fetch())))
    classic.page.reload()
    classic.page.wait_for_function(READY, timeout=WAIT_MS)
    classic.load(steps=500)
    classic.queue()
    classic.page.wait_for_function(UNDER_WAY, arg=SAMPLER, timeout=WAIT_MS)
    assert held
    for route, answer in held:
        route.fulfill(response=answer)
    classic.page.wait_for_timeout(500)
    shown = classic.shown()
    assert shown["ended"] == "false"
    assert shown["line"].startswith("step ")
    classic.server.post("/interrupt", {})
    classic.page.wait_for_function(ENDED, arg=[SAMPLER, ""], timeout=WAIT_MS)
    shown = classic.shown()
    assert "of 500 steps: cancelled" in shown["line"]
    assert shown["bars"]
    classic.idle()
    badges = classic.badges()
    assert badges[classic.id_of(SAMPLER)].endswith(" RAM")
    assert "not run" in badges.values(), "what comes after it"


ALIVE = (
    f"import('/extensions/{PACK}/overlay/run_widget.mjs')"
    ".then(module => module.RunWidget.prototype)"
)


def widgets_alive(page: Page) -> int:
    """Return the number of overlays in the browser after a garbage collection."""
    session = page.page.context.new_cdp_session(page.page)
    prototype = session.send("Runtime.evaluate", {"expression": ALIVE, "awaitPromise": True})[
        "result"
    ]["objectId"]
    found = session.send("Runtime.queryObjects", {"prototypeObjectId": prototype})["objects"][
        "objectId"
    ]
    count = {"objectId": found, "functionDeclaration": "function() { return this.length }"}
    alive: int = session.send("Runtime.callFunctionOn", count)["result"]["value"]
    session.detach()
    return alive


def test_overlays_of_graphs_that_are_gone_are_gone(unused):
    """ComfyUI does not notify nodes inside a subgraph when their graph is replaced.

    Every undo replaces it.
    """
    unused.load()
    unused.page.evaluate(
        f"title => {{ {FIND}; {GRAPH}.convertToSubgraph(new Set([find(title)])) }}",
        SAMPLER,
    )
    workflow = unused.frontend.export().workflow
    for _ in range(6):
        unused.frontend.load_workflow(workflow)
        unused.page.wait_for_timeout(200)
    assert widgets_alive(unused) <= 3


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
    page.page.evaluate(
        f"title => {{ {FIND}; overlay(title).querySelector('.wanstream-plot').focus() }}",
        SAMPLER,
    )
    page.page.keyboard.press("ArrowRight")
    assert page.shown()["numbers"].startswith("步 0（高噪）")
    open_table(page)
    heads = page.page.locator(".wanstream-table th").all_inner_texts()
    assert heads[1:5] == ["时间", "节点", "尺寸", "精度"]
    assert page.page.get_by_text("WanStream 运行记录").count() > 0
    assert "wall" in download(page, "CSV").splitlines()[0], (
        "what other programs read stays as it is"
    )


@pytest.mark.parametrize("renderer", ["nodes-2"], indirect=True)
def test_prediction_is_drawn_as_an_outline(page, renderer):
    page.load(steps=4)
    # Choosing a policy measures an unknown machine. From then on every run is predicted.
    page.page.evaluate(
        f"""title => {{ {FIND}
            const policy = window.LiteGraph.createNode('WanStreamAutoOffload');
            {GRAPH}.add(policy)
            policy.connect(0, find(title), 'policy')
        }}""",
        SAMPLER,
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


def test_two_samplers_show_a_run_each(classic):
    prompt: dict[str, Any] = json.loads(
        (WORKFLOWS / "api" / "t2v.json").read_text(encoding="utf-8")
    )
    prompt["latent"]["inputs"] |= SMALL["WanStreamEmptyLatent"]
    prompt["sampler"]["inputs"] |= {"steps": 8, "seed": next(SEEDS)}
    second = {**prompt["sampler"], "_meta": {"title": "Second"}}
    second["inputs"] = {**second["inputs"], "steps": 6, "seed": next(SEEDS)}
    prompt |= {
        "second": second,
        "keep": {"class_type": "WanStreamVAEDecode", "_meta": {"title": "Second frames"}},
    }
    prompt["keep"]["inputs"] = {**prompt["frames"]["inputs"], "latent": ["second", 0]}
    prompt["save 2"] = {**prompt["save"], "_meta": {"title": "Second MP4"}}
    prompt["save 2"]["inputs"] = {
        **prompt["save"]["inputs"],
        "images": ["keep", 0],
        "latent": ["second", 0],
    }
    classic.frontend.load_prompt(numbered(prompt))
    classic.page.evaluate(
        f"""title => {{ {FIND}
            const left = find(title).pos[0]
            for (const node of {GRAPH}.nodes)
                if (node.pos[0] > left) node.pos = [node.pos[0] + 340, node.pos[1]]
            find('Second').pos = [left + 340, find(title).pos[1]]
        }}""",
        SAMPLER,
    )
    before = {title: classic.shown(title)["run"] for title in (SAMPLER, "Second")}
    classic.queue()
    for title, run in before.items():
        classic.page.wait_for_function(ENDED, arg=[title, run], timeout=WAIT_MS)
    classic.idle()
    classic.look_at(SAMPLER, zoom=0.85)
    both = [classic.shown(title) for title in (SAMPLER, "Second")]
    assert [len(shown["bars"]) for shown in both] == [8, 6]
    for title, shown in zip((SAMPLER, "Second"), both, strict=True):
        assert_shows(shown, timeline_of(classic.server, title))


def test_second_window_sees_what_the_first_one_runs(browser, classic):
    workflow_id = classic.load(steps=40)
    with opened_frontend(browser, classic.server) as frontend:
        other = Page(frontend, classic.server)
        other.load(steps=40, workflow_id=workflow_id)
        classic.queue()
        other.page.wait_for_function(UNDER_WAY, arg=SAMPLER, timeout=WAIT_MS)
        for each in (other, classic):
            each.page.wait_for_function(ENDED, arg=[SAMPLER, ""], timeout=WAIT_MS)
        classic.idle()
        assert other.shown()["bars"] == classic.shown()["bars"]
        assert len(classic.badges()) == 7
        # ComfyUI sends the events of nodes to the page that queued them.
        assert other.badges() == {}


def test_run_is_shown_after_another_tab_was_open(classic):
    classic.load(steps=40)
    classic.queue()
    classic.page.wait_for_function(UNDER_WAY, arg=SAMPLER, timeout=WAIT_MS)
    execute = "name => window.app.extensionManager.command.execute(name)"
    classic.page.evaluate(execute, "Comfy.NewBlankWorkflow")
    classic.page.wait_for_function(f"() => {GRAPH}.nodes.length === 0")
    assert classic.badges() == {}
    classic.idle()
    classic.page.evaluate(execute, "Workspace.PreviousOpenedWorkflow")
    classic.page.wait_for_function(f"() => {GRAPH}.nodes.length > 0")
    classic.page.wait_for_function(ENDED, arg=[SAMPLER, ""], timeout=WAIT_MS)
    classic.look_at(SAMPLER)
    assert_shows(classic.shown(), timeline_of(classic.server))
    assert len(classic.badges()) == 7


def test_reload_during_a_run_shows_no_guessed_times(classic):
    workflow_id = classic.load(steps=300)
    classic.queue()
    classic.page.wait_for_function(UNDER_WAY, arg=SAMPLER, timeout=WAIT_MS)
    classic.page.reload()
    classic.page.wait_for_function(READY, timeout=WAIT_MS)
    classic.load(steps=300, workflow_id=workflow_id)
    classic.page.wait_for_function(UNDER_WAY, arg=SAMPLER, timeout=WAIT_MS)
    classic.server.post("/interrupt", {})
    classic.page.wait_for_function(ENDED, arg=[SAMPLER, ""], timeout=WAIT_MS)
    classic.idle()
    assert classic.badges() == {}
    classic.set(SAMPLER, steps=1)
    classic.run()
    assert len(classic.badges()) == 7


def test_nodes_of_other_packs_have_badges_without_memory(classic):
    value = {"class_type": "PrimitiveString", "inputs": {"value": str(uuid.uuid4())}}
    classic.frontend.load_prompt(
        {"1": value, "2": {"class_type": "PreviewAny", "inputs": {"source": ["1", 0]}}}
    )
    classic.queue()
    classic.page.wait_for_function(
        "() => document.querySelectorAll('.wanstream-badge').length === 2"
    )
    classic.idle()
    assert classic.badges() == {"1": "< 0.1 s", "2": "< 0.1 s"}
    classic.queue()
    classic.page.wait_for_function(
        "() => document.querySelector('.wanstream-badge').textContent === 'cached'"
    )


def without_preview(prompt: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs without a widget of ComfyUI, added when the browser has loaded a video."""
    return {
        node_id: {name: value for name, value in node["inputs"].items() if name != "video-preview"}
        for node_id, node in prompt.items()
    }


def test_overlay_opens_and_closes_by_keyboard(page):
    page.load(steps=6)
    page.run()
    before, full = page.frontend.export(), page.shown()["box"]["height"]
    page.page.evaluate(
        f"title => {{ {FIND}; overlay(title).querySelector('button').focus() }}", SAMPLER
    )
    page.page.keyboard.press("Enter")
    page.page.wait_for_timeout(500)
    closed = page.shown()
    assert (closed["open"], closed["box"]["height"] < full / 2) == ("false", True)
    after = page.frontend.export()
    assert without_preview(after.prompt) == without_preview(before.prompt)
    assert not any("wanstream_run" in node["inputs"] for node in after.prompt.values())
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
    page.page.evaluate(f"title => {{ {FIND}; {plot}.focus() }}", SAMPLER)
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
    box = page.page.evaluate(
        f"title => {{ {FIND}; return {plot}.getBoundingClientRect().toJSON() }}", SAMPLER
    )
    page.page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] * 0.5)
    page.page.wait_for_timeout(200)
    assert "step 2 " in page.shown()["numbers"]


def test_all_views_have_the_numbers_of_the_timeline(classic):
    classic.load(steps=6)
    classic.page.evaluate(
        f"""title => {{ {FIND}
            const sampler = find(title)
            const benchmark = window.LiteGraph.createNode('WanStreamBenchmark')
            benchmark.pos = [sampler.pos[0] + 330, sampler.pos[1] + 480];
            {GRAPH}.add(benchmark)
            benchmark.title = 'Benchmark'
            const run = sampler.outputs.findIndex(output => output.type === 'WANSTREAM_RUN')
            sampler.connect(run, benchmark, 'run')
        }}""",
        SAMPLER,
    )
    classic.run()
    timeline = timeline_of(classic.server)
    assert_shows(classic.shown(), timeline)
    assert_shows(classic.shown("Benchmark"), timeline)

    written = sorted((classic.server.base / "output" / "benchmark").glob("*.json"))[-1]
    (variant,) = json.loads(written.read_text(encoding="utf-8"))["variants"]
    assert [Timeline.from_dict(trial["timeline"]).steps for trial in variant["trials"]] == [
        timeline.steps
    ]

    open_table(classic)
    row = classic.page.locator(".wanstream-table tbody tr[data-run]").first
    cells = {
        cell.get_attribute("data-figure"): cell.inner_text()
        for cell in row.locator("td[data-figure]").all()
    }
    assert cells["wall"] == f"{format_seconds(timeline.wall_s)} s"
    assert cells["stall"] == f"{format_seconds(timeline.stall_s)} s"
    assert cells["moved"] == format_size(timeline.bytes_moved)
    assert cells["read"] == format_size(timeline.transfers.read_bytes)

    run = classic.shown()["run"]
    (exported,) = (
        each for each in json.loads(download(classic, "JSON"))["runs"] if each["run"] == run
    )
    assert Timeline.from_dict(exported["timeline"]).steps == timeline.steps
    (line,) = (
        line for line in csv.DictReader(io.StringIO(download(classic, "CSV"))) if line["run"] == run
    )
    assert float(line["wall"]) == timeline.wall_s
    assert float(line["moved"]) == timeline.bytes_moved


def open_table(page: Page) -> None:
    page.page.evaluate(
        "() => "
        "window.app.extensionManager.command.execute('Workspace.ToggleBottomPanelTab.wanstream-runs')"
    )
    page.page.locator(".wanstream-table").first.wait_for(timeout=WAIT_MS)


def download(page: Page, kind: str) -> str:
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
    outside = unused.page.evaluate(
        """names => {
            const { right } = document.querySelector('.wanstream-panel').getBoundingClientRect()
            const cell = name => document.querySelector(`tr[data-run] td[data-figure="${name}"]`)
            return names.filter(name => cell(name).getBoundingClientRect().right > right)
        }""",
        ["overlap", "moved", "read", "RAM"],
    )
    assert outside == [], "the page is 1600 pixels wide"
    settings = unused.page.locator(
        ".wanstream-table:not(.wanstream-comparison) tr[data-run] td[data-setting]"
    )
    assert settings.all_inner_texts()[:3] == ["64x48x9", "fp32", "layerwise, 1 ahead"]
    row = unused.page.locator('.wanstream-comparison tr[data-figure="steps"] td')
    assert [cell.inner_text() for cell in row.all()] == ["4", "6 (1.50 x)"]
    assert [run["steps"] for run in json.loads(download(unused, "JSON"))["runs"]] == [4, 6]
    unused.picture("runs_table", x=60, y=680, width=1540, height=400)


PLANTED = ["img", {"src": "x", "onerror": "window.ran = true"}]
MARKUP = '<img src=x onerror="window.ran = true">'


def prefixed(prompt: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The same graph with this before every id."""

    def renamed(value: Any) -> Any:
        return [f"{prefix}{value[0]}", value[1]] if isinstance(value, list) else value

    return {
        f"{prefix}{node_id}": {
            **node,
            "inputs": {name: renamed(value) for name, value in node["inputs"].items()},
        }
        for node_id, node in prompt.items()
    }


def test_nothing_of_a_posted_prompt_runs_in_the_page(unused):
    """A user who posts a prompt cannot run a script in the page of a user who opens the table."""
    workflow_id = unused.load(steps=1)
    unused.page.evaluate("() => { window.ran = false }")
    here = {"id": workflow_id}
    posted = [("", {"id": PLANTED}, PLANTED), ("", here, MARKUP), (MARKUP, PLANTED, PLANTED)]
    for prefix, canvas, title in posted:
        prompt = prefixed(unused.frontend.export().prompt, prefix)
        for node in prompt.values():
            node["_meta"] = {"title": title}
        (sampler,) = (node for node in prompt.values() if node["class_type"] == "WanStreamSampler")
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
    assert unused.page.evaluate("() => document.querySelector('.wanstream-badges')") is None
    unused.load(steps=1)
    unused.run()
    assert unused.badges() == {}
    unused.page.evaluate(switch, True)
    unused.run()
    assert len(unused.badges()) == 7


REMOVALS = {
    "key": "window.app.canvas.selectNodes([find(title)])",
    "clear": "window.app.extensionManager.command.execute('Comfy.ClearWorkflow')",
}


def test_badges_go_with_their_nodes(page):
    page.page.once("dialog", lambda dialog: dialog.accept())
    page.load(steps=1)
    page.run()
    assert len(page.badges()) == 7
    for way, left in (("key", 6), ("clear", 0)):
        page.page.evaluate(f"title => {{ {FIND}; {REMOVALS[way]} }}", SAMPLER)
        if way == "key":
            page.page.locator("#graph-canvas").focus()
            page.page.keyboard.press("Delete")
        page.page.wait_for_function(f"() => {GRAPH}.nodes.length <= {left + 1}")
        page.page.wait_for_timeout(500)
        assert len(page.badges()) == left


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
HEIGHTS = (
    f"() => {{ {FIND}; return [...every({GRAPH})].filter(n => n.type === '{SAMPLER}').map(n => "
    f"n.size[1]) }}"
)
PASTE = f"""title => {{ {FIND}
    const {{ canvas }} = window.app
    canvas.copyToClipboard([find(title)])
    canvas.pasteFromClipboard()
}}"""
STATES = {
    "selected": "canvas.selectNodes([node])",
    "bypassed": "canvas.selectNodes([]); node.mode = 4",
    "collapsed": "node.mode = 0; node.collapse(true)",
}
STATE = """title => {{ {find}
    const {{ canvas }} = window.app, {{ ds }} = canvas, node = find(title)
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
    }}, 1000))
}}"""


def test_the_overlay_follows_its_node(page, renderer):
    page.load(steps=1, ids_from=1000)
    (before,) = page.page.evaluate(HEIGHTS)
    page.run()
    (with_chart,) = page.page.evaluate(HEIGHTS)
    page.page.evaluate(PASTE, SAMPLER)
    page.page.wait_for_function(
        f"wanted => ({HEIGHTS})().length === 2 && ({HEIGHTS})()[1] === wanted", arg=before
    )
    assert page.page.evaluate(HEIGHTS) == [with_chart, before], "a copy has no run to show"
    found = {
        name: page.page.evaluate(STATE.format(find=FIND, state=state), SAMPLER)
        for name, state in STATES.items()
    }
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
    texts = page.page.evaluate(
        f"""title => {{ {FIND}
            const letters =
                [...overlay(title).querySelectorAll('.wanstream-text, .wanstream-line-text')]
            return [...letters, ...document.querySelectorAll('.wanstream-badge')]
                .map(text => text.getBoundingClientRect().height)
        }}""",
        SAMPLER,
    )
    assert min(texts) >= 9, "lines of letters of 8 pixels and more"
