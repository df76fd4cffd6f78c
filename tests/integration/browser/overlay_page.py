"""A page of ComfyUI's frontend with shipped graphs and the overlay, and servers for such pages.

`WANSTREAM_IMAGES` names a folder for the documentation's pictures. Without it none are kept.
"""

import io
import itertools
import os
import uuid
from pathlib import Path

import pytest
from PIL import Image

from wanstream.tools.comfyui import NoComfyUIError, find_comfyui, populate, running_server
from wanstream.tools.frontend import GRAPH, READY
from wanstream.tools.templates import template

NODES = Path(__file__).parents[1] / "comfy" / "custom_nodes"
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
const overlay = title =>
    find(title).widgets?.find(widget => widget.name === 'wanstream_run')?.element
const bars = root =>
    [...root.querySelectorAll('.wanstream-bar[data-wall]')].map(bar => ({{...bar.dataset}}))
"""
SHOWN = f"""title => {{ {FIND}
    const root = overlay(title)
    return root && {{
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
UNDER_WAY = f"""title => {{ {FIND}
    return overlay(title).dataset.ended === 'false' && bars(overlay(title)).length > 1
}}"""
SET = f"""([title, values]) => {{ {FIND}
    for (const [name, value] of Object.entries(values))
        find(title).widgets.find(w => w.name === name).value = value
}}"""
BADGES = """() => [...document.querySelectorAll('.wanstream-badge')]
    .map(badge => [badge.dataset.node, badge.textContent])"""

SEEDS = itertools.count(1000)
"""Unused seeds. The server caches a seed's result, so the sampler would not run again."""

SMALL = {
    "WanStreamEmptyLatent": {"width": 64, "height": 48, "frames": 9},
    # A CPU without units for bf16 multiplies it a hundred times slower.
    "WanStreamExperts": {"compute_dtype": "fp32"},
}


def add_to_ids(workflow, number):
    for node in workflow["nodes"]:
        node["id"] += number
    for link in workflow["links"]:
        link[1] += number
        link[3] += number
    workflow["last_node_id"] += number


class Page:
    """User actions on the overlay, on one page."""

    def __init__(self, frontend, server):
        self.frontend = frontend
        self.page = frontend.page
        self.server = server

    def js(self, code, title=SAMPLER):
        """Run code that finds a node by title."""
        return self.page.evaluate(f"title => {{ {FIND};\n{code} }}", title)

    def wait(self, condition, arg=SAMPLER):
        self.page.wait_for_function(condition, arg=arg, timeout=WAIT_MS)

    def until_under_way(self):
        self.wait(UNDER_WAY)

    def until_ended(self, title=SAMPLER, before=""):
        """Wait until a run that is not the one `before` has ended, and the server is idle."""
        self.wait(ENDED, [title, before])
        self.idle()

    def reload(self):
        self.page.reload()
        self.wait(READY)

    def load(self, name="t2v", *, steps=12, workflow_id=None, ids_from=0):
        """Open a shipped graph, sized for a CPU, under a new id, and return the id.

        A run by an API client without a graph is shown at nodes with the same ids. `ids_from` is
        added to all ids, so that no node has such a run.
        """
        workflow = template(name)
        workflow["id"] = workflow_id or str(uuid.uuid4())
        add_to_ids(workflow, ids_from)
        self.frontend.load_workflow(workflow)
        for title, values in {**SMALL, SAMPLER: {"steps": steps, "seed": next(SEEDS)}}.items():
            self.set(title, **values)
        self.look_at(SAMPLER)
        return str(workflow["id"])

    def set(self, title, **values):
        """Change a node's widgets."""
        self.page.evaluate(SET, [title, values])

    def look_at(self, title, zoom=1.0):
        """Put a node into the canvas, at the upper middle."""
        code = f"""const [x, y] = find(title).pos, {{ ds }} = window.app.canvas, zoom = {zoom}
            ds.scale = zoom; ds.offset[0] = 450 / zoom - x; ds.offset[1] = 120 / zoom - y
            window.app.canvas.setDirty(true, true)"""
        self.js(code, title)
        self.page.wait_for_timeout(300)

    def queue(self):
        self.page.evaluate("() => window.app.queuePrompt(0)")

    def run(self, title=SAMPLER):
        """Run the graph with an unused seed until it ends, and return the overlay's content."""
        before = self.shown(title)["run"]
        self.set(SAMPLER, seed=next(SEEDS))
        self.queue()
        self.until_ended(title, before)
        return self.shown(title)

    def add_benchmark(self, sampler=SAMPLER, *, right, down):
        """Add a node with the title "Benchmark", connected to the sampler's run."""
        code = f"""const [x, y] = find(title).pos, {{ outputs }} = find(title)
            const node = window.LiteGraph.createNode('WanStreamBenchmark')
            Object.assign(node, {{ title: 'Benchmark', pos: [x + {right}, y + {down}] }});
            {GRAPH}.add(node)
            const run = outputs.findIndex(output => output.type === 'WANSTREAM_RUN')
            find(title).connect(run, node, 'run')"""
        self.js(code, sampler)

    def idle(self):
        """Wait until the server has nothing more to do and every badge shows it."""
        while self.server.get("/prompt")["exec_info"]["queue_remaining"]:
            self.page.wait_for_timeout(100)
        self.page.wait_for_timeout(500)

    def shown(self, title=SAMPLER):
        return self.page.evaluate(SHOWN, title)

    def id_of(self, title):
        return str(self.js("return find(title).id", title))

    def badges(self):
        return dict(self.page.evaluate(BADGES))

    def picture(self, name, **part):
        """Save a screenshot of part of the page, if pictures are enabled."""
        if folder := os.environ.get("WANSTREAM_IMAGES"):
            self.page.wait_for_timeout(1000)  # until the view has moved
            clip = {"x": 380, "y": 60, "width": 720, "height": 850, **part}
            with Image.open(io.BytesIO(self.page.screenshot(clip=clip))) as picture:
                picture.convert("RGB").save(Path(folder) / f"{name}.png", optimize=True)


def last_history(server):
    (entry,) = server.get("/history?max_items=1").values()
    return entry


def need_frontend_of_0_4(reason):
    """Skip a test in an older ComfyUI's frontend, for this reason."""
    if find_comfyui().version() < (0, 4):
        pytest.skip(reason)


def serve(base, *nodes):
    """Yield a server with the test model and some of our nodes for tests."""
    try:
        comfyui = find_comfyui()
    except NoComfyUIError as err:
        pytest.skip(str(err))
    populate(base)
    for name in nodes:
        (base / "custom_nodes" / name).symlink_to(NODES / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(base / "cache"))  # not the user's machine profiles
        with running_server(comfyui, base) as server:
            yield server
