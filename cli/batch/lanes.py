"""`--share-weights N`: rows that can share one pass, and the workflow that runs them."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...host.embedded import Prompt, as_link
from ..inputs import Sockets
from .rows import BatchJob, Planner, Row, apply_row, node_traits, workflow_digest

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
        found = node_traits(prompt, node_id)
        names = found.keys() - {f"{node_id}.{name}" for name in OWN_INPUTS}
        if node_id not in samplers:
            names = {f"{node_id}.{name}" for name in SIZES}
        traits |= {name: value for name, value in found.items() if name in names}
    return traits


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


LANE, LANE_SAMPLER, LANE_LATENT = "WanStreamLane", "WanStreamLaneSampler", "WanStreamLaneLatent"
_DIGEST = "wanstream_row"
"""Entry of the `_meta` of a row's nodes, which is stored in its video with the prompt of the pass."""
MAX_LANES = 1000
"""Maximum index of the node that selects a lane's latent, plus one."""
LATENT_OUTPUT = 0
"""Output of the sampler that is replaced by the lane's latent; the other outputs are those of the lane sampler."""


@dataclass(frozen=True, kw_only=True)
class LanePass:
    """One workflow that runs one row, or several rows as lanes of one pass over the weights."""

    rows: tuple[Hashable, ...]
    """Names of the rows, in the order of their lanes."""
    prompt: Prompt
    own_ids: tuple[frozenset[str] | None, ...]
    """For each row: its nodes of `prompt`; a shared node belongs to the first of its rows. None: all nodes."""
    reason: str = ""
    """Reason why a row could not share a pass."""


def lane_passes(prompts: Mapping[Any, Prompt], lanes: int) -> tuple[LanePass, ...]:
    """Return passes of at most `lanes` rows that run every row of `prompts` (row name -> its workflow) once.

    Rows share a pass if they differ only in properties of one video: texts, images, seeds, output files. A row without
    a partner runs alone, with the reason. Passes are in the order of their first rows.
    """
    groups: dict[str, list[Hashable]] = {}
    reasons: dict[Hashable, str] = {}
    for row, prompt in prompts.items():
        refusal = lane_refusal(prompt) if lanes > 1 else ""
        if lanes == 1 or refusal:
            reasons[row] = refusal
        else:
            groups.setdefault(json.dumps(lane_traits(prompt), sort_keys=True), []).append(row)
    shares = [rows[at : at + lanes] for rows in groups.values() for at in range(0, len(rows), lanes)]
    for (row,) in (share for share in shares if len(share) == 1):
        reasons[row] = _reason_alone(row, prompts, groups.values())
    alone = [lane_pass({row: prompts[row]}, reason=reason) for row, reason in reasons.items()]
    shared = [lane_pass({row: prompts[row] for row in share}) for share in shares if len(share) > 1]
    order = {row: at for at, row in enumerate(prompts)}
    return tuple(sorted([*alone, *shared], key=lambda each: order[each.rows[0]]))


def lane_pass(prompts: Mapping[Any, Prompt], *, reason: str = "") -> LanePass:
    """Return the pass of these rows (row name -> its workflow); a single row keeps its own workflow.

    Several rows must have equal `lane_traits`, and no `lane_refusal`: `lane_passes` groups rows by them.
    """
    rows = tuple(prompts)
    if len(rows) == 1:
        (prompt,) = prompts.values()
        return LanePass(rows=rows, prompt=prompt, own_ids=(None,), reason=reason)
    composed, owners = _Composer([*prompts.values()]).compose()
    own_ids = tuple(frozenset(each for each, owner in owners.items() if owner == row) for row in range(len(rows)))
    return LanePass(rows=rows, prompt=composed, own_ids=own_ids)


def digest_of_lane(prompt: object, node_id: str) -> object:
    """Return the `workflow_digest` of a node's row in the prompt of a pass; None for a node or a prompt without one."""
    for name in (node_id, "_meta", _DIGEST):
        prompt = prompt.get(name) if isinstance(prompt, Mapping) else None
    return prompt


def _reason_alone(row: Hashable, prompts: Mapping[Any, Prompt], groups: Collection[Sequence[Hashable]]) -> str:
    """Return the reason why `row` has no partner; `groups` are the rows that fit together."""
    others = [rows[0] for rows in groups if row not in rows]
    if [row] in groups and others:
        return difference(lane_traits(prompts[row]), lane_traits(prompts[others[0]]), others[0])
    return "no other row is left to share a pass with"


