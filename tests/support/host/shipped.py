"""Shipped workflows, small enough for a test, and what their samplers leave."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from wanstream.host.embedded.run import History
from wanstream.schema.records import Timeline

WORKFLOWS = Path(__file__).parents[3] / "workflows" / "api"
SMALL = {"width": 32, "height": 32, "frames": 5, "steps": 4}

Workflow = dict[str, dict[str, Any]]
Run = Callable[..., History]


def node(class_type: str, **inputs):
    return {"class_type": class_type, "inputs": inputs}


def shipped(name: str = "t2v", **changes) -> Workflow:
    """Return the shipped workflow `name`, small, with changes.

    Each change is `node={input: value}`, or a whole node for a name that the workflow lacks.
    """
    nodes: Workflow = json.loads((WORKFLOWS / f"{name}.json").read_text(encoding="utf-8"))
    for each in nodes.values():
        each["inputs"] |= {key: value for key, value in SMALL.items() if key in each["inputs"]}
    for node_id, change in changes.items():
        if node_id in nodes and "class_type" not in change:
            nodes[node_id]["inputs"] |= change
        else:
            nodes[node_id] = change
    return nodes


def latent(history: History, node_id: str = "sampler") -> torch.Tensor:
    return history.results[node_id][0]["samples"]


def timeline(history: History) -> Timeline:
    return Timeline.from_dict(history.outputs["sampler"]["wanstream_timeline"][0])
