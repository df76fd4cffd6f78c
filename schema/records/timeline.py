"""Timeline: the schema for measured and simulated runs, with phases and transfer rates.

Field names are JSON keys in saved timelines and reports.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import groupby
from math import inf
from typing import Any, Generic, Literal, TypeVar, get_args

RATE_BORDERS = (0, 1, 5, 20, 50, 80)
"""Lower bounds for the rate ranges in GB/s. A bound belongs to the range above it."""


@dataclass(frozen=True, kw_only=True)
class RateRange:
    """Fetches on one route with rates in one range."""

    from_gb_per_s: int
    """Lower bound, one of `RATE_BORDERS`."""
    fetches: int
    nbytes: int
    busy_s: float
    """Sum of the single fetch times, in seconds."""

    @classmethod
    def of_fetch(cls, nbytes: int, seconds: float) -> RateRange:
        """Return the range with this fetch only. A fetch of 0 seconds belongs to the last range."""
        rate = nbytes / seconds / 1e9 if seconds > 0 else inf
        border = RATE_BORDERS[bisect_right(RATE_BORDERS, rate) - 1]
        return cls(from_gb_per_s=border, fetches=1, nbytes=nbytes, busy_s=seconds)


def together(ranges: Iterable[RateRange]) -> tuple[RateRange, ...]:
    """Add up entries in equal ranges. Return one entry per range, in ascending order."""
    sums: dict[int, RateRange] = {}
    for each in ranges:
        border = each.from_gb_per_s
        sums.setdefault(border, RateRange(from_gb_per_s=border, fetches=0, nbytes=0, busy_s=0.0))
        sums[border] = replace(
            each,
            fetches=sums[border].fetches + each.fetches,
            nbytes=sums[border].nbytes + each.nbytes,
            busy_s=sums[border].busy_s + each.busy_s,
        )
    return tuple(sums[border] for border in sorted(sums))


TimelineKind = Literal["measured", "simulated"]

PHASES = ("open", "text", "first block", "high", "switch", "low", "model", "decode", "save")
"""Phase names in a queue item."""


@dataclass(frozen=True, kw_only=True)
class Transfers:
    """Transfers in a step, or in all steps of a run. Times are in seconds.

    A fetch and a read belong to the step with the visit that needs them, even if they ran in an
    earlier step.
    """

    stall_s: float
    """Time spent waiting for weights on the device."""
    bytes_moved: int
    """Bytes in all fetches."""
    stall_on_read_s: float = 0.0
    """Part of `stall_s` before the block's bytes were read from the file."""
    copied_bytes: int = 0
    """Part of `bytes_moved` that was copied in `copy_s`. On a CPU the rest is read or decoded
    directly into buffers."""
    copy_s: float = 0.0
    """Busy time on the route from RAM to the buffers."""
    read_bytes: int = 0
    """Bytes read from files."""
    read_s: float = 0.0
    """Busy time on the route from files, to RAM or directly to the buffers."""

    @classmethod
    def total(cls, transfers: Iterable[Transfers]) -> Transfers:
        """Return the sums field by field."""
        return _by_field(cls, transfers, sum)

    @property
    def overlap(self) -> float | None:
        """Share of the transfer time hidden by compute, 0 to 1. None if nothing was transferred.

        Both routes work in parallel, so the busier one gives the transfer time.
        """
        transfer_s = max(self.copy_s, self.read_s)
        if transfer_s <= 0:
            return None
        return 1 - min(1.0, self.stall_s / transfer_s)

    @property
    def copy_bytes_per_s(self) -> float | None:
        """Busy rate on the route from RAM to the buffers.

        None if nothing was copied.
        """
        if self.copy_s > 0:
            return self.copied_bytes / self.copy_s
        return None

    @property
    def read_bytes_per_s(self) -> float | None:
        """Busy rate on the route from files. None if nothing was read."""
        if self.read_s > 0:
            return self.read_bytes / self.read_s
        return None


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Memory during a step. A figure is None if the device has no such counter."""

    device_bytes: int | None = None
    """Peak bytes allocated on the device during the step."""
    reserved_bytes: int | None = None
    """Peak bytes reserved by torch's allocator during the step."""
    device_used_bytes: int | None = None
    """Device memory used by all processes when the step ends."""
    dynamic_bytes: int | None = None
    """Device memory for other models under ComfyUI's dynamic VRAM when the step ends."""
    rss_bytes: int | None = None
    """Resident set size of the process when the step ends."""
    pinned_bytes: int | None = None
    """RAM page-locked for streaming when the step ends, in bytes. None if no engine reported it."""

    @classmethod
    def peak(cls, memories: Iterable[StepMemory]) -> StepMemory:
        """Return the largest known value field by field."""
        return _by_field(cls, memories, largest_known)


