"""`--share-weights N`: rows in one pass, and their common workflow."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from ...host.embedded import Prompt, Sockets, as_link
from .rows import BatchJob, Planner, Row, apply_row, node_traits, workflow_digest

SAMPLER = "WanStreamSampler"
OWN_INPUTS = ("positive", "negative", "latent", "seed")
"""Sampler inputs that may differ between lanes. All others must be equal."""

SIZES = ("width", "height", "frames", "length")
"""Inputs with a video size, in our nodes and in ComfyUI's. The lane sampler checks the resulting
latents."""


def sampler_ids(prompt: Prompt) -> tuple[str, ...]:
    """Return the ids of samplers. Lanes can share their passes."""
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
    """Return why this workflow's rows cannot be lanes; empty if they can."""
    samplers = sampler_ids(prompt)
    if not samplers:
        return f"its workflow has no {SAMPLER}, the node whose passes lanes share"
    for sampler in samplers:
        before = [other for other in samplers if other in _common_sources(prompt, sampler)]
        if before:
            return (
                f"the settings of {sampler}, common to all lanes, depend on {before[0]}, which "
                "makes one video"
            )
    return ""


def lane_traits(prompt: Prompt) -> dict[str, object]:
    """Return the properties that all lanes in a pass must share, in the format of `node_traits`."""
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


def _common_sources(prompt: Prompt, sampler: str) -> set[str]:
    """Return the direct and indirect sources of the sampler's shared inputs."""
    inputs = prompt[sampler].get("inputs", {})
    return upstream(
        prompt, _sources(value for name, value in inputs.items() if name not in OWN_INPUTS)
    )


def _sources(values: Iterable[object]) -> list[str]:
    return [link.node_id for link in map(as_link, values) if link]


LANE = "WanStreamLane"
LANE_SAMPLER = "WanStreamLaneSampler"
LANE_LATENT = "WanStreamLaneLatent"
_DIGEST = "wanstream_row"
"""Entry in the `_meta` of a row's nodes. The row's video stores it with the prompt of the pass."""
MAX_LANES = 1000
"""Maximum index plus one for the node that selects a lane's latent."""
LATENT_OUTPUT = 0
"""Sampler output that the lane's latent replaces. The other outputs come from the lane sampler."""


def lane_jobs(prompts: Mapping[Row, Prompt], lanes: int) -> list[BatchJob]:
    """Return jobs of at most `lanes` rows, with every row in `prompts` (row -> workflow) once.

    Rows share a job, as lanes in one pass over the weights, if they differ only in properties of
    one video: texts, images, seeds, output files. A row without a partner runs alone, with the
    reason. Jobs are in the order of their first rows.
    """
    jobs: list[BatchJob] = []
    groups: dict[str, list[Row]] = {}
    for row, prompt in prompts.items():
        separate = lanes == 1 or lane_refusal(prompt)
        # Rows with different depths never share a job: one may continue another.
        shared = json.dumps([row.depth, lane_traits(prompt)], sort_keys=True)
        groups.setdefault(row.hash if separate else shared, []).append(row)
    for rows in groups.values():
        for at in range(0, len(rows), lanes):
            share = rows[at : at + lanes]
            reason = ""
            if len(share) == 1 and lanes > 1:
                reason = _reason_alone(rows, prompts, groups.values())
            merged, own_ids = merge_lanes([prompts[row] for row in share])
            saves = {row.hash: own for row, own in zip(share, own_ids, strict=True)}
            jobs.append(BatchJob(prompt=merged, rows=tuple(share), saves=saves, reason=reason))
    order = {row: at for at, row in enumerate(prompts)}
    return sorted(jobs, key=lambda job: order[job.rows[0]])


def merge_lanes(prompts: Sequence[Prompt]) -> tuple[Prompt, list[frozenset[str] | None]]:
    """Return one workflow for several rows, and each row's nodes.

    A common node belongs to the first row with it. The workflows must have equal `lane_traits`, and
    no `lane_refusal`: `lane_jobs` groups rows by them. A single one stays as it is; None: all
    nodes.
    """
    if len(prompts) == 1:
        return prompts[0], [None]
    merger = _LaneMerger(prompts)
    merged = dict[str, Mapping[str, Any]]()
    own_ids: list[frozenset[str] | None] = []
    for row, prompt in enumerate(prompts):
        nodes = {
            made: node
            for own in prompt
            for made, node in merger.nodes(row, own).items()
            if made not in merged
        }
        merged |= nodes
        own_ids.append(frozenset(nodes))
    return merged, own_ids


def digest_of_lane(prompt: object, node_id: str) -> object:
    """Return the `workflow_digest` for a node's row, from the prompt of a pass.

    None for a node or a prompt without one.
    """
    for name in (node_id, "_meta", _DIGEST):
        prompt = prompt.get(name) if isinstance(prompt, Mapping) else None
    return prompt


def _reason_alone(
    group: Sequence[Row], prompts: Mapping[Row, Prompt], groups: Collection[Sequence[Row]]
) -> str:
    """Return why a row in `group` has no partner.

    `groups` are rows that fit together, or cannot be lanes.
    """
    row = group[0]
    refusal = lane_refusal(prompts[row])
    if refusal:
        return refusal
    firsts = [rows[0] for rows in groups if rows is not group]
    other = next((first for first in firsts if not lane_refusal(prompts[first])), None)
    if other is not None and len(group) == 1:
        traits = lane_traits(prompts[row])
        others = lane_traits(prompts[other])
        for name in {**others, **traits}:
            value = traits.get(name, "missing")
            wanted = others.get(name, "missing")
            # True == 1 in Python, but not in a workflow.
            if value != wanted or type(value) is not type(wanted):
                return f"its {name} is {value}, that of {other} is {wanted}"
    return "no other row is left to share a pass with"


