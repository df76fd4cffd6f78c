"""Web page events: begin, progress and end of a run, and node notices. Also their log."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import time
import uuid
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from graphlib import CycleError, TopologicalSorter
from typing import Any, TypeAlias, TypeVar

import torch

from ..bench import policy_name
from ..devices import total_bytes
from ..plan import AutoOffload
from ..schema import FRAMES_PER_LATENT, ExpertsRef, OffloadPolicy, StateError, StepRecord, Timeline, WorkersRef
from ..wan import space_of
from .distilled_models import still_has

SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Run settings in a few words each, for a run table."""

    size: str
    """Width, height and frames, and the number of videos if it is not 1: `832x480x81, 2 videos`."""
    dtype: str
    policy: str
    lora: str
    """Name and strength of each LoRA. Empty without one."""
    workers: int | None = None
    """Requested worker count. None: this process computes."""
    device_total: int | None = None
    """Device memory in bytes. None on a CPU, and for workers, which may have different devices."""
    ram_total: int | None = None
    """Machine RAM in bytes. None for workers."""


def run_settings(
    ref: ExpertsRef,
    requested: OffloadPolicy | AutoOffload,
    policy: OffloadPolicy,
    shape: Sequence[int],
    device: torch.device,
    *,
    workers: WorkersRef | None = None,
) -> RunSettings:
    """Return the settings of a run on latents of `shape` [B, C, T, h, w] that starts with `policy`.

    `requested` is the user's policy.
    """
    totals = (None, None) if workers is not None else total_bytes(device)
    chosen = policy_name(policy) + (", RAM" if policy.source == "pinned" else "")
    return RunSettings(
        size=_size(shape),
        dtype=SHORT_DTYPES.get(ref.compute_dtype, ref.compute_dtype),
        policy=f"auto: {chosen}" if isinstance(requested, AutoOffload) else chosen,
        lora=", ".join(_lora_names(ref)),
        workers=None if workers is None else workers.count,
        device_total=totals[0],
        ram_total=totals[1],
    )


def _size(shape: Sequence[int]) -> str:
    videos, channels, frames, height, width = shape
    pixels = space_of(channels).pixels
    size = f"{width * pixels}x{height * pixels}x{(frames - 1) * FRAMES_PER_LATENT + 1}"
    return size if videos == 1 else f"{size}, {videos} videos"


def _lora_names(ref: ExpertsRef) -> list[str]:
    """Return file stems with strengths, each once even if both experts use the file."""
    found: dict[str, None] = {}
    for lora in ref.loras:
        for file, strengths in ((lora.high_noise, lora.high), (lora.low_noise, lora.low)):
            if file is not None:
                found[f"{file.stem} {strengths}"] = None
    return list(found)


BEGIN = "wanstream.begin"
VISITS = "wanstream.visits"
STEP = "wanstream.step"
PREVIEW = "wanstream.preview"
END = "wanstream.end"
NOTICES_EVENT = "wanstream.notices"
"""All notices on a node, as `Notice` dicts. An empty list removes earlier ones.

With `of_graph`, they were found in the queued graph for a node that is not ours, and are removed if a later graph no
longer has them. An empty list then leaves the notices of our nodes.
"""

Announce: TypeAlias = "Callable[[str, Mapping[str, Any]], None]"


class _State(Enum):
    NEW = "new"
    RUNNING = "running"
    OVER = "over"


