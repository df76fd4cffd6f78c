"""Model calls without enough device memory, and under a policy revised after the first call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from wanstream.block_kernels import Kernels
from wanstream.offload import SessionState
from wanstream.sampling import ModelCalls
from wanstream.sampling.loop.oom_fallback import Revise, RunPolicy
from wanstream.sampling.steps import InsufficientMemoryError, SamplingCancelled
from wanstream.schema import OffloadPolicy
from wanstream.telemetry import Recorder
from wanstream.wan import ExpertPair, Lane

LAYERS, LANES = 4, 2
CALL = LAYERS * LANES
CPU = torch.device("cpu")
LAYERWISE, BLOCK_SWAP, RESIDENT = (
    OffloadPolicy.layerwise,
    OffloadPolicy.block_swap,
    OffloadPolicy.resident,
)
H, L = "high", "low"

OpenPair = Callable[..., ExpertPair]


def _lanes() -> list[Lane]:
    draw = torch.Generator().manual_seed(5)
    return [
        Lane(
            latents=torch.randn(1, 16, 2, 4, 6, generator=draw),
            text=torch.randn(1, 3, 4096, generator=draw),
        )
        for _ in range(LANES)
    ]


class Calls:
    """Model calls on a pair that raises out-of-memory errors at chosen block uses."""

    def __init__(
        self,
        pair: ExpertPair,
        policy: OffloadPolicy,
        short: Callable[[int], bool] = lambda _: False,
        *,
        revise: Revise | None = None,
    ) -> None:
        self.policy = RunPolicy(
            pair, policy, CPU, shape=(1, 16, 2, 4, 6), sides=(0, 0), revise=revise
        )
        self.recorder = Recorder(CPU)
        self._uses, self._short = 0, short
        self._hooks = [
            block.register_forward_pre_hook(self._use)
            for blocks in self.policy.engine().models.blocks.values()
            for block in blocks
        ]

    def _use(self, block: torch.nn.Module, given: tuple[Any, ...]) -> None:
        use, self._uses = self._uses, self._uses + 1
        if self._short(use):
            raise torch.OutOfMemoryError(f"no room at use {use}")

    def of(self, calls: list[str], predicted: list[str], **settings: Any) -> list[torch.Tensor]:
        try:
            with self.passes(predicted, **settings) as passes:
                found = [
                    v
                    for n, call in enumerate(calls)
                    for v in passes.forward(call, _lanes(), 1 - n / 16)
                ]
            self.recompiled = passes.recompiled
        finally:
            for hook in self._hooks:
                hook.remove()
        return found

    def passes(self, predicted: list[str], **settings: Any) -> ModelCalls:
        return ModelCalls(self.policy, predicted, recorder=self.recorder, **settings)


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, tuple[list[torch.Tensor], int]]:
    """Velocities and new program counts in runs without memory errors."""
    return {}


POLICIES = [RESIDENT(), BLOCK_SWAP(2, 2), LAYERWISE(3)]
USES = [{0}, {CALL - 1}, {CALL}, {3 * CALL, 3 * CALL + 1}, {2, 5 * CALL}]
PREDICTIONS: list[list[str]] = [[H, H, L, L], [H, L], []]


@pytest.mark.slow  # whole runs
@pytest.mark.parametrize(
    ("predicted", "uses", "policy"),
    # Every prediction with every use, and both with every policy.
    [
        (predicted, uses, POLICIES[(at + use) % 3])
        for at, predicted in enumerate(PREDICTIONS)
        for use, uses in enumerate(USES)
    ],
    ids=str,
)
def test_no_bit_of_a_call_changes(
    predicted: list[str],
    uses: set[int],
    policy: OffloadPolicy,
    open_pair: OpenPair,
    undisturbed: dict[str, tuple[list[torch.Tensor], int]],
) -> None:
    calls = [H, H, L, L]
    if (case := f"{predicted} {policy}") not in undisturbed:
        plain = Calls(open_pair(), policy)
        undisturbed[case] = plain.of(calls, predicted), plain.recompiled
    short = Calls(open_pair(), policy, uses.__contains__)
    found = short.of(calls, predicted)
    expected, recompiled = undisturbed[case]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert short.recompiled == recompiled, "a call that is computed again is no surprise"
    assert len(short.policy.changes) == len({use for use in uses if use < 4 * CALL + len(uses)})
    steps = short.recorder.timeline().steps
    assert [(step.index, step.expert) for step in steps] == list(enumerate(calls))


def test_a_change_names_its_call(open_pair: OpenPair) -> None:
    calls = Calls(open_pair(), RESIDENT(), {2 * CALL + 3}.__contains__)
    calls.of([H, H, L], [H, H, L])
    (change,) = calls.policy.changes
    assert change.startswith("out of memory in call 2 (low-noise expert): ")
    assert "one expert resident" in change


def test_a_call_that_fails_after_its_pass_is_computed_again(open_pair: OpenPair) -> None:
    short = iter([True, False, False])
    calls = Calls(open_pair(), RESIDENT())
    with calls.passes([H, L]) as passes, torch.inference_mode():
        for expert in (H, L):
            for attempt in passes.attempts(expert, 1.0):
                with attempt:
                    passes.velocities(_lanes(), 1000.0)
                    if next(short):
                        raise torch.OutOfMemoryError("no room for the solver")
    assert [(step.index, step.expert) for step in calls.recorder.timeline().steps] == [
        (0, H),
        (1, L),
    ]
    assert "in call 0 (high-noise expert)" in calls.policy.changes[0]
    assert passes.recompiled == 0


def test_where_nothing_smaller_is_left_the_passes_wait_for_another_call(
    open_pair: OpenPair,
) -> None:
    short = [True]
    calls = Calls(open_pair(), LAYERWISE(2), lambda _: short[0])
    with calls.passes([H, L]) as passes:
        with pytest.raises(InsufficientMemoryError, match="out of memory in call 0"):
            passes.forward(H, _lanes(), 1.0)
        assert passes.state is SessionState.IDLE
        short[0] = False
        assert len(passes.forward(L, _lanes(), 0.5)) == LANES


def test_a_stop_ends_a_call_that_is_computed_again(open_pair: OpenPair) -> None:
    polls = list[int]()
    calls = Calls(open_pair(), RESIDENT(), {3}.__contains__)

    def should_stop() -> bool:
        polls.append(len(calls.policy.changes))
        return polls.count(1) == 3

    with pytest.raises(SamplingCancelled) as stopped:
        calls.of([H], [H], should_stop=should_stop)
    assert (stopped.value.step, stopped.value.block) == (0, 2)


@pytest.mark.parametrize(
    ("calls", "uses", "revisions", "after"),
    [
        ([H, H, L], set(), 1, BLOCK_SWAP(2)),
        ([H, L], {1}, 0, BLOCK_SWAP(0)),  # the first call ran out of memory
        ([H], set(), 0, LAYERWISE(1)),  # the run has a single call
    ],
)
def test_a_policy_is_revised_after_an_undisturbed_first_call(
    calls: list[str], uses: set[int], revisions: int, after: OffloadPolicy, open_pair: OpenPair
) -> None:
    records = list[Any]()

    def revise(record: Any) -> OffloadPolicy:
        records.append(record)
        return BLOCK_SWAP(2)

    before = RESIDENT() if uses else LAYERWISE(1)
    going = Calls(open_pair(), before, uses.__contains__, revise=revise)
    found = going.of(calls, calls)
    expected = Calls(open_pair(), LAYERWISE(1)).of(calls, calls)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len(records) == revisions
    assert going.policy.policy == after
    assert going.recompiled == 0


@pytest.mark.slow  # several loop runs
def test_a_call_in_which_blocks_were_compiled_teaches_nothing(open_pair: OpenPair) -> None:
    torch._dynamo.reset()
    records, pair = list[Any](), open_pair(layers=2)
    pair.kernels = Kernels(compiler="eager")
    Calls(pair, LAYERWISE(1), revise=records.append).of([H, H], [H, H])
    assert records == []
    Calls(pair, LAYERWISE(1), revise=records.append).of([H, H], [H, H])
    assert len(records) == 1