class _LaneMerger:
    """Nodes from several similar workflows in a merged one. Common nodes occur once."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = prompts
        self._digests = [workflow_digest(prompt) for prompt in prompts]
        self._samplers = sampler_ids(prompts[0])
        self._owners = _owners(prompts, self._samplers)
        self._shared = {
            own for own in prompts[0] if all(owners.get(own) == 0 for owners in self._owners)
        }
        self._stem = "lane"
        # No node id in a row may begin with the stem.
        while any(node_id.startswith(self._stem) for node_id in chain(*prompts)):
            self._stem += "_"

    def nodes(self, row: int, own: str) -> Prompt:
        """Return the merged nodes for a row's node.

        Shared nodes are the same for all their rows.
        """
        node = self._prompts[row][own]
        if own in self._samplers:
            return self._lane_nodes(row, own)
        if own in self._shared:
            return {own: node}
        if self._owners[row][own] != row:
            return {}
        return {
            self._merged_id(row, own): {
                **node,
                "_meta": self._meta(row, own),
                "inputs": self._inputs(row, own),
            }
        }

    def _lane_nodes(self, row: int, sampler: str) -> Prompt:
        """Return the sampler node for all lanes, and nodes for the row's inputs and latent."""
        # Unlike these ids, row nodes have a number after the stem.
        ids = [f"{self._stem}_inputs{lane}_{sampler}" for lane, _ in enumerate(self._prompts, 1)]
        node = self._prompts[0][sampler]
        meta = self._meta(row, sampler)
        settings = {name: value for name, value in node["inputs"].items() if name not in OWN_INPUTS}
        inputs = {
            name: value for name, value in self._inputs(row, sampler).items() if name in OWN_INPUTS
        }
        if row > 0:
            # The lanes form a chain, and the sampler is connected to the last lane only.
            inputs["lanes"] = [ids[row - 1], 0]
        common = {
            "class_type": LANE_SAMPLER,
            "_meta": {"title": _title(node)},
            "inputs": {**settings, "lanes": [ids[-1], 0]},
        }
        latent = {
            "class_type": LANE_LATENT,
            "_meta": meta,
            "inputs": {"latents": [sampler, 0], "index": row},
        }
        return {
            sampler: {**node, **common},
            ids[row]: {"class_type": LANE, "_meta": meta, "inputs": inputs},
            self._merged_id(row, sampler): latent,
        }

    def _inputs(self, row: int, own: str) -> dict[str, Any]:
        """Return the inputs of a row's node, with links to the merged nodes."""
        inputs = dict(self._prompts[row][own].get("inputs", {}))
        for name, value in inputs.items():
            link = as_link(value)
            if link is None or link.node_id not in self._prompts[row]:
                continue
            if link.node_id in self._samplers and link.output != LATENT_OUTPUT:
                continue
            inputs[name] = [self._merged_id(row, link.node_id), link.output]
        return inputs

    def _merged_id(self, row: int, own: str) -> str:
        """Return the merged node's id for a row's node `own`."""
        return own if own in self._shared else f"{self._stem}{self._owners[row][own] + 1}_{own}"

    def _meta(self, row: int, own: str) -> dict[str, str]:
        return {
            "title": f"{_title(self._prompts[row][own])} (lane {row + 1})",
            _DIGEST: self._digests[row],
        }


def _owners(prompts: Sequence[Prompt], samplers: Collection[str]) -> list[dict[str, int]]:
    """Return, for each row and node, the first row with an equal node that can be shared.

    Equal nodes also have equal sources. Nodes behind a sampler belong to their row. So do nodes
    without readers, because they have side effects.
    """
    first: dict[str, int] = {}
    owners: list[dict[str, int]] = []
    for row, prompt in enumerate(prompts):
        read = set().union(*(_sources(node.get("inputs", {}).values()) for node in prompt.values()))
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
    title = isinstance(meta, Mapping) and meta.get("title")
    return str(title or node.get("class_type", ""))


MAX_NAMED = 8
"""Maximum number of rows to list by name."""


def lane_planner(
    workflow: Prompt, sockets: Sockets, lanes: int, report: Callable[[str], None]
) -> Planner:
    """Return a planner for jobs with up to `lanes` rows.

    It reports rows without partners, with the reasons.
    """

    def plan(rows: Sequence[Row]) -> list[BatchJob]:
        jobs = lane_jobs({row: apply_row(workflow, row, sockets) for row in rows}, lanes)
        if len(rows) > 1:  # a single row is a retry after a failed job, and was reported before
            by_reason: dict[str, list[str]] = {}
            for job in jobs:
                by_reason.setdefault(job.reason, []).append(str(job.rows[0]))
            for reason, names in by_reason.items():
                if reason:
                    report(f"{_listed(names)} alone: {reason}")
        return jobs

    return plan


def _listed(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"{names[0]} runs"
    if len(names) > MAX_NAMED:
        return f"{names[0]} and {len(names) - 1} more run"
    return f"{', '.join(names[:-1])} and {names[-1]} run"
