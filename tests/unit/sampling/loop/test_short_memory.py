"""Runs that run out of device memory at chosen visits: module hooks raise torch's errors."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import UniPCMultistepScheduler

from wanstream.devices.oom import forget, is_out_of_memory
from wanstream.sampling import denoise
from wanstream.sampling.inputs import DenoiseRequest
from wanstream.sampling.steps import InsufficientMemoryError, SamplingCancelled
from wanstream.sampling.steps.schedules import wan_schedule
from wanstream.sampling.steps.solvers import Solver
from wanstream.schema import OffloadPolicy
from wanstream.wan import ExpertPair
from wanstream.wan.experts.engine import ExpertEngine

LAYERS = 4
LAYERWISE, BLOCK_SWAP, RESIDENT = (
    OffloadPolicy.layerwise,
    OffloadPolicy.block_swap,
    OffloadPolicy.resident,
)

Request = Callable[..., DenoiseRequest]
OpenPair = Callable[..., ExpertPair]


class ShortPair:
    """Pair wrapper that raises out-of-memory errors at chosen block uses.

    The uses are counted over the run.
    """

    def __init__(
        self,
        pair: ExpertPair,
        short: Callable[[int, OffloadPolicy], bool],
        error: type[RuntimeError] = torch.OutOfMemoryError,
        said: str = "out of memory",
    ) -> None:
        self._pair, self._short, self._error, self._said = pair, short, error, said
        self.policies = list[OffloadPolicy]()
        self.uses = 0
        self.left = list[Any]()
        self._hooked = set[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pair, name)

    def engine(self, policy: OffloadPolicy, device: torch.device) -> ExpertEngine:
        engine = self._pair.engine(policy, device)
        self.policies.append(policy)
        for blocks in engine.models.blocks.values():
            for block in blocks:
                if id(block) not in self._hooked:
                    self._hooked.add(id(block))
                    block.register_forward_pre_hook(self._use)
        return engine

    def _use(self, block: torch.nn.Module, given: tuple[Any, ...]) -> None:
        use, self.uses = self.uses, self.uses + 1
        assert all(left() is None for left in self.left), (
            "what the failed step computed is still there"
        )
        if self._short(use, self.policies[-1]):
            computed = given[
                0
            ].clone()  # a new tensor: the lanes' first tensors are views of the inputs
            self.left += [weakref.ref(given[0]), weakref.ref(computed)]
            raise self._error(f"{self._said} at use {use}: {list(computed.shape)}")


@contextmanager
def _no_collector() -> Iterator[None]:
    """Memory in a reference cycle is not free when the next step needs it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _run(pair: Any, request: DenoiseRequest, policy: OffloadPolicy, **settings: Any) -> Any:
    return denoise(pair, request, policy=policy, device="cpu", **settings)


def _once(*uses: int) -> Callable[[int, OffloadPolicy], bool]:
    return lambda use, _: use in uses


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    """Results by solver without memory errors. Other tests compare the policies."""
    return {}


@pytest.mark.parametrize(
    ("policy", "uses", "solver"),
    [
        (RESIDENT(), [0], "euler"),  # the very first use
        (RESIDENT(), [2 * LAYERS - 1], "unipc"),  # a step's last use
        (RESIDENT(), [21, 22], "unipc"),  # twice in one step
        (BLOCK_SWAP(1, 2), [5, 18], "unipc"),  # before and after the switch
        (LAYERWISE(3), [30], "euler"),
        (RESIDENT(source="pinned"), [9, 20], "euler"),
    ],
    ids=str,
)
def test_no_bit_changes_wherever_memory_was_short(
    solver: str,
    policy: OffloadPolicy,
    uses: Sequence[int],
    open_pair: OpenPair,
    make_request: Request,
    undisturbed: dict[str, Any],
) -> None:
    request = make_request(solver=solver, guidance=(4.0, 3.0))
    whole = undisturbed[solver] = undisturbed.get(solver) or _run(open_pair(), request, policy)
    pair = ShortPair(open_pair(), _once(*uses))
    with _no_collector():
        disturbed = _run(pair, request, policy)
    assert torch.equal(disturbed.latents, whole.latents)
    assert len(disturbed.timeline.changes) == len(uses)
    assert len(pair.policies) == len(uses) + 1
    assert [step.index for step in disturbed.timeline.steps] == list(range(5))
    assert whole.timeline.changes == ()
    assert not [
        thread for thread in threading.enumerate() if thread.name.startswith("wanstream-fetch")
    ]


