"""Runs compared with whole models: policies, parts, masks, telemetry, LoRA strengths by step."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
import threading
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from wanstream.sampling import denoise, predicted_timeline, request_run_shape
from wanstream.sampling.cache import EasyCache, FirstBlockCache
from wanstream.sampling.inputs import DenoiseRequest, native_inputs, native_latent
from wanstream.sampling.steps import (
    SOLVERS,
    NonFiniteLatentError,
    RequestError,
    RunSlice,
    RunState,
    SamplingCancelled,
    StepProgress,
)
from wanstream.schema import OffloadPolicy, StepRange, StepStrengths
from wanstream.schema.records import Timeline
from wanstream.telemetry import QueueItemPhases, TelemetryOptions
from wanstream.testing.experts import save_expert_folder
from wanstream.tests.support.plan_fixtures import CPU_MACHINE
from wanstream.tests.support.rounding import distance
from wanstream.tests.support.sampling.plain_loop import windowed_loop
from wanstream.tests.support.sampling.runs import (
    CPU,
    LAYERWISE,
    SHAPE,
    block_calls,
    changed_request,
    latents_of,
    normal,
    run,
)
from wanstream.wan import open_experts, open_lora

LATENT = normal(*SHAPE, seed=20)
LEFT_HALF = (torch.arange(6) < 3).float().expand(1, 1, 2, 4, 6)
SOFT = torch.rand(1, 1, 2, 4, 6, generator=torch.Generator().manual_seed(21))
NOT_ON_A_CPU = {"device_bytes", "reserved_bytes", "device_used_bytes", "dynamic_bytes"}
exact = pytest.mark.usefixtures("exact_blocks")

LAYERS = 4
POLICIES = [
    OffloadPolicy.resident(source="pinned"),
    OffloadPolicy.layerwise(3),
    OffloadPolicy.block_swap(2, 1, source="pinned"),
    OffloadPolicy.block_swap(0, 3),
    OffloadPolicy.block_swap(LAYERS, 1),
]


@exact
def test_no_policy_changes_a_bit(pair, plain_models, plain_denoise, make_request):
    request = make_request(guidance=(4.0, 1.0))
    expected = plain_denoise(plain_models(), request)
    for policy in POLICIES:
        for _ in range(2):  # the second run starts from kept blocks
            assert torch.equal(latents_of(pair, request, policy), expected), policy


@exact
@pytest.mark.parametrize(("solver", "dtype"), [("euler", torch.float32), ("unipc", torch.bfloat16)])
def test_batches_are_plain_loops(
    solver, dtype, open_pair, plain_models, plain_denoise, make_request
):
    request = make_request(batch=2, solver=solver)
    before = request.noise.clone()
    latents = latents_of(open_pair(dtype=dtype, layers=2), request)
    assert torch.equal(latents, plain_denoise(plain_models(dtype=dtype, layers=2), request))
    assert torch.equal(request.noise, before), "the request is left alone"
    assert latents.dtype == torch.float32
    assert not latents.is_inference()


@exact
@pytest.mark.parity
@pytest.mark.slow  # several loop runs
def test_an_image_condition_is_a_plain_loop(open_pair, plain_models, make_request):
    request = make_request(image_condition=normal(1, 20, 2, 4, 6, seed=13))
    expected = windowed_loop(plain_models(in_channels=36), request)
    assert torch.equal(latents_of(open_pair(in_channels=36), request), expected)


@exact
def test_starting_later_from_a_latent(open_pair, plain_models, plain_denoise, make_request):
    request = make_request(start_step=1, latent=normal(1, 16, 2, 4, 6, seed=14))
    result = run(open_pair(layers=2), request)
    assert torch.equal(result.latents, plain_denoise(plain_models(layers=2), request))
    assert [step.index for step in result.timeline.steps] == [1, 2, 3, 4]


@pytest.mark.parametrize("how", [{"start_step": 3}, {"schedule": "simple"}], ids=str)
def test_no_latent_is_an_empty_one(how, short_pair, make_request):
    empty = torch.zeros(1, 16, 2, 4, 6)
    ends = [latents_of(short_pair, make_request(latent=latent, **how)) for latent in (None, empty)]
    assert torch.equal(*ends)


def test_guidance_of_one_computes_no_negative_lane(pair, make_request):
    calls = block_calls(pair)
    run(pair, make_request(guidance_steps=(1.0, 4.0, 1.0, 3.0, 1.0)))
    assert calls == ["high"] * 3 + ["low"] * 4
    unguided = make_request(guidance=(1.0, 1.0))
    without = changed_request(unguided, negative=None)
    assert torch.equal(latents_of(pair, without), latents_of(pair, unguided))


def test_a_layerwise_step_moves_every_block_once(pair, make_request):
    request = make_request(batch=2)
    timeline = run(pair, request).timeline
    one_pass = LAYERS * pair.block_bytes.stored
    assert [step.bytes_moved for step in timeline.steps] == [one_pass] * 5
    assert [step.expert for step in timeline.steps] == ["high"] * 2 + ["low"] * 3
    assert tuple(step.sigma for step in timeline.steps) == request.step_plan.schedule.sigmas[:-1]
    assert timeline.kind == "measured"
    weights = [*pair.high.weights.values(), *pair.low.weights.values()]
    outside = sum(tensor.nbytes for tensor in weights) - 2 * one_pass
    assert timeline.non_block_bytes == outside, "embedders are read once for all steps"
    assert timeline.first_block_s is not None


def test_progress_is_reported_after_each_step(open_pair, make_request):
    progress = list[StepProgress]()
    result = run(open_pair(), make_request(solver="euler", start_step=1), on_step=progress.append)
    numbers = [(step.index, step.done, step.total) for step in progress]
    assert numbers == [(step, step, 4) for step in range(1, 5)]
    assert [step.record for step in progress] == list(result.timeline.steps)
    # Euler's last step ends where the estimate points.
    assert torch.equal(progress[-1].denoised, result.latents)


def test_a_cancel_between_blocks_leaves_the_pair_usable(pair, make_request):
    request = make_request()
    expected = latents_of(pair, request)
    for questions, step, block in ((1, 0, 0), (7, 1, 2), (9, 2, 0)):
        polls = itertools.count(1)
        with pytest.raises(SamplingCancelled) as caught:
            run(pair, request, should_stop=lambda: next(polls) == questions)  # noqa: B023
        assert (caught.value.step, caught.value.block) == (step, block)
    assert torch.equal(latents_of(pair, request), expected)


def test_nan_names_its_first_step(make_tiny_expert, tiny_expert_folder, tmp_path, make_request):
    broken = make_tiny_expert(seed=2)
    broken.proj_out.bias.data[0] = float("nan")
    save_expert_folder(broken, tmp_path, dtype=torch.float32)
    message = r"after step 2 \(low-noise expert, sigma 0\.\d+\)"
    with open_experts(tiny_expert_folder(seed=1), tmp_path, compute_dtype=torch.float32) as pair:
        with pytest.raises(NonFiniteLatentError, match=message):
            run(pair, make_request())
        run(pair, make_request(switch_step=5))


def test_unusable_policies_and_devices_are_refused(open_pair, make_request):
    with pytest.raises(ValueError, match="blocks_to_swap"):
        run(open_pair(), make_request(), OffloadPolicy.block_swap(LAYERS + 1))
    with pytest.raises(ValueError, match="meta is not supported"):
        denoise(open_pair(), make_request(), policy=LAYERWISE, device="meta")


@pytest.fixture
def states_of(open_short):
    """`states_of(request)`: the states after each step."""

    def states(request: DenoiseRequest) -> list[RunState]:
        found: list[RunState] = []
        run(open_short(), request, on_step=lambda step: found.append(step.state()))
        return found

    return states


@pytest.mark.parametrize(
    "solver", [pytest.param(name, marks=[pytest.mark.slow] * (name != "unipc")) for name in SOLVERS]
)
def test_a_run_resumes_after_any_step_in_another_pair(solver, open_short, make_request, states_of):
    request = make_request(guidance=(4.0, 1.0), solver=solver, steps=4)
    states = states_of(request)
    first = states[0].latents.clone()
    for done, state in enumerate(states[:-1], 1):
        with open_short() as pair:
            after: list[StepProgress] = []
            ended = run(pair, request, part=RunSlice(resume=state), on_step=after.append)
        assert torch.equal(ended.latents, states[-1].latents)
        assert [(each.done, each.total) for each in after] == [(at, 4) for at in range(done + 1, 5)]
    assert torch.equal(states[0].latents, first), "a state is a copy that no later step changes"
    assert len({state.latents.data_ptr() for state in states}) == 4


@pytest.mark.parametrize("cut", [0, 3])
def test_a_cut_run_leaves_the_noise_of_its_step(cut, open_short, make_request, states_of):
    request = make_request(solver="unipc", steps=4)
    before = run(open_short(), request, part=RunSlice(until=cut))
    assert before.sigma == request.step_plan.schedule.sigmas[cut]
    assert [step.index for step in before.timeline.steps] == list(range(cut))
    if cut:
        assert torch.equal(before.latents, states_of(request)[cut - 1].latents)


@pytest.mark.parametrize("expert", [0, 1], ids=["high", "low"])
def test_a_part_needs_no_other_expert(
    expert, tiny_expert_folder, tmp_path, make_request, states_of
):
    request = make_request(steps=2, switch_step=1)
    states = states_of(request)
    given = [tiny_expert_folder(seed=seed, layers=2) for seed in (1, 2)]
    folders = [shutil.copytree(folder, tmp_path / folder.name) for folder in given]
    part = RunSlice(resume=states[0]) if expert else RunSlice(until=1)
    with open_experts(*folders, compute_dtype=torch.float32) as pair:
        for file in folders[1 - expert].glob("*.safetensors"):
            os.truncate(file, 0)
        latents = run(pair, request, part=part).latents
    assert torch.equal(latents, states[expert].latents)


def test_a_part_outside_the_run_is_refused(open_short, make_request, states_of):
    request = make_request(steps=2, switch_step=1)
    state = states_of(request)[0]
    for next_step, until in ((3, None), (0, 3), (2, 1), (0, -1)):
        part = RunSlice(resume=dataclasses.replace(state, next_step=next_step), until=until)
        with pytest.raises(RequestError, match="takes steps 0 to 2"):
            run(open_short(), request, part=part)


def _handed_on(result: Any) -> dict[str, Any]:
    """Return the next run's arguments from the last one's LATENT."""
    latent = native_latent(result.latents, {}, sigma=result.sigma)
    inputs = native_inputs([[torch.zeros(1, 1, 4096), {}]], None, latent)
    return {"latent": inputs.latent, "latent_sigma": inputs.latent_sigma, "add_noise": False}


@pytest.mark.parametrize(("cuts", "schedule"), [((2,), "wan"), ((1, 2, 3, 4), "simple")])
def test_samplers_in_sequence_are_one_run(cuts, schedule, short_pair, make_request):
    plain = make_request(solver="euler", schedule=schedule)
    expected = run(short_pair, plain)
    given = dict[str, Any]()
    for start, end in pairwise((0, *cuts, 5)):
        part = {"start_step": start, "end_step": end, "leftover_noise": True}
        result = run(short_pair, changed_request(plain, **part, **given))
        assert [step.index for step in result.timeline.steps] == list(range(start, end))
        assert result.sigma == plain.step_plan.schedule.sigmas[end]
        given = _handed_on(result)
    assert expected.sigma == result.sigma == 0
    assert distance(result.latents, expected.latents) <= 1e-5


def test_sigmas_cut_by_hand_are_the_same_pieces(short_pair, make_request):
    settings = {"solver": "euler", "steps": None, "switch_step": None}
    sigmas = [1.0, 0.95, 0.9, 0.8, 0.5, 0.0]
    expected = latents_of(short_pair, make_request(**settings, sigmas=sigmas))
    high = run(short_pair, make_request(**settings, sigmas=sigmas[:3]))
    assert high.sigma == pytest.approx(0.9)
    low = run(short_pair, make_request(**settings, sigmas=sigmas[2:], **_handed_on(high)))
    assert [step.expert for step in low.timeline.steps] == ["high", "low", "low"]
    assert distance(low.latents, expected) <= 1e-5


@pytest.mark.parametrize("mask", [None, LEFT_HALF], ids=["no mask", "mask"])
def test_without_added_noise_the_noise_is_not_read(mask, short_pair, make_request):
    """As in ComfyUI, a run without added noise keeps the masked latent with its own noise."""
    given = {"start_step": 2, "add_noise": False, "latent": LATENT, "mask": mask}
    noises = torch.zeros_like(LATENT), torch.full_like(LATENT, float("nan"))
    ends = [latents_of(short_pair, make_request(noise=noise, **given)) for noise in noises]
    assert torch.equal(*ends)
    if mask is not None:
        assert torch.allclose(ends[0][..., 3:], LATENT[..., 3:], atol=1e-5)


def test_a_mask_keeps_the_given_latent_and_frees_the_rest(short_pair, make_request):
    latent = LATENT.repeat(2, 1, 1, 1, 1)
    plain = make_request(batch=2, latent=latent, start_step=1)
    masked = latents_of(short_pair, changed_request(plain, mask=LEFT_HALF))
    assert torch.allclose(masked[..., 3:], latent[..., 3:], atol=1e-5)
    assert not torch.allclose(masked[..., :3], latent[..., :3], atol=0.1)
    free = latents_of(short_pair, changed_request(plain, mask=torch.ones(1, 16, 2, 4, 6)))
    assert distance(free, latents_of(short_pair, plain)) <= 1e-5


@pytest.mark.parametrize(
    ("mask", "latent", "changes"),
    [
        (LEFT_HALF, None, {"guidance": (1.0, 1.0)}),
        (SOFT.repeat(1, 16, 1, 1, 1).cumprod(1), LATENT, {"guidance": (1.0, 1.0)}),
        (None, None, {"steps": 4}),
        (None, None, {"steps": 6, "flow_shift": 12.0, "guidance": (1.0, 1.0)}),
    ],
    ids=["half", "soft", "no mask", "no guidance"],
)
def test_euler_is_comfyuis_loop(mask, latent, changes, open_short, plain_models, make_request):
    """ComfyUI steps with the denoised estimate, we with the velocity: equal up to rounding."""
    given = {"solver": "euler", "schedule": "simple", "mask": mask, "latent": latent, **changes}
    request = make_request(**given)
    models = plain_models(layers=2)
    kept = torch.zeros_like(LATENT) if latent is None else latent
    free = torch.ones(()) if mask is None else mask
    latents = noise = request.noise
    with torch.inference_mode():
        for step, (sigma, after) in enumerate(pairwise(request.step_plan.schedule.sigmas)):
            seen = latents * free + (sigma * noise + (1 - sigma) * kept) * (1 - free)
            model = models["high" if step < 2 else "low"]
            time = torch.tensor([sigma * 1000])
            texts = (request.positive, request.negative)
            ends = [seen - sigma * model(seen, time, text, return_dict=False)[0] for text in texts]
            end = ends[1] + request.guidance[step >= 2] * (ends[0] - ends[1])
            end = end * free + kept * (1 - free)
            latents = latents + (latents - end) / sigma * (after - sigma)
    policy = OffloadPolicy.block_swap(1)
    assert distance(latents_of(open_short(), request, policy), latents) <= 1e-5


def samplers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "wanstream-memory"]


def test_a_step_has_every_figure(pair, make_request):
    called = time.monotonic()
    seen = list[int]()
    reported = list[float]()

    def on_step(_: StepProgress) -> None:
        seen.append(len(samplers()))
        reported.append(time.monotonic())

    timeline = run(pair, make_request(), on_step=on_step).timeline
    took = time.monotonic() - called
    for step in timeline.steps:
        unknown = {name for name, value in step.to_dict().items() if value is None}
        assert unknown == {*NOT_ON_A_CPU, "limit_s"}
        assert step.memory.pinned_bytes == 0
    assert [phase.name for phase in timeline.phases] == ["first block", "high", "switch", "low"]
    assert Timeline.from_dict(json.loads(json.dumps(timeline.to_dict()))) == timeline
    last = timeline.steps[-1]
    assert timeline.wall_s <= last.start_s + last.wall_s <= took, "from the call on"
    assert timeline.memory[-1].at_s <= took
    assert (seen, samplers()) == ([1] * 5, []), "memory is watched during the run only"
    # For some start time, steps end before their report, and the next begins afterwards.
    steps = timeline.steps
    ends = [step.start_s + step.wall_s for step in steps]
    latest = min(at - end for at, end in zip(reported, ends, strict=True))
    earliest = max(at - step.start_s for at, step in zip(reported, steps[1:], strict=False))
    assert earliest <= latest + 1e-4


@pytest.mark.parametrize("fails", ["cancelled", "callback"])
def test_a_run_that_ends_early_leaves_no_thread(pair, make_request, fails):
    ledger = QueueItemPhases()
    steps = list[StepProgress]()

    def on_step(step: StepProgress) -> None:
        if fails == "callback":
            raise OSError("no room for the preview")
        steps.append(step)

    how = {"on_step": on_step, "should_stop": lambda: bool(steps)}
    with pytest.raises(OSError if fails == "callback" else SamplingCancelled):
        run(pair, make_request(), **how, observe=TelemetryOptions(ledger=ledger))
    assert samplers() == []
    assert not pair.running
    assert [phase.name for phase in ledger.phases()] == ["first block", "high"], "as far as it came"


def test_the_environment_asks_for_a_trace(open_pair, make_request, tmp_path, monkeypatch):
    monkeypatch.setenv("WANSTREAM_TRACE", str(tmp_path / "traces"))
    pair = open_pair()
    request = make_request()
    timeline = run(pair, request).timeline
    run(pair, request, observe=TelemetryOptions())
    (file,) = (tmp_path / "traces").iterdir()
    events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    computed = [event["name"] for event in events if event.get("cat") == "compute"]
    names = {f"{expert} {block}" for expert in ("high", "low") for block in range(4)}
    assert (len(computed), {*computed}) == (5 * 4, names)
    steps = [event["name"] for event in events if event.get("cat") == "steps"]
    assert steps == [f"{step.expert} {step.index}" for step in timeline.steps]


RESIDENT = OffloadPolicy.resident()
WITH_RAM = {
    "resident": RESIDENT,
    "layerwise pinned": OffloadPolicy.layerwise(2, source="pinned"),
    "block swap": OffloadPolicy.block_swap(2, 1),
    "some in RAM": replace(OffloadPolicy.block_swap(2, 1, source="pinned"), ram_blocks=3),
}
# 1 - sigma is a power of two where a stage ends, so the hand-over to the next sampler rounds
# nothing.
SIGMAS = (1.0, 0.9, 0.75, 0.6, 0.5, 0.25, 0.0)
ENDS = (0, 2, 4, 6)
"""Stage ends: the high-noise expert without a LoRA, with it, and the low-noise expert."""
PARTS = [*zip(pairwise(ENDS), (0.0, 0.8, 0.8), strict=True)]
STAGES = {"steps": None, "sigmas": SIGMAS, "switch_step": 4, "solver": "euler"}
STAGES |= {"guidance_steps": (4.0, 4.0, 1.0)}


def strengths(usual: float, *ranges: tuple[int, int, float]) -> StepStrengths:
    return StepStrengths(usual=usual, ranges=tuple(StepRange(*each) for each in ranges))


WITHOUT_AT_FIRST = strengths(0.8, (0, 1, 0.0))


@pytest.fixture
def loras(lora_file, lightning):
    """A LoRA for each expert, with blocks, a bias and the time embedder.

    Time embedder rows are computed ahead.
    """
    found = []
    for seed in (3, 4):
        tensors = lightning(seed=seed)
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int, generator: torch.Generator = generator) -> torch.Tensor:
            return 0.1 * torch.randn(*shape, generator=generator)

        for name, shape in (("down", (4, 256)), ("up", (6 * 256, 4))):
            tensors[f"diffusion_model.time_projection.1.lora_{name}.weight"] = draw(*shape)
        tensors["diffusion_model.blocks.0.cross_attn.o.diff_b"] = draw(256)
        # A DoRA and a LoKr, computed in other ways, in blocks with equal bytes.
        for layer in (f"diffusion_model.blocks.{block}.self_attn" for block in range(LAYERS)):
            tensors[f"{layer}.q.dora_scale"] = 1 + torch.rand(256, 1, generator=generator)
            for part in ("lora_down.weight", "lora_up.weight"):
                del tensors[f"{layer}.k.{part}"]
            tensors[f"{layer}.k.lokr_w1"] = 2 * draw(8, 4)
            tensors[f"{layer}.k.lokr_w2"] = 2 * draw(32, 64)
        found.append(open_lora(lora_file(tensors)))
    return found


def set_both(pair, loras, strengths):
    pair.set_loras(*([(lora, strengths)] for lora in loras))


def test_a_run_of_three_stages_is_three_samplers_in_sequence(open_pair, make_request, loras):
    """Each sampler has fixed strengths, and hands on a latent with noise."""
    samplers = open_pair()
    pair = open_pair()
    given = dict[str, Any]()
    for (start, end), strength in PARTS:
        set_both(samplers, loras, strength)
        stage = {**STAGES, "start_step": start, "end_step": end, "leftover_noise": True}
        result = run(samplers, make_request(**stage, **given))
        latent = result.latents / (1 - result.sigma)
        given = {"latent": latent, "latent_sigma": result.sigma, "add_noise": False}
    set_both(pair, loras, WITHOUT_AT_FIRST)
    request = make_request(**STAGES)
    last = WITH_RAM["some in RAM"]
    # The last run starts from the blocks and strengths of the same policy.
    for policy in (*WITH_RAM.values(), last):
        assert torch.equal(latents_of(pair, request, policy), result.latents), policy
    set_both(pair, loras, 0.8)
    assert not torch.allclose(latents_of(pair, request, last), result.latents, atol=1e-3)


def test_the_solver_keeps_its_history_across_a_change(pair, make_request, loras):
    """The reference continues from the previous part's state, with other strengths.

    A run is also resumed with the strengths of each step.
    """
    request = make_request(**{**STAGES, "solver": "unipc"})
    set_both(pair, loras, WITHOUT_AT_FIRST)
    states: list[RunState] = []
    whole = run(pair, request, on_step=lambda progress: states.append(progress.state()))
    for state in (states[0], states[2]):
        rest = run(pair, request, part=RunSlice(resume=state))
        assert [step.index for step in rest.timeline.steps] == list(range(state.next_step, 6))
        assert torch.equal(rest.latents, whole.latents)
    kept: list[RunState] = []
    for (_, end), strength in PARTS:
        set_both(pair, loras, strength)
        part = RunSlice(resume=kept[-1] if kept else None, until=end)
        run(pair, request, part=part, on_step=lambda progress: kept.append(progress.state()))
        assert torch.equal(kept[-1].latents, states[end - 1].latents)
    assert [state.next_step for state in kept] == list(range(1, 7))


def factor_bytes(pair, policy, step):
    """Return the bytes of the factors of all high-noise blocks in a step."""
    engine = pair.current_engine(policy, CPU)
    patch = pair.patch_at("high", step)
    keys = [key._replace(patch=patch) for key in engine.formats if key.expert == "high"]
    return sum(engine.patches.nbytes(key) for key in keys)


@pytest.mark.parametrize("policy", [RESIDENT, WITH_RAM["some in RAM"]], ids=["resident", "RAM"])
def test_fetches_at_a_change_are_as_predicted(policy, pair, engine_runs, make_request, loras):
    request = make_request(**{**STAGES, "switch_step": 6})
    set_both(pair, loras, WITHOUT_AT_FIRST)
    for cold in (True, False):
        predicted = predicted_timeline(pair, request, policy, machine=CPU_MACHINE, device=CPU)
        measured = run(pair, request, policy).timeline
        for ours, theirs in zip(predicted.steps, measured.steps, strict=True):
            # The prediction counts the stored bytes, as for every run with a LoRA. Factors come on
            # top.
            fetched = ours.bytes_moved // pair.block_bytes.stored
            factors = fetched * factor_bytes(pair, policy, theirs.index) // LAYERS
            assert theirs.bytes_moved == ours.bytes_moved + factors
            assert theirs.transfers.read_bytes == ours.transfers.read_bytes
        program = engine_runs[-1].program
        assert engine_runs[-1].fetched == list(program.fetches)
        if cold:
            fetched_for = [program.visits[fetch.needed_by].step for fetch in program.fetches]
            streamed = policy.blocks_to_swap
            # All blocks before the first step and where the strength changes, otherwise the
            # streamed ones.
            expected = [4, streamed, 4, streamed, streamed, streamed]
            assert [fetched_for.count(step) for step in range(6)] == expected


def test_resident_runs_hand_buffers_on_at_a_change(pair, engine_runs, make_request, loras):
    """A block is fetched again once its last visit with the old strength has ended.

    It does not wait for the step's end.
    """
    set_both(pair, loras, WITHOUT_AT_FIRST)
    run(pair, make_request(**STAGES), RESIDENT)
    [engine_run] = engine_runs
    fetches = [each for each in engine_run.program.fetches if each.block.expert == "high"]
    again = [fetch.start_after for fetch in fetches if fetch.block.patch == 1]
    assert len(again) == LAYERS
    assert max(again) < 2 * LAYERS


def test_equal_strengths_share_their_blocks_and_factors(pair, make_request, loras):
    request = make_request(**STAGES)
    high = loras[0]
    pair.set_loras([(high, 0.8)], [])
    plain = latents_of(pair, request, RESIDENT)
    factors = pair.host_bytes
    pair.set_loras([(high, strengths(0.8, (0, 1, 0.8)))], [])
    assert not pair.strengths_vary
    again = run(pair, request, RESIDENT)
    assert again.timeline.bytes_moved == 0
    assert torch.equal(again.latents, plain)
    pair.set_loras([(high, strengths(0.8, (1, 1, 0.0), (3, 3, 0.0)))], [])
    assert [pair.patch_at("high", step) for step in range(5)] == [0, 1, 0, 1, 0]
    run(pair, request, RESIDENT)
    assert pair.host_bytes == factors


def test_the_planner_counts_factors_of_all_strengths(pair, make_request, loras):
    high = loras[0]
    without = pair.host_resident_bytes

    def factors(strength: StepStrengths | float) -> int:
        pair.set_loras([(high, strength)], [])
        return pair.host_resident_bytes - without

    one = factors(0.8)
    assert factors(WITHOUT_AT_FIRST) == one, "a strength of 0 needs no factors"
    stored = sum(tensor.nbytes for tensor in high.tensors.values())
    assert factors(strengths(0.8, (0, 1, 0.3))) == 2 * one - stored
    steps = request_run_shape(pair, make_request(**STAGES), CPU).steps
    assert [step.patch for step in steps] == [0, 0, 1, 1, 0, 0]


@pytest.mark.parametrize(
    "cache", [FirstBlockCache(threshold=1e3), EasyCache(threshold=1e3, retention=0)]
)
def test_a_cache_reuses_nothing_across_a_change(cache, pair, make_request, loras):
    changes = {"guidance_steps": (1.0,), "switch_step": 6, "cache": cache}
    request = make_request(**{**STAGES, **changes})
    found = []
    for strength in (WITHOUT_AT_FIRST, 0.8):
        set_both(pair, loras, strength)
        found.append([step.skipped_visits > 0 for step in run(pair, request).timeline.steps])
    assert found[1][2], "the same strength: the cache skips the step"
    assert not found[0][2], "another strength: the step is computed"
    assert any(found[0])


def test_ranges_must_lie_in_the_schedule(pair, make_request, loras):
    six_steps = make_request(**STAGES, end_step=2)
    set_both(pair, loras, strengths(1.0, (0, 5, 0.0)))
    assert len(run(pair, six_steps).timeline.steps) == 2, "a range may lie behind an early end"
    name = loras[0].path.name
    message = f"{name} has a strength for steps '0-5: 0', and the run has 5 steps"
    with pytest.raises(RequestError, match=message):
        run(pair, make_request())
