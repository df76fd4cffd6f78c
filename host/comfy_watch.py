"""What browsers are told by a ComfyUI server: runs as they go, and time and memory of every node of the graph.

Doors: `PromptServer` sends events to all browsers and serves two routes, its queue says which item runs, and
`get_progress_state` holds the state of every node. Nothing of ComfyUI is replaced.

    GET  /wanstream/runs    {"runs": [...], "items": [...]}: the last ones of this server, for a page that comes later
    POST /wanstream/watch   {"seconds": 90}: a page is interested in nodes for so long; without one nobody looks at them
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import comfy.model_management
from aiohttp import web
from comfy_execution.progress import NodeState, ProgressRegistry, get_progress_state
from server import PromptServer

from ..metrics.device import MemoryMeter
from .announced_run import BEGIN, Announce
from .node_times import ItemTimes, MemoryNow, NodeSeen
from .run_log import NODES, RunLog, title_in, workflow_in

MEMORY = "wanstream.memory"

LOOK_SECONDS = 0.05
TELL_SECONDS = 0.5
IDLE_SECONDS = 5.0
"""How long nothing may be queued before nobody looks any more; a prompt that is posted wakes the watch."""
LONGEST_LEASE = 600.0


class ComfyWatch:
    """Keeps what was told and, while a page is interested and something runs, looks at the nodes from a thread."""

    def __init__(self) -> None:
        self.log = RunLog()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._leased_until = self._idle_at = 0.0

    def open(self) -> None:
        """Serve the routes; called once, before the server begins to listen. Nothing without a server."""
        server = getattr(PromptServer, "instance", None)
        if server is None or any(getattr(route, "path", None) == "/wanstream/runs" for route in server.routes):
            return  # another copy of this pack serves them
        server.routes.get("/wanstream/runs")(self._runs)
        server.routes.post("/wanstream/watch")(self._watch)
        server.add_on_prompt_handler(self._on_prompt)

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

    async def _watch(self, request: web.Request) -> web.Response:
        try:
            seconds = float((await request.json())["seconds"])
        except (ValueError, KeyError, TypeError):
            return web.json_response({"error": 'give {"seconds": a number}'}, status=400)
        if not 0 <= seconds <= LONGEST_LEASE:
            return web.json_response({"error": f"seconds {seconds:g}: give 0 to {LONGEST_LEASE:g}"}, status=400)
        self._leased_until = max(self._leased_until, time.monotonic() + seconds)
        self._wake(late=True)
        return web.json_response({"seconds": seconds})

    def _on_prompt(self, posted: dict[str, Any]) -> dict[str, Any]:
        if time.monotonic() < self._leased_until:
            self._wake(late=False)
        return posted

    def _wake(self, *, late: bool) -> None:
        """Begin to look, unless somebody does; `late`: something may run already."""
        with self._lock:
            self._idle_at = time.monotonic() + IDLE_SECONDS
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, args=(late,), name="wanstream-watch", daemon=True)
                self._thread.start()

    def _look(self, late: bool) -> None:
        """Look at what runs until nobody is interested, or nothing has run for a while."""
        looking, told_at = _Looking(self.announce, late=late), 0.0
        try:
            while True:
                now = time.monotonic()
                busy = looking.look(now)
                if now - told_at >= TELL_SECONDS:
                    looking.tell(now)
                    told_at = now
                if not self._goes_on(now, busy=busy):
                    break
                time.sleep(LOOK_SECONDS)
            looking.leave(now)
        except BaseException:
            self._thread = None  # the next prompt begins anew; what went wrong is shown by the thread's own trace
            raise

    def _goes_on(self, now: float, *, busy: bool) -> bool:
        with self._lock:
            if busy:
                self._idle_at = now + IDLE_SECONDS
            if now < min(self._idle_at, self._leased_until):
                return True
            self._thread = None
            return False


@dataclass(frozen=True, kw_only=True)
class _Item:
    """A queue item that runs."""

    prompt_id: str
    workflow: str | None
    graph: Mapping[str, str]
    """The class of each node."""
    registry: ProgressRegistry
    """Of this item alone; the next one has another."""
    times: ItemTimes


class _Looking:
    """The queue item that is looked at, if any. `late`: the first look may find one that has been running for long."""

    def __init__(self, announce: Announce, *, late: bool) -> None:
        self._announce, self._late = announce, late
        self._meter = MemoryMeter(comfy.model_management.get_torch_device())
        self._item: _Item | None = None

    def look(self, now: float) -> bool:
        """Note which nodes run; whether any item does."""
        running, waiting = PromptServer.instance.prompt_queue.get_current_queue_volatile()
        registry = get_progress_state()
        here = registry.prompt_id if any(item[1] == registry.prompt_id for item in running) else None
        if self._item is not None and self._item.prompt_id != here:
            self.close(now)
        if here is not None:
            if self._item is None:
                prompt, workflow = _queued(here)
                graph = {node_id: node["class_type"] for node_id, node in prompt.items()}
                times = ItemTimes(late=self._late)
                self._item = _Item(prompt_id=here, workflow=workflow, graph=graph, registry=registry, times=times)
            if self._item.times.look(now, _seen(registry)):
                self._item.times.memory(self._memory())
        self._late = False
        return bool(running or waiting)

    def tell(self, now: float) -> None:
        """Tell the memory in use, and the nodes that have changed."""
        if self._item is None:
            return
        used = self._memory()
        self._item.times.memory(used)
        self._announce(MEMORY, {"at": time.time(), "prompt_id": self._item.prompt_id, **asdict(used)})
        self._tell_nodes(self._item, now, running=True)

    def close(self, now: float) -> None:
        """The item is over; its last nodes may have run since the last look."""
        if self._item is not None:
            self._item.times.look(now, _seen(self._item.registry))
            self._item.times.close(now, self._item.graph, _cached(self._item.prompt_id))
            self._tell_nodes(self._item, now, running=False)
            self._item = None

    def leave(self, now: float) -> None:
        """Nobody looks any more, whether the item is over or not."""
        if self._item is not None:
            self._item.times.leave(now)
            self._tell_nodes(self._item, now, running=False)
            self._item = None

    def _tell_nodes(self, item: _Item, now: float, *, running: bool) -> None:
        nodes = item.times.changes(now)
        if nodes or not running:
            told = {"prompt_id": item.prompt_id, "workflow": item.workflow, "at": time.time(), "running": running}
            self._announce(NODES, {**told, "nodes": nodes})

    def _memory(self) -> MemoryNow:
        device = comfy.model_management.get_torch_device()
        used = self._meter.used_bytes()
        total = None if used is None else int(comfy.model_management.get_total_memory(device))
        return MemoryNow(
            device_used=used,
            device_total=total,
            torch_allocated=self._meter.allocated_bytes(),
            rss=self._meter.rss_bytes(),
        )


def _seen(registry: ProgressRegistry) -> list[NodeSeen]:
    """Every node that has begun. The executing thread adds to the table meanwhile, so it is copied in one go."""
    states = list(registry.nodes.items())
    return [
        NodeSeen(
            node_id=registry.dynprompt.get_display_node_id(part),
            part=part,
            class_type=registry.dynprompt.get_node(registry.dynprompt.get_display_node_id(part))["class_type"],
            state="running" if entry["state"] is NodeState.Running else "finished",
        )
        for part, entry in states
        if entry["state"] is not NodeState.Pending
    ]


def _cached(prompt_id: str) -> frozenset[str]:
    """Nodes of an item that is over whose results were there already; of these, output nodes seem to have run."""
    told = PromptServer.instance.prompt_queue.get_history(prompt_id, map_function=lambda item: item.get("status"))
    messages = (told.get(prompt_id) or {"messages": []})["messages"]
    return frozenset(node for event, data in messages if event == "execution_cached" for node in data["nodes"])


def _queued(prompt_id: str | None) -> tuple[Mapping[str, Any], str | None]:
    """The graph of a running queue item, and the id of the canvas that it came from; None for one without."""
    server = getattr(PromptServer, "instance", None)
    running = [] if server is None else server.prompt_queue.get_current_queue_volatile()[0]
    for item in running:
        if item[1] == prompt_id:
            return item[2], workflow_in(item[3])
    return {}, None
