"""Model calls in a predicted order, compared with whole models.

Wrong predictions cost fetches. Calls without enough device memory are computed again.
"""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from wanstream.offload import SessionState
from wanstream.offload.engine.calls import CALLS_AHEAD, predict_again
from wanstream.sampling import FirstBlockCache, ModelCalls, RunPolicy
from wanstream.sampling.cache.base import LaneName
from wanstream.sampling.steps import InsufficientMemoryError, SamplingCancelled
from wanstream.schema import OffloadPolicy, StateError
from wanstream.telemetry import Recorder
from wanstream.tests.support.sampling.runs import CPU, LAYERWISE, SHAPE, normal
from wanstream.tests.support.sampling.short_memory import ShortPair, once
from wanstream.wan import Lane, Nag

pytestmark = pytest.mark.usefixtures("exact_blocks")

LAYERS = 4
LANES = 2
CALL = LAYERS * LANES
RESIDENT = OffloadPolicy.resident()
POLICIES = [LAYERWISE, OffloadPolicy.layerwise(3), OffloadPolicy.block_swap(2, 1), RESIDENT]
KEEPS_FIRST = replace(LAYERWISE, pin_first_block=True)
H = "high"
L = "low"


def _lanes(count: int = LANES) -> list[Lane]:
    return [
        Lane(
            latents=normal(*SHAPE, seed=5 + lane),
            text=normal(1, 3 + lane, 4096, seed=15 + lane),
            name=LaneName(lane, 0),
        )
        for lane in range(count)
    ]


def _sigma(call: int) -> float:
    return 1 - call / 16


class Calls:
    """Model calls on a pair."""

    def __init__(self, pair, policy=LAYERWISE):
        self.policy = RunPolicy(pair, policy, CPU, shape=SHAPE, sides=(0, 0))
        self.recorder = Recorder(CPU)

    def open(self, predicted, **settings):
        return ModelCalls(self.policy, predicted, recorder=self.recorder, **settings)

    def of(self, calls, predicted=None, lanes=LANES, **settings):
        """Return the velocities of each call, which are predicted by default."""
        with self.open(calls if predicted is None else predicted, **settings) as made:
            found = [
                [*made.forward(expert, _lanes(lanes), _sigma(call))]
                for call, expert in enumerate(calls)
            ]
        self.recompiled = made.recompiled
        assert made.calls == len(calls)
        assert _no_thread_is_left()
        return found

    @property
    def steps(self) -> list[tuple[int, str]]:
        return [(step.index, step.expert) for step in self.recorder.timeline().steps]


def _equal(found: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> list[bool]:
    """Return whether each call has equal velocities in all lanes."""
    assert len(found) == len(expected)
    return [all(map(torch.equal, *calls)) for calls in zip(found, expected, strict=True)]


def _no_thread_is_left() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name == "wanstream-fetch"]


@pytest.mark.parametrize(
    ("rest", "expert", "then"),
    [
        ([L, L], H, [H] * CALLS_AHEAD + [L, L]),
        ([H, H, L], L, [L]),
        ([H, L, H, L], L, [L, H, L]),
        ([], H, [H] * CALLS_AHEAD),
    ],
)
def test_the_prediction_after_a_surprise(rest, expert, then):
    assert predict_again(rest, expert) == tuple(then)


PREDICTIONS = [
    ([H, H, L, L], [H, H, L, L], 0),
    ([H, H, H, L], [H, L, L], 2),  # one high call less, one low call more
    ([H, L, L], [H, H, H, L], 2),  # two high calls more, and low ones sooner than predicted then
    ([], [H, L], 2),
    ([H, H, H], [H], 0),  # fewer calls than predicted need no new program
]


@pytest.mark.parametrize(
    ("predicted", "calls", "surprises", "policy"),
    [(*case, POLICIES[at % 4]) for at, case in enumerate(PREDICTIONS)],
    ids=str,
)
def test_calls_equal_the_whole_models(policy, predicted, calls, surprises, open_pair, plain_models):
    whole = plain_models()
    going = Calls(open_pair(), policy)
    for call, velocities in enumerate(going.of(calls, predicted)):
        time = torch.tensor([1000 * _sigma(call)])
        for lane, velocity in zip(_lanes(), velocities, strict=True):
            expected = whole[calls[call]](lane.latents, time, lane.text, return_dict=False)[0]
            assert torch.equal(velocity, expected)
    assert going.recompiled == surprises


