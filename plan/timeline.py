"""Timeline: the one schema for what a run did and for what the simulator says it will do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

TimelineKind = Literal["measured", "simulated"]


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


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """All steps of one run, in order."""

    steps: tuple[StepRecord, ...]
    kind: TimelineKind
    outer_bytes: int = 0
    """Bytes moved for weights outside the blocks."""
    first_block_s: float | None = None
    """Seconds from the start of the run to the first block's compute; None when no block was visited."""
    changes: tuple[str, ...] = ()
    """What was changed on the way, in words: fewer buffers after running out of memory, another plan."""

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
        """Bytes of all blocks fetched; `outer_bytes` come on top."""
        return sum(step.bytes_moved for step in self.steps)

    @property
    def read_bytes(self) -> int:
        """Bytes read from files for the blocks of this run."""
        return sum(step.read_bytes for step in self.steps)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts, ready for JSON."""
        return {**asdict(self), "steps": [asdict(step) for step in self.steps], "changes": list(self.changes)}

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
            fields["changes"] = _lines(fields.get("changes", ()))
            return cls(**fields)
        except TypeError as err:
            raise ValueError(f"not a timeline: {err}") from err


def _lines(changes: Any) -> tuple[str, ...]:
    if isinstance(changes, str) or not all(isinstance(change, str) for change in changes):
        raise ValueError(f"not a timeline: changes is {changes!r}, not a list of lines")
    return tuple(changes)
