"""Timeline: the schema of measured and simulated runs, with their phases and transfer rates."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from math import inf
from typing import Any, Literal, get_args

RATE_BORDERS = (0, 1, 5, 20, 50, 80)
"""GB/s at which the ranges begin; a border belongs to the range above it."""


@dataclass(frozen=True, kw_only=True)
class RateRange:
    """What one route did at the rates of one range."""

    from_gb_per_s: int
    """One of `RATE_BORDERS`."""
    fetches: int
    nbytes: int
    busy_s: float
    """Seconds of the single fetches, added up."""


def rate_range(nbytes: int, seconds: float) -> int:
    """The border at which the range of `nbytes` in `seconds` begins; no time at all belongs to the last one."""
    rate = nbytes / seconds / 1e9 if seconds > 0 else inf
    return RATE_BORDERS[bisect_right(RATE_BORDERS, rate) - 1]


def together(ranges: Iterable[RateRange]) -> tuple[RateRange, ...]:
    """One of each range, in their order, with the sums of what is given."""
    found: dict[int, RateRange] = {}
    for each in ranges:
        held = found.get(each.from_gb_per_s)
        found[each.from_gb_per_s] = each if held is None else _sum(held, each)
    return tuple(found[border] for border in sorted(found))


def _sum(one: RateRange, other: RateRange) -> RateRange:
    return replace(
        one,
        fetches=one.fetches + other.fetches,
        nbytes=one.nbytes + other.nbytes,
        busy_s=one.busy_s + other.busy_s,
    )


TimelineKind = Literal["measured", "simulated"]

PHASES = ("open", "text", "first block", "high", "switch", "low", "decode", "save")
"""What the parts of a queue item are called."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One denoising step. Times in seconds.

    Simulated, `wall_s` is `compute_s + stall_s`, on a CPU with `decode_s`. Measured, `compute_s` is that of the blocks
    alone; what is left of `wall_s` was spent outside them: embedders, projection, solver, and loading those of the next
    expert.
    """

    index: int
    expert: str
    sigma: float | None
    """Noise level at the start of the step; None when only weights are simulated."""
    wall_s: float
    compute_s: float
    stall_s: float
    """Time in which the device waited for weights."""
    bytes_moved: int
    """Bytes of the fetches whose needing visit lies in this step, whenever they ran."""
    device_bytes: int | None = None
    """Peak bytes allocated on the device during the step; None when there is no such counter."""
    rss_bytes: int | None = None
    """RAM of the process at the end of the step."""
    decode_s: float = 0.0
    """Time of decoding and patching blocks: on a GPU beside the computing, on a CPU between stall and compute."""
    read_bytes: int = 0
    """Bytes read from files for the visits of this step, whenever they were read."""
    start_s: float | None = None
    """Seconds from the start of the run to the start of the step; None in timelines that were written without."""
    stall_on_read_s: float = 0.0
    """That part of `stall_s` in which the block's bytes had not left their file yet."""
    copy_s: float = 0.0
    """Time in which the way from RAM to the buffers was busy with fetches of this step, whenever they ran."""
    read_s: float = 0.0
    """Time in which the way from files to RAM, or straight to the buffers, was busy for this step. Likewise."""
    copied_bytes: int = 0
    """That part of `bytes_moved` that was copied in `copy_s`. A CPU reads or decodes the rest straight into buffers."""
    reserved_bytes: int | None = None
    """Peak bytes that torch held on the device, in use or kept for later; None as `device_bytes`."""
    device_used_bytes: int | None = None
    """Bytes that all processes together held on the device at the end of the step."""
    dynamic_bytes: int | None = None
    """Bytes of the device that ComfyUI's dynamic VRAM held for other models at the end of the step."""
    pinned_bytes: int | None = None
    """Bytes of RAM that were page-locked for streaming at the end of the step; None where no engine told."""
    skipped_lanes: int = 0
    """Lanes that took over what blocks had added in a step before, instead of computing them (Wan Cache)."""
    skipped_visits: int = 0
    """Blocks that no lane needed for that reason; they were neither visited nor fetched."""

    @property
    def overlap(self) -> float | None:
        """Share of the transfer time that computing hid: 0 to 1; None where nothing was transferred.

        Both routes work side by side, so that the transfer time is that of the busier one.
        """
        return _overlap(self)

    @property
    def copy_bytes_per_s(self) -> float | None:
        """Rate of the way from RAM to the buffers while it was busy; None where nothing was copied."""
        return self.copied_bytes / self.copy_s if self.copy_s > 0 else None

    @property
    def read_bytes_per_s(self) -> float | None:
        """Rate of the way from files while it was busy; None where nothing was read."""
        return self.read_bytes / self.read_s if self.read_s > 0 else None


