"""What a host has told of its last runs, kept for a page that is opened or loaded again later. Bounded, thread-safe."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from .announced_run import BEGIN, END, STEP

NODES = "wanstream.nodes"
"""Event: time and memory of the nodes of a queue item, those alone that have changed since the last one."""

KEPT_RUNS = 50
KEPT_ITEMS = 50

LONGEST_NAME = 200
"""Characters of a title or an id that are kept; the rest of a longer one is cut off."""


def title_in(prompt: Mapping[str, Any], node_id: str | None) -> str | None:
    """The title of a node in a posted prompt, which may hold any JSON there; None where it is not a text."""
    return _text_at(prompt, node_id, "_meta", "title")


def workflow_in(extra_data: Mapping[str, Any]) -> str | None:
    """The id of the canvas in what was posted next to a prompt; None without one, or where it is not a text."""
    return _text_at(extra_data, "extra_pnginfo", "workflow", "id")


def _text_at(value: object, *path: str | None) -> str | None:
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value[:LONGEST_NAME] if isinstance(value, str) else None


class RunLog:
    """Takes every event in the order in which it is told, and answers with the state that they amount to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._items: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def note(self, event: str, payload: Mapping[str, Any]) -> None:
        """Keep what an event says; events of runs that were forgotten, and of other kinds, are not kept."""
        with self._lock:
            if event == BEGIN:
                self._runs[payload["run"]] = {**payload, "records": [], "ended": False, "timeline": None, "error": None}
                _keep_last(self._runs, KEPT_RUNS)
            elif event in (STEP, END) and payload["run"] in self._runs:
                self._go_on(self._runs[payload["run"]], event, payload)
            elif event == NODES:
                item = self._items.setdefault(payload["prompt_id"], {**payload, "nodes": {}})
                item.update({**payload, "nodes": item["nodes"] | payload["nodes"]})
                _keep_last(self._items, KEPT_ITEMS)

    def told(self) -> dict[str, list[dict[str, Any]]]:
        """`runs` and `items`, the oldest first: copies that no later event changes."""
        with self._lock:
            return {
                "runs": [{**run, "records": list(run["records"])} for run in self._runs.values()],
                "items": [{**item, "nodes": dict(item["nodes"])} for item in self._items.values()],
            }

    @staticmethod
    def _go_on(run: dict[str, Any], event: str, payload: Mapping[str, Any]) -> None:
        if event == STEP:
            run["records"].append(payload["record"])
            return
        timeline = payload["timeline"]
        run.update(ended=True, timeline=timeline, predicted=payload["predicted"], error=payload["error"])
        if timeline is not None:
            run["records"] = []  # the timeline holds them


def _keep_last(kept: OrderedDict[str, Any], count: int) -> None:
    while len(kept) > count:
        kept.popitem(last=False)
