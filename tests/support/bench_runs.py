"""Timelines, variants and reports with round figures."""

from wanstream.bench import Report, Trial, Variant
from wanstream.schema.records import STEP_FIGURES, StepRecord, Timeline


def _step(index, expert, wall_s, *, stall_s=0.0, **values) -> StepRecord:
    values = {"sigma": 1 - index / 100, "compute_s": wall_s - stall_s, **values}
    values = {"bytes_moved": 28 * 10**9, "wall_s": wall_s, "stall_s": stall_s, **values}
    return StepRecord.of(index=index, expert=expert, **values)


def make_timeline(*walls, switch=3, first=0, **values):
    """Return a measured run with these wall times.

    The low-noise expert runs from step number `switch` on. `values` are for every step, or for the
    run.
    """
    of_step = {name: value for name, value in values.items() if name in STEP_FIGURES}
    of_run = {name: value for name, value in values.items() if name not in STEP_FIGURES}
    named = [(at, "high" if at < switch else "low", wall) for at, wall in enumerate(walls, first)]
    steps = tuple(_step(*each, **of_step) for each in named)
    return Timeline(**{"kind": "measured", "steps": steps, **of_run})


def make_variant(name, *runs, latents="ab" * 32, job="one", **values) -> Variant:
    """Return a variant with these measured runs."""
    trials = tuple(Trial(timeline=run, latents=latents) for run in runs)
    given = {"settings": {"Policy": name}, "job": job, "trials": trials, **values}
    return Variant(**{"name": name, **given})


def make_report(*variants, **values):
    """Return a finished report with these variants."""
    about = {"title": "A benchmark", "method": {"Runs": "3"}, "machine": {"Device": "CPU"}}
    return Report(variants=variants, **{**about, "planned": 0, **values})


BLOCKING = make_timeline(40, 20, 20, 47, 20, 20)
"""A run whose switch waits 27 s for the next expert."""
SEAMLESS = make_timeline(65, 23, 23, 23, 23, 23)
"""A slower run whose switch is a step like any other."""
