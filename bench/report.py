"""Report of a benchmark as values: its variants and their runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..schema import PhaseRecord, Timeline


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of a variant."""

    timeline: Timeline
    latents: str
    """SHA-256 of the latents, to compare results bit by bit."""
    warmup: bool = False
    """True for a trial that is made first and not counted."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Settings of a run, and the trials that were made with them."""

    name: str
    settings: Mapping[str, str]
    """Settings as text, by name, in the order of the tables."""
    job: str = ""
    """Name of the computation: variants with the same job differ only in streaming, so their latents must be equal."""
    trials: tuple[Trial, ...] = ()
    predicted: Timeline | None = None
    """Simulated run; None for an unknown machine."""
    failed: str = ""
    """Reason for which the variant could not be run; empty if it could."""

    @property
    def measured(self) -> tuple[Timeline, ...]:
        """Timelines of the trials without warm-ups."""
        return tuple(trial.timeline for trial in self.trials if not trial.warmup)

    @property
    def latents(self) -> frozenset[str]:
        """Distinct results of all trials, warm-ups included: one if they are all equal."""
        return frozenset(trial.latents for trial in self.trials)

    @property
    def usual(self) -> Timeline | None:
        """Measured run with the median wall time, the shorter of two in the middle; None if there is no run."""
        ordered = sorted(self.measured, key=lambda timeline: timeline.wall_s)
        return ordered[(len(ordered) - 1) // 2] if ordered else None


@dataclass(frozen=True, kw_only=True)
class Report:
    """Results of a benchmark, finished or in progress."""

    title: str
    variants: tuple[Variant, ...]
    method: Mapping[str, str]
    """Method as text by name: warm-ups, repeats, pauses, date."""
    machine: Mapping[str, str]
    """Machine as text by name: device, processor, memory, versions."""
    phases: tuple[PhaseRecord, ...] = ()
    """Phases of the queue item of the first run; empty if none were recorded."""
    planned: int
    """Number of requested trials, warm-ups included."""
    finished: bool = True
    """False while trials are outstanding, and after a cancelled benchmark."""

    @property
    def done(self) -> int:
        """Number of trials that were made."""
        return sum(len(variant.trials) for variant in self.variants)
