"""Log of the last runs, for pages that are opened later."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from .run_events import BEGIN, END, STEP

KEPT_RUNS = 50

LONGEST_NAME = 200
"""Maximum number of characters of a title or an id; longer ones are truncated."""


def title_in(prompt: Mapping[str, Any], node_id: str | None) -> str | None:
    """Return the title of a node in a posted prompt; None if it is missing or, as prompts are untrusted, not a text."""
    return _text_at(prompt, node_id, "_meta", "title")


def workflow_in(extra_data: Mapping[str, Any]) -> str | None:
    """Return the id of the canvas from the extra data of a prompt; None if it is missing or not a text."""
    return _text_at(extra_data, "extra_pnginfo", "workflow", "id")


def _text_at(value: object, *path: str | None) -> str | None:
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value[:LONGEST_NAME] if isinstance(value, str) else None


class RunLog:
    """State of the last `KEPT_RUNS` runs, built from their events in order. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def record(self, event: str, payload: Mapping[str, Any]) -> None:
        """Apply an event; events of other kinds, and of runs that were evicted from the log, are ignored."""
        with self._lock:
            if event == BEGIN:
                self._runs[payload["run"]] = {**payload, "records": [], "ended": False, "timeline": None, "error": None}
                while len(self._runs) > KEPT_RUNS:
                    self._runs.popitem(last=False)
            elif event in (STEP, END) and payload["run"] in self._runs:
                self._update(self._runs[payload["run"]], event, payload)

    def snapshot(self) -> dict[str, list[dict[str, Any]]]:
        """Return `runs`, oldest first, as copies that later events do not change."""
        with self._lock:
            return {"runs": [{**run, "records": list(run["records"])} for run in self._runs.values()]}

    @staticmethod
    def _update(run: dict[str, Any], event: str, payload: Mapping[str, Any]) -> None:
        if event == STEP:
            run["records"].append(payload["record"])
            return
        timeline = payload["timeline"]
        run.update(ended=True, timeline=timeline, predicted=payload["predicted"], error=payload["error"])
        if timeline is not None:
            run["records"] = []  # the timeline contains them
