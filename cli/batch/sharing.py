"""Conditions under which rows can share one pass: experts, policy, noise levels, settings, sizes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

from ...host.embedded import Prompt, as_link

SAMPLER = "WanStreamSampler"
OWN_INPUTS = ("positive", "negative", "latent", "seed")
"""Inputs of the sampler that every lane has of its own; all others are those of the pass."""

SIZES = ("width", "height", "frames", "length")
"""Inputs that say how large a video is, in our nodes and in ComfyUI's. What they do not tell, the lane sampler does."""


def sampler_ids(prompt: Prompt) -> tuple[str, ...]:
    """The nodes whose work lanes can share."""
    return tuple(node_id for node_id, node in prompt.items() if node.get("class_type") == SAMPLER)


def upstream(prompt: Prompt, node_ids: Iterable[str]) -> set[str]:
    """These nodes and all that they read, as far as they are in the workflow."""
    found: set[str] = set()
    pending = [*node_ids]
    while pending:
        node_id = pending.pop()
        if node_id not in found and node_id in prompt:
            found.add(node_id)
            pending += _sources(prompt[node_id].get("inputs", {}).values())
    return found


def lane_refusal(prompt: Prompt) -> str:
    """Why no row of this workflow can be a lane; empty if it can."""
    samplers = sampler_ids(prompt)
    if not samplers:
        return f"its workflow has no {SAMPLER}, the node whose passes lanes share"
    for sampler in samplers:
        behind = [other for other in samplers if other in _common_sources(prompt, sampler)]
        if behind:
            return f"what {sampler} takes for all lanes comes from {behind[0]}, which makes one video"
    return ""


def lane_traits(prompt: Prompt) -> dict[str, object]:
    """All that lanes of one pass have in common: see `node_traits`."""
    samplers = sampler_ids(prompt)
    common = set().union(*(_common_sources(prompt, sampler) for sampler in samplers))
    own = upstream(prompt, samplers) - common
    traits: dict[str, object] = {}
    for node_id in (node_id for node_id in prompt if node_id in common):
        traits |= node_traits(prompt, node_id)
    for node_id in (node_id for node_id in prompt if node_id in own):
        if node_id in samplers:
            without = {f"{node_id}.{name}" for name in OWN_INPUTS}
            traits |= {name: value for name, value in node_traits(prompt, node_id).items() if name not in without}
        else:
            sizes = {f"{node_id}.{name}" for name in SIZES}
            traits |= {name: value for name, value in node_traits(prompt, node_id).items() if name in sizes}
    return traits


def node_traits(prompt: Prompt, node_id: str) -> dict[str, object]:
    """What a node does: its class under its id, and its inputs under `node.input`."""
    node = prompt[node_id]
    inputs = {f"{node_id}.{name}": _plain(value) for name, value in node.get("inputs", {}).items()}
    return {node_id: node.get("class_type"), **inputs}


def difference(traits: Mapping[str, object], others: Mapping[str, object], other_row: Hashable) -> str:
    """The first thing in which a row is unlike `other_row`, in words; empty if there is none."""
    for name in {**others, **traits}:
        mine, theirs = traits.get(name, "missing"), others.get(name, "missing")
        if mine != theirs or type(mine) is not type(theirs):  # True is 1 in Python, and not in a workflow
            return f"its {name} is {mine}, that of {other_row} is {theirs}"
    return ""


def _common_sources(prompt: Prompt, sampler: str) -> set[str]:
    """The nodes behind those inputs of a sampler that all lanes share."""
    inputs = prompt[sampler].get("inputs", {})
    return upstream(prompt, _sources(value for name, value in inputs.items() if name not in OWN_INPUTS))


def _sources(values: Iterable[object]) -> list[str]:
    return [link.node_id for value in values if (link := as_link(value))]


def _plain(value: object) -> object:
    """The value, with 4 in place of 4.0: rows may write the same number in different ways."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