T = TypeVar("T", Transfers, StepMemory)


def _by_field(kind: type[T], values: Iterable[T], combine: Callable[[Iterable[Any]], Any]) -> T:
    """Return a value with the fields of `values` combined."""
    # An iterator could be read for one field only.
    parts = tuple(values)
    figures = {
        each.name: combine(getattr(part, each.name) for part in parts) for each in fields(kind)
    }
    return kind(**figures)


REQUIRED_FIGURES = ("index", "expert", "sigma", "wall_s", "compute_s", "stall_s", "bytes_moved")
STEP_FIGURES = (
    *REQUIRED_FIGURES,
    *("device_bytes", "rss_bytes", "decode_s", "read_bytes", "start_s", "stall_on_read_s"),
    *("copy_s", "read_s", "copied_bytes", "reserved_bytes", "device_used_bytes"),
    *("dynamic_bytes", "pinned_bytes", "skipped_lanes", "skipped_visits", "limit_s"),
)
"""Keys for a step in saved timelines, in order."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One denoising step. Times are in seconds.

    A simulated `wall_s` is `compute_s + stall_s`, on a CPU plus `decode_s`. A measured `compute_s`
    covers the blocks only. The rest of `wall_s` went to embedders, projection, solver, and loading
    the next expert's embedders.
    """

    index: int
    expert: str
    sigma: float | None
    """Noise level at the start. None if only the weights are simulated."""
    wall_s: float
    compute_s: float
    transfers: Transfers
    memory: StepMemory = StepMemory()
    decode_s: float = 0.0
    """Time for decoding and patching blocks. On a GPU it runs in parallel with compute, on a CPU
    between stall and compute."""
    start_s: float | None = None
    """Start relative to the run start. None in timelines from older versions."""
    skipped_lanes: int = 0
    """Lanes that reused an earlier step's residual instead of computing blocks (Wan Cache)."""
    skipped_visits: int = 0
    """Blocks skipped by all lanes for this reason. They were neither visited nor fetched."""
    limit_s: float | None = None
    """Time for products and attention alone, at the machine's measured rates. None: in measured
    steps, or if the rates are unknown."""

    @property
    def stall_s(self) -> float:
        """Time spent waiting for weights on the device."""
        return self.transfers.stall_s

    @property
    def bytes_moved(self) -> int:
        """Bytes fetched for this step."""
        return self.transfers.bytes_moved

    def to_dict(self) -> dict[str, Any]:
        """Return the values for `STEP_FIGURES`."""
        values = {**vars(self), **vars(self.transfers), **vars(self.memory)}
        return {name: values[name] for name in STEP_FIGURES}

    @classmethod
    def of(cls, **figures: Any) -> StepRecord:
        """Create a record from `STEP_FIGURES` values.

        Raises TypeError for missing or unknown ones.
        """
        missing = [name for name in REQUIRED_FIGURES if name not in figures]
        if missing:
            raise TypeError(f"a step is missing {', '.join(missing)}")
        # `_taken` removes the fields from `figures`, so the step gets only the rest. Dataclasses
        # raise TypeError for unknown fields.
        transfers = Transfers(**_taken(figures, Transfers))
        memory = StepMemory(**_taken(figures, StepMemory))
        return cls(**figures, transfers=transfers, memory=memory)


