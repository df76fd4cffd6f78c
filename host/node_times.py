"""Seconds and memory of every node of a queue item, from looks at it now and then.

ComfyUI keeps the state of each node where anyone may read it; nothing of it is changed or hooked. A look sees which
nodes run, so a time is known to within the time between two looks, and a node that begins and ends between two of them
took none. Of what ran while nobody looked no time is told, or the part that was seen.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class NodeSeen:
    """One node at a look; `node_id` is the one on the canvas, `part` another one where a node has several parts."""

    node_id: str
    part: str
    class_type: str
    state: Literal["running", "finished"]


@dataclass(frozen=True, kw_only=True)
class MemoryNow:
    """Bytes in use; None where there is no such counter, as on a CPU."""

    device_used: int | None
    """On the whole device, by all processes."""
    device_total: int | None
    torch_allocated: int | None
    rss: int


@dataclass(kw_only=True)
class _Node:
    """What is known of one node; a part that runs has no seconds yet."""

    class_type: str
    began: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    partly: bool = False
    cached: bool = False

    def told(self, now: float) -> dict[str, Any]:
        seconds = sum(self.ended.get(part, now) - began for part, began in self.began.items())
        return {
            "class_type": self.class_type,
            "ran": bool(self.began),
            "running": self.began.keys() != self.ended.keys(),
            "seconds": seconds,
            "cached": self.cached,
            "partly": self.partly,
            **{f"{name}_peak": self.peaks.get(name) for name in PEAKS},
        }


PEAKS = ("device_used", "torch_allocated", "rss")
"""The fields of `MemoryNow` whose most is kept for each node."""


class ItemTimes:
    """The nodes of one queue item. Times are those of one clock, in seconds.

    `late`: the item went on already before the first look. What has ended by then is never told, and what runs then has
    the time since, and is told to be `partly` known.
    """

    def __init__(self, *, late: bool = False) -> None:
        self._late = late
        self._nodes: dict[str, _Node] = {}
        self._missed: set[str] = set()
        self._changed: set[str] = set()

    def look(self, now: float, seen: Iterable[NodeSeen]) -> bool:
        """Note the states of all nodes that have begun; whether another one runs now, whose memory is worth a look."""
        begins, late, self._late = False, self._late, False
        for each in seen:
            if each.part in self._missed or (late and each.state == "finished"):
                self._missed |= {each.part, each.node_id}
                continue
            node = self._nodes.setdefault(each.node_id, _Node(class_type=each.class_type))
            if each.part not in node.began:
                node.began[each.part] = now
                node.partly = late or node.partly
                self._changed.add(each.node_id)
                begins = begins or each.state == "running"
            if each.state == "finished" and each.part not in node.ended:
                node.ended[each.part] = now
                self._changed.add(each.node_id)
        return begins

    def memory(self, used: MemoryNow) -> None:
        """Note what is in use while the present nodes run."""
        for node_id, node in self._running():
            for name in PEAKS:
                value = getattr(used, name)
                if value is not None:
                    node.peaks[name] = max(value, node.peaks.get(name, 0))
            self._changed.add(node_id)

    def close(self, now: float, graph: Mapping[str, str], cached: Collection[str]) -> None:
        """The item is over: what still seems to run was interrupted, or has failed.

        `graph` has the class of every node of the item. Those that were not seen did not run, nor did those whose
        results were `cached`, whatever was seen of them.
        """
        self._end(now)
        for node_id, class_type in graph.items():
            if node_id in cached or (node_id not in self._nodes and node_id not in self._missed):
                self._nodes[node_id] = _Node(class_type=class_type, cached=node_id in cached)
                self._changed.add(node_id)

    def leave(self, now: float) -> None:
        """Nobody looks any more, and the item goes on: what runs now is partly known, of the rest nothing is said."""
        for _, node in self._running():
            node.partly = True
        self._end(now)

    def changes(self, now: float) -> dict[str, dict[str, Any]]:
        """What the event says of each node that has changed since the last call."""
        changed, self._changed = self._changed, set()
        return {node_id: self._nodes[node_id].told(now) for node_id in sorted(changed)}

    def _end(self, now: float) -> None:
        for node_id, node in self._running():
            node.ended |= dict.fromkeys(node.began.keys() - node.ended.keys(), now)
            self._changed.add(node_id)

    def _running(self) -> list[tuple[str, _Node]]:
        return [(node_id, node) for node_id, node in self._nodes.items() if node.began.keys() != node.ended.keys()]
