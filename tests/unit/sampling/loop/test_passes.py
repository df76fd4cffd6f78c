"""Model calls in a predicted order, compared with whole models, and what wrong predictions cost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from wanstream.offload import SessionState
from wanstream.offload.engine.calls import CALLS_AHEAD, predict_again
from wanstream.sampling import ModelCalls
from wanstream.sampling.cache.base import LaneName, StepCache
from wanstream.sampling.cache.settings import FirstBlockCache
from wanstream.sampling.loop.oom_fallback import RunPolicy
from wanstream.sampling.steps import SamplingCancelled
from wanstream.schema import OffloadPolicy, StateError
from wanstream.telemetry import Recorder
from wanstream.wan import ExpertPair, Lane, Nag

pytestmark = pytest.mark.usefixtures("exact_blocks")

LAYERS = 4
CPU = torch.device("cpu")
LAYERWISE = OffloadPolicy.layerwise(1)
H, L = "high", "low"

OpenPair = Callable[..., ExpertPair]


def _lanes(count: int = 2) -> list[Lane]:
    draw = torch.Generator().manual_seed(5)
    return [
        Lane(
            latents=torch.randn(1, 16, 2, 4, 6, generator=draw),
            text=torch.randn(1, 3 + lane, 4096, generator=draw),
        )
        for lane in range(count)
    ]


def _sigma(call: int) -> float:
    return 1 - call / 16


def _passes(
    pair: Any,
    predicted: Sequence[str],
    policy: OffloadPolicy = LAYERWISE,
    recorder: Recorder | None = None,
    **settings: Any,
) -> ModelCalls:
    run_policy = RunPolicy(pair, policy, CPU, shape=(1, 16, 2, 4, 6), sides=(0, 0))
    return ModelCalls(run_policy, predicted, recorder=recorder or Recorder(CPU), **settings)


def _fetched(pair: Any) -> int:
    return sum(len(run.fetched) for run in pair.runs)


def _no_thread_is_left() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name == "wanstream-fetch"]


@pytest.mark.parametrize(
    ("rest", "expert", "then"),
    [
        ("LL", H, [H] * CALLS_AHEAD + [L, L]),
        ("HHL", L, [L]),
        ("HLHL", L, [L, H, L]),
        ("", H, [H] * CALLS_AHEAD),
    ],
)
def test_what_is_expected_after_a_surprise(rest: str, expert: str, then: list[str]) -> None:
    assert predict_again([{"H": H, "L": L}[letter] for letter in rest], expert) == tuple(then)


PREDICTIONS = [
    ([H, H, L, L], [H, H, L, L], 0),
    ([H, L, H, L], [H, L, H, L], 0),
    ([H, H, H, L], [H, L, L], 2),  # one high call less, one low call more
    (
        [H, L, L],
        [H, H, H, L],
        2,
    ),  # two high calls more, then the low ones come sooner than predicted
    ([H, L], [L, L], 2),
    ([], [H, L], 2),
    ([L], [L] * 4, 1),
    ([H, H, H], [H], 0),  # fewer calls than predicted need no new program
]


POLICIES = [
    LAYERWISE,
    OffloadPolicy.layerwise(3),
    OffloadPolicy.block_swap(2, 1),
    OffloadPolicy.resident(),
]


@pytest.mark.parametrize(
    ("predicted", "calls", "surprises", "policy"),
    [(*case, POLICIES[at % 4]) for at, case in enumerate(PREDICTIONS)],
    ids=str,
)
def test_every_call_is_that_of_the_whole_model_whatever_was_predicted(
    policy: OffloadPolicy,
    predicted: list[str],
    calls: list[str],
    surprises: int,
    open_pair: OpenPair,
    plain_models: Callable[..., Any],
) -> None:
    whole, lanes = plain_models(), _lanes()
    with _passes(open_pair(), predicted, policy) as passes:
        for call, expert in enumerate(calls):
            for lane, velocity in zip(
                lanes, passes.forward(expert, lanes, _sigma(call)), strict=True
            ):
                time = torch.tensor([1000 * _sigma(call)])
                expected = whole[expert](lane.latents, time, lane.text, return_dict=False)[0]
                assert torch.equal(velocity, expected)
    assert (passes.calls, passes.recompiled) == (len(calls), surprises)
    assert _no_thread_is_left()


def test_a_right_prediction_is_one_program_that_fetches_every_block_once_per_call(
    watched: Any,
) -> None:
    recorder = Recorder(CPU)
    with _passes(watched, [H, H, L], recorder=recorder) as passes:
        for call, expert in enumerate([H, H, L]):
            passes.forward(expert, _lanes(), _sigma(call))
        # The last predicted call has ended the run: nothing is fetched for calls after it.
        assert passes.state is SessionState.IDLE
    (run,) = watched.runs
    assert _fetched(watched) == 3 * LAYERS
    steps = recorder.timeline().steps
    assert [(step.index, step.expert, step.sigma) for step in steps] == [
        (0, H, 1.0),
        (1, H, _sigma(1)),
        (2, L, _sigma(2)),
    ]
    assert len({step.bytes_moved for step in steps}) == 1
    # The low-noise expert's first block is fetched while the high-noise expert still computes.
    first_low = next(fetch for fetch in run.program.fetches if fetch.block.expert == L)
    assert first_low.start_after < 2 * LAYERS - 1


@pytest.mark.parametrize("prefetch", [1, 3])
def test_a_surprise_costs_no_more_than_what_was_fetched_ahead(prefetch: int, watched: Any) -> None:
    with _passes(watched, [H, H, L, L], OffloadPolicy.layerwise(prefetch)) as passes:
        for call, expert in enumerate([H, L, L, L]):
            passes.forward(expert, _lanes(1), _sigma(call))
    assert passes.recompiled == 2
    # Two wrong predictions, and the last program had more calls than were made.
    assert _fetched(watched) <= 4 * LAYERS + 3 * (prefetch + 1)


def test_residents_stay_over_a_surprise(watched: Any) -> None:
    with _passes(watched, [H], OffloadPolicy.block_swap(0, 1)) as passes:
        for call in range(3):
            passes.forward(H, _lanes(1), _sigma(call))
    assert passes.recompiled == 1
    assert _fetched(watched) == LAYERS


def test_a_pass_belongs_into_with_and_not_into_another_pass(open_pair: OpenPair) -> None:
    pair = open_pair()

    def within() -> bool:
        passes.forward(H, _lanes(), 1.0)
        return False

    passes = _passes(pair, [H], should_stop=within)
    with pytest.raises(StateError, match="not entered"):
        passes.forward(H, _lanes(), 1.0)
    with passes:
        with pytest.raises(StateError, match="one call must end"):
            passes.forward(H, _lanes(), 1.0)
        with (
            pytest.raises(StateError, match=r"cannot be entered twice; state: waiting for a call"),
            passes,
        ):
            pass
    with pytest.raises(StateError, match="state: closed"):
        passes.forward(H, _lanes(), 1.0)
    with pytest.raises(StateError, match=r"cannot be entered twice; state: closed"), passes:
        pass
    assert _no_thread_is_left()


@pytest.mark.parametrize("poll", [1, LAYERS, LAYERS + 2])
def test_a_stop_comes_before_the_next_block_and_leaves_all_usable(
    poll: int, open_pair: OpenPair
) -> None:
    pair, asking = open_pair(), list[int]()

    def should_stop() -> bool:
        asking.append(1)
        return len(asking) == poll

    with _passes(pair, [H, H, L], should_stop=should_stop) as passes:
        with pytest.raises(SamplingCancelled) as stopped:
            for call in range(2):
                passes.forward(H, _lanes(), _sigma(call))
        assert (stopped.value.step, stopped.value.block) == divmod(poll - 1, LAYERS)
        assert passes.state is SessionState.IDLE
        assert _no_thread_is_left()
        again = passes.forward(L, _lanes(), 0.5)
    with _passes(pair, [L]) as fresh:
        expected = fresh.forward(L, _lanes(), 0.5)
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))


def test_an_error_between_two_calls_ends_the_run(open_pair: OpenPair) -> None:
    pair = open_pair()
    with pytest.raises(ZeroDivisionError), _passes(pair, [H, L]) as passes:
        passes.forward(H, _lanes(), 1.0)
        1 / 0  # noqa: B018 (a sampler may do this)
    assert _no_thread_is_left()
    with _passes(pair, [H]) as passes:
        passes.forward(H, _lanes(), 1.0)


def _named_lanes(count: int = 2) -> list[Lane]:
    names = [LaneName(side, 0) for side in range(count)]
    return [replace(lane, name=name) for lane, name in zip(_lanes(count), names, strict=True)]


def _cached(threshold: float, calls: Sequence[str]) -> StepCache:
    names = tuple(lane.name for lane in _named_lanes())
    return FirstBlockCache(threshold=threshold).start(
        {at: (expert, names) for at, expert in enumerate(calls)}
    )


@pytest.mark.parametrize("predicted", [[H, H, L, L, L], [], [H, L]], ids=["all", "none", "wrong"])
def test_calls_take_over_what_the_one_before_has_computed(
    predicted: list[str], open_pair: OpenPair
) -> None:
    calls, lanes = [H, H, L, L, L], _named_lanes()
    recorder, pair, policy = Recorder(CPU), open_pair(), replace(LAYERWISE, pin_first_block=True)
    with _passes(pair, predicted, policy, recorder, cache=_cached(1e9, calls)) as passes:
        found = [passes.forward(expert, lanes, _sigma(call)) for call, expert in enumerate(calls)]
    steps = recorder.timeline().steps
    assert [step.skipped_lanes for step in steps] == [0, 2, 0, 2, 2]
    assert [step.skipped_visits for step in steps] == [0, LAYERS - 1, 0, LAYERS - 1, LAYERS - 1]
    with _passes(pair, calls, policy) as passes:
        whole = [passes.forward(expert, lanes, _sigma(call)) for call, expert in enumerate(calls)]
    for call, (ours, theirs) in enumerate(zip(found, whole, strict=True)):
        same = [torch.equal(one, other) for one, other in zip(ours, theirs, strict=True)]
        assert same == [call in {0, 2}] * 2
    assert _no_thread_is_left()


def test_a_cache_that_leaves_nothing_out_changes_no_bit_and_no_bytes(open_pair: OpenPair) -> None:
    calls, lanes, found = [H, H, L], _named_lanes(), []
    for cache in (None, _cached(0.0, calls)):
        recorder = Recorder(CPU)
        with open_pair() as pair:
            with _passes(
                pair, calls, replace(LAYERWISE, pin_first_block=True), recorder, cache=cache
            ) as passes:
                velocities = [
                    passes.forward(expert, lanes, _sigma(call)) for call, expert in enumerate(calls)
                ]
        found.append(
            (
                torch.stack([each for call in velocities for each in call]),
                recorder.timeline().bytes_moved,
            )
        )
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1] > 0


def test_nag_is_in_the_blocks_as_long_as_passes_are_open(open_pair: OpenPair) -> None:
    pair = open_pair()
    settings = pair.engine(LAYERWISE, CPU).models.settings
    (plain,) = _lanes(1)
    held = replace(plain, negative_text=_lanes(2)[1].text)
    with _passes(pair, [H, H, L], nag=Nag(scale=5.0)) as passes:
        assert settings.nag == Nag(scale=5.0)
        (off,), (on,) = (passes.forward(H, [lane], 0.9) for lane in (plain, held))
        passes.forward(H, [held], 0.8)  # an unpredicted call: another program
        with pytest.raises(ZeroDivisionError):
            passes.forward(L, _Failing(), 0.7)
        assert settings.nag is None, "after an error nothing is fetched, and nothing held"
        passes.forward(L, [held], 0.7)
    assert settings.nag is None
    assert not torch.allclose(off, on, rtol=1e-3)
    with _passes(pair, [H]) as passes:
        assert torch.equal(passes.forward(H, [plain], 0.9)[0], off)


class _Failing(list[Lane]):
    """Lanes that raise when read."""

    def __iter__(self) -> Iterator[Lane]:
        raise ZeroDivisionError
