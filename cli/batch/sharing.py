"""Conditions for rows to share one pass: equal experts, policy, noise levels, settings and sizes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

from ...host.embedded import Prompt, as_link

SAMPLER = "WanStreamSampler"
OWN_INPUTS = ("positive", "negative", "latent", "seed")
"""Inputs of the sampler that may differ between lanes; all others must be equal."""

SIZES = ("width", "height", "frames", "length")
"""Inputs with the size of a video, in our nodes and in ComfyUI's. The lane sampler checks the resulting latents."""


def sampler_ids(prompt: Prompt) -> tuple[str, ...]:
    """Return the ids of the samplers, whose passes lanes can share."""
    return tuple(node_id for node_id, node in prompt.items() if node.get("class_type") == SAMPLER)


def upstream(prompt: Prompt, node_ids: Iterable[str]) -> set[str]:
    """Return these nodes and all their direct and indirect sources in the workflow."""
    found: set[str] = set()
    pending = [*node_ids]
    while pending:
        node_id = pending.pop()
        if node_id not in found and node_id in prompt:
            found.add(node_id)
            pending += _sources(prompt[node_id].get("inputs", {}).values())
    return found


def lane_refusal(prompt: Prompt) -> str:
    """Return the reason why rows of this workflow cannot be lanes; empty if they can."""
    samplers = sampler_ids(prompt)
    if not samplers:
        return f"its workflow has no {SAMPLER}, the node whose passes lanes share"
    for sampler in samplers:
        before = [other for other in samplers if other in _common_sources(prompt, sampler)]
        if before:
            return f"the settings of {sampler}, common to all lanes, depend on {before[0]}, which makes one video"
    return ""


def lane_traits(prompt: Prompt) -> dict[str, object]:
    """Return the properties that must be equal for all lanes of a pass, in the format of `node_traits`."""
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
    """Return a node's class under its id, and its inputs under `node.input`."""
    node = prompt[node_id]
    inputs = {f"{node_id}.{name}": _plain(value) for name, value in node.get("inputs", {}).items()}
    return {node_id: node.get("class_type"), **inputs}


def difference(traits: Mapping[str, object], others: Mapping[str, object], other_row: Hashable) -> str:
    """Describe the first difference between a row and `other_row`; empty if there is none."""
    for name in {**others, **traits}:
        value, other = traits.get(name, "missing"), others.get(name, "missing")
        if value != other or type(value) is not type(other):  # True == 1 in Python, but not in a workflow
            return f"its {name} is {value}, that of {other_row} is {other}"
    return ""


def _common_sources(prompt: Prompt, sampler: str) -> set[str]:
    """Return the direct and indirect sources of the sampler inputs that all lanes share."""
    inputs = prompt[sampler].get("inputs", {})
    return upstream(prompt, _sources(value for name, value in inputs.items() if name not in OWN_INPUTS))


def _sources(values: Iterable[object]) -> list[str]:
    return [link.node_id for value in values if (link := as_link(value))]


def _plain(value: object) -> object:
    """Return the value, with 4 instead of 4.0, because rows may contain either notation."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
