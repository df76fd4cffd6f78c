"""Web page events: begin, progress and end of a run, and node notices, with their log."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import time
import uuid
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from graphlib import CycleError, TopologicalSorter
from typing import Any, TypeAlias, TypeVar

import torch

from ..bench import policy_name
from ..devices import total_bytes
from ..plan import AutoOffload
from ..schema import OffloadPolicy, StateError
from ..schema.records import Advice, StepRecord, Timeline
from ..schema.refs import ExpertsRef, WorkersRef
from ..shapes import FRAMES_PER_LATENT
from ..wan.latents import space_of
from .distilled_models import still_has

SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Run settings in a few words each, for a run table."""

    size: str
    """Width, height and frames, and the number of videos if above 1: `832x480x81, 2 videos`."""
    dtype: str
    policy: str
    lora: str
    """Name and strength of each LoRA, or empty."""
    workers: int | None = None
    """Requested worker count, or None if this process computes."""
    device_total: int | None = None
    """Device memory in bytes. None on a CPU, and for workers, as their devices may differ."""
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
    """Return the settings of a run on latents [B, C, T, h, w] that starts with `policy`.

    `requested` is the user's policy.
    """
    chosen = policy_words(policy)
    if isinstance(requested, AutoOffload):
        chosen = f"auto: {chosen}"
    settings = RunSettings(
        size=_size(shape),
        dtype=SHORT_DTYPES.get(ref.compute_dtype, ref.compute_dtype),
        policy=chosen,
        lora=", ".join(_lora_names(ref)),
    )
    if workers is not None:
        return replace(settings, workers=workers.count)
    device_total, ram_total = total_bytes(device)
    return replace(settings, device_total=device_total, ram_total=ram_total)


def policy_words(policy: OffloadPolicy) -> str:
    """Return a policy's name, and whether blocks are RAM-resident."""
    return policy_name(policy) + (", RAM" if policy.source == "pinned" else "")


def _size(shape: Sequence[int]) -> str:
    videos, channels, frames, height, width = shape
    pixels = space_of(channels).pixels
    size = f"{width * pixels}x{height * pixels}x{(frames - 1) * FRAMES_PER_LATENT + 1}"
    if videos == 1:
        return size
    return f"{size}, {videos} videos"


def _lora_names(ref: ExpertsRef) -> list[str]:
    """Return file stems with strengths, each once even if both experts use the file."""
    names = (f"{file.stem} {strengths}" for file, strengths in ref.lora_files)
    return list(dict.fromkeys(names))


BEGIN = "wanstream.begin"
VISITS = "wanstream.visits"
STEP = "wanstream.step"
PREVIEW = "wanstream.preview"
END = "wanstream.end"
NOTICES_EVENT = "wanstream.notices"
"""All notices on a node, as `Notice` dicts. An empty list removes earlier ones.

With `of_graph`, they were found in the queued graph for a node that is not ours. They are removed
when a later graph no longer has them. An empty list then keeps the notices on our own nodes.
"""

Announce: TypeAlias = "Callable[[str, Mapping[str, Any]], None]"


class _State(Enum):
    NEW = "new"
    RUNNING = "running"
    OVER = "over"


