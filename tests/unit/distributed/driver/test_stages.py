"""Stage runner with step functions of any model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from wanstream.distributed.driver.local_stages import StepFunction, StepGroup, run_stages
from wanstream.distributed.driver.stage_run import RestartLimitError, StageRun
from wanstream.distributed.messages import RunTask
from wanstream.distributed.transport.pool import WorkerLostError
from wanstream.plan.workers.jobs import GroupId
from wanstream.sampling import RunSlice, RunState, SamplingCancelled, StepProgress, denoise
from wanstream.wan.experts.open import ExpertsRegistry

VIDEO = (1, 4, 14, 8, 8)
"""Latent shape of SVD's UNet: 14 frames of 4 channels."""
STEPS = [range(3), range(3, 7)]


class ToyUnet(torch.nn.Module):
    """Noise prediction from a latent and its image condition: 8 channels in, 4 out."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.mix = torch.nn.Parameter(torch.randn(4, 8, generator=generator) / 8, requires_grad=False)
        self.steps: list[int] = []

    def step(self, state: dict[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
        """Take one Euler step; the condition does not change."""
        self.steps.append(step)
        seen = torch.cat([state["latent"], state["image"]], dim=1)
        noise = torch.einsum("oc,bcfhw->bofhw", self.mix, seen)
        return {"latent": state["latent"] - noise / (step + 1), "image": state["image"]}


def videos(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{name: torch.randn(VIDEO, generator=generator) for name in ("latent", "image")} for _ in range(count)]


def run_groups(
    steps: list[list[range]],
    groups: dict[GroupId, StepGroup[Any]],
    states: list[Any],
    *,
    max_restarts: int = 0,
    on_step: Callable[[int, Any], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> list[Any]:
    run = StageRun(steps, groups, states, max_restarts=max_restarts)
    return run.run(None if on_step is None else lambda item, step: on_step(item, step.state), should_stop)


def stages_of(steps: dict[GroupId, StepFunction[Any]]) -> dict[GroupId, StepGroup[Any]]:
    return {group: StepGroup(step) for group, step in steps.items()}


@pytest.mark.parametrize("data", [1, 2])
def test_another_model_goes_through_stages_and_no_stage_takes_a_step_of_another(data: int) -> None:
    alone = [ToyUnet(1), ToyUnet(2)]
    wanted = []
    for state in videos(5):
        for unet, steps in zip(alone, STEPS, strict=True):
            for step in steps:
                state = unet.step(state, step)
        wanted.append(state)
    unets = {GroupId(place, stage): ToyUnet(stage + 1) for place in range(data) for stage in range(2)}
    told: list[int] = []
    ended = run_groups(
        [STEPS] * 5,
        stages_of({group: unet.step for group, unet in unets.items()}),
        videos(5),
        on_step=lambda item, _: told.append(item),
    )
    for got, expected in zip(ended, wanted, strict=True):
        assert torch.equal(got["latent"], expected["latent"])
    assert sorted(told) == sorted([*range(5)] * 7)
    for group, unet in unets.items():
        assert set(unet.steps) <= set(STEPS[group.stage])
    if data == 1:
        assert unets[GroupId(0, 0)].steps == [*STEPS[0]] * 5, "one video after the other"


@pytest.mark.parametrize(("stages", "borders"), [(1, [7]), (2, [3, 7]), (3, [2, 4, 7]), (7, [*range(1, 8)])])
def test_steps_are_divided_evenly_among_stages(stages: int, borders: list[int]) -> None:
    taken: list[list[int]] = [[] for _ in range(stages)]

    def stepping(stage: int) -> StepFunction[int]:
        def take(state: int, step: int) -> int:
            taken[stage].append(step)
            return state + step

        return take

    assert run_stages([stepping(stage) for stage in range(stages)], [0, 100], steps=7) == [21, 121]
    assert [steps[-1] + 1 for steps in taken] == borders
    assert all(len(steps) in {2 * (7 // stages), 2 * -(-7 // stages)} for steps in taken)


@pytest.mark.parametrize(("stages", "steps"), [(0, 4), (5, 4), (1, 0)])
def test_every_stage_needs_a_step(stages: int, steps: int) -> None:
    with pytest.raises(ValueError, match=f"{steps} steps for {stages} stages: give one stage or more"):
        run_stages([lambda state, step: state] * stages, [0], steps=steps)


def test_a_state_of_none_is_refused_with_its_item() -> None:
    taken: list[int] = []
    with pytest.raises(TypeError, match="the state of item 1 is None: give an initial state"):
        run_stages([lambda state, step: taken.append(step)], [0, None], steps=2)
    assert taken == []
    with pytest.raises(TypeError, match=r"item 0 after step 0 is None: .* return the new one from the step function"):
        run_stages([lambda state, step: taken.append(step)], [0], steps=2)
    assert taken == [0]


def test_videos_overlap_in_the_stages() -> None:
    """The first stage's second video and the second stage's first one wait for each other: only together they end."""
    together = threading.Barrier(2, timeout=20)

    def first(state: int, step: int) -> int:
        if state >= 100:
            together.wait()
        return state + 1

    def second(state: int, step: int) -> int:
        if state < 100:
            together.wait()
        return state + 1

    groups = stages_of({GroupId(0, 0): first, GroupId(0, 1): second})
    assert run_groups([[range(1), range(1, 2)]] * 2, groups, [0, 100]) == [2, 102]


def test_our_denoiser_is_such_a_step_function(
    make_task: Callable[..., RunTask], alone: Callable[[RunTask], torch.Tensor]
) -> None:
    task = make_task()
    first, second = ExpertsRegistry(), ExpertsRegistry()

    def stepping(experts: ExpertsRegistry) -> StepFunction[RunState | None]:
        def take(state: RunState | None, step: int) -> RunState:
            told: list[StepProgress] = []
            part = RunSlice(resume=state, until=step + 1)
            pair = experts.get(task.experts)
            denoise(pair, task.request, part, policy=task.policy, device="cpu", on_step=told.append)
            return told[-1].state()

        return take

    groups = stages_of({GroupId(0, 0): stepping(first), GroupId(0, 1): stepping(second)})
    begun = [stepping(first)(None, 0)] * 2
    ended = run_groups([[range(1, 2), range(2, 4)]] * 2, groups, begun)
    first.free()
    second.free()
    for state in ended:
        assert state is not None
        assert torch.equal(state.latents, alone(task))


def test_a_lost_step_is_taken_again_from_the_state_before_it() -> None:
    losses = iter([4, 5])
    next_loss = next(losses)

    def step(state: list[int], step: int) -> list[int]:
        nonlocal next_loss
        if step == next_loss:
            next_loss = next(losses, -1)
            raise WorkerLostError(f"gone in step {step}", 0)
        return [*state, step]

    assert run_groups([[range(8)]], stages_of({GroupId(0, 0): step}), [[]], max_restarts=2) == [[*range(8)]]


def test_one_loss_too_many_is_raised_with_the_last() -> None:
    def step(state: int, step: int) -> int:
        raise WorkerLostError("gone, and its log says why", 0)

    with pytest.raises(RestartLimitError, match="its log says why\ngiving up after 2 worker restarts"):
        run_groups([[range(3)]], stages_of({GroupId(0, 0): step}), [0], max_restarts=2)


@pytest.mark.parametrize("where", ["step", "on_step"])
def test_an_error_ends_the_run_and_leaves_no_job(where: str) -> None:
    taken: list[int] = []

    def step(state: int, step: int) -> int:
        taken.append(step)
        if where == "step" and step == 5:
            raise ArithmeticError("NaN")
        return state + 1

    def on_step(item: int, state: int) -> None:
        if where == "on_step" and state == 3:
            raise ArithmeticError("NaN")

    groups = stages_of({GroupId(0, 0): step, GroupId(1, 0): lambda state, step: state + 1})
    with pytest.raises(ArithmeticError, match="NaN"):
        run_groups([[range(2000)]] * 4, groups, [0] * 4, on_step=on_step)
    before = list(taken)
    assert run_groups([[range(3)]] * 2, groups, [0, 0]) == [3, 3], "usable afterwards"
    assert len(taken) <= len(before) + 6


def test_a_stop_ends_all_jobs() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def step(state: int, step: int) -> int:
        begun.set()
        assert go_on.wait(20)
        return state + 1

    def should_stop() -> bool:
        if begun.is_set():
            go_on.set()
        return begun.is_set()

    with pytest.raises(SamplingCancelled) as stopped:
        run_groups([[range(1000)]] * 2, stages_of({GroupId(0, 0): step}), [0, 0], should_stop=should_stop)
    assert (stopped.value.step, stopped.value.block) == (1, 0)
