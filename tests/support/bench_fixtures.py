"""Timelines, variants and reports with round figures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from wanstream.bench import Report, Trial, Variant
from wanstream.schema.records import STEP_FIGURES, StepRecord, Timeline

OF_STEP = {*STEP_FIGURES}


def _step(
    index: int, expert: str, wall_s: float, *, stall_s: float = 0.0, **values: Any
) -> StepRecord:
    given = {
        "sigma": 1 - index / 100,
        "compute_s": wall_s - stall_s,
        "bytes_moved": 28 * 10**9,
        **values,
    }
    return StepRecord.of(index=index, expert=expert, wall_s=wall_s, stall_s=stall_s, **given)


@pytest.fixture(scope="session")
def make_timeline() -> Callable[..., Timeline]:
    """`make_timeline(*walls, switch=3, first=0, **values)`: a measured run with these wall times.

    The low-noise expert runs from step number `switch` on. `values` are for every step, or for the
    run.
    """

    def make(*walls: float, switch: int = 3, first: int = 0, **values: Any) -> Timeline:
        of_step = {name: value for name, value in values.items() if name in OF_STEP}
        of_run = {name: value for name, value in values.items() if name not in OF_STEP}
        steps = tuple(
            _step(index, "high" if index < switch else "low", wall, **of_step)
            for index, wall in enumerate(walls, first)
        )
        return Timeline(**{"kind": "measured", "steps": steps, **of_run})

    return make


@pytest.fixture(scope="session")
def make_variant() -> Callable[..., Variant]:
    """`make_variant(name, *runs, latents="ab...", job="one", **values)`: a variant.

    `runs` are the measured runs.
    """

    def make(
        name: str, *runs: Timeline, latents: str = "ab" * 32, job: str = "one", **values: Any
    ) -> Variant:
        trials = tuple(Trial(timeline=run, latents=latents) for run in runs)
        return Variant(
            **{"name": name, "settings": {"Policy": name}, "job": job, "trials": trials, **values}
        )

    return make


@pytest.fixture(scope="session")
def make_report() -> Callable[..., Report]:
    """`make_report(*variants, **values)`: a finished report with these variants."""

    def make(*variants: Variant, **values: Any) -> Report:
        given = {
            "title": "A benchmark",
            "method": {"Runs": "3"},
            "machine": {"Device": "CPU"},
            "planned": 0,
        }
        return Report(variants=variants, **{**given, **values})

    return make


@pytest.fixture
def blocking(make_timeline: Callable[..., Timeline]) -> Timeline:
    """A run whose switch waits 27 s for the next expert."""
    return make_timeline(40, 20, 20, 47, 20, 20)


@pytest.fixture
def seamless(make_timeline: Callable[..., Timeline]) -> Timeline:
    """A slower run whose switch is a step like any other."""
    return make_timeline(65, 23, 23, 23, 23, 23)