class RunEvents:
    """Announces begin, steps and end of one run.

    A context manager around the whole run, so the end is always sent.

    Args:
        announce: called with each event name and payload.
        prompt_id: queue item id.
        node_id: executing node id.
        experts: expert for each step, in order.
        shown_at: id of the displaying node, or None for the executing node.
        predicted: simulated timeline.
        settings: shown in the table of runs.
        notes: sentences known before the run. Empty ones are left out.
        is_stop: returns True for the host's own error for a cancelled run, which has no text.
    """

    def __init__(  # noqa: PLR0913 (of a run, and the host that may cancel it)
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
        is_stop: Callable[[BaseException], bool] = lambda error: False,
    ) -> None:
        self._announce = announce
        self._is_stop = is_stop
        self._experts = list(experts)
        self._predicted = predicted and predicted.to_dict()
        self._notes = [note for note in notes if note]
        self._settings = settings and asdict(settings)
        self._ids = {
            "run": uuid.uuid4().hex,
            "prompt_id": prompt_id,
            "node": node_id,
            "shown_at": shown_at or node_id,
        }
        self._timeline: Timeline | None = None
        self._advice: Advice | None = None
        self._ranks: dict[int, Timeline] = {}
        self._state = _State.NEW
        self._done = 0

    def __enter__(self) -> RunEvents:
        self._check_state(_State.NEW)
        self._state = _State.RUNNING
        pairs = zip(self._experts, self._experts[1:], strict=False)
        switch = next(
            (step for step, (before, now) in enumerate(pairs, start=1) if before != now), None
        )
        self._send(
            BEGIN,
            steps=len(self._experts),
            experts=self._experts,
            switch_step=switch,
            predicted=self._predicted,
            settings=self._settings,
            changes=self._notes,
            at=time.time(),
        )
        return self

    def visits(self, done: int, blocks: int) -> tuple[int, float]:
        """Announce the visits in the running step so far.

        Return the number of finished steps and the finished share of this one.

        May be called on any thread. A native model call may pass through the `blocks` more than
        once.
        """
        step = self._done
        total = blocks * max(1, -(-done // blocks))
        if self._state is _State.RUNNING:
            self._send(VISITS, step=step, done=done, total=total)
        return step, done / total

    def step(self, record: StepRecord, changes: Sequence[str] = ()) -> None:
        """Announce a finished step, and the policy changes so far.

        Raises StateError outside the `with`.
        """
        self._check_state(_State.RUNNING)
        self._done += 1
        total = max(self._done, len(self._experts))
        self._send(
            STEP,
            done=self._done,
            total=total,
            record=record.to_dict(),
            changes=[*self._notes, *changes],
        )

    def preview(self, done: int, webp: bytes) -> None:
        """Announce a picture of the first video after `done` steps.

        Raises StateError outside the `with`.
        """
        self._check_state(_State.RUNNING)
        image = f"data:image/webp;base64,{base64.b64encode(webp).decode()}"
        self._send(PREVIEW, done=done, image=image)

    def ended(
        self,
        timeline: Timeline,
        *,
        ranks: Mapping[int, Timeline] | None = None,
        advice: Advice | None = None,
    ) -> None:
        """Set the run result, to be announced at the end of the `with`.

        Raises StateError outside the `with`.

        Args:
            timeline: the measured run.
            ranks: timeline for each worker, announced without memory samples.
            advice: another policy, for a run that waited.
        """
        self._check_state(_State.RUNNING)
        self._ranks = dict(ranks or {})
        self._timeline = timeline
        self._advice = advice

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._state = _State.OVER
        message = None
        if error is not None:
            name = "cancelled" if self._is_stop(error) else type(error).__name__
            message = str(error) or name
        self._send(
            END,
            timeline=self._timeline and self._timeline.to_dict(),
            predicted=self._predicted,
            advice=self._advice and asdict(self._advice),
            ranks={
                str(rank): replace(ran, memory=()).to_dict()
                for rank, ran in sorted(self._ranks.items())
            },
            error=message,
        )

    def _check_state(self, expected: _State) -> None:
        if self._state is not expected:
            raise StateError(
                f"the run is {self._state.value}, expected {expected.value}: use RunEvents once, "
                "in `with`"
            )

    def _send(self, event: str, **payload: Any) -> None:
        self._announce(event, {**self._ids, **payload})


KEPT_RUNS = 50
KEPT_NOTICES = 1000

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

LONGEST_NAME = 200
"""Character limit for a title or an id. Longer ones are truncated."""


def short_text(value: object, *path: str | None) -> str | None:
    """Return the text at `path` in a posted prompt.

    Return None if it is missing or not a text. Prompts are untrusted.
    """
    for key in path:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    if not isinstance(value, str):
        return None
    return value[:LONGEST_NAME]


def contents_of(prompt: Mapping[str, Any]) -> dict[str, str]:
    """Return a digest for each node in a posted prompt.

    It covers class and inputs, for the node and for all nodes before it.

    Ids and titles do not count. ComfyUI computes nodes with equal digests once. Prompt parts other
    than nodes have no digest, nor has a graph with a cycle.
    """
    inputs: dict[str, Mapping[str, Any]] = {}
    for key, node in prompt.items():
        if isinstance(node, Mapping) and isinstance(node.get("inputs"), Mapping):
            inputs[key] = node["inputs"]

    sources = {
        key: [value[0] for value in given.values() if _is_link(value, inputs)]
        for key, given in inputs.items()
    }
    digests: dict[str, str] = {}

    def plain(value: Any) -> Any:
        if _is_link(value, inputs):
            return [digests[value[0]], value[1]]
        # ComfyUI turns a posted 4 into 4.0 for a FLOAT input.
        if isinstance(value, float) and value.is_integer():
            return int(value)
        return value

    try:
        for key in TopologicalSorter(sources).static_order():
            content = [
                prompt[key].get("class_type"),
                {name: plain(value) for name, value in inputs[key].items()},
            ]
            text = json.dumps(content, sort_keys=True, default=str)
            digests[key] = hashlib.sha256(text.encode()).hexdigest()
    except CycleError:
        return {}
    return digests


def _is_link(value: Any, nodes: Container[str]) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and isinstance(value[0], str)
        and value[0] in nodes
    )


class RunLog:
    """The last `KEPT_RUNS` runs and node notices, for pages opened later.

    It is built from events in order.

    Notices belong to the node content (see `contents_of`). ComfyUI does not run an equal node in
    another graph again, so no event announces the notices.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: dict[str, dict[str, Any]] = {}
        self._notices: dict[str, Mapping[str, Any]] = {}
        self._contents: dict[tuple[str | None, str | None], str] = {}

    def record(self, event: str, payload: Mapping[str, Any]) -> bool:
        """Apply an event.

        Return False for an empty list of notices that removes nothing. It need not be sent.

        Other events, and events for evicted runs, are ignored.
        """
        with self._lock:
            if event == BEGIN:
                self._runs[payload["run"]] = {
                    **payload,
                    "records": [],
                    "ended": False,
                    "timeline": None,
                    "error": None,
                }
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
        """Replace a node's notices.

        The last `KEPT_NOTICES` nodes are kept, even without notices.
        """
        node = payload["workflow"], payload["node"]
        content = payload.get("content") or str(node)
        _keep(self._notices, content, payload)
        _keep(self._contents, node, content)

    def queued(self, prompt: Mapping[str, Any], workflow: str | None) -> list[dict[str, Any]]:
        """Give each node in a queued graph the notices of an equal node. Return the event payloads.

        Notices from an earlier graph are removed if this one no longer has them: the node may run
        without WanStream now.
        """
        changed = []
        contents = contents_of(prompt)
        with self._lock:
            for node, content in contents.items():
                place = workflow, node
                if self._contents.get(place) == content:
                    continue
                found = self._notices.get(content)
                if found is None:
                    shown = self._of_graph(place)
                    if shown is None or still_has(
                        prompt, node, [notice["text"] for notice in shown["notices"]]
                    ):
                        continue
                    found = {**shown, "notices": [], "content": content}
                changed.append({**found, "workflow": workflow, "node": node})
                self._record_notices(changed[-1])
        return changed

    def _of_graph(self, place: tuple[str | None, str | None]) -> Mapping[str, Any] | None:
        """Return the payload with the notices a node has from its graph, or None."""
        shown = self._notices.get(self._contents.get(place, ""), {})
        if shown.get("of_graph") and shown["notices"]:
            return shown
        return None

    def snapshot(self) -> dict[str, list[dict[str, Any]]]:
        """Return `runs` and `notices`, oldest first, as copies that later events do not change."""
        with self._lock:
            now = time.time()
            runs = [
                # An age, because the clocks of browser and server may differ.
                {**run, "records": list(run["records"]), "age_s": now - run["at"]}
                for run in self._runs.values()
            ]
            notices = []
            for (workflow, node), content in self._contents.items():
                payload = self._notices.get(content)
                if payload is not None and payload["notices"]:
                    notices.append({**payload, "workflow": workflow, "node": node})
            return {"runs": runs, "notices": notices}


def _keep(kept: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    """Set a value as the newest of the last `KEPT_NOTICES`."""
    # Otherwise the key would keep the old place in the dictionary.
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
        ended = ("timeline", "predicted", "advice", "error")
        run.update({name: payload[name] for name in ended}, ended=True)
        if run["timeline"] is not None:
            run["records"] = []  # the timeline contains them
