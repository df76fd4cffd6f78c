"""Two real workers share runs with a cache: both skip the same blocks, so neither waits."""

import random
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from wanstream.distributed.worker.worker import Worker
from wanstream.sampling.cache.settings import EasyCache, FirstBlockCache
from wanstream.schema import Mesh
from wanstream.shapes.context_windows import ContextWindows
from wanstream.tests.support.distributed.reports import Reports
from wanstream.tests.support.distributed.split_jobs import rendezvous
from wanstream.tests.support.rounding import ROUNDING, difference
from wanstream.tests.support.sampling.runs import normal

ULYSSES = Mesh(ulysses=2)
CFG = Mesh(cfg=2)
FEWER_LANES_LATE = {"guidance_steps": (4.0, 4.0, 4.0, 4.0, 3.0, 3.0, 1.0, 1.0)}
"""No negative lanes in the late steps."""
RANDOM = random.Random(7)
THRESHOLDS = [RANDOM.uniform(0.35, 0.85) for _ in range(8)]
EVERY = 4
"""One in this many thresholds is compared with a single worker."""


def job_run_each(here, every, tasks):
    """Run the tasks one after the other on one worker, in a group if there are several."""
    worker = Worker("cpu", threads=1)
    found = []
    with closing(worker):
        if every:
            worker.join(every[here.number])
        for task in tasks:
            reports = Reports()
            steps = worker.run(task, reports).timeline.steps
            decided = [(step.skipped_lanes, step.skipped_visits) for step in steps]
            found.append((decided, reports[-1].state and reports.latents))
    return found


@pytest.fixture
def group(processes):
    """`group(mesh, tasks, home="full")`: the results on each worker in a group.

    `None` as mesh: a single worker.
    """

    def run(mesh, tasks, home="full"):
        specs = rendezvous(mesh) if mesh else []
        every = [replace(each, weights=home) for each in specs]
        return processes.all(job_run_each, every, tasks, count=len(every) or 1)

    return run


@pytest.fixture
def cached_task(make_task):
    """`cached_task(threshold, batch=1, kind=FirstBlockCache, **request)`: 8 steps, 4 high-noise.

    Lanes with 12 tokens.
    """

    def make(threshold, *, batch=1, kind=FirstBlockCache, **changes):
        noise = normal(batch, 16, 2, 4, 6, seed=10)
        request = {"noise": noise, "steps": 8, "switch_step": 4, "cache": kind(threshold=threshold)}
        return make_task(request={**request, **changes})

    return make


def visits_of(ran):
    return [[visits for _, visits in decided] for decided, _ in ran]


@pytest.mark.slow
def test_two_workers_that_share_tokens_decide_alike(group, cached_task):
    tasks = [cached_task(threshold, end_step=6) for threshold in THRESHOLDS]
    one, other = group(ULYSSES, tasks)
    assert [decided for decided, _ in one] == [decided for decided, _ in other]
    assert len({*map(tuple, visits_of(one))}) >= 3, "these thresholds are too much alike"
    [alone] = group(None, tasks[::EVERY])
    for (decided, latents), (expected, whole) in zip(one[::EVERY], alone, strict=True):
        assert decided == expected
        assert difference(latents, whole) <= ROUNDING


@pytest.fixture
def check_alike(group):
    """`check_alike(mesh, tasks, home="full", exact=False)`: two workers do what one does.

    Returns the results of one worker alone, and of both.
    """

    def check(mesh, tasks, home="full", *, exact=False):
        [alone] = group(None, tasks)
        one, other = group(mesh, tasks, home)
        assert visits_of(one) == visits_of(other) == visits_of(alone)
        for (_, whole), (_, latents) in zip(alone, one, strict=True):
            assert difference(latents, whole) <= (0 if exact else ROUNDING)
        return alone, one, other

    return check


@pytest.mark.parametrize("mesh", [ULYSSES, CFG], ids=str)
def test_two_workers_decide_as_one_does(mesh, check_alike, cached_task):
    tasks = [cached_task(threshold) for threshold in (0.45, 0.55, 0.7)]
    alone, one, other = check_alike(mesh, tasks)
    if mesh == CFG:  # each side has one lane
        for (expected, _), (first, _), (second, _) in zip(alone, one, other, strict=True):
            both = [mine + theirs for (mine, _), (theirs, _) in zip(first, second, strict=True)]
            assert both == [lanes for lanes, _ in expected]
    skipped = {lanes for decided, _ in alone for lanes, _ in decided}
    assert 1 in skipped, "one lane alone never leaves anything out"


@pytest.mark.parametrize(
    ("mesh", "home"), [(ULYSSES, "sharded"), (CFG, "full"), (CFG, "sharded in VRAM")], ids=str
)
def test_two_workers_skip_the_steps_that_one_skips_by_easycache(
    mesh, home, check_alike, cached_task
):
    tasks = [cached_task(threshold, kind=EasyCache, batch=2) for threshold in (0.67, 0.8, 1e9)]
    alone, _, _ = check_alike(mesh, tasks, home)
    assert sum(map(bool, visits_of(alone)[-1])) == 3


@pytest.mark.parametrize("home", ["sharded", "sharded in VRAM"])
def test_workers_with_shards_skip_the_same_visits(home, check_alike, cached_task):
    tasks = [cached_task(threshold) for threshold in (0.55, 1e9)]
    alone, _, _ = check_alike(CFG, tasks, home, exact=True)
    assert all(any(visits) for visits in visits_of(alone))


def test_an_odd_number_of_videos_on_two_sides(group, cached_task):
    tasks = [cached_task(0.6, batch=3, **more) for more in ({}, FEWER_LANES_LATE)]
    [alone] = group(None, tasks)
    for (_, whole), (_, latents) in zip(alone, group(CFG, tasks)[0], strict=True):
        assert torch.equal(latents, whole)


@pytest.mark.parametrize("mesh", [ULYSSES, CFG], ids=str)
def test_context_windows_of_two_workers_decide_as_those_of_one(mesh, check_alike, cached_task):
    """Shifted windows find cached values by frame.

    Without guidance in late steps, cfg ranks share windows.
    """
    noise = normal(1, 16, 7, 4, 6, seed=11)
    windows = [ContextWindows(frames=3, overlap=1, shift_windows=shift) for shift in (True, False)]
    moving, resting = ({"noise": noise, "windows": each} for each in windows)
    tasks = [cached_task(0.55, **moving), cached_task(0.55, **resting)]
    alone, _, _ = check_alike(mesh, [*tasks, cached_task(1e9, **resting, **FEWER_LANES_LATE)])
    assert all(any(lanes for lanes, _ in expected) for expected, _ in alone)
