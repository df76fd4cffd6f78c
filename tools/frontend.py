"""ComfyUI's frontend in headless Chromium: loads and saves graphs, returns error messages.

The system's Chromium is used, or the one named by `CHROMIUM`. playwright only drives it. Both are
optional.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .comfyui import Server

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

START_MS = 90_000
LOAD_MS = 30_000
CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--no-proxy-server"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)

CLASSIC: Mapping[str, object] = {"Comfy.VueNodes.Enabled": False}
"""Setting for ComfyUI's classic canvas."""
NODES_2: Mapping[str, object] = {"Comfy.VueNodes.Enabled": True}
"""Setting for "Nodes 2.0", with nodes as DOM elements."""

# Without the first one, a first start opens the template browser over the canvas.
SETTINGS = {
    "Comfy.TutorialCompleted": True,
    "Comfy.ColorPalette": "dark",
    "Comfy.Locale": "en",
    **CLASSIC,
}

GRAPH = "(window.app.rootGraph ?? window.app.graph)"
"""Graph in JavaScript. The frontend in ComfyUI 0.3.64 has only the second name."""

# The app has created its canvas and loaded the default graph. Before that, the default graph would
# replace a loaded one.
READY = f"() => window.app?.vueAppReady && {GRAPH}?.nodes?.length > 0"

# The default graph names a missing model, and that error would remain on later nodes with the same
# ids.
EMPTY = {"last_node_id": 0, "last_link_id": 0, "nodes": [], "links": [], "version": 0.4}

EXPORT = "async () => JSON.stringify(await window.app.graphToPrompt())"

# Dialogs, toasts and the error summary, as shown to a user.
COMPLAINTS = """() => [...document.querySelectorAll(
    '[role=dialog], .p-dialog, .p-toast-message, [data-testid=error-overlay]'
)].map(element => element.innerText.trim()).filter(text => text)"""


# Closes dialogs, messages, panels and all graphs but the open one.
CLEAR = """async () => {
    const { workflow, toast, bottomPanel } = window.app.extensionManager
    window.app.ui.dialog.close?.()
    toast.removeAll?.()
    if (bottomPanel?.activePanel) bottomPanel.activePanel = null
    for (const opened of [...workflow.openWorkflows])
        if (opened !== workflow.activeWorkflow) await workflow.closeWorkflow(opened)
}"""


class NoBrowserError(OSError):
    """No Chromium, or no playwright to drive it. The message says what to install."""


class Exported(NamedTuple):
    """Graph as saved by the frontend, in canvas and in API format."""

    workflow: dict[str, Any]
    prompt: dict[str, Any]


class Frontend:
    """One page of the frontend."""

    def __init__(self, page: Page) -> None:
        self.page = page

    def load_prompt(self, prompt: Mapping[str, Any]) -> None:
        """Replace the graph by one in API format."""
        self.page.evaluate("prompt => window.app.loadApiJson(prompt, 'graph.json')", prompt)
        self._wait_for_nodes(len(prompt))

    def load_workflow(self, workflow: Mapping[str, Any]) -> None:
        """Replace the graph by one in canvas format, as opening a file does."""
        self.page.evaluate("workflow => window.app.loadGraphData(workflow)", workflow)
        self._wait_for_nodes(len(workflow["nodes"]))

    def export(self) -> Exported:
        """Return the graph as written by Save and by Export (API)."""
        # As text, because playwright would convert undefined values to null.
        found = json.loads(self.page.evaluate(EXPORT))
        return Exported(found["workflow"], found["output"])

    def clear(self) -> None:
        """Leave an empty graph alone, without dialogs and messages."""
        self.page.unroute_all()
        self.load_workflow(EMPTY)
        self.page.evaluate(CLEAR)

    def complaints(self) -> list[str]:
        """Return the texts of all dialogs, messages and errors on the page."""
        # They are drawn some frames after the graph is loaded.
        self.page.wait_for_timeout(500)
        found: list[str] = self.page.evaluate(COMPLAINTS)
        return found

    def _wait_for_nodes(self, count: int) -> None:
        self.page.wait_for_function(f"() => {GRAPH}.nodes.length === {count}", timeout=LOAD_MS)


def find_chromium() -> Path:
    """Return this machine's Chromium.

    Raises NoBrowserError, also without playwright.
    """
    named = os.environ.get("CHROMIUM")
    found = (
        named
        if named and Path(named).is_file()
        else next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)
    )
    if found is None:
        raise NoBrowserError(
            "NO CHROMIUM: install it (on Debian: the package chromium) or name one in CHROMIUM"
        )
    if find_spec("playwright") is None:
        raise NoBrowserError(
            "NO PLAYWRIGHT: install it into this Python with `python -m pip install -e .[browser]`"
        )
    return Path(found)


@contextmanager
def running_browser() -> Iterator[Browser]:
    """Run this machine's Chromium, headless. Raises NoBrowserError."""
    chromium = find_chromium()
    # This import is here, because playwright is optional.
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened_frontend(
    browser: Browser,
    server: Server,
    *,
    width: int = 1600,
    height: int = 900,
    settings: Mapping[str, object] = {},
) -> Iterator[Frontend]:
    """Open the frontend of `server` in a new profile, `width` x `height` pixels, without nodes.

    `settings` are ComfyUI's, by id. All others are as in a first start. A new profile has no state
    from earlier pages, in particular no pictures for nodes with the same ids.
    """
    # The page reads the settings once, so they are set before the page is opened.
    status, _ = server.post("/settings", {**SETTINGS, **settings})
    assert status == 200
    with browser.new_context(viewport={"width": width, "height": height}) as profile:
        page = profile.new_page()
        page.goto(server.url)
        # `goto` returns earlier, when the page is loaded but the app is not set up.
        page.wait_for_function(READY, timeout=START_MS)
        frontend = Frontend(page)
        frontend.load_workflow(EMPTY)
        yield frontend


class SharedFrontends(AbstractContextManager["SharedFrontends"]):
    """Pages of one server that are opened once, because ComfyUI's page takes seconds to start.

    Two stay open, for tests that change between both renderers.
    """

    def __init__(self, browser: Browser, server: Server) -> None:
        self._browser = browser
        self._server = server
        self._opened: dict[tuple[object, ...], tuple[Frontend, ExitStack]] = {}

    def get(self, *, height: int = 900, settings: Mapping[str, object] = {}) -> Frontend:
        """Return the page of this height and these settings, without nodes, opened if need be."""
        key = height, *sorted({**SETTINGS, **settings}.items())
        if key in self._opened:
            # The page is put last: the first one is closed when a third page is opened.
            found = self._opened[key] = self._opened.pop(key)
            # A page that a test loads again reads those of the page that was opened last.
            self._server.post("/settings", {**SETTINGS, **settings})
            found[0].clear()
            return found[0]
        if len(self._opened) == 2:
            self._opened.pop(next(iter(self._opened)))[1].close()
        closing = ExitStack()
        frontend = closing.enter_context(
            opened_frontend(self._browser, self._server, height=height, settings=settings)
        )
        self._opened[key] = frontend, closing
        return frontend

    def __exit__(self, *error: object) -> None:
        while self._opened:
            self._opened.popitem()[1][1].close()
