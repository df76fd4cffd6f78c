"""Two workers share each step's lanes: the result equals one worker's, bit for bit."""

import os

import pytest

from wanstream.schema import Mesh, OffloadPolicy
from wanstream.shapes.context_windows import ContextWindows
from wanstream.tests.support.distributed import split_jobs
from wanstream.tests.support.sampling.runs import LAYERWISE, SHAPE, normal
from wanstream.wan import Nag

BLOCKS = 4
CFG = Mesh(cfg=2)
STEPS = 4
LANE_BYTES = 16 * 2 * 4 * 6 * 4
"""Bytes in one lane's fp32 velocity with the tests' shape."""


@pytest.fixture
def split(split: split_jobs.SplitProcesses) -> split_jobs.SplitProcesses:
    """Two processes joined as one group's cfg ranks."""
    split.join(CFG)
    return split


@pytest.mark.parametrize(
    ("batch", "guidance", "lanes_a_step"),
    [
        (1, (4.0, 3.0), (1, 1)),
        (1, (4.0, 1.0), (1, 1)),
        (3, (1.0, 3.0), (2, 3)),
        (2, (1.0, 1.0), (1, 1)),
    ],
)
def test_two_sides_give_what_one_worker_gives(
    batch, guidance, lanes_a_step, split, experts_ref, make_request, check_split
):
    request = make_request(shape=(batch, *SHAPE[1:]), guidance=guidance)
    _, results = check_split(experts_ref(), request, LAYERWISE, exact=True)
    assert len({*split.pids, os.getpid()}) == 3
    for side in results:
        assert side["gathered"] == side["crossed"] == sum(lanes_a_step) * STEPS // 2 * LANE_BYTES


def test_windows_nag_and_noise_of_every_step_are_shared_too(experts_ref, make_request, check_split):
    """Steps with one and with two lanes per window, and a lane on both ranks."""
    windows = ContextWindows(frames=3, overlap=1)
    steps = {"solver": "lcm", "guidance_steps": (4.0, 1.0, 3.0, 1.0), "nag": Nag()}
    request = make_request(shape=(1, 16, 5, 4, 6), windows=windows, **steps)
    assert {request.lanes_at(step) for step in range(STEPS)} >= {2, 4}
    check_split(experts_ref(), request, LAYERWISE, exact=True)


@pytest.mark.parametrize("policy", [OffloadPolicy.block_swap(2), OffloadPolicy.layerwise(0)])
def test_images_condition_both_sides_under_any_policy(
    policy, experts_ref, make_request, check_split
):
    given = {"image_condition": normal(1, 20, 2, 4, 6, seed=21), "solver": "unipc"}
    request = make_request(shape=(2, *SHAPE[1:]), **given)
    check_split(experts_ref(in_channels=36), request, policy, exact=True)


@pytest.fixture
def given(experts_ref, make_request):
    return experts_ref(), make_request(shape=SHAPE), LAYERWISE


@pytest.mark.parametrize(
    ("spans_machines", "rank", "visits", "stop"),
    [
        (False, 0, 0, (0, 0)),
        (False, 1, 6, (1, 2)),
        (False, 1, 15, (3, 3)),
        (True, 0, 0, (0, 0)),
        (True, 1, 5, (2, 0)),
        (True, 0, 8, (2, 0)),
    ],
)
def test_stop_of_one_rank_stops_both_before_one_block(
    spans_machines, rank, visits, stop, split, given, check_split
):
    """Between machines, before the same step."""
    if spans_machines:
        split.leave()
        split.join(CFG, spans_machines=True)
    assert split.all(split_jobs.job_run_until, *given, {rank: visits}, None) == [stop] * 2
    check_split(*given, exact=True)


def test_worker_that_left_ends_before_its_next_block(split, given):
    """After one worker's error the driver makes all leave. A step may take minutes."""
    split.leave()
    split.join(CFG, spans_machines=True)
    (first, polls), (second, _) = split.all(split_jobs.job_run_and_leave, *given, BLOCKS + 2)
    assert (first, second, polls) == ("PeerLostError", "PeerLostError", BLOCKS + 2)