class RunEvents:
    """Announces begin, steps and end of one run. A context manager around the whole run, so the end is always sent.

    Args:
        announce: called with each event name and payload.
        prompt_id: id of the queue item.
        node_id: id of the executing node.
        experts: the expert of each step, in order.
        shown_at: id of the displaying node. None: the executing node.
        predicted: the simulated timeline.
        settings: shown in the table of runs.
        notes: sentences known before the run. Empty ones are left out.
    """

    def __init__(
        self,
        announce: Announce,
        *,
        prompt_id: str | None,
        node_id: str | None,
        experts: Sequence[str],
        shown_at: str | None = None,
        predicted: Timeline | None = None,
        settings: RunSettings | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self._announce, self._experts, self._predicted = announce, list(experts), predicted
        self._notes = [note for note in notes if note]
        self._settings = None if settings is None else asdict(settings)
        self._ids = {"run": uuid.uuid4().hex, "prompt_id": prompt_id, "node": node_id, "shown_at": shown_at or node_id}
        self._timeline: Timeline | None = None
        self._ranks: dict[int, Timeline] = {}
        self._state = _State.NEW
        self._done = 0

    def __enter__(self) -> RunEvents:
        self._check_state(_State.NEW)
        self._state = _State.RUNNING
        pairs = zip(self._experts, self._experts[1:], strict=False)
        switch = next((step for step, (before, now) in enumerate(pairs, start=1) if before != now), None)
        self._send(
            BEGIN,
            steps=len(self._experts),
            experts=self._experts,
            switch_step=switch,
            predicted=_plain(self._predicted),
            settings=self._settings,
            changes=self._notes,
            at=time.time(),
        )
        return self

    def visits(self, done: int, blocks: int) -> tuple[int, float]:
        """Announce the visits of the running step so far. Return the finished steps and the finished share of this one.

        May be called on any thread. A native model call may pass through the `blocks` more than once.
        """
        step = self._done
        total = blocks * max(1, -(-done // blocks))
        if self._state is _State.RUNNING:
            self._send(VISITS, step=step, done=done, total=total)
        return step, done / total

    def step(self, record: StepRecord, changes: Sequence[str] = ()) -> None:
        """Announce a finished step, and the policy changes so far. Raises StateError outside the `with`."""
        self._check_state(_State.RUNNING)
        self._done += 1
        total = max(self._done, len(self._experts))
        self._send(STEP, done=self._done, total=total, record=asdict(record), changes=[*self._notes, *changes])

    def preview(self, done: int, webp: bytes) -> None:
        """Announce a picture of the first video after `done` steps. Raises StateError outside the `with`."""
        self._check_state(_State.RUNNING)
        image = f"data:image/webp;base64,{base64.b64encode(webp).decode()}"
        self._send(PREVIEW, done=done, image=image)

    def ended(self, timeline: Timeline, *, ranks: Mapping[int, Timeline] | None = None) -> None:
        """Set the run result, to be announced at the end of the `with`. Raises StateError outside it.

        Args:
            timeline: the measured run.
            ranks: timeline of each worker, announced without memory samples.
        """
        self._check_state(_State.RUNNING)
        self._ranks = dict(ranks or {})
        missing = [note for note in self._notes if note not in timeline.changes]
        self._timeline = replace(timeline, changes=(*missing, *timeline.changes))

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._state = _State.OVER
        message = None if error is None else str(error) or type(error).__name__
        ranks = {str(rank): _plain(replace(ran, memory=())) for rank, ran in sorted(self._ranks.items())}
        timelines = {"timeline": _plain(self._timeline), "predicted": _plain(self._predicted), "ranks": ranks}
        self._send(END, **timelines, error=message)

    def _check_state(self, expected: _State) -> None:
        if self._state is not expected:
            raise StateError(
                f"the run is {self._state.value}, expected {expected.value}: use RunEvents once, in `with`"
            )

    def _send(self, event: str, **payload: Any) -> None:
        self._announce(event, {**self._ids, **payload})


def _plain(timeline: Timeline | None) -> dict[str, Any] | None:
    return None if timeline is None else timeline.to_dict()


KEPT_RUNS = 50
KEPT_NOTICES = 1000

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

LONGEST_NAME = 200
"""Character limit for a title or an id. Longer ones are truncated."""


def short_text(value: object, *path: str | None) -> str | None:
    """Return the text at `path` in a posted prompt. None if it is missing or, as prompts are untrusted, not a text."""
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value[:LONGEST_NAME] if isinstance(value, str) else None


def contents_of(prompt: Mapping[str, Any]) -> dict[str, str]:
    """Return a digest of each node in a posted prompt, over the class and inputs of the node and all nodes before it.

    Ids and titles do not count. ComfyUI computes nodes with equal digests once. Prompt parts other than nodes have no
    digest, nor has a graph with a cycle.
    """
    inputs: dict[str, Mapping[str, Any]] = {}
    for key, node in prompt.items():
        if isinstance(node, Mapping) and isinstance(node.get("inputs"), Mapping):
            inputs[key] = node["inputs"]

    sources = {key: [value[0] for value in given.values() if _is_link(value, inputs)] for key, given in inputs.items()}
    digests: dict[str, str] = {}

    def plain(value: Any) -> Any:
        if _is_link(value, inputs):
            return [digests[value[0]], value[1]]
        # ComfyUI turns the 4 of a posted float into 4.0.
        return int(value) if isinstance(value, float) and value.is_integer() else value

    try:
        for key in TopologicalSorter(sources).static_order():
            content = [prompt[key].get("class_type"), {name: plain(value) for name, value in inputs[key].items()}]
            text = json.dumps(content, sort_keys=True, default=str)
            digests[key] = hashlib.sha256(text.encode()).hexdigest()
    except CycleError:
        return {}
    return digests


def _is_link(value: Any, nodes: Container[str]) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and value[0] in nodes


class RunLog:
    """The last `KEPT_RUNS` runs and node notices, for pages opened later. Built from events in order.

    Notices belong to the node content (see `contents_of`): ComfyUI does not run an equal node in another graph again,
    and no event announces the notices.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: dict[str, dict[str, Any]] = {}
        self._notices: dict[str, Mapping[str, Any]] = {}
        self._contents: dict[tuple[str | None, str | None], str] = {}

    def record(self, event: str, payload: Mapping[str, Any]) -> bool:
        """Apply an event. Return False for an empty list of notices that removes none, which need not be sent.

        Other events, and events of evicted runs, are ignored.
        """
        with self._lock:
            if event == BEGIN:
                self._runs[payload["run"]] = {**payload, "records": [], "ended": False, "timeline": None, "error": None}
                for oldest in list(self._runs)[:-KEPT_RUNS]:
                    del self._runs[oldest]
            elif event == NOTICES_EVENT:
                place = payload["workflow"], payload["node"]
                if payload.get("of_graph") and not payload["notices"] and not self._of_graph(place):
                    return False
                self._record_notices(payload)
            elif (run := self._runs.get(payload.get("run", ""))) is not None:
                _apply(run, event, payload)
        return True

    def _record_notices(self, payload: Mapping[str, Any]) -> None:
        """Replace the notices of a node. The last `KEPT_NOTICES` nodes are kept, also without notices."""
        node = payload["workflow"], payload["node"]
        content = payload.get("content") or str(node)
        _keep(self._notices, content, payload)
        _keep(self._contents, node, content)

    def queued(self, prompt: Mapping[str, Any], workflow: str | None) -> list[dict[str, Any]]:
        """Give the nodes of a queued graph the notices of equal nodes, and return the event payloads.

        Notices of an earlier graph that this one no longer has are removed: the node may run without WanStream now.
        """
        changed = []
        contents = contents_of(prompt)
        with self._lock:
            for node, content in contents.items():
                place = workflow, node
                if self._contents.get(place) == content:
                    continue
                found = self._notices.get(content)
                shown = self._of_graph(place) if found is None else None
                if shown and not still_has(prompt, node, [notice["text"] for notice in shown["notices"]]):
                    found = {**shown, "notices": [], "content": content}
                if found is not None:
                    changed.append({**found, "workflow": workflow, "node": node})
                    self._record_notices(changed[-1])
        return changed

    def _of_graph(self, place: tuple[str | None, str | None]) -> Mapping[str, Any] | None:
        """Return the payload with the notices that a node has from its graph, or None."""
        shown = self._notices.get(self._contents.get(place, ""))
        return shown if shown is not None and shown.get("of_graph") and shown["notices"] else None

    def snapshot(self) -> dict[str, list[dict[str, Any]]]:
        """Return `runs` and `notices`, oldest first, as copies that later events do not change."""
        with self._lock:
            now = time.time()
            runs = [{**run, "records": list(run["records"]), "age_s": now - run["at"]} for run in self._runs.values()]
            return {"runs": runs, "notices": list(self._shown_notices())}

    def _shown_notices(self) -> Iterator[dict[str, Any]]:
        for (workflow, node), content in self._contents.items():
            payload = self._notices.get(content)
            if payload is not None and payload["notices"]:
                yield {**payload, "workflow": workflow, "node": node}


def _keep(kept: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    """Set a value as the newest of the last `KEPT_NOTICES`."""
    kept.pop(key, None)
    kept[key] = value
    for oldest in list(kept)[:-KEPT_NOTICES]:
        del kept[oldest]


def _apply(run: dict[str, Any], event: str, payload: Mapping[str, Any]) -> None:
    """Apply a run event to the log entry."""
    if event == STEP:
        run["records"].append(payload["record"])
        run["changes"] = payload["changes"]
    elif event == VISITS:
        run["visits"] = {name: payload[name] for name in ("step", "done", "total")}
    elif event == END:
        run.update({name: payload[name] for name in ("timeline", "predicted", "error")}, ended=True)
        if run["timeline"] is not None:
            run["records"] = []  # the timeline contains them