def test_the_smaller_policy_stays_and_is_told(
    open_pair: OpenPair, make_request: Request, caplog: pytest.LogCaptureFixture
) -> None:
    pair = ShortPair(open_pair(), _once(2 * 2 * LAYERS))
    with caplog.at_level(logging.WARNING, "wanstream.sampling"):
        result = _run(pair, make_request(), BLOCK_SWAP(2, 1))
    assert pair.policies == [BLOCK_SWAP(2, 1), BLOCK_SWAP(3, 1)]
    (change,) = result.timeline.changes
    assert change.startswith("out of memory in step 2 (low-noise expert): ")
    assert "3 of 4 stream, 1 ahead" in change
    assert "instead of" in change
    (warning,) = caplog.messages
    assert warning.startswith(change)
    assert "computed again, and the result is the same (out of memory at use 16" in warning
    streamed = [step.bytes_moved for step in result.timeline.steps]
    assert streamed[1] < streamed[3] == streamed[4], (
        "three blocks stream instead of two from step 2 on"
    )


class DeviceError(RuntimeError):
    """Stand-in for torch.AcceleratorError. Python code cannot construct the real one."""

    error_code = 2


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError, "HIP error: out of memory"),
        (RuntimeError, "HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"),
        (
            RuntimeError,
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        ),
        (RuntimeError, "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        (RuntimeError, "CUDA error: out of memory"),
        (
            RuntimeError,
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 "
            "bytes.",
        ),
        (DeviceError, "the device said no"),
    ],
)
def test_a_shortage_that_a_library_tells_is_one_too(
    error: type[RuntimeError], said: str, open_pair: OpenPair, make_request: Request
) -> None:
    request = make_request()
    pair = ShortPair(open_pair(), _once(5), error, said)
    result = _run(pair, request, RESIDENT())
    assert len(result.timeline.changes) == 1
    assert torch.equal(result.latents, _run(open_pair(), request, RESIDENT()).latents)


def test_another_error_of_the_device_ends_the_run_at_once(
    open_pair: OpenPair, make_request: Request
) -> None:
    pair = ShortPair(
        open_pair(), _once(5), RuntimeError, "CUDA error: an illegal memory access was encountered"
    )
    with pytest.raises(RuntimeError, match="illegal memory access"):
        _run(pair, make_request(), RESIDENT())
    assert pair.uses == 6


def test_an_error_with_another_number_is_no_shortage() -> None:
    error = DeviceError("the device said no")
    assert is_out_of_memory(error)
    error.error_code = 700
    assert not is_out_of_memory(error)


@pytest.mark.slow  # several loop runs
def test_where_two_buffers_are_all_there_is_fewer_tokens_are_computed_at_once(
    open_pair: OpenPair, make_request: Request, caplog: pytest.LogCaptureFixture
) -> None:
    noise = torch.randn(1, 16, 5, 42, 40, generator=torch.Generator().manual_seed(1))  # 2100 tokens
    request = make_request(noise=noise, steps=1, switch_step=1, guidance=(1.0, 1.0))
    pair = ShortPair(open_pair(), _once(LAYERS - 1))
    with caplog.at_level(logging.WARNING, "wanstream.sampling"):
        result = _run(pair, request, LAYERWISE(1))
    assert pair.policies == [LAYERWISE(1), replace(LAYERWISE(1), chunk_tokens=2048)]
    assert "2048 tokens at once" in result.timeline.changes[0]
    assert "the result is the same" not in caplog.text, "last bits may differ"
    whole = _run(open_pair(), request, LAYERWISE(1)).latents
    assert torch.allclose(result.latents, whole, rtol=1e-4, atol=1e-4)


def test_a_step_is_tried_again_with_less_and_less_and_no_more_often_than_needed(
    open_pair: OpenPair, make_request: Request
) -> None:
    """Only two buffers fit: at least one less than eight, then at least two less than four."""
    pair = ShortPair(open_pair(), lambda _, policy: policy != LAYERWISE(1))
    _run(pair, make_request(), RESIDENT())
    assert pair.policies == [RESIDENT(), BLOCK_SWAP(0, 1), LAYERWISE(1)]