def test_a_right_prediction_fetches_every_block_once_per_call(open_pair, engine_runs):
    calls = Calls(open_pair())
    with calls.open([H, H, L]) as made:
        for call, expert in enumerate([H, H, L]):
            made.forward(expert, _lanes(), _sigma(call))
        # The last predicted call has ended the run: nothing is fetched for calls after it.
        assert made.state is SessionState.IDLE
    (run,) = engine_runs
    assert len(run.fetched) == 3 * LAYERS
    steps = calls.recorder.timeline().steps
    assert calls.steps == [(0, H), (1, H), (2, L)]
    assert [step.sigma for step in steps] == [_sigma(call) for call in range(3)]
    assert len({step.bytes_moved for step in steps}) == 1
    # The low-noise expert's first block is fetched while the high-noise expert still computes.
    first_low = next(fetch for fetch in run.program.fetches if fetch.block.expert == L)
    assert first_low.start_after < 2 * LAYERS - 1


@pytest.mark.parametrize("prefetch", [1, 3])
def test_a_surprise_costs_no_more_than_the_blocks_ahead(prefetch, open_pair, engine_runs):
    calls = Calls(open_pair(), OffloadPolicy.layerwise(prefetch))
    calls.of([H, L, L, L], [H, H, L, L], lanes=1)
    assert calls.recompiled == 2
    # Two wrong predictions, and the last program had more calls than were made.
    assert sum(len(run.fetched) for run in engine_runs) <= 4 * LAYERS + 3 * (prefetch + 1)


def test_residents_stay_over_a_surprise(open_pair, engine_runs):
    calls = Calls(open_pair(), OffloadPolicy.block_swap(0, 1))
    calls.of([H] * 3, [H], lanes=1)
    assert calls.recompiled == 1
    assert sum(len(run.fetched) for run in engine_runs) == LAYERS


def test_calls_need_with_and_no_other_call_under_way(open_pair):
    def within() -> bool:
        made.forward(H, _lanes(), 1.0)
        return False

    made = Calls(open_pair()).open([H], should_stop=within)
    with pytest.raises(StateError, match="not entered"):
        made.forward(H, _lanes(), 1.0)
    with made:
        with pytest.raises(StateError, match="one call must end"):
            made.forward(H, _lanes(), 1.0)
        with pytest.raises(StateError, match="entered twice; state: waiting for a call"), made:
            pass
    with pytest.raises(StateError, match="state: closed"):
        made.forward(H, _lanes(), 1.0)
    with pytest.raises(StateError, match=r"cannot be entered twice; state: closed"), made:
        pass
    assert _no_thread_is_left()


@pytest.mark.parametrize("poll", [1, LAYERS + 2])
def test_stop_comes_before_the_next_block(poll, pair):
    polls = list[int]()

    def should_stop() -> bool:
        polls.append(1)
        return len(polls) == poll

    with Calls(pair).open([H, H, L], should_stop=should_stop) as made:
        with pytest.raises(SamplingCancelled) as stopped:
            for call in range(2):
                made.forward(H, _lanes(), _sigma(call))
        assert (stopped.value.step, stopped.value.block) == divmod(poll - 1, LAYERS)
        assert made.state is SessionState.IDLE
        assert _no_thread_is_left()
        again = made.forward(L, _lanes(), _sigma(0))
    assert _equal([again], Calls(pair).of([L])) == [True]


def test_an_error_between_two_calls_ends_the_run(pair):
    with pytest.raises(ZeroDivisionError), Calls(pair).open([H, L]) as made:
        made.forward(H, _lanes(), 1.0)
        1 / 0  # noqa: B018 (a sampler may do this)
    assert _no_thread_is_left()
    Calls(pair).of([H])


def _cache(threshold, calls):
    names = tuple(lane.name for lane in _lanes())
    lanes = {at: (expert, names) for at, expert in enumerate(calls)}
    return FirstBlockCache(threshold=threshold).start(lanes)


