"""Run events from a ComfyUI server to all browsers, and routes for the last runs and the version.

`PromptServer` sends the events and serves the routes. The queue has the running item's graph.
Nothing in ComfyUI is patched.

    GET  /wanstream/runs    {"runs": [...], "notices": [...]}: the last runs on this server and the
                            node notices, for pages opened later
    GET  /wanstream/about   {"version": "...", "instance": "..."}: for `wanstream batch` with
                            several servers
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web

from ....schema import VERSION
from ...run_events import BEGIN, NOTICES_EVENT, RunLog, contents_of, short_text
from .. import versions


class ServerEvents:
    """Sends run events to all browsers and logs them for pages opened later."""

    def __init__(self) -> None:
        self.log = RunLog()
        self._instance = str(uuid.uuid4())

    def open(self) -> None:
        """Serve the routes.

        Called once, before the server starts to listen. Does nothing without a server.
        """
        server = versions.server()
        if server is None or any(_is_ours(route) for route in server.routes):
            return  # another copy of this pack serves them
        server.routes.get("/wanstream/runs")(self._runs)
        server.routes.get("/wanstream/about")(self._about)

    def check_prompts(self, check: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Let `check` change the body of each `POST /prompt` before the workflow is validated.

        Nodes that ComfyUI has already computed in another graph get the earlier notices. Nodes that
        no longer have the cause of a notice lose it.
        """
        server = versions.server()
        if server is None:
            return

        def handle(request: dict[str, Any]) -> dict[str, Any]:
            request = check(request)
            prompt = request.get("prompt")
            workflow = short_text(request, "extra_data", "extra_pnginfo", "workflow", "id")
            if isinstance(prompt, dict):
                for payload in self.log.queued(prompt, workflow):
                    # No client id: the message goes to all pages, not only to the one with the
                    # queued workflow.
                    server.send_sync(NOTICES_EVENT, payload, None)
            return request

        server.add_on_prompt_handler(handle)

    def announce(self, event: str, payload: Mapping[str, Any]) -> None:
        """Send an event to all browsers and record it.

        Begin and notice events get names from the graph.
        """
        if event in (BEGIN, NOTICES_EVENT):
            prompt, extra_data = versions.running_item(payload["prompt_id"])
            workflow = short_text(extra_data, "extra_pnginfo", "workflow", "id")
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
        server = versions.server()
        if server is not None:
            server.send_sync(event, payload, None)

    async def _runs(self, request: web.Request) -> web.Response:
        return web.json_response(self.log.snapshot())

    async def _about(self, request: web.Request) -> web.Response:
        # The id differs between processes: two addresses with one id are the same server.
        return web.json_response({"version": VERSION, "instance": self._instance})


def _is_ours(route: web.AbstractRouteDef) -> bool:
    return isinstance(route, web.RouteDef) and route.path == "/wanstream/runs"
