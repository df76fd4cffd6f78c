"""Run events from a ComfyUI server to all browsers, and the routes for the last runs and the version.

`PromptServer` sends the events and serves the routes. The queue contains the graph of the running item. Nothing in
ComfyUI is patched.

    GET  /wanstream/runs    {"runs": [...], "notices": [...]}: the last runs on this server and the node notices, for
                            pages opened later
    GET  /wanstream/about   {"version": "...", "instance": "..."}: for `wanstream batch` with several servers
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web
from server import PromptServer

from ...schema import VERSION
from ..run_events import BEGIN, NOTICES_EVENT, RunLog, contents_of, short_text


class ServerEvents:
    """Sends run events to all browsers and logs them for pages opened later."""

    def __init__(self) -> None:
        self.log = RunLog()
        self._instance = str(uuid.uuid4())

    def open(self) -> None:
        """Serve the routes. Called once, before the server starts to listen. Does nothing without a server."""
        server = getattr(PromptServer, "instance", None)
        if server is None or any(getattr(route, "path", None) == "/wanstream/runs" for route in server.routes):
            return  # another copy of this pack serves them
        server.routes.get("/wanstream/runs")(self._runs)
        server.routes.get("/wanstream/about")(self._about)

    def check_prompts(self, check: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Let `check` change the body of each `POST /prompt` before the workflow is validated.

        Workflow nodes that ComfyUI has already computed in another graph get the earlier notices, and nodes without
        what their notices are about lose them.
        """
        server = getattr(PromptServer, "instance", None)
        if server is None:
            return

        def handle(request: dict[str, Any]) -> dict[str, Any]:
            request = check(request)
            prompt = request.get("prompt")
            workflow = short_text(request, "extra_data", "extra_pnginfo", "workflow", "id")
            for payload in self.log.queued(prompt, workflow) if isinstance(prompt, dict) else ():
                server.send_sync(NOTICES_EVENT, payload, None)
            return request

        server.add_on_prompt_handler(handle)

    def has_viewers(self) -> bool:
        """Return True if at least one websocket is connected: a page, or an API client."""
        server = getattr(PromptServer, "instance", None)
        return server is not None and bool(server.sockets)

    def running_graph(self, prompt_id: str | None) -> Mapping[str, Any]:
        """Return the graph of the running queue item with this id; empty if there is none."""
        return _queued(prompt_id)[0]

    def announce(self, event: str, payload: Mapping[str, Any]) -> None:
        """Send an event to all browsers and record it. Begin and notice events get names from the graph."""
        if event in (BEGIN, NOTICES_EVENT):
            prompt, workflow = _queued(payload["prompt_id"])
            node = payload.get("shown_at", payload["node"])
            names = {
                "title": short_text(prompt, node, "_meta", "title"),
                "type": short_text(prompt, node, "class_type"),
            }
            payload = {**payload, "workflow": workflow, **names}
            if event == NOTICES_EVENT:
                payload["content"] = contents_of(prompt).get(node)
        if not self.log.record(event, payload):
            return
        server = getattr(PromptServer, "instance", None)
        if server is not None:
            server.send_sync(event, payload, None)

    async def _runs(self, request: web.Request) -> web.Response:
        return web.json_response(self.log.snapshot())

    async def _about(self, request: web.Request) -> web.Response:
        # The id differs from process to process: two addresses with one id are one server.
        return web.json_response({"version": VERSION, "instance": self._instance})


def _queued(prompt_id: str | None) -> tuple[Mapping[str, Any], str | None]:
    """Return the graph and the canvas id of a running queue item, None without one."""
    server = getattr(PromptServer, "instance", None)
    running = [] if server is None else server.prompt_queue.get_current_queue_volatile()[0]
    for item in running:
        if item[1] == prompt_id:
            return item[2], short_text(item[3], "extra_pnginfo", "workflow", "id")
    return {}, None
