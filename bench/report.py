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
    """SHA-256 of the latents: equal exactly where the results are equal to the bit."""
    warmup: bool = False
    """Made first and not counted."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to run, and every trial that was made of it."""

    name: str
    settings: Mapping[str, str]
    """Settings of the run in words, in the order of the page."""
    job: str = ""
    """Names what is computed: variants of one job differ in how weights are streamed, and their latents are equal."""
    trials: tuple[Trial, ...] = ()
    predicted: Timeline | None = None
    """Simulated run; None for an unknown machine."""
    failed: str = ""
    """Reason for which it could not be run; empty where it could."""

    @property
    def measured(self) -> tuple[Timeline, ...]:
        """The runs that count."""
        return tuple(trial.timeline for trial in self.trials if not trial.warmup)

    @property
    def latents(self) -> frozenset[str]:
        """The results of all runs, warm-ups too: one, if they are all equal."""
        return frozenset(trial.latents for trial in self.trials)

    @property
    def usual(self) -> Timeline | None:
        """The measured run with the median wall time, of two in the middle the shorter one; None without any."""
        ordered = sorted(self.measured, key=lambda timeline: timeline.wall_s)
        return ordered[(len(ordered) - 1) // 2] if ordered else None


@dataclass(frozen=True, kw_only=True)
class Report:
    """A benchmark, finished or on its way."""

    title: str
    variants: tuple[Variant, ...]
    method: Mapping[str, str]
    """Method in words: warm-ups, repeats, pauses, date."""
    machine: Mapping[str, str]
    """Machine in words: device, processor, memory, versions."""
    phases: tuple[PhaseRecord, ...] = ()
    """Phases of the queue item of the first run; empty where none were recorded."""
    planned: int
    """Trials that were asked for, warm-ups too."""
    finished: bool = True
    """False while trials are still to come: what a cancelled benchmark leaves behind."""

    @property
    def done(self) -> int:
        """Trials that were made."""
        return sum(len(variant.trials) for variant in self.variants)