def _taken(figures: dict[str, Any], kind: type[Transfers | StepMemory]) -> dict[str, Any]:
    """Move the values for fields of `kind` out of `figures`."""
    return {each.name: figures.pop(each.name) for each in fields(kind) if each.name in figures}


@dataclass(frozen=True, kw_only=True)
class PhaseRecord:
    """One phase in a queue item: a group of steps, or work before or after them.

    Times are in seconds.
    """

    name: str
    """One of `PHASES`."""
    start_s: float
    """Start relative to the run start. Negative for phases before the run."""
    wall_s: float
    device_bytes: int | None = None
    """Peak bytes allocated by torch on the device during the phase. None if the device has no
    counter."""
    device_used_bytes: int | None = None
    """Largest sampled device memory over all processes."""
    rss_bytes: int | None = None
    """Resident set size of the process when the phase ends."""


@dataclass(frozen=True, kw_only=True)
class MemorySample:
    """Memory at one moment in a run."""

    at_s: float
    """Seconds since the run start."""
    device_bytes: int | None
    """Bytes allocated by torch on the device. None if the device has no counter."""
    device_used_bytes: int | None
    """Device memory used by all processes. None if the device has no counter."""
    rss_bytes: int
    """Resident set size of the process."""


Number = TypeVar("Number", int, float)


def largest_known(values: Iterable[Number | None]) -> Number | None:
    """Return the largest value other than None. None without one."""
    return max((value for value in values if value is not None), default=None)