@pytest.mark.parametrize("predicted", [[H, H, L, L, L], [H, L]], ids=["all", "wrong"])
def test_a_cache_reuses_the_results_of_the_previous_call(predicted, pair):
    calls = [H, H, L, L, L]
    cached = Calls(pair, KEEPS_FIRST)
    found = cached.of(calls, predicted, cache=_cache(1e9, calls))
    steps = cached.recorder.timeline().steps
    assert [step.skipped_lanes for step in steps] == [0, 2, 0, 2, 2]
    assert [step.skipped_visits for step in steps] == [0, LAYERS - 1, 0, LAYERS - 1, LAYERS - 1]
    assert _equal(found, Calls(pair, KEEPS_FIRST).of(calls)) == [True, False, True, False, False]


def test_nag_is_in_the_blocks_as_long_as_calls_are_open(pair):
    settings = pair.engine(LAYERWISE, CPU).models.settings
    plain, other = _lanes(2)
    held = replace(plain, negative_text=other.text)
    with Calls(pair).open([H, H, L], nag=Nag(scale=5.0)) as made:
        assert settings.nag == Nag(scale=5.0)
        (off,), (on,) = (made.forward(H, [lane], 0.9) for lane in (plain, held))
        made.forward(H, [held], 0.8)  # an unpredicted call: another program
        with pytest.raises(AttributeError):
            made.forward(L, [None], 0.7)
        assert settings.nag is None, "after an error nothing is fetched, and nothing held"
        made.forward(L, [held], 0.7)
    assert settings.nag is None
    assert not torch.allclose(off, on, rtol=1e-3)
    with Calls(pair).open([H]) as made:
        assert torch.equal(made.forward(H, [plain], 0.9)[0], off)


def test_memory_is_watched_from_entering_to_leaving(pair):
    def watchers() -> int:
        return [thread.name for thread in threading.enumerate()].count("wanstream-memory")

    calls = Calls(pair)
    with calls.open([H]):
        assert watchers() == 1
    assert watchers() == 0
    assert len(calls.recorder.timeline().memory) >= 2


@pytest.mark.slow  # whole runs
@pytest.mark.parametrize(
    ("predicted", "uses", "policy"),
    [
        ([H, H, L, L], {0}, RESIDENT),
        ([H, L], {CALL - 1}, OffloadPolicy.block_swap(2, 2)),
        ([], {CALL}, OffloadPolicy.layerwise(3)),
        ([H, H, L, L], {3 * CALL, 3 * CALL + 1}, RESIDENT),
        ([H, L], {2, 5 * CALL}, OffloadPolicy.block_swap(2, 2)),
    ],
    ids=str,
)
def test_a_shortage_changes_no_bit_of_a_call(predicted, uses, policy, open_pair):
    calls = [H, H, L, L]
    plain = Calls(open_pair(), policy)
    short = Calls(ShortPair(open_pair(), once(*uses)), policy)
    assert all(_equal(short.of(calls, predicted), plain.of(calls, predicted)))
    assert short.recompiled == plain.recompiled, "a call that is computed again is no surprise"
    assert len(short.policy.changes) == len({use for use in uses if use < 4 * CALL + len(uses)})
    assert short.steps == list(enumerate(calls))


def test_a_call_that_fails_after_its_pass_is_computed_again(open_pair):
    calls = Calls(open_pair(), RESIDENT)
    short = iter([True, False, False])
    with calls.open([H, L]) as made, torch.inference_mode():
        for expert in (H, L):
            for attempt in made.attempts(expert, 1.0):
                with attempt:
                    made.velocities(_lanes(), 1000.0)
                    if next(short):
                        raise torch.OutOfMemoryError("no room for the solver")
    assert calls.steps == [(0, H), (1, L)]
    assert "in call 0 (high-noise expert)" in calls.policy.changes[0]
    assert made.recompiled == 0


def test_without_a_smaller_policy_another_call_may_follow(open_pair):
    short = [True]
    calls = Calls(ShortPair(open_pair(), lambda *_: short[0]), OffloadPolicy.layerwise(2))
    with calls.open([H, L]) as made:
        with pytest.raises(InsufficientMemoryError, match="out of memory in call 0"):
            made.forward(H, _lanes(), 1.0)
        assert made.state is SessionState.IDLE
        short[0] = False
        assert len(made.forward(L, _lanes(), 0.5)) == LANES