@pytest.mark.parametrize(
    ("policy", "smallest"),
    [(RESIDENT(), LAYERWISE(1)), (LAYERWISE(3), LAYERWISE(1)), (LAYERWISE(0), LAYERWISE(0))],
)
def test_where_nothing_smaller_is_left_the_error_says_what_was_tried(
    policy: OffloadPolicy, smallest: OffloadPolicy, open_pair: OpenPair, make_request: Request
) -> None:
    inner = open_pair()
    still = [True]
    pair = ShortPair(inner, lambda use, _: still[0] and use >= 3)
    with _no_collector(), pytest.raises(InsufficientMemoryError) as refused:
        _run(pair, make_request(), policy)
    assert all(left() is None for left in pair.left)
    assert pair.policies[-1] == smallest
    assert isinstance(refused.value, ValueError)
    assert isinstance(refused.value, torch.OutOfMemoryError), "a host unloads other models for it"
    message = str(refused.value)
    assert message.startswith(
        "out of memory in step 0 (high-noise expert), and no smaller policy is left"
    )
    assert message.count(" of weights (") == len(pair.policies)
    assert "Make the video smaller or shorter" in message
    assert "out of memory at use" in message
    still[0], request = False, make_request()
    assert torch.equal(
        _run(inner, request, policy).latents, _run(open_pair(), request, policy).latents
    )


def test_an_interrupt_ends_a_step_that_is_taken_again(
    open_pair: OpenPair, make_request: Request
) -> None:
    inner, polls = open_pair(), list[int]()
    pair = ShortPair(inner, _once(2 * LAYERS + 2))

    def should_stop() -> bool:
        polls.append(len(pair.policies))
        return polls.count(2) == 3

    with pytest.raises(SamplingCancelled) as stopped:
        _run(pair, make_request(), RESIDENT(), should_stop=should_stop)
    assert (stopped.value.step, stopped.value.block) == (1, 2)
    assert not inner.running


def test_what_a_callback_raises_is_no_shortage_of_the_step(
    open_pair: OpenPair, make_request: Request
) -> None:
    def preview(_: Any) -> None:
        raise torch.OutOfMemoryError("the preview has no room")

    pair = ShortPair(open_pair(), _once())
    with pytest.raises(torch.OutOfMemoryError, match="the preview has no room"):
        _run(pair, make_request(), RESIDENT(), on_step=preview)
    assert pair.policies == [RESIDENT()]


def test_a_pool_that_finds_no_room_is_made_smaller_too(
    open_pair: OpenPair, make_request: Request
) -> None:
    request = make_request()

    class NoRoomForThePool(ShortPair):
        def engine(self, policy: OffloadPolicy, device: torch.device) -> ExpertEngine:
            if policy.kind == "resident":
                self.policies.append(policy)
                raise torch.OutOfMemoryError("no room for the pool")
            return super().engine(policy, device)

    result = _run(NoRoomForThePool(open_pair(), _once()), request, RESIDENT())
    assert len(result.timeline.changes) == 1
    assert torch.equal(result.latents, _run(open_pair(), request, LAYERWISE(1)).latents)


