"""Timeline: the schema of measured and simulated runs, with their phases and transfer rates.

Field names are JSON keys of saved timelines and reports.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from math import inf
from typing import Any, Generic, Literal, TypeVar, get_args

RATE_BORDERS = (0, 1, 5, 20, 50, 80)
"""Lower bounds of the rate ranges in GB/s; a border belongs to the range above it."""


@dataclass(frozen=True, kw_only=True)
class RateRange:
    """Fetches of one route whose rate lies in one range."""

    from_gb_per_s: int
    """Lower bound of the range, one of `RATE_BORDERS`."""
    fetches: int
    nbytes: int
    busy_s: float
    """Sum of the seconds of the single fetches."""

    @classmethod
    def of_fetch(cls, nbytes: int, seconds: float) -> RateRange:
        """Return the range with this fetch only; one of 0 seconds belongs to the last range."""
        rate = nbytes / seconds / 1e9 if seconds > 0 else inf
        border = RATE_BORDERS[bisect_right(RATE_BORDERS, rate) - 1]
        return cls(from_gb_per_s=border, fetches=1, nbytes=nbytes, busy_s=seconds)


def together(ranges: Iterable[RateRange]) -> tuple[RateRange, ...]:
    """Add up the entries of equal ranges; return one entry per range, in ascending order."""
    sums: dict[int, RateRange] = {}
    for each in ranges:
        earlier = sums.get(each.from_gb_per_s)
        sums[each.from_gb_per_s] = each if earlier is None else _sum(earlier, each)
    return tuple(sums[border] for border in sorted(sums))


def _sum(one: RateRange, other: RateRange) -> RateRange:
    return replace(
        one,
        fetches=one.fetches + other.fetches,
        nbytes=one.nbytes + other.nbytes,
        busy_s=one.busy_s + other.busy_s,
    )


TimelineKind = Literal["measured", "simulated"]

PHASES = ("open", "text", "first block", "high", "switch", "low", "model", "decode", "save")
"""Names of the phases of a queue item."""


class _Transfers:
    """Figures of the transfers of a step, or of all steps of a run."""

    stall_s: float
    copy_s: float
    read_s: float
    copied_bytes: int
    read_bytes: int

    @property
    def overlap(self) -> float | None:
        """Share of the transfer time that compute hid, 0 to 1; None if nothing was transferred.

        Both routes work in parallel, so the transfer time is that of the busier one.
        """
        transfer_s = max(self.copy_s, self.read_s)
        return 1 - min(1.0, self.stall_s / transfer_s) if transfer_s > 0 else None

    @property
    def copy_bytes_per_s(self) -> float | None:
        """Rate of the route from RAM to the buffers while it was busy; None if nothing was copied."""
        return self.copied_bytes / self.copy_s if self.copy_s > 0 else None

    @property
    def read_bytes_per_s(self) -> float | None:
        """Rate of the route from files while it was busy; None if nothing was read."""
        return self.read_bytes / self.read_s if self.read_s > 0 else None


@dataclass(frozen=True, kw_only=True)
class StepRecord(_Transfers):
    """One denoising step. Times are in seconds.

    Simulated, `wall_s` is `compute_s + stall_s`, on a CPU also `decode_s`. Measured, `compute_s` is the time in the
    blocks only; the rest of `wall_s` was spent outside them: embedders, projection, solver, and loading the next
    expert's embedders.

    A fetch and a read belong to the step of the visit that needs them, even if they ran in an earlier step.
    """

    index: int
    expert: str
    sigma: float | None
    """Noise level at the start of the step; None if only the weights are simulated."""
    wall_s: float
    compute_s: float
    stall_s: float
    """Time in which the device waited for weights."""
    bytes_moved: int
    """Bytes of the fetches of this step."""
    device_bytes: int | None = None
    """Peak bytes allocated on the device during the step; None if the device has no counter."""
    rss_bytes: int | None = None
    """Resident set size of the process at the end of the step."""
    decode_s: float = 0.0
    """Time for decoding and patching blocks: on a GPU in parallel with compute, on a CPU between stall and compute."""
    read_bytes: int = 0
    """Bytes read from files for this step."""
    start_s: float | None = None
    """Start of the step since the start of the run; None in timelines of older versions."""
    stall_on_read_s: float = 0.0
    """Part of `stall_s` in which the block's bytes were not yet read from their file."""
    copy_s: float = 0.0
    """Busy time of the route from RAM to the buffers for fetches of this step."""
    read_s: float = 0.0
    """Busy time of the route from files, to RAM or directly to the buffers, for this step."""
    copied_bytes: int = 0
    """Part of `bytes_moved` that was copied in `copy_s`. On a CPU the rest is read or decoded directly into buffers."""
    reserved_bytes: int | None = None
    """Peak bytes reserved by torch's allocator during the step; None as `device_bytes`."""
    device_used_bytes: int | None = None
    """Device memory used by all processes at the end of the step."""
    dynamic_bytes: int | None = None
    """Device memory of other models under ComfyUI's dynamic VRAM at the end of the step."""
    pinned_bytes: int | None = None
    """Bytes of RAM that are page-locked for streaming at the end of the step; None if no engine reported them."""
    skipped_lanes: int = 0
    """Lanes that reused the residual of an earlier step instead of computing blocks (Wan Cache)."""
    skipped_visits: int = 0
    """Blocks that all lanes skipped for that reason; they were neither visited nor fetched."""
    limit_s: float | None = None
    """Time of the products and the attention alone at the measured rates of the machine. None: in measured steps, or if
    the rates are unknown."""


