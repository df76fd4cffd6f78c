"""Events of a run for the page: its beginning, each step, its end, with settings and telemetry."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

from ..bench import policy_name
from ..devices import total_bytes
from ..plan import AutoOffload
from ..schema import FRAMES_PER_LATENT, ExpertsRef, OffloadPolicy, StateError, StepRecord, Timeline, WorkersRef
from ..telemetry import TelemetryOptions
from ..wan import space_of
from .api import HostApi

if TYPE_CHECKING:
    import torch


SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings by which runs differ, in a few words each, as JSON carries them."""

    size: str
    """Width, height and frames, and the number of videos where it is not 1: `832x480x81, 2 videos`."""
    dtype: str
    policy: str
    lora: str
    """Name and strength of each LoRA; empty without one."""
    workers: int | None = None
    """The number requested; None: this process computes."""
    device_total: int | None = None
    """Bytes of the device; None on a CPU, and for workers, whose devices may be of several sizes."""
    ram_total: int | None = None
    """Bytes of the RAM of this machine; None for workers."""

    def plain(self) -> dict[str, str | int | None]:
        """The same as JSON."""
        return asdict(self)


def run_settings(
    ref: ExpertsRef,
    asked: OffloadPolicy | AutoOffload,
    policy: OffloadPolicy,
    shape: Sequence[int],
    device: torch.device,
    *,
    workers: WorkersRef | None = None,
) -> RunSettings:
    """The settings of a run on latents of `shape` [B, C, T, h, w], which was `asked` for and begins with `policy`."""
    totals = (None, None) if workers is not None else total_bytes(device)
    chosen = policy_name(policy) + (", RAM" if policy.source == "pinned" else "")
    return RunSettings(
        size=_size(shape),
        dtype=SHORT_DTYPES.get(ref.compute_dtype, ref.compute_dtype),
        policy=f"auto: {chosen}" if isinstance(asked, AutoOffload) else chosen,
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
    """Each file once, though both experts may take it."""
    found: dict[str, None] = {}
    for lora in ref.loras:
        for file, strength in ((lora.high_noise, lora.strength_high), (lora.low_noise, lora.strength_low)):
            if file is not None:
                found[f"{file.stem} {strength:g}"] = None
    return list(found)


def observed(host: HostApi) -> TelemetryOptions:
    """For the run of the node that is executed now. Raises ValueError where the environment asks for nonsense."""
    return TelemetryOptions.asked(os.environ, ledger=host.ledger(), dynamic_bytes=host.dynamic_bytes)


BEGIN = "wanstream.begin"
STEP = "wanstream.step"
END = "wanstream.end"

Announce: TypeAlias = "Callable[[str, Mapping[str, Any]], None]"


class _State(Enum):
    """Where an announced run is; the value completes the sentence "this run ..."."""

    NEW = "has not begun: use `with`"
    RUNNING = "goes on"
    OVER = "is over"


class RunEvents:
    """Tells one run from its first step to its end, however it ends; use with `with`, around all of it.

    Args:
        announce: is given the name of each event and its payload.
        prompt_id: the queue item.
        node_id: the node that executes.
        shown_at: the node that the run belongs to where that is another one; None: the same.
        experts: the expert of each step of this run, in order.
        predicted: what was simulated for it.
        settings: what a list of runs shows of its settings.
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
    ) -> None:
        self._announce, self._experts, self._predicted = announce, list(experts), predicted
        self._settings = None if settings is None else settings.plain()
        self._ids = {"run": uuid.uuid4().hex, "prompt_id": prompt_id, "node": node_id, "shown_at": shown_at or node_id}
        self._timeline: Timeline | None = None
        self._ranks: dict[int, Timeline] = {}
        self._state = _State.NEW
        self._done = 0

    def __enter__(self) -> RunEvents:
        self._in(_State.NEW)
        self._state = _State.RUNNING
        pairs = zip(self._experts, self._experts[1:], strict=False)
        switch = next((step for step, (before, now) in enumerate(pairs, start=1) if before != now), None)
        self._tell(
            BEGIN,
            steps=len(self._experts),
            experts=self._experts,
            switch_step=switch,
            predicted=_plain(self._predicted),
            settings=self._settings,
            at=time.time(),
        )
        return self

    def step(self, record: StepRecord) -> None:
        """A step is whole. Raises AnnounceOrderError outside `with`."""
        self._in(_State.RUNNING)
        self._done += 1
        self._tell(STEP, done=self._done, total=max(self._done, len(self._experts)), record=asdict(record))

    def ended(
        self, timeline: Timeline, predicted: Timeline | None = None, *, ranks: Mapping[int, Timeline] | None = None
    ) -> None:
        """The run has come to its end with this; `predicted` None leaves what was told at the beginning.

        `ranks` is what each worker did, where there were some; samples of their memory are not told.

        Raises AnnounceOrderError outside `with`.
        """
        self._in(_State.RUNNING)
        self._ranks = dict(ranks or {})
        self._timeline, self._predicted = timeline, predicted or self._predicted

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._state = _State.OVER
        said = None if error is None else str(error) or type(error).__name__
        ranks = {str(rank): _plain(replace(told, memory=())) for rank, told in sorted(self._ranks.items())}
        timelines = {"timeline": _plain(self._timeline), "predicted": _plain(self._predicted), "ranks": ranks}
        self._tell(END, **timelines, error=said)

    def _in(self, state: _State) -> None:
        if self._state is not state:
            raise StateError(f"this run {self._state.value}")

    def _tell(self, event: str, **what: Any) -> None:
        self._announce(event, {**self._ids, **what})


def _plain(timeline: Timeline | None) -> dict[str, Any] | None:
    return None if timeline is None else timeline.to_dict()
