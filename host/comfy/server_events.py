"""Events of runs from a ComfyUI server to all browsers, and the route that returns the last runs.

`PromptServer` sends the events and serves the route; its queue holds the graph of the item that runs. Nothing of
ComfyUI is replaced.

    GET  /wanstream/runs    {"runs": [...]}: the last runs of this server, for a page that is opened later
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohttp import web
from server import PromptServer

from ..run_events import BEGIN
from ..run_log import RunLog, title_in, workflow_in


class ServerEvents:
    """Sends the events of runs to all browsers and keeps them for pages that are opened later."""

    def __init__(self) -> None:
        self.log = RunLog()

    def open(self) -> None:
        """Serve the route; called once, before the server begins to listen. Nothing without a server."""
        server = getattr(PromptServer, "instance", None)
        if server is None or any(getattr(route, "path", None) == "/wanstream/runs" for route in server.routes):
            return  # another copy of this pack serves it
        server.routes.get("/wanstream/runs")(self._runs)

    def announce(self, event: str, payload: Mapping[str, Any]) -> None:
        """Tell all browsers, and keep it for those that come later."""
        if event == BEGIN:
            prompt, workflow = _queued(payload["prompt_id"])
            payload = {**payload, "workflow": workflow, "title": title_in(prompt, payload["shown_at"])}
        self.log.note(event, payload)
        server = getattr(PromptServer, "instance", None)
        if server is not None:
            server.send_sync(event, payload, None)

    async def _runs(self, request: web.Request) -> web.Response:
        return web.json_response(self.log.told())


def _queued(prompt_id: str | None) -> tuple[Mapping[str, Any], str | None]:
    """The graph of a running queue item, and the id of the canvas that it came from; None for one without."""
    server = getattr(PromptServer, "instance", None)
    running = [] if server is None else server.prompt_queue.get_current_queue_volatile()[0]
    for item in running:
        if item[1] == prompt_id:
            return item[2], workflow_in(item[3])
    return {}, None