def test_buffers_that_find_no_room_when_a_run_begins_are_fewer_then(
    open_pair: OpenPair, make_request: Request
) -> None:
    request = make_request()

    class NoRoomAtTheStart(ShortPair):
        def engine(self, policy: OffloadPolicy, device: torch.device) -> Any:
            engine = super().engine(policy, device)
            return Beginning(engine) if policy.kind == "resident" else engine

    class Beginning:
        def __init__(self, engine: ExpertEngine) -> None:
            self._engine = engine

        def __getattr__(self, name: str) -> Any:
            return getattr(self._engine, name)

        @contextmanager
        def run(self, *visits: Any, **settings: Any) -> Iterator[Any]:
            with self._engine.run(*visits, **settings):
                raise torch.OutOfMemoryError("no room for the buffers")
            yield

    pair = NoRoomAtTheStart(open_pair(), _once())
    result = _run(pair, request, RESIDENT())
    assert [policy.kind for policy in pair.policies] == ["resident", "block_swap"]
    assert result.timeline.changes[0].startswith("out of memory in step 0 (high-noise expert)")
    assert torch.equal(result.latents, _run(open_pair(), request, LAYERWISE(1)).latents)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (LAYERWISE(1), BLOCK_SWAP(1)),
        (LAYERWISE(1), RESIDENT()),
        (RESIDENT(), RESIDENT()),
        (RESIDENT(), LAYERWISE(1, source="pinned")),
    ],
    ids=str,
)
def test_a_revised_policy_holds_from_the_second_step_on_and_changes_no_bit(
    before: OffloadPolicy, after: OffloadPolicy, open_pair: OpenPair, make_request: Request
) -> None:
    records, pair, request = list[Any](), ShortPair(open_pair(), _once()), make_request()

    def revise(record: Any) -> OffloadPolicy:
        records.append(record)
        return after

    result = _run(pair, request, before, revise=revise)
    assert torch.equal(result.latents, _run(open_pair(), request, before).latents)
    assert records == [result.timeline.steps[0]]
    assert pair.policies == ([before] if before == after else [before, after])
    assert len(result.timeline.changes) == (before != after)
    if before != after:
        assert result.timeline.changes[0].startswith("after the first step: ")


@pytest.mark.parametrize(
    ("steps", "uses", "revisions"),
    [(5, [], 1), (5, [3], 0), (5, [40], 1), (1, [], 0)],
    ids=["5", "short", "later", "1"],
)
def test_nobody_is_asked_about_a_disturbed_first_step_or_the_only_one(
    steps: int, uses: list[int], revisions: int, open_pair: OpenPair, make_request: Request
) -> None:
    records = list[Any]()
    pair = ShortPair(open_pair(), _once(*uses))
    _run(pair, make_request(steps=steps, switch_step=steps), RESIDENT(), revise=records.append)
    assert len(records) == revisions


def test_an_error_that_somebody_keeps_holds_no_tensor() -> None:
    left = list[Any]()

    def compute() -> None:
        hidden = torch.zeros(4)
        left.append(weakref.ref(hidden))
        raise torch.OutOfMemoryError("no room for 4 values. Of the allocated memory 1 GiB is ours")

    def compute_more() -> None:
        other = torch.zeros(5)
        left.append(weakref.ref(other))
        try:
            compute()
        except torch.OutOfMemoryError as err:
            raise torch.OutOfMemoryError("no room after that either") from err

    with _no_collector():
        try:
            compute_more()
        except torch.OutOfMemoryError as err:
            kept = err
        assert any(ref() is not None for ref in left)
        assert forget(kept) == "no room after that either"
        assert all(ref() is None for ref in left)


@pytest.mark.parametrize("name", ["unipc", "euler"])
def test_steps_of_a_copied_solver_are_none_of_the_solvers(name: str) -> None:
    schedule = wan_schedule(6, 5.0)
    draw = torch.Generator().manual_seed(1)
    given = [torch.randn(1, 16, 1, 2, 2, generator=draw) for _ in range(7)]
    plain, careful = Solver(name, schedule), Solver(name, schedule)
    latents = [given[0], given[0]]
    for velocity in given[1:]:
        tried = careful.copy()
        tried.step(velocity * 2, latents[1])  # a step that failed
        latents = [plain.step(velocity, latents[0]), careful.step(velocity, latents[1])]
        assert torch.equal(*latents)


def test_a_shortage_in_the_solver_leaves_its_history_as_it_was(
    open_pair: OpenPair, make_request: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, pair, steps = make_request(), open_pair(), iter(range(100))
    whole = _run(pair, request, RESIDENT()).latents
    real = UniPCMultistepScheduler.multistep_uni_p_bh_update

    def short(self: Any, *args: Any, **settings: Any) -> torch.Tensor:
        """Called last in a step, after the history was shifted."""
        if next(steps) == 2:
            raise torch.OutOfMemoryError("no room in the solver")
        return real(self, *args, **settings)

    monkeypatch.setattr(UniPCMultistepScheduler, "multistep_uni_p_bh_update", short)
    disturbed = _run(pair, request, RESIDENT())
    assert torch.equal(disturbed.latents, whole)
    assert len(disturbed.timeline.changes) == 1
