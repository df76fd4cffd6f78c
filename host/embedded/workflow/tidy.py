"""Removal of frontend-only parts: widgets, and nodes without effect on a result."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from .graph import Prompt, as_link, class_of
from .near_names import nearest

_WIDGETS = re.compile(r"upload|preview|control_(?:after|before)|^__|^\$\$", re.IGNORECASE)
"""Widget names that the frontend and other packs add to any node."""
_VIEWERS = re.compile(
    r"(?!.*save).*(?:preview|note|show|display|primitive|reroute)", re.IGNORECASE | re.DOTALL
)
"""Node classes that only show or annotate something."""
_SAME_CLASS = 0.85
"""Similarity between a mistyped class and the real one."""


@dataclass(frozen=True, kw_only=True)
class TidyWorkflow:
    """A workflow without such parts, and one line per affected node."""

    prompt: Prompt
    notes: tuple[str, ...] = ()


def tidy(
    prompt: Prompt, inputs: Mapping[str, Collection[str]], outputs: Collection[str]
) -> TidyWorkflow:
    """Return the workflow without frontend widgets and without unused foreign nodes.

    No output depends on an unused node.

    Args:
        prompt: the workflow, maybe with unknown classes.
        inputs: input names by known class.
        outputs: the known output node classes.
    """
    idle = _idle_nodes(prompt, inputs, outputs)
    notes = [
        f"node {node_id} ({prompt[node_id]['class_type']}): skipped: no result depends on it"
        for node_id in idle
    ]
    tidied: dict[str, Mapping[str, Any]] = {}
    names = {name for node in prompt.values() for name in inputs.get(class_of(node) or "", ())}
    for node_id, node in prompt.items():
        if node_id in idle:
            continue
        tidied[node_id] = node
        own = inputs.get(class_of(node) or "")
        if own is None:
            continue
        given = node.get("inputs", {})
        extra = [name for name in given if _is_widget(name, given[name], own, names)]
        if extra:
            kept = {name: given[name] for name in given if name not in extra}
            tidied[node_id] = {**node, "inputs": kept}
            kind = "is a widget" if len(extra) == 1 else "are widgets"
            notes.append(
                f"node {node_id} ({node['class_type']}): ignored: {', '.join(extra)} {kind} of the "
                "frontend"
            )
    return TidyWorkflow(prompt=tidied, notes=tuple(notes))


def _is_widget(name: str, value: object, own: Collection[str], others: Collection[str]) -> bool:
    """Return True if an input cannot be a node setting.

    A link, a number, another node's input name, and a name similar to the node's own inputs are
    settings. Without them the run would differ from the workflow.
    """
    if name in own or as_link(value) is not None:
        return False
    if _WIDGETS.search(name):
        return True
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return not is_number and name not in others and nearest(name, own) is None


def _idle_nodes(prompt: Prompt, known: Mapping[str, object], outputs: Collection[str]) -> list[str]:
    """Return the foreign nodes on which no output depends, ours or foreign."""
    sources = {node_id: _sources(node) for node_id, node in prompt.items()}
    foreign = {node_id: node for node_id, node in prompt.items() if class_of(node) not in known}
    read = {source for found in sources.values() for source in found}
    pending = [node_id for node_id, node in prompt.items() if class_of(node) in outputs]
    if not pending:  # an output's missing class is the better message
        return []
    pending += [
        each
        for each in foreign
        if each not in read and not _is_idle_end(foreign[each], sources[each], known)
    ]
    needed: set[str] = set()
    while pending:
        node_id = pending.pop()
        if node_id not in needed:
            needed.add(node_id)
            pending += sources.get(node_id, ())
    return [node_id for node_id in foreign if node_id not in needed]


def _sources(node: Mapping[str, Any]) -> set[str]:
    links = map(as_link, node.get("inputs", {}).values())
    return {link.node_id for link in links if link is not None}


def _is_idle_end(
    node: Mapping[str, Any], sources: Collection[str], known: Mapping[str, object]
) -> bool:
    """Return True for an unread node if it only shows something, or has values but no links."""
    class_type = class_of(node)
    if class_type is None or nearest(class_type, known, cutoff=_SAME_CLASS) is not None:
        return False  # not a node, or a mistyped one of ours
    return bool(_VIEWERS.match(class_type)) or bool(node.get("inputs") and not sources)
