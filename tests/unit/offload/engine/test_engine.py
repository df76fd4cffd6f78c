"""The engine executes the program exactly, bit-equal to the plain blocks at any timing."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from wanstream.devices.clock import CpuClock
from wanstream.offload import attach_offload
from wanstream.offload.sources.base import SourceError
from wanstream.offload.sources.module import ModuleSource
from wanstream.plan.programs import Visit, step_visits
from wanstream.plan.programs.transfer_program import ProgramError
from wanstream.schema import OffloadPolicy, StateError
from wanstream.telemetry import Recorder

CPU = torch.device("cpu")
POLICIES = [
    OffloadPolicy.resident(),
    OffloadPolicy.layerwise(0),
    OffloadPolicy.layerwise(1),
    OffloadPolicy.layerwise(2),
    OffloadPolicy.layerwise(3),
    OffloadPolicy.block_swap(3, 1),
    OffloadPolicy.block_swap(3, 2),
    OffloadPolicy.block_swap(5, 3),
    OffloadPolicy.block_swap(0, 1),
]
STEPS = ["high", "high", "low", "low", "high"]


def named(policy: OffloadPolicy) -> str:
    return f"{policy.kind}-{policy.blocks_to_swap}-{policy.prefetch_blocks}"


@pytest.mark.parametrize(
    ("policy", "source_name", "dtype"),
    # Every policy with both sources and both dtypes.
    [
        (policy, source, dtype)
        for at, policy in enumerate(POLICIES)
        for source, dtype in zip(
            ("file", "pinned"), (torch.float32, torch.bfloat16)[:: 1 - 2 * (at % 2)], strict=True
        )
    ],
    ids=lambda value: named(value) if isinstance(value, OffloadPolicy) else str(value),
)
def test_streamed_equals_plain_with_reads_delayed_at_random(
    make_stack: Callable[..., nn.ModuleList],
    slow_source: Callable[..., ModuleSource],
    policy: OffloadPolicy,
    source_name: str,
    dtype: torch.dtype,
) -> None:
    stacks = {"high": make_stack(6, seed=1, dtype=dtype), "low": make_stack(6, seed=2, dtype=dtype)}
    plain = copy.deepcopy(stacks)
    policy = replace(policy, source=source_name)
    hidden = expected = torch.randn(2, 5, 32).to(dtype)
    for name in STEPS:
        for block in plain[name]:
            expected = block(expected)

    source = slow_source(ModuleSource(stacks), seed=hash(named(policy)) % 1000)
    with attach_offload(
        stacks, policy=policy, device=CPU, source=source, follow_forward=False
    ) as handle:
        for _ in range(2):  # the second run starts from the first one's buffers
            value = hidden
            with handle.run(step_visits(STEPS, handle.block_counts)) as run:
                for visit in run.program.visits:
                    with run.visit(*visit):
                        value = stacks[visit.expert][visit.block](value)
            assert torch.equal(value, expected)
            assert tuple(run.fetched) == run.program.fetches


def test_permanent_residents_are_fetched_once_and_for_all(
    make_stack: Callable[..., nn.ModuleList], slow_source: Callable[..., ModuleSource]
) -> None:
    stacks = {"high": make_stack(4, seed=1), "low": make_stack(4, seed=2)}
    source = slow_source(ModuleSource(stacks), seed=0)
    with attach_offload(
        stacks, policy=OffloadPolicy.resident(), device=CPU, source=source, follow_forward=False
    ) as handle:
        for _ in range(3):
            with handle.run(step_visits(["high", "low"], handle.block_counts)) as run:
                for visit in run.program.visits:
                    with run.visit(*visit):
                        pass
        assert len(source.reads) == 8
        assert run.fetched == []


def test_the_recorder_counts_the_bytes_of_the_program(
    make_stack: Callable[..., nn.ModuleList],
) -> None:
    stacks = {"high": make_stack(4, seed=1), "low": make_stack(4, seed=2)}
    recorder = Recorder(CPU)
    with attach_offload(
        stacks, policy=OffloadPolicy.layerwise(1), device=CPU, follow_forward=False
    ) as handle:
        block_bytes = 2 * 3 * 32 * 32 * 4
        with handle.run(
            step_visits(["high", "high", "low"], handle.block_counts), recorder=recorder
        ) as run:
            for step, expert in enumerate(["high", "high", "low"]):
                with recorder.step(step, expert, sigma=0.5):
                    for index in range(4):
                        with run.visit(step, expert, index):
                            pass
    timeline = recorder.timeline()
    assert [step.bytes_moved for step in timeline.steps] == [4 * block_bytes] * 3
    assert [step.expert for step in timeline.steps] == ["high", "high", "low"]
    assert timeline.first_block_s is not None
    for step in timeline.steps:
        assert step.wall_s >= step.compute_s + step.stall_s


class Moment(float):
    """CPU event. `alive` counts existing events."""

    alive = 0

    def __init__(self, _: float) -> None:
        type(self).alive += 1

    def __del__(self) -> None:
        type(self).alive -= 1


class CountedClock(CpuClock):
    mark = staticmethod(lambda: Moment(time.perf_counter()))


@pytest.mark.parametrize(
    "policy", [OffloadPolicy.layerwise(2), OffloadPolicy.block_swap(2, 1)], ids=named
)
def test_a_long_run_holds_no_more_marks_than_a_short_one(
    make_stack: Callable[..., nn.ModuleList], policy: OffloadPolicy
) -> None:
    """On a GPU each mark is a CUDA event, and a run may have 400,000 visits."""
    stacks, steps = {"high": make_stack(4)}, 50
    recorder = Recorder(CPU)
    recorder.clock = CountedClock()
    with attach_offload(stacks, policy=policy, device=CPU, follow_forward=False) as handle:
        alive = []
        with handle.run(
            step_visits(["high"] * steps, handle.block_counts), recorder=recorder
        ) as run:
            for step in range(steps):
                with recorder.step(step, "high", sigma=0.5):
                    for index in range(4):
                        with run.visit(step, "high", index):
                            pass
                alive.append(Moment.alive)
    assert 0 < max(alive) < 50, "those of the last visits, of 200"


def test_a_visit_out_of_order_raises(make_stack: Callable[..., nn.ModuleList]) -> None:
    stacks = {"high": make_stack(4)}
    with (
        attach_offload(
            stacks, policy=OffloadPolicy.layerwise(1), device=CPU, follow_forward=False
        ) as handle,
        handle.run(step_visits(["high"], handle.block_counts)) as run,
    ):
        with run.visit(0, "high", 0):
            pass
        with pytest.raises(StateError, match="visit 1"), run.visit(0, "high", 2):
            pass


def test_a_program_with_two_fetches_exchanged_is_refused(
    make_stack: Callable[..., nn.ModuleList],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stacks = {"high": make_stack(4)}
    with attach_offload(
        stacks, policy=OffloadPolicy.layerwise(1), device=CPU, follow_forward=False
    ) as handle:
        visits = step_visits(["high", "high"], handle.block_counts)
        programs = handle.programs(visits)
        first, second, *rest = programs.device.fetches
        broken = replace(
            programs.device, fetches=(first._replace(buffer=second.buffer), second, *rest)
        )
        monkeypatch.setattr(handle, "programs", lambda _: replace(programs, device=broken))
        with pytest.raises(ProgramError):
            handle.run(visits)


def test_a_failing_read_reaches_the_visit_and_the_engine_stays_usable(
    make_stack: Callable[..., nn.ModuleList],
    slow_source: Callable[..., ModuleSource],
    run_plain: Callable[..., torch.Tensor],
) -> None:
    stack = make_stack(6)
    expected = run_plain(copy.deepcopy(stack), torch.ones(1, 32))
    source = slow_source(ModuleSource({"high": stack}), seed=0)
    source.fail_at = 4
    with attach_offload(
        {"high": stack},
        policy=OffloadPolicy.layerwise(1),
        device=CPU,
        source=source,
        follow_forward=False,
    ) as handle:
        visits = step_visits(["high"], handle.block_counts)
        reached = -1
        with pytest.raises(SourceError, match="disk went away"), handle.run(visits) as run:
            for visit in visits:
                with run.visit(*visit):
                    reached = visit.block
        assert reached == 3
        source.fail_at = None
        value = torch.ones(1, 32)
        with handle.run(visits) as run:
            for visit in visits:
                with run.visit(*visit):
                    value = stack[visit.block](value)
        assert torch.equal(value, expected)


@pytest.mark.parametrize("stop_at", range(8))
def test_a_run_cut_short_anywhere_leaves_the_engine_usable(
    make_stack: Callable[..., nn.ModuleList], slow_source: Callable[..., ModuleSource], stop_at: int
) -> None:
    stacks = {"high": make_stack(4, seed=1), "low": make_stack(4, seed=2)}
    plain = copy.deepcopy(stacks)
    expected = value = torch.ones(1, 32)
    for name in ("high", "low"):
        for block in plain[name]:
            expected = block(expected)
    source = slow_source(ModuleSource(stacks), seed=stop_at)
    policy = OffloadPolicy.block_swap(2, 1)
    with attach_offload(
        stacks, policy=policy, device=CPU, source=source, follow_forward=False
    ) as handle:
        visits = step_visits(["high", "low"], handle.block_counts)
        with pytest.raises(KeyboardInterrupt), handle.run(visits) as run:
            for number, visit in enumerate(visits):
                with run.visit(*visit):
                    if number == stop_at:
                        raise KeyboardInterrupt
        with handle.run(visits) as run:
            for visit in visits:
                with run.visit(*visit):
                    value = stacks[visit.expert][visit.block](value)
        assert torch.equal(value, expected)
        assert tuple(run.fetched) == run.program.fetches


def test_two_runs_at_once_are_refused(make_stack: Callable[..., nn.ModuleList]) -> None:
    stack = make_stack(3)
    with attach_offload(
        stack, policy=OffloadPolicy.layerwise(1), device=CPU, follow_forward=False
    ) as handle:
        visits = (Visit(0, "blocks", 0), Visit(0, "blocks", 1), Visit(0, "blocks", 2))
        with handle.run(visits), pytest.raises(RuntimeError, match="already running"):
            handle.run(visits)
