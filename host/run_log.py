"""Log of the last runs for pages that are opened later: settings, telemetry options, bounded entries."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from .run_events import BEGIN, END, STEP

KEPT_RUNS = 50

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

    def note(self, event: str, payload: Mapping[str, Any]) -> None:
        """Keep what an event says; events of runs that were forgotten, and of other kinds, are not kept."""
        with self._lock:
            if event == BEGIN:
                self._runs[payload["run"]] = {**payload, "records": [], "ended": False, "timeline": None, "error": None}
                while len(self._runs) > KEPT_RUNS:
                    self._runs.popitem(last=False)
            elif event in (STEP, END) and payload["run"] in self._runs:
                self._go_on(self._runs[payload["run"]], event, payload)

    def told(self) -> dict[str, list[dict[str, Any]]]:
        """`runs`, the oldest first: copies that no later event changes."""
        with self._lock:
            return {"runs": [{**run, "records": list(run["records"])} for run in self._runs.values()]}

    @staticmethod
    def _go_on(run: dict[str, Any], event: str, payload: Mapping[str, Any]) -> None:
        if event == STEP:
            run["records"].append(payload["record"])
            return
        timeline = payload["timeline"]
        run.update(ended=True, timeline=timeline, predicted=payload["predicted"], error=payload["error"])
        if timeline is not None:
            run["records"] = []  # the timeline holds them