class _Composer:
    """Merges several similar workflows into one, in which common nodes occur once."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = prompts
        self._digests = [workflow_digest(prompt) for prompt in prompts]
        self._samplers = sampler_ids(prompts[0])
        self._owners = _owners(prompts, self._samplers)
        self._shared = {own for own in prompts[0] if all(owners.get(own) == 0 for owners in self._owners)}
        self._stem = "lane"
        while any(node_id.startswith(self._stem) for prompt in prompts for node_id in prompt):
            self._stem += "_"

    def compose(self) -> tuple[Prompt, dict[str, int]]:
        """Return the composed workflow, and the row of each of its nodes."""
        composed: dict[str, Mapping[str, Any]] = {}
        owners: dict[str, int] = {}
        for row, prompt in enumerate(self._prompts):
            for own, node in prompt.items():
                for node_id, made in self._nodes(row, own, node).items():
                    composed.setdefault(node_id, made)
                    owners.setdefault(node_id, row)
        return composed, owners

    def _nodes(self, row: int, own: str, node: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        """Return the composed nodes of a row's node; those that rows share are the same for all of them."""
        if own in self._samplers:
            return {
                own: self._lane_sampler(own),
                self._lane(row, own): self._lane_node(row, own),
                self._composed_id(row, own): self._lane_latent(row, own),
            }
        if own in self._shared:
            return {own: node}
        if self._owners[row][own] != row:
            return {}
        return {self._composed_id(row, own): _as(node, self._meta(row, node), self._linked(row, node))}

    def _lane_sampler(self, sampler: str) -> dict[str, Any]:
        node = self._prompts[0][sampler]
        settings = {name: value for name, value in node["inputs"].items() if name not in OWN_INPUTS}
        last = self._lane(len(self._prompts) - 1, sampler)
        return _as({**node, "class_type": LANE_SAMPLER}, {"title": _title(node)}, {**settings, "lanes": [last, 0]})

    def _lane_node(self, row: int, sampler: str) -> dict[str, Any]:
        node = self._prompts[row][sampler]
        inputs = {name: value for name, value in self._linked(row, node).items() if name in OWN_INPUTS}
        if row > 0:
            inputs["lanes"] = [self._lane(row - 1, sampler), 0]
        return _as({"class_type": LANE}, self._meta(row, node), inputs)

    def _lane_latent(self, row: int, sampler: str) -> dict[str, Any]:
        inputs = {"latents": [sampler, 0], "index": row}
        return _as({"class_type": LANE_LATENT}, self._meta(row, self._prompts[row][sampler]), inputs)

    def _linked(self, row: int, node: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs of a row's node, with links to the composed nodes."""
        inputs = dict(node.get("inputs", {}))
        for name, value in inputs.items():
            link = as_link(value)
            if link is None or link.node_id not in self._prompts[row]:
                continue
            if link.node_id in self._samplers and link.output != LATENT_OUTPUT:
                continue
            inputs[name] = [self._composed_id(row, link.node_id), link.output]
        return inputs

    def _composed_id(self, row: int, own: str) -> str:
        """Return the id of the composed node for a row's node `own`."""
        return own if own in self._shared else f"{self._stem}{self._owners[row][own] + 1}_{own}"

    def _lane(self, row: int, sampler: str) -> str:
        return f"{self._stem}_inputs{row + 1}_{sampler}"  # unlike ids of row nodes, which have a number after the stem

    def _meta(self, row: int, node: Mapping[str, Any]) -> dict[str, str]:
        return {"title": f"{_title(node)} (lane {row + 1})", _DIGEST: self._digests[row]}


def _owners(prompts: Sequence[Prompt], samplers: Collection[str]) -> list[dict[str, int]]:
    """Return, for each row and node, the first row that has an equal node with equal sources, which can be shared.

    Nodes that depend on a sampler belong to their row, and so do nodes without readers, which have side effects.
    """
    first: dict[str, int] = {}
    owners: list[dict[str, int]] = []
    for row, prompt in enumerate(prompts):
        read = {source for node in prompt.values() for source in _sources(node.get("inputs", {}).values())}
        owners.append({})
        for own in prompt:
            behind = sorted(upstream(prompt, [own]))
            if own not in read or not {*behind}.isdisjoint(samplers):
                owners[row][own] = row
                continue
            work = {each: node_traits(prompt, each) for each in behind}
            owners[row][own] = first.setdefault(json.dumps([own, work], sort_keys=True), row)
    return owners


def _title(node: Mapping[str, Any]) -> str:
    meta = node.get("_meta")
    return str((meta.get("title") if isinstance(meta, Mapping) else None) or node.get("class_type", ""))


def _as(node: Mapping[str, Any], meta: Mapping[str, str], inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {**node, "_meta": meta, "inputs": dict(inputs)}


MAX_NAMED = 8
"""Maximum number of rows that a message lists by name."""


def lane_planner(workflow: Prompt, sockets: Sockets, lanes: int, report: Callable[[str], None]) -> Planner:
    """Return a planner of jobs with up to `lanes` rows, which reports rows that run alone with their reasons."""

    def plan(rows: Sequence[Row]) -> list[BatchJob]:
        named = {f"line {row.line}": row for row in rows}
        passes = lane_passes({name: apply_row(workflow, row, sockets) for name, row in named.items()}, lanes)
        if len(rows) > 1:  # a single row is a retry after its job failed, which has been reported
            for line in _describe_unshared(passes):
                report(line)
        return [_job(each, tuple(named[str(name)] for name in each.rows)) for each in passes]

    return plan


def _describe_unshared(passes: Sequence[LanePass]) -> list[str]:
    """Return a line for each reason why rows run alone."""
    by_reason: dict[str, list[str]] = {}
    for each in passes:
        if each.reason:
            by_reason.setdefault(each.reason, []).append(str(each.rows[0]))
    return [f"{_listed(names)} alone: {reason}" for reason, names in by_reason.items()]


def _listed(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"{names[0]} runs"
    if len(names) > MAX_NAMED:
        return f"{names[0]} and {len(names) - 1} more run"
    return f"{', '.join(names[:-1])} and {names[-1]} run"


def _job(lane_pass: LanePass, rows: tuple[Row, ...]) -> BatchJob:
    saves = {row.hash: own for row, own in zip(rows, lane_pass.own_ids, strict=True)}
    return BatchJob(prompt=lane_pass.prompt, rows=rows, saves=saves)
