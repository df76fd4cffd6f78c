"""Predicted timelines compared with real runs: the same steps and bytes, on any machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from wanstream.block_kernels import Kernels
from wanstream.devices import auto_dtype
from wanstream.sampling import denoise
from wanstream.sampling.estimate import predicted_calls, predicted_timeline, request_run_shape
from wanstream.sampling.inputs import DenoiseRequest
from wanstream.schema import OffloadPolicy
from wanstream.tests.support.plan_fixtures import CPU_MACHINE
from wanstream.wan import ExpertPair

CPU = torch.device("cpu")
POLICIES = [
    OffloadPolicy.resident(),
    OffloadPolicy.layerwise(1),
    OffloadPolicy.layerwise(2, source="pinned"),
    OffloadPolicy.block_swap(2, 1),
    replace(OffloadPolicy.block_swap(2, 1, source="pinned"), ram_blocks=3),
]

Request, OpenPair = Callable[..., DenoiseRequest], Callable[..., ExpertPair]


@pytest.mark.parametrize(
    ("policy", "dtype"),
    [*((policy, torch.float32) for policy in POLICIES), (POLICIES[-1], torch.bfloat16)],
    ids=str,
)
def test_the_bytes_predicted_are_the_bytes_moved(
    policy: OffloadPolicy, dtype: torch.dtype, open_pair: OpenPair, make_request: Request
) -> None:
    """The second run starts with blocks in the buffers, and is predicted as well."""
    pair, request = open_pair(dtype=dtype), make_request()
    for _ in range(2):
        predicted = predicted_timeline(pair, request, policy, machine=CPU_MACHINE, device=CPU)
        measured = denoise(pair, request, policy=policy, device=CPU).timeline
        for ours, theirs in zip(predicted.steps, measured.steps, strict=True):
            assert (ours.index, ours.expert, ours.sigma) == (
                theirs.index,
                theirs.expert,
                theirs.sigma,
            )
            assert ours.bytes_moved == theirs.bytes_moved
            assert ours.transfers.read_bytes == theirs.transfers.read_bytes
            assert ours.transfers.copied_bytes == theirs.transfers.copied_bytes
        assert [phase.name for phase in predicted.phases] == [
            phase.name for phase in measured.phases
        ]
        assert (predicted.kind, measured.kind) == ("simulated", "measured")
        assert predicted.switch_step == measured.switch_step == 2


def test_steps_keep_their_numbers_where_a_run_starts_late(
    open_pair: OpenPair, make_request: Request
) -> None:
    request = make_request(start_step=2)
    predicted = predicted_timeline(
        open_pair(), request, POLICIES[1], machine=CPU_MACHINE, device=CPU
    )
    assert [step.index for step in predicted.steps] == [2, 3, 4]
    assert {step.expert for step in predicted.steps} == {"low"}
    assert [step.sigma for step in predicted.steps] == list(request.step_plan.schedule.sigmas[2:5])


def test_the_limit_of_a_step_is_that_of_its_lanes(
    open_pair: OpenPair, make_request: Request
) -> None:
    pair, request = open_pair(dtype=auto_dtype(CPU)), make_request(guidance=(3.0, 1.0))
    rates = {"product_flops_per_s": {"": 1e9}, "attention_flops_per_s": 2e9}
    plain, measured = (
        predicted_timeline(pair, request, POLICIES[0], machine=machine, device=CPU).steps
        for machine in (CPU_MACHINE, CPU_MACHINE.with_figures(**rates))
    )
    shape, tokens = (
        pair.high.config.shape,
        request_run_shape(pair, request, CPU).lane_tokens("low")[0],
    )
    block_s = shape.linear_flops(tokens) / 1e9 + shape.attention_flops(tokens) / 2e9
    assert {step.limit_s for step in plain} == {None}
    for step in measured:
        lanes = {"high": 2, "low": 1}[step.expert]
        assert step.limit_s == pytest.approx(lanes * pair.block_counts[step.expert] * block_s)
    rated = CPU_MACHINE.with_figures(**rates)
    other = open_pair(dtype=torch.float16)
    assert (
        predicted_timeline(other, request, POLICIES[0], machine=rated, device=CPU).steps[0].limit_s
        is None
    )
    pair.kernels = Kernels(attention="sdpa")
    assert (
        predicted_timeline(pair, request, POLICIES[0], machine=rated, device=CPU).steps[0].limit_s
        is None
    )


def test_asking_makes_no_engine_and_changes_none(
    open_pair: OpenPair, make_request: Request
) -> None:
    pair, request = open_pair(), make_request()
    predicted_timeline(pair, request, POLICIES[1], machine=CPU_MACHINE, device=CPU)
    assert pair.loaded_bytes == 0
    denoise(pair, request, policy=POLICIES[1], device=CPU)
    engine = pair.current_engine(POLICIES[1], CPU)
    assert engine is not None
    loaded = pair.loaded_bytes
    cold = predicted_timeline(pair, request, POLICIES[0], machine=CPU_MACHINE, device=CPU)
    assert pair.current_engine(POLICIES[0], CPU) is None
    assert (pair.current_engine(POLICIES[1], CPU), pair.loaded_bytes) == (engine, loaded)
    assert cold.bytes_moved == 8 * pair.block_bytes.stored, (
        "under another policy it starts from nothing"
    )


def test_a_slower_disk_is_predicted_to_take_longer(
    open_pair: OpenPair, make_request: Request
) -> None:
    pair, request = open_pair(), make_request()
    slow = replace(CPU_MACHINE, disk_bytes_per_s=1e6)
    times = [
        predicted_timeline(pair, request, POLICIES[1], machine=machine, device=CPU).wall_s
        for machine in (CPU_MACHINE, slow)
    ]
    assert times[1] > 10 * times[0]


def test_calls_are_numbered_from_0_and_take_what_steps_take(
    open_pair: OpenPair, make_request: Request
) -> None:
    pair, request = open_pair(), make_request(start_step=2)
    run, sigmas = request_run_shape(pair, request, CPU), request.step_plan.schedule.sigmas[2:5]
    calls = predicted_calls(pair, run, sigmas, POLICIES[1], machine=CPU_MACHINE, device=CPU)
    steps = predicted_timeline(pair, request, POLICIES[1], machine=CPU_MACHINE, device=CPU).steps
    assert [step.index for step in calls.steps] == [0, 1, 2]
    assert [replace(step, index=step.index + 2) for step in calls.steps] == [*steps]
