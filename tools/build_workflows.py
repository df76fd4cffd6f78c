"""Build the canvas workflows and their thumbnails from the API files, with ComfyUI's frontend.

Each `workflows/api/<name>.json` is loaded in a real server's frontend, laid out, completed with a
note and model file links, and saved by the frontend under its title in `templates.py`. The layout
uses node heights after a run, with chart, preview and result, in the renderer that draws them
higher. `thumbnails.py` draws the picture beside it. Run `scripts/workflows` after any change to a
node's inputs or to an API file.
"""

from __future__ import annotations

import json
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any

from .arrange import NOTE, NOTE_TYPE, Box, Layout, Size, columns, least_size, models_of, note, place
from .comfyui import NoComfyUIError, find_comfyui, populate, running_server
from .frontend import (
    CLASSIC,
    EMPTY,
    NODES_2,
    Frontend,
    NoBrowserError,
    opened_frontend,
    running_browser,
)
from .graphs import numbered
from .shown_run import populate_results, show_run
from .templates import TITLES, WORKFLOWS, template_path
from .thumbnails import thumbnail

VIEW = (2600, 1600)
SCREEN = (1600, 900)
"""Screen size that a workflow fills when it is opened."""
MARGIN = 30
ID_STRIDE = 100
QUALITY = 88

ADD_NOTE = """([type, title, text]) => {
    const note = window.LiteGraph.createNode(type)
    note.title = title
    window.app.rootGraph.add(note)
    note.widgets[0].value = text
    return String(note.id)
}"""

SIZES = """() => Object.fromEntries(
    window.app.rootGraph.nodes.map(node => [String(node.id), Array.from(node.computeSize())])
)"""

PUT = """([sizes, positions]) => {
    for (const node of window.app.rootGraph.nodes) {
        node.setSize(sizes[node.id])
        node.pos = positions[node.id]
    }
}"""
# Nodes 2.0 draws higher rows, and sets a node's height in the graph only after drawing it.
HEIGHTS = """() => Object.fromEntries(
    window.app.rootGraph.nodes.map(node => [String(node.id), node.size[1]])
)"""
DRAWN = (
    "() => window.app.rootGraph.nodes.every(node => "
    "document.querySelector(`[data-node-id='${node.id}']`))"
)
DRAWN_MS = 2000

# "fixed": with a seed that changes after a run, the next video would differ from the file's.
DRESS = """([id, models, frames]) => {
    const graph = window.app.rootGraph
    graph.id = id
    for (const node of graph.nodes) {
        if (models[node.id]) node.properties.models = models[node.id]
        for (const widget of node.widgets ?? [])
            if (widget.name === "control_after_generate") widget.value = "fixed"
    }
    for (const [title, [x, y, width, height]] of Object.entries(frames)) {
        const group = new window.LiteGraph.LGraphGroup(title)
        group.pos = [x, y]
        group.size = [width, height]
        graph.add(group)
    }
}"""

SHOW = """([scale, x, y]) => {
    window.app.canvas.ds.scale = scale
    window.app.canvas.ds.offset = [x, y]
    window.app.canvas.setDirty(true, true)
}"""


def main(names: Sequence[str]) -> int:
    """Build the named workflows, all by default, and return the exit code."""
    files = sorted((WORKFLOWS / "api").glob("*.json"))
    unknown = {*names} - {file.stem for file in files}
    if unknown:
        print(f"no workflows/api/{{{', '.join(sorted(unknown))}}}.json", file=sys.stderr)
        return 2
    untitled = {file.stem for file in files} - TITLES.keys()
    if untitled:
        print(f"no title in tools/templates.py: {', '.join(sorted(untitled))}", file=sys.stderr)
        return 2
    try:
        with tempfile.TemporaryDirectory() as base:
            build([file for file in files if not names or file.stem in names], Path(base))
    except (NoComfyUIError, NoBrowserError) as err:
        print(err, file=sys.stderr)
        return 1
    return 0