class _StepSum(Generic[Number]):
    """Read-only `Timeline` attribute: sum of the steps' attribute with the same name."""

    def __set_name__(self, owner: type[Timeline], name: str) -> None:
        self._name = name

    def __get__(self, timeline: Timeline, owner: type[Timeline]) -> Number:
        total: Number = sum(getattr(step, self._name) for step in timeline.steps)
        return total


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Steps of one run in order, with phases, memory samples and transfer rates.

    `wall_s` to `skipped_visits` are sums over the steps.
    """

    steps: tuple[StepRecord, ...]
    kind: TimelineKind
    non_block_bytes: int = 0
    """Bytes moved for weights outside the blocks, in addition to `bytes_moved`."""
    first_block_s: float | None = None
    """Seconds from the run start to the first block's compute. None if no block was visited."""
    changes: tuple[str, ...] = ()
    """Notes about changes during the run: fewer buffers after an out-of-memory error, another
    plan."""
    phases: tuple[PhaseRecord, ...] = ()
    """Phases by start time."""
    memory: tuple[MemorySample, ...] = ()
    copy_rates: tuple[RateRange, ...] = ()
    """Copy rates from RAM to the buffers. Empty in a simulation, and if they were not recorded."""
    read_rates: tuple[RateRange, ...] = ()
    """File read rates for the fetches in this run. Empty as `copy_rates`."""

    # With annotations, `dataclass` would make fields of these.
    wall_s = _StepSum[float]()
    compute_s = _StepSum[float]()
    stall_s = _StepSum[float]()
    decode_s = _StepSum[float]()
    bytes_moved = _StepSum[int]()
    skipped_visits = _StepSum[int]()

    @property
    def transfers(self) -> Transfers:
        """Transfers in all steps together."""
        return Transfers.total(step.transfers for step in self.steps)

    @property
    def switch_step(self) -> int | None:
        """Index of the first step with another expert than the step before.

        None without such a step.
        """
        pairs = zip(self.steps, self.steps[1:], strict=False)
        return next((step.index for before, step in pairs if step.expert != before.expert), None)

    @property
    def skipped_steps(self) -> int:
        """Number of steps with blocks skipped by a cache."""
        return sum(step.skipped_visits > 0 for step in self.steps)

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, strings, lists and dicts, ready for JSON."""
        # `asdict` would nest transfers and memory, and saved steps are flat.
        data = {**asdict(self), "steps": [step.to_dict() for step in self.steps]}
        # Lists, so that the result equals the same timeline read from JSON.
        return {
            name: list(value) if isinstance(value, tuple) else value for name, value in data.items()
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Timeline:
        """Create a timeline from a `to_dict` result.

        Fields not written by older versions keep their defaults.

        Raises ValueError for missing or unknown fields and for an unknown kind.
        """
        values = dict(data)
        if values.get("kind") not in get_args(TimelineKind):
            raise ValueError(
                f"not a timeline: kind is {values.get('kind')!r}, not one of "
                f"{get_args(TimelineKind)}"
            )
        try:
            values["steps"] = tuple(StepRecord.of(**step) for step in values.get("steps", ()))
            values["phases"] = tuple(PhaseRecord(**phase) for phase in values.get("phases", ()))
            values["memory"] = tuple(MemorySample(**sample) for sample in values.get("memory", ()))
            for name in ("copy_rates", "read_rates"):
                values[name] = tuple(RateRange(**each) for each in values.get(name, ()))
            values["changes"] = _lines(values.get("changes", ()))
            return cls(**values)
        # Dataclasses raise TypeError for missing fields, and for fields from a newer version.
        except TypeError as err:
            raise ValueError(f"not a timeline: {err}") from err


def limit_share(measured: Timeline, simulated: Timeline | None) -> float | None:
    """Return the time for products and attention alone, as a share of the measured compute time.

    Steps with lanes skipped by a cache do not count. None: the machine was not measured, or no step
    counts.
    """
    if simulated is None:
        return None
    limits = {step.index: step.limit_s for step in simulated.steps if step.limit_s is not None}
    steps = [
        step
        for step in measured.steps
        # `limit_s` counts all lanes, so steps with skipped lanes are left out.
        if step.index in limits and step.compute_s > 0 and not step.skipped_lanes
    ]
    if not steps:
        return None
    return sum(limits[step.index] for step in steps) / sum(step.compute_s for step in steps)


def _lines(changes: Any) -> tuple[str, ...]:
    # A string would pass as a list of its characters.
    if isinstance(changes, str) or not all(isinstance(change, str) for change in changes):
        raise ValueError(f"not a timeline: changes is {changes!r}, not a list of lines")
    return tuple(changes)


def run_phases(
    steps: Sequence[StepRecord], computed_from: Sequence[float | None]
) -> tuple[PhaseRecord, ...]:
    """Return phases without gaps, from the run start to the end of the last step.

    "first block" and each "switch" end when the first block in the next stage starts to compute. A
    stage's phase has the name of its expert.

    Args:
        steps: all steps in the run. The result is empty if one that begins or ends a stage has no
            `start_s`.
        computed_from: per step, when its first block starts to compute, in seconds since the run
            start. None for a step without blocks.
    """
    phases: list[PhaseRecord] = []
    reached = 0.0
    placed = zip(steps, computed_from, strict=True)
    for expert, members in groupby(placed, key=lambda placed_step: placed_step[0].expert):
        stage = list(members)
        first, computes = stage[0]
        last, _ = stage[-1]
        # Timelines from older versions have no start times.
        if first.start_s is None or last.start_s is None:
            return ()
        if computes is None:
            computes = first.start_s
        opening = "switch" if phases else "first block"
        # Not below 0: the same seconds summed in another order differ in their last bits.
        wait_s = max(0.0, computes - reached)
        phases.append(PhaseRecord(name=opening, start_s=reached, wall_s=wait_s))
        reached = last.start_s + last.wall_s
        phases.append(
            PhaseRecord(
                name=expert,
                start_s=computes,
                wall_s=reached - computes,
                device_bytes=largest_known(step.memory.device_bytes for step, _ in stage),
                device_used_bytes=largest_known(step.memory.device_used_bytes for step, _ in stage),
                rss_bytes=last.memory.rss_bytes,
            )
        )
    return tuple(phases)
