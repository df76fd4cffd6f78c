"""Policies chosen by the planner for a run, from the free memory and the known machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from wanstream.devices.machine.available_ram import available_bytes
from wanstream.host.auto_policy import AutoPlanner, _better_policy, free_memory, limited
from wanstream.host.embedded.adapter import EmbeddedHost
from wanstream.plan import AutoOffload, Budgets, Bus, DoesNotFitError, Machine, plan_offload
from wanstream.sampling import denoise, request_run_shape
from wanstream.sampling.inputs import DenoiseRequest
from wanstream.schema import OffloadPolicy
from wanstream.schema.records import StepRecord
from wanstream.schema.refs.experts import ExpertsRef
from wanstream.shapes import ExpertShape, RunShape, StepShape
from wanstream.tests.support.plan_fixtures import predicted, run_shape
from wanstream.tests.support.steps import changed_step
from wanstream.wan.experts.open import open_experts

GB = 10**9
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
WEIGHTS = Path("high.safetensors")

GPU = Machine(
    name="a GPU",
    origin="made up",
    vram_bytes=16 * GB,
    ram_bytes=64 * GB,
    bus=Bus(h2d_bytes_per_s=24e9, h2d_pageable_bytes_per_s=6e9, d2h_bytes_per_s=24e9),
    disk_bytes_per_s=3e9,
    flops_per_s=80e12,
    decode_bytes_per_s=100e9,
    copy_bytes_per_s=10e9,
    quantise_bytes_per_s=4e9,
)
ONLY_CPU = replace(
    GPU,
    name="a CPU",
    vram_bytes=0,
    bus=None,
    flops_per_s=1e11,
)
BLOCK = 703_000_000

RUN = run_shape(
    tokens=32_760,
    expert=ExpertShape(),
    sides={"high": 2, "low": 2},
    stored_bytes=BLOCK,
    file_bytes=BLOCK,
    computed_bytes=BLOCK,
    outside_bytes=GB,
)


def _room(vram: int | None = 12 * GB, ram: int = 32 * GB) -> Callable[[bool], Budgets]:
    return lambda _: Budgets(vram_bytes=vram, ram_bytes=ram)


def _choose(
    planner: AutoPlanner, room: Callable[[bool], Budgets], run: RunShape = RUN, **budgets: int
) -> Any:
    auto = AutoOffload(budgets=Budgets(**budgets))
    return planner.choose(
        auto, run, device=CUDA, weights=WEIGHTS, free_memory_now=room, starts_empty=True
    )


@pytest.mark.parametrize(
    ("room", "asked", "given"),
    [
        (Budgets(vram_bytes=10, ram_bytes=100), Budgets(), (10, 50)),
        (Budgets(vram_bytes=10, ram_bytes=30), Budgets(), (10, 30)),
        (Budgets(vram_bytes=10, ram_bytes=100), Budgets(vram_bytes=4, ram_bytes=80), (4, 80)),
        (Budgets(vram_bytes=10, ram_bytes=70), Budgets(vram_bytes=40, ram_bytes=80), (10, 70)),
        (Budgets(vram_bytes=None, ram_bytes=100), Budgets(vram_bytes=4), (4, 50)),
        (Budgets(vram_bytes=None, ram_bytes=100), Budgets(), (None, 50)),
    ],
)
def test_budgets_are_no_more_than_there_is(
    room: Budgets, asked: Budgets, given: tuple[int | None, int]
) -> None:
    found = limited(asked, room, replace(GPU, ram_bytes=100))
    assert (found.vram_bytes, found.ram_bytes) == given


def test_the_choice_is_the_planners_within_what_is_free() -> None:
    choice = _choose(AutoPlanner(lambda *_: GPU), _room())
    plan = plan_offload(RUN, GPU, Budgets(vram_bytes=12 * GB, ram_bytes=32 * GB))
    assert choice.policy == plan.policy
    assert plan.reason in choice.reason
    assert choice.reason.startswith("chosen: ")
    little = _choose(AutoPlanner(lambda *_: GPU), _room(vram=6 * GB, ram=2 * GB))
    assert little.policy != choice.policy
    assert (
        plan_offload(RUN, GPU, Budgets(vram_bytes=6 * GB, ram_bytes=2 * GB)).policy == little.policy
    )


def test_budgets_below_the_minimum_are_refused_with_numbers() -> None:
    with pytest.raises(
        DoesNotFitError, match=r"needs 2 buffers of 0\.70 GB \+ 1\.00 GB .*; 1\.50 GB given"
    ):
        _choose(AutoPlanner(lambda *_: GPU), _room(), vram_bytes=1_500_000_000)


def _record(policy: OffloadPolicy, machine: Machine, index: int = 0) -> StepRecord:
    """Return a record for the first step on `machine`."""
    (first, *_) = predicted(RUN, machine, policy).timeline.steps
    return replace(first, index=index)


def test_a_first_step_as_predicted_changes_nothing() -> None:
    choice = _choose(AutoPlanner(lambda *_: GPU), _room())
    assert choice.revise(_record(choice.policy, GPU)) is None


def test_a_slow_bus_is_learned_from_and_the_next_run_knows_it() -> None:
    asked = list[object]()
    believed = GPU.with_figures(h2d_bytes_per_s=50e9, disk_bytes_per_s=100e9)

    def profile(*key: object) -> Machine:
        asked.append(key)
        return believed

    planner, room, few = AutoPlanner(profile), _room(vram=14 * GB), replace(RUN, video_tokens=4_000)
    first = _choose(planner, room, few)
    assert first.policy == OffloadPolicy.layerwise(1)
    step, *_ = predicted(
        few, believed.with_figures(h2d_bytes_per_s=0.4e9), first.policy
    ).timeline.steps
    better = first.revise(replace(step, index=3))  # a run with a late start
    assert better is not None
    assert better.kind == "block_swap"
    assert _choose(planner, room, few).policy.kind == "block_swap"
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("vram", "ram", "swapped"),
    [(14, 40, 25), (8, 2, 33), (7, 2, None), (6, 2, None), (2, 2, None)],
    ids=["much more", "three blocks more", "one block more", "the same", "too little for any"],
)
def test_another_policy_must_save_a_twentieth_of_the_rest(
    vram: int, ram: int, swapped: int | None
) -> None:
    """One block more saves 1.9 %, three save 5.8 %. Without free memory the policy is kept."""
    few, slow = replace(RUN, video_tokens=4_000), GPU.with_figures(h2d_bytes_per_s=1e9)
    start = plan_offload(
        few, GPU.with_figures(h2d_bytes_per_s=1e12), Budgets(vram_bytes=6 * GB, ram_bytes=2 * GB)
    )
    assert start.policy.blocks_to_swap == 36
    better = _better_policy(start, few, slow, Budgets(vram_bytes=vram * GB, ram_bytes=ram * GB))
    assert (better and better.blocks_to_swap) == swapped


@pytest.mark.parametrize("varying", [{"sides": 1}, {"patch": 1}])
def test_a_first_step_of_steps_that_differ_is_learned_from_too(varying: dict[str, int]) -> None:
    other = (StepShape(expert="high"),) * 2 + (StepShape(expert="high", **varying),) * 2  # type: ignore[arg-type]
    run = replace(
        RUN, video_tokens=4_000, steps=other + tuple(replace(step, expert="low") for step in other)
    )
    believed = GPU.with_figures(h2d_bytes_per_s=50e9, disk_bytes_per_s=100e9)
    choice = _choose(AutoPlanner(lambda *_: believed), _room(vram=14 * GB), run)
    slow = believed.with_figures(h2d_bytes_per_s=0.4e9)
    step, *_ = predicted(run, slow, choice.policy, by_step=True).timeline.steps
    better = choice.revise(step)
    assert better is not None
    assert better.kind == "block_swap"


def test_what_is_not_empty_at_first_teaches_nothing() -> None:
    choice = AutoPlanner(lambda *_: GPU).choose(
        AutoOffload(),
        RUN,
        device=CUDA,
        weights=WEIGHTS,
        free_memory_now=_room(),
        starts_empty=False,
    )
    assert choice.revise is None


def test_nothing_is_revised_where_the_host_had_room_for_another_policy_only() -> None:
    choice = _choose(AutoPlanner(lambda *_: GPU), _room())
    assert choice.revise_under(choice.policy) is choice.revise
    assert choice.revise_under(replace(choice.policy, prefetch_blocks=7)) is None


def test_a_revised_policy_counts_on_nothing_that_others_still_hold() -> None:
    evicting = list[bool]()

    def room(evict: bool) -> Budgets:
        evicting.append(evict)
        return Budgets(vram_bytes=12 * GB if evict else GB, ram_bytes=2 * GB if evict else 0)

    choice = _choose(AutoPlanner(lambda *_: GPU), room)
    choice.revise(_record(choice.policy, GPU))  # does not raise: the plan's memory is allocated
    assert evicting == [True, False]


def test_a_first_call_that_no_step_predicted_teaches_nothing() -> None:
    """A ComfyUI sampler may begin with another expert than the sigmas suggest.

    It may also call the model twice in its only step.
    """
    choice = _choose(AutoPlanner(lambda *_: GPU), _room())
    assert choice.revise(replace(_record(choice.policy, GPU), expert="low")) is None
    single = _choose(AutoPlanner(lambda *_: GPU), _room(), RUN.of_steps([0]))
    assert (
        single.revise(changed_step(_record(choice.policy, GPU), stall_s=99.0, wall_s=200.0)) is None
    )


class _Pair:
    loaded_bytes, host_bytes, shared_bytes = 5 * GB, 3 * GB, 0


def test_what_the_experts_hold_already_is_theirs() -> None:
    on_gpu = free_memory(_Pair(), CUDA, GB)  # type: ignore[arg-type]
    assert on_gpu.vram_bytes == 6 * GB
    assert free_memory(_Pair(), CUDA, -9 * GB).vram_bytes == 0  # type: ignore[arg-type]
    assert free_memory(_Pair(), CPU, -GB).vram_bytes is None  # type: ignore[arg-type]


def test_some_of_the_free_ram_is_left_to_others() -> None:
    found = free_memory(_Pair(), CUDA, GB).ram_bytes - _Pair.host_bytes  # type: ignore[arg-type]
    assert 0.8 * available_bytes() < found < 0.95 * available_bytes()


@pytest.fixture
def request_of() -> Callable[..., DenoiseRequest]:
    def make(**changes: Any) -> DenoiseRequest:
        draw = torch.Generator().manual_seed(3)
        noise = torch.randn(2, 16, 2, 4, 6, generator=draw)
        text = torch.randn(1, 5, 4096, generator=draw)
        given: dict[str, Any] = {
            "negative": text,
            "guidance": (4.0, 1.0),
            "steps": 5,
            "switch_step": 2,
        }
        return DenoiseRequest(noise, text, **{**given, **changes})

    return make


def test_the_shape_of_a_request(
    tiny_expert_file: Callable[..., Path], request_of: Callable[..., DenoiseRequest]
) -> None:
    files = [tiny_expert_file(seed=seed) for seed in (1, 2)]
    with open_experts(*files, compute_dtype=torch.float32) as pair:
        run = request_run_shape(pair, request_of(start_step=1), CPU)
        assert (run.tokens, run.lanes) == (12, {"high": 4, "low": 2})
        assert run.experts_of_steps == ("high", "low", "low", "low")
        assert (run.expert.width, run.expert.ffn_width, run.expert.blocks) == (256, 512, 4)
        assert (run.blocks.stored_bytes, run.blocks.computed_bytes, run.value_bytes) == (
            pair.block_bytes.stored,
            pair.block_bytes.computed,
            4,
        )
        for ahead in (0, 1, 3):
            on_device = pair.device_bytes(OffloadPolicy.layerwise(ahead), device="cpu")
            assert run.blocks.outside_bytes + (ahead + 1) * run.blocks.computed_bytes == on_device


def _host(machine: Machine) -> EmbeddedHost:
    return EmbeddedHost(AutoPlanner(lambda *_: machine))


@pytest.mark.parametrize("rate", [1e6, 1e12])
def test_the_embedded_host_chooses_and_the_run_is_the_same(
    rate: float, tiny_expert_file: Callable[..., Path], request_of: Callable[..., DenoiseRequest]
) -> None:
    files: Sequence[Path] = [tiny_expert_file(seed=seed) for seed in (1, 2)]
    host, request = _host(replace(ONLY_CPU, disk_bytes_per_s=rate)), request_of()
    ref = ExpertsRef(high_noise=files[0], low_noise=files[1], compute_dtype="float32")
    pair = host.models.experts(ref)
    run = request_run_shape(pair, request, CPU)
    own = OffloadPolicy.layerwise(3)
    assert host.memory.choose_policy(pair, ref, own, run).policy is own
    plain = denoise(pair, request, policy=own, device="cpu").latents
    pair.close()
    choice = host.memory.choose_policy(pair, ref, AutoOffload(), run)
    result = denoise(
        pair, request, policy=choice.policy, device="cpu", revise=choice.revise_under(choice.policy)
    )
    assert torch.equal(result.latents, plain)
    told = result.with_notes(choice.reason, "").timeline.changes
    assert told[0] == choice.reason
    with pytest.raises(DoesNotFitError, match=r"0\.00 GB given"):
        host.memory.choose_policy(pair, ref, AutoOffload(budgets=Budgets(ram_bytes=1000)), run)
    assert host.memory.choose_policy(pair, ref, AutoOffload(), run).revise is None, (
        "blocks lie there already"
    )
    host.free_experts()


def test_a_machine_is_known_as_it_was_stored() -> None:
    asked = list[tuple[object, ...]]()

    def never(*_: object) -> Machine:
        raise AssertionError("this machine was measured")

    def known(*key: object) -> Machine | None:
        asked.append(key)
        return ONLY_CPU if len(asked) > 1 else None

    planner = AutoPlanner(never, known)
    assert planner.known_machine(CPU, RUN.expert, WEIGHTS) is None
    assert planner.known_machine(CPU, RUN.expert, WEIGHTS) is ONLY_CPU
    assert asked == [(CPU, RUN.expert, WEIGHTS)] * 2


def test_advice_is_the_planners_choice_and_the_gain_is_simulated() -> None:
    slow_disk = replace(GPU, disk_bytes_per_s=0.5e9)
    stored: list[Machine | None] = [None, *[slow_disk] * 4]
    planner = AutoPlanner(stored=lambda *_: stored.pop(0))
    advise = partial(planner.advise, shape=RUN, device=CUDA, weights=WEIGHTS, requested=Budgets())
    layerwise = OffloadPolicy.layerwise(1)
    assert advise(layerwise, free_memory_now=_room()) is None, "an unknown machine"
    plan = plan_offload(RUN, slow_disk, Budgets(vram_bytes=12 * GB, ram_bytes=32 * GB))
    advice = advise(layerwise, free_memory_now=_room())
    assert advice.gain == predicted(RUN, slow_disk, layerwise).total_s / plan.total_s > 1.2
    assert advice.policy.endswith(" in RAM")
    assert advise(plan.policy, free_memory_now=_room()).gain == 1
    assert advise(layerwise, free_memory_now=_room(vram=1)) is None, "nothing fits"
    little = advise(layerwise, free_memory_now=_room(), requested=Budgets(ram_bytes=6 * GB))
    assert 1 <= little.gain < advice.gain


def test_what_a_first_step_has_taught_is_what_is_known() -> None:
    planner = AutoPlanner(lambda *_: GPU, lambda *_: None)
    choice = _choose(planner, _room())
    assert planner.known_machine(CUDA, RUN.expert, WEIGHTS) is None
    choice.revise(_record(choice.policy, replace(GPU, flops_per_s=40e12)))
    learned = planner.known_machine(CUDA, RUN.expert, WEIGHTS)
    assert learned is not None
    assert learned.flops_per_s == pytest.approx(40e12, rel=0.01)
    assert planner.known_machine(CPU, RUN.expert, WEIGHTS) is None
