"""Report: what a benchmark ran and how long it took, as values, and the JSON document that they make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..plan import Timeline
from ..plan.timeline import PhaseRecord

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of a variant."""

    timeline: Timeline
    latents: str
    """SHA-256 of the latents: equal exactly where the results are equal to the bit."""
    warm_up: bool = False
    """Made first and not counted."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to run, and every trial that was made of it."""

    name: str
    settings: Mapping[str, str]
    """What was run, in words for a reader, in the order in which it is shown."""
    job: str = ""
    """Names what is computed: variants of one job differ in how weights are streamed, and their latents are equal."""
    trials: tuple[Trial, ...] = ()
    predicted: Timeline | None = None
    """What the simulator said of it; None where the machine was not known."""
    failed: str = ""
    """Why it could not be run; empty where it could."""

    @property
    def measured(self) -> tuple[Timeline, ...]:
        """The runs that count."""
        return tuple(trial.timeline for trial in self.trials if not trial.warm_up)

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
    """How the figures came about, in words: warm-ups, repeats, pauses, date."""
    machine: Mapping[str, str]
    """What they were measured on, in words: device, processor, memory, versions."""
    phases: tuple[PhaseRecord, ...] = ()
    """Of the queue item that the first run belongs to; empty where nobody took them down."""
    planned: int
    """Trials that were asked for, warm-ups too."""
    finished: bool = True
    """False while trials are still to come: what a cancelled benchmark leaves behind."""

    @property
    def done(self) -> int:
        """Trials that were made."""
        return sum(len(variant.trials) for variant in self.variants)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts, ready for JSON. Timelines are as `Timeline.to_dict` writes them."""
        return {
            "wanstream_report": FORMAT,
            "title": self.title,
            "method": dict(self.method),
            "machine": dict(self.machine),
            "planned": self.planned,
            "done": self.done,
            "finished": self.finished,
            "phases": [asdict(phase) for phase in self.phases],
            "variants": [_variant_dict(variant) for variant in self.variants],
        }


def _variant_dict(variant: Variant) -> dict[str, Any]:
    return {
        "name": variant.name,
        "settings": dict(variant.settings),
        "job": variant.job,
        "failed": variant.failed,
        "predicted": None if variant.predicted is None else variant.predicted.to_dict(),
        "trials": [
            {"warm_up": trial.warm_up, "latents": trial.latents, "timeline": trial.timeline.to_dict()}
            for trial in variant.trials
        ],
    }