@dataclass(frozen=True, kw_only=True)
class PhaseRecord:
    """One part of a queue item, steps together or work beside them. Times in seconds."""

    name: str
    """One of `PHASES`."""
    start_s: float
    """Since the run began; negative for what was done before it."""
    wall_s: float
    device_bytes: int | None = None
    """Peak bytes that torch allocated on the device during the phase; None when there is no such counter."""
    device_used_bytes: int | None = None
    """Most bytes that all processes together held on the device, as far as it was sampled."""
    rss_bytes: int | None = None
    """RAM of the process at the end of the phase."""


@dataclass(frozen=True, kw_only=True)
class MemorySample:
    """Memory at one moment between events."""

    at_s: float
    """Seconds since the run began."""
    device_bytes: int | None
    """Bytes that torch has allocated on the device; None when there is no such counter."""
    device_used_bytes: int | None
    """Bytes that all processes together hold on the device. Likewise."""
    rss_bytes: int
    """RAM of the process."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """All steps of one run, in order."""

    steps: tuple[StepRecord, ...]
    kind: TimelineKind
    non_block_bytes: int = 0
    """Bytes moved for weights outside the blocks."""
    first_block_s: float | None = None
    """Seconds from the start of the run to the first block's compute; None when no block was visited."""
    changes: tuple[str, ...] = ()
    """What was changed on the way, in words: fewer buffers after running out of memory, another plan."""
    phases: tuple[PhaseRecord, ...] = ()
    """In the order in which they began."""
    memory: tuple[MemorySample, ...] = ()
    copy_rates: tuple[RateRange, ...] = ()
    """How fast single fetches were copied out of RAM; empty where nobody counted, and where the run is simulated."""
    read_rates: tuple[RateRange, ...] = ()
    """How fast blocks were read from files for the fetches of this run. Likewise."""

    @property
    def switch_step(self) -> int | None:
        """Index of the first step whose expert is not that of the step before; None when there is none."""
        pairs = zip(self.steps, self.steps[1:], strict=False)
        return next((step.index for before, step in pairs if step.expert != before.expert), None)

    @property
    def wall_s(self) -> float:
        return sum(step.wall_s for step in self.steps)

    @property
    def compute_s(self) -> float:
        return sum(step.compute_s for step in self.steps)

    @property
    def stall_s(self) -> float:
        return sum(step.stall_s for step in self.steps)

    @property
    def decode_s(self) -> float:
        return sum(step.decode_s for step in self.steps)

    @property
    def bytes_moved(self) -> int:
        """Bytes of all blocks fetched; `non_block_bytes` come on top."""
        return sum(step.bytes_moved for step in self.steps)

    @property
    def read_bytes(self) -> int:
        """Bytes read from files for the blocks of this run."""
        return sum(step.read_bytes for step in self.steps)

    @property
    def skipped_visits(self) -> int:
        """Visits that a cache left out."""
        return sum(step.skipped_visits for step in self.steps)

    @property
    def skipped_steps(self) -> int:
        """Steps in which a cache left visits out."""
        return sum(step.skipped_visits > 0 for step in self.steps)

    @property
    def stall_on_read_s(self) -> float:
        """That part of `stall_s` in which a block's bytes had not left their file yet."""
        return sum(step.stall_on_read_s for step in self.steps)

    @property
    def copy_s(self) -> float:
        """Time in which the way from RAM to the buffers was busy."""
        return sum(step.copy_s for step in self.steps)

    @property
    def read_s(self) -> float:
        """Time in which the way from files was busy."""
        return sum(step.read_s for step in self.steps)

    @property
    def copied_bytes(self) -> int:
        """That part of `bytes_moved` that was copied in `copy_s`."""
        return sum(step.copied_bytes for step in self.steps)

    @property
    def copy_bytes_per_s(self) -> float | None:
        """As that of a step, for the run."""
        return self.copied_bytes / self.copy_s if self.copy_s > 0 else None

    @property
    def read_bytes_per_s(self) -> float | None:
        """As that of a step, for the run."""
        return self.read_bytes / self.read_s if self.read_s > 0 else None

    @property
    def overlap(self) -> float | None:
        """As that of a step, for the run."""
        return _overlap(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts, ready for JSON."""
        data = asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in data.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Timeline:
        """The inverse of `to_dict`; fields that older timelines do not have are left at their defaults.

        Raises ValueError for missing or unknown fields and for an unknown kind.
        """
        fields = dict(data)
        if fields.get("kind") not in get_args(TimelineKind):
            raise ValueError(f"not a timeline: kind is {fields.get('kind')!r}, not one of {get_args(TimelineKind)}")
        try:
            fields["steps"] = tuple(StepRecord(**step) for step in fields.get("steps", ()))
            fields["phases"] = tuple(PhaseRecord(**phase) for phase in fields.get("phases", ()))
            fields["memory"] = tuple(MemorySample(**sample) for sample in fields.get("memory", ()))
            for name in ("copy_rates", "read_rates"):
                fields[name] = tuple(RateRange(**each) for each in fields.get(name, ()))
            fields["changes"] = _lines(fields.get("changes", ()))
            return cls(**fields)
        except TypeError as err:
            raise ValueError(f"not a timeline: {err}") from err


def _overlap(spent: StepRecord | Timeline) -> float | None:
    transfer_s = max(spent.copy_s, spent.read_s)
    return 1 - min(1.0, spent.stall_s / transfer_s) if transfer_s > 0 else None


def _lines(changes: Any) -> tuple[str, ...]:
    if isinstance(changes, str) or not all(isinstance(change, str) for change in changes):
        raise ValueError(f"not a timeline: changes is {changes!r}, not a list of lines")
    return tuple(changes)


def run_phases(steps: Sequence[StepRecord], computed_from: Sequence[float | None]) -> tuple[PhaseRecord, ...]:
    """Parts of a run that follow each other without a gap, from its start to the end of its last step.

    "first block" ends, and so does each "switch", when the first block of the stage behind it begins to compute. A
    stage has the name of its expert.

    Args:
        steps: all of the run, each with its `start_s`; without it there are no phases.
        computed_from: per step, in seconds since the run began, when its first block began to compute; None for a step
            without blocks.
    """
    phases: list[PhaseRecord] = []
    reached = 0.0
    placed = zip(steps, computed_from, strict=True)
    for expert, members in groupby(placed, key=lambda placed_step: placed_step[0].expert):
        stage = list(members)
        (first, computes), (last, _) = stage[0], stage[-1]
        if first.start_s is None or last.start_s is None:
            return ()
        computes = first.start_s if computes is None else computes
        opening = "switch" if phases else "first block"
        phases.append(PhaseRecord(name=opening, start_s=reached, wall_s=computes - reached))
        reached = last.start_s + last.wall_s
        phases.append(
            PhaseRecord(
                name=expert,
                start_s=computes,
                wall_s=reached - computes,
                device_bytes=_most(step.device_bytes for step, _ in stage),
                device_used_bytes=_most(step.device_used_bytes for step, _ in stage),
                rss_bytes=last.rss_bytes,
            )
        )
    return tuple(phases)


def _most(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)