@dataclass(frozen=True, kw_only=True)
class PhaseRecord:
    """One phase of a queue item: a group of steps, or work before or after them. Times are in seconds."""

    name: str
    """One of `PHASES`."""
    start_s: float
    """Start since the start of the run; negative for phases before it."""
    wall_s: float
    device_bytes: int | None = None
    """Peak bytes allocated by torch on the device during the phase; None if the device has no counter."""
    device_used_bytes: int | None = None
    """Largest sampled device memory of all processes."""
    rss_bytes: int | None = None
    """Resident set size of the process at the end of the phase."""


@dataclass(frozen=True, kw_only=True)
class MemorySample:
    """Memory at one moment of a run."""

    at_s: float
    """Seconds since the start of the run."""
    device_bytes: int | None
    """Bytes allocated by torch on the device; None if the device has no counter."""
    device_used_bytes: int | None
    """Device memory used by all processes; None if the device has no counter."""
    rss_bytes: int
    """Resident set size of the process."""


Number = TypeVar("Number", int, float)


def largest_known(values: Iterable[Number | None]) -> Number | None:
    """Return the largest of the values that are not None; None if there is none."""
    return max((value for value in values if value is not None), default=None)


class _StepSum(Generic[Number]):
    """Read-only attribute of a `Timeline`: the sum over its steps of the `StepRecord` field with the same name."""

    def __set_name__(self, owner: type[Timeline], name: str) -> None:
        self._name = name

    def __get__(self, timeline: Timeline, owner: type[Timeline]) -> Number:
        total: Number = sum(getattr(step, self._name) for step in timeline.steps)
        return total


@dataclass(frozen=True, kw_only=True)
class Timeline(_Transfers):
    """Steps of one run in order, with its phases, memory samples and transfer rates.

    `wall_s` to `copied_bytes` are sums of the same field of the steps.
    """

    steps: tuple[StepRecord, ...]
    kind: TimelineKind
    non_block_bytes: int = 0
    """Bytes moved for weights outside the blocks, in addition to `bytes_moved`."""
    first_block_s: float | None = None
    """Seconds from the start of the run to the first block's compute; None if no block was visited."""
    changes: tuple[str, ...] = ()
    """Notes about changes during the run: fewer buffers after an out-of-memory error, another plan."""
    phases: tuple[PhaseRecord, ...] = ()
    """Phases in order of their start."""
    memory: tuple[MemorySample, ...] = ()
    copy_rates: tuple[RateRange, ...] = ()
    """Rates of the copies from RAM to the buffers; empty in a simulation, and if they were not recorded."""
    read_rates: tuple[RateRange, ...] = ()
    """Rates of the reads from files for the fetches of this run; empty as `copy_rates`."""

    wall_s = _StepSum[float]()
    compute_s = _StepSum[float]()
    stall_s = _StepSum[float]()
    decode_s = _StepSum[float]()
    bytes_moved = _StepSum[int]()
    read_bytes = _StepSum[int]()
    skipped_visits = _StepSum[int]()
    stall_on_read_s = _StepSum[float]()
    copy_s = _StepSum[float]()
    read_s = _StepSum[float]()
    copied_bytes = _StepSum[int]()

    @property
    def switch_step(self) -> int | None:
        """Index of the first step whose expert differs from the step before; None if there is none."""
        pairs = zip(self.steps, self.steps[1:], strict=False)
        return next((step.index for before, step in pairs if step.expert != before.expert), None)

    @property
    def skipped_steps(self) -> int:
        """Number of steps in which a cache skipped blocks."""
        return sum(step.skipped_visits > 0 for step in self.steps)

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, strings, lists and dicts, ready for JSON."""
        data = asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in data.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Timeline:
        """Create a timeline from the result of `to_dict`; fields that older versions did not write keep their defaults.

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


def limit_share(measured: Timeline, simulated: Timeline | None) -> float | None:
    """Return the time that products and attention would take alone, as a share of the measured compute time.

    Steps in which a cache skipped lanes do not count. None: the machine was not measured, or no step counts.
    """
    limits = {} if simulated is None else {step.index: step.limit_s for step in simulated.steps}
    steps = [(limits.get(step.index), step.compute_s) for step in measured.steps if not step.skipped_lanes]
    known = [(limit_s, compute_s) for limit_s, compute_s in steps if limit_s is not None and compute_s > 0]
    return sum(limit_s for limit_s, _ in known) / sum(compute_s for _, compute_s in known) if known else None


def _lines(changes: Any) -> tuple[str, ...]:
    if isinstance(changes, str) or not all(isinstance(change, str) for change in changes):
        raise ValueError(f"not a timeline: changes is {changes!r}, not a list of lines")
    return tuple(changes)


def run_phases(steps: Sequence[StepRecord], computed_from: Sequence[float | None]) -> tuple[PhaseRecord, ...]:
    """Return the phases of a run without gaps, from its start to the end of its last step.

    "first block" and each "switch" end when the first block of the next stage starts to compute. The phase of a stage
    has the name of its expert.

    Args:
        steps: all steps of the run. The result is empty if one that begins or ends a stage has no `start_s`.
        computed_from: per step, the start of its first block's compute in seconds since the start of the run; None for
            a step without blocks.
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
        # Not below 0, where sums of the same seconds in another order differ in their last bits.
        phases.append(PhaseRecord(name=opening, start_s=reached, wall_s=max(0.0, computes - reached)))
        reached = last.start_s + last.wall_s
        phases.append(
            PhaseRecord(
                name=expert,
                start_s=computes,
                wall_s=reached - computes,
                device_bytes=largest_known(step.device_bytes for step, _ in stage),
                device_used_bytes=largest_known(step.device_used_bytes for step, _ in stage),
                rss_bytes=last.rss_bytes,
            )
        )
    return tuple(phases)