def build(files: Sequence[Path], base: Path) -> None:
    """Build each of these API files, with a server in the base directory `base`."""
    populate(base)
    populate_results(base)
    width, height = VIEW
    heights: dict[Path, list[float]] = {}
    with running_browser() as browser, running_server(find_comfyui(), base) as server:
        # Heights come from both renderers: a user may switch, and the taller nodes must fit.
        for settings in (NODES_2, CLASSIC):
            with opened_frontend(
                browser, server, width=width, height=height, settings=settings
            ) as frontend:
                for number, file in enumerate(files):
                    # Ids differ between files, because a node is never lower than an earlier one
                    # with the same id.
                    found = _heights_after_a_run(
                        frontend, _prompt(file, first=1 + number * ID_STRIDE), settings
                    )
                    heights[file] = [
                        max(pair) for pair in zip(found, heights.get(file, found), strict=True)
                    ]
        with opened_frontend(
            browser, server, width=width, height=height, settings=CLASSIC
        ) as frontend:
            for file in files:
                _build_one(frontend, file, heights[file])
                print(f"workflows/{template_path(file.stem).name}")


def _prompt(file: Path, *, first: int = 1) -> dict[str, Any]:
    return numbered(json.loads(file.read_text(encoding="utf-8")), first=first)


def _heights_after_a_run(
    frontend: Frontend, prompt: dict[str, Any], settings: Mapping[str, object]
) -> list[float]:
    """Return each node's height after a run in the renderer of `frontend`, in file order."""
    frontend.load_prompt(prompt)
    sizes = _sizes(frontend, prompt)
    layout = place(columns(prompt), sizes)
    frontend.page.evaluate(PUT, [sizes, layout.nodes])
    frontend.page.evaluate(SHOW, _view(layout, VIEW))
    if settings is NODES_2:
        frontend.page.wait_for_function(DRAWN)
    frontend.page.wait_for_timeout(DRAWN_MS)
    show_run(frontend, {node_id: node["class_type"] for node_id, node in prompt.items()})
    heights: dict[str, float] = frontend.page.evaluate(HEIGHTS)
    return [heights[node_id] for node_id in prompt]


def _build_one(frontend: Frontend, file: Path, heights: Sequence[float]) -> None:
    """Build one workflow.

    The layout reserves `heights` (in file order), but nodes keep their own height.
    """
    prompt = _prompt(file)
    frontend.load_workflow(EMPTY)
    frontend.load_prompt(prompt)
    note_id: str = frontend.page.evaluate(ADD_NOTE, [NOTE_TYPE, NOTE, note(file.stem, prompt)])
    nodes = {**prompt, note_id: {"class_type": NOTE_TYPE, "inputs": {}}}
    sizes = _sizes(frontend, nodes)
    needed = dict(zip(prompt, map(ceil, heights), strict=True))
    reserved = {
        node: size._replace(height=max(size.height, needed.get(node, 0)))
        for node, size in sizes.items()
    }
    layout = place(columns(nodes), reserved)
    frames = {title: frame for title, frame in layout.frames.items() if title != NOTE}
    models = {
        node_id: [model._asdict() for model in models_of(node)] for node_id, node in prompt.items()
    }
    # Nodes without files are left out: an empty list is true in JavaScript, and would be saved.
    linked = {node_id: found for node_id, found in models.items() if found}
    # The id is derived from the file name, so a rebuilt workflow keeps its id.
    name = str(uuid.uuid5(uuid.NAMESPACE_URL, f"wanstream/{file.stem}"))
    frontend.page.evaluate(PUT, [sizes, layout.nodes])
    frontend.page.evaluate(DRESS, [name, linked, frames])
    frontend.page.evaluate(SHOW, _view(layout, SCREEN))
    saved = frontend.export().workflow
    target = template_path(file.stem)
    target.write_text(json.dumps(saved, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    # The template browser shows the picture with the workflow's name, next to the workflow.
    thumbnail(file.stem).save(target.with_suffix(".jpg"), quality=QUALITY, optimize=True)


def _sizes(frontend: Frontend, nodes: dict[str, Any]) -> dict[str, Size]:
    """Return each node's size: the larger of required and minimum size."""
    needed: dict[str, list[float]] = frontend.page.evaluate(SIZES)
    return {
        node_id: Size(*map(max, needed[node_id], least_size(node["class_type"])))
        for node_id, node in nodes.items()
    }


def _view(layout: Layout, screen: tuple[int, int]) -> tuple[float, float, float]:
    """Return scale and offset for the whole layout to fill a screen."""
    frames = layout.frames.values()
    whole = Box(
        0, 0, max(box.x + box.width for box in frames), max(box.y + box.height for box in frames)
    )
    width, height = screen
    scale = min((width - 2 * MARGIN) / whole.width, (height - 2 * MARGIN) / whole.height)
    return scale, (width / scale - whole.width) / 2, (height / scale - whole.height) / 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
