"""The loop compared with whole models, with other policies, and with its transfer program."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from wanstream.plan.programs import compile_program, step_visits
from wanstream.sampling import denoise
from wanstream.sampling.inputs import DenoiseRequest
from wanstream.sampling.steps import (
    NonFiniteLatentError,
    RequestError,
    SamplingCancelled,
    StepProgress,
)
from wanstream.schema import OffloadPolicy, plan_residency
from wanstream.testing.experts import save_expert_folder
from wanstream.wan import ExpertPair
from wanstream.wan.experts.open import open_experts

pytestmark = pytest.mark.usefixtures("exact_blocks")

LAYERS = 4
LAYERWISE = OffloadPolicy.layerwise(1)
POLICIES = [
    OffloadPolicy.resident(source="file"),
    OffloadPolicy.resident(source="pinned"),
    *(
        OffloadPolicy.layerwise(k, source=source)
        for k, source in ((1, "file"), (1, "pinned"), (3, "file"))
    ),
    *(
        OffloadPolicy.block_swap(2, k, source=source)
        for k, source in ((1, "pinned"), (2, "file"), (3, "pinned"))
    ),
    OffloadPolicy.block_swap(0, 1),
    OffloadPolicy.block_swap(LAYERS, 1),
]

Request = Callable[..., DenoiseRequest]
OpenPair = Callable[..., ExpertPair]


def _latents(pair: Any, request: DenoiseRequest, policy: OffloadPolicy = LAYERWISE) -> torch.Tensor:
    return denoise(pair, request, policy=policy, device="cpu").latents


@pytest.fixture(scope="module")
def textbook() -> list[torch.Tensor]:
    """Reference loop latents, computed by the first test to need them."""
    return []


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_no_policy_changes_a_bit(
    policy: OffloadPolicy,
    open_pair: OpenPair,
    plain_models: Any,
    plain_denoise: Any,
    make_request: Request,
    textbook: list[torch.Tensor],
) -> None:
    request = make_request(guidance=(4.0, 1.0))
    if not textbook:
        textbook.append(plain_denoise(plain_models(), request))
    expected = textbook[0]
    with open_pair() as pair:
        assert torch.equal(_latents(pair, request, policy), expected)
        assert torch.equal(_latents(pair, request, policy), expected), (
            "the second run starts from kept blocks"
        )


@pytest.mark.parametrize("solver", ["euler", "unipc"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_batch_is_the_textbook_loop_to_the_bit(
    solver: str,
    dtype: torch.dtype,
    open_pair: OpenPair,
    plain_models: Any,
    plain_denoise: Any,
    make_request: Request,
) -> None:
    request = make_request(batch=2, solver=solver)
    expected = plain_denoise(plain_models(dtype=dtype), request)
    assert torch.equal(_latents(open_pair(dtype=dtype), request), expected)


@pytest.mark.slow  # several loop runs
def test_an_image_condition_is_the_textbook_loop_to_the_bit(
    open_pair: OpenPair, plain_models: Any, plain_denoise: Any, make_request: Request
) -> None:
    condition = torch.randn(1, 20, 2, 4, 6, generator=torch.Generator().manual_seed(13))
    request = make_request(batch=2, image_condition=condition)
    expected = plain_denoise(plain_models(in_channels=36), request)
    assert torch.equal(_latents(open_pair(in_channels=36), request), expected)


@pytest.mark.parametrize("solver", ["euler", "unipc"])
def test_switching_to_the_same_expert_changes_nothing(
    solver: str, open_pair: OpenPair, make_request: Request
) -> None:
    pair = open_pair(high=1, low=1)
    runs = [
        make_request(solver=solver, steps=6, switch_step=at, guidance=(4.0, 4.0))
        for at in (0, 3, 6)
    ]
    low_only, switched, high_only = (_latents(pair, request) for request in runs)
    assert torch.equal(switched, high_only)
    assert torch.equal(switched, low_only)


def test_the_experts_do_differ(open_pair: OpenPair, make_request: Request) -> None:
    pair = open_pair()
    ends = [_latents(pair, make_request(switch_step=at)) for at in (0, 2, 5)]
    assert not torch.allclose(ends[0], ends[1])
    assert not torch.allclose(ends[1], ends[2])


@pytest.mark.slow  # several loop runs
@pytest.mark.parametrize("solver", ["euler", "unipc"])
def test_samples_of_a_batch_are_single_runs_to_the_bit(
    solver: str, open_pair: OpenPair, make_request: Request
) -> None:
    pair, whole = open_pair(), make_request(batch=3, solver=solver)
    for i, sample in enumerate(_latents(pair, whole)):
        one = {
            name: getattr(whole, name)[i : i + 1].clone()
            for name in ("noise", "positive", "negative")
        }
        assert torch.equal(_latents(pair, make_request(solver=solver, **one))[0], sample)


@pytest.mark.parametrize("start_step", [1, 2, 4])
def test_starting_later_from_a_latent(
    start_step: int,
    open_pair: OpenPair,
    plain_models: Any,
    plain_denoise: Any,
    make_request: Request,
) -> None:
    latent = torch.randn(1, 16, 2, 4, 6, generator=torch.Generator().manual_seed(14))
    request = make_request(start_step=start_step, latent=latent)
    result = denoise(open_pair(), request, policy=LAYERWISE, device="cpu")
    assert torch.equal(result.latents, plain_denoise(plain_models(), request))
    assert [step.index for step in result.timeline.steps] == list(range(start_step, 5))


def test_no_latent_is_an_empty_one(open_pair: OpenPair, make_request: Request) -> None:
    pair, empty = open_pair(), torch.zeros(1, 16, 2, 4, 6)
    late = [_latents(pair, make_request(start_step=3, latent=latent)) for latent in (None, empty)]
    assert torch.equal(*late)
    from_start = [
        _latents(pair, make_request(schedule="simple", latent=latent)) for latent in (None, empty)
    ]
    assert torch.equal(*from_start)


def test_guidance_of_one_computes_no_negative_lane(
    open_pair: OpenPair, make_request: Request
) -> None:
    pair, calls = open_pair(), list[str]()
    models = pair.engine(LAYERWISE, torch.device("cpu")).models
    for name in ("high", "low"):
        models[name].blocks[0].register_forward_hook(lambda *_, name=name: calls.append(name))
    denoise(pair, make_request(guidance=(1.0, 3.0)), policy=LAYERWISE, device="cpu")
    assert calls == ["high"] * 2 + ["low", "low"] * 3
    without = make_request(guidance=(1.0, 1.0), negative=None)
    assert torch.equal(_latents(pair, without), _latents(pair, make_request(guidance=(1.0, 1.0))))


def _block_bytes(models: Any) -> int:
    linears = [m for m in models["high"].blocks[0].modules() if isinstance(m, torch.nn.Linear)]
    return sum(linear.weight.nbytes for linear in linears)


@pytest.mark.parametrize("guidance", [(1.0, 1.0), (4.0, 3.0)])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_layerwise_step_moves_every_block_once_whatever_the_lanes(
    guidance: tuple[float, float],
    batch: int,
    open_pair: OpenPair,
    plain_models: Any,
    make_request: Request,
) -> None:
    result = denoise(
        open_pair(), make_request(batch=batch, guidance=guidance), policy=LAYERWISE, device="cpu"
    )
    one_pass = LAYERS * _block_bytes(plain_models())
    assert [step.bytes_moved for step in result.timeline.steps] == [one_pass] * 5


@pytest.mark.parametrize("policy", POLICIES[::3], ids=str)
def test_what_was_fetched_is_the_program_and_its_sum(
    policy: OffloadPolicy, watched: Any, make_request: Request, make_tiny_expert: Any
) -> None:
    result = denoise(watched, make_request(), policy=policy, device="cpu")
    counts = {"high": LAYERS, "low": LAYERS}
    residency, buffers = plan_residency(policy, counts)
    program = compile_program(step_visits(["high"] * 2 + ["low"] * 3, counts), residency, buffers)
    assert watched.runs[0].fetched == list(program.fetches)
    needed = [program.visits[fetch.needed_by].step for fetch in program.fetches]
    block = _block_bytes({"high": make_tiny_expert()})
    assert [step.bytes_moved for step in result.timeline.steps] == [
        needed.count(step) * block for step in range(5)
    ]


def test_the_timeline_names_expert_and_noise_level(
    open_pair: OpenPair, make_request: Request
) -> None:
    request = make_request()
    timeline = denoise(open_pair(), request, policy=LAYERWISE, device="cpu").timeline
    assert [step.expert for step in timeline.steps] == ["high"] * 2 + ["low"] * 3
    assert tuple(step.sigma for step in timeline.steps) == request.step_plan.schedule.sigmas[:-1]
    assert timeline.kind == "measured"
    assert timeline.non_block_bytes > 0
    assert timeline.first_block_s is not None


def test_progress_is_told_after_each_step(open_pair: OpenPair, make_request: Request) -> None:
    progress = list[StepProgress]()
    request = make_request(solver="euler", start_step=1)
    result = denoise(open_pair(), request, policy=LAYERWISE, device="cpu", on_step=progress.append)
    assert [(step.index, step.done, step.total) for step in progress] == [
        (1, 1, 4),
        (2, 2, 4),
        (3, 3, 4),
        (4, 4, 4),
    ]
    assert [step.record for step in progress] == list(result.timeline.steps)
    assert torch.equal(progress[-1].denoised, result.latents), (
        "euler's last step ends where the estimate points"
    )


@pytest.mark.parametrize(
    ("questions", "step", "block"), [(1, 0, 0), (7, 1, 2), (9, 2, 0), (20, 4, 3)]
)
def test_cancel_between_blocks_leaves_the_pair_usable(
    questions: int, step: int, block: int, open_pair: OpenPair, make_request: Request
) -> None:
    pair, request = open_pair(), make_request()
    expected = _latents(pair, request)
    polls = iter(range(1, questions + 1))
    with pytest.raises(SamplingCancelled) as caught:
        denoise(
            pair,
            request,
            policy=LAYERWISE,
            device="cpu",
            should_stop=lambda: next(polls) == questions,
        )
    assert (caught.value.step, caught.value.block) == (step, block)
    assert torch.equal(_latents(pair, request), expected)


def test_an_error_in_on_step_leaves_the_pair_usable(
    open_pair: OpenPair, make_request: Request
) -> None:
    def fail(progress: StepProgress) -> None:
        raise OSError("the disk is full")

    pair, request = open_pair(), make_request()
    expected = _latents(pair, request)
    with pytest.raises(OSError, match="the disk is full"):
        denoise(pair, request, policy=LAYERWISE, device="cpu", on_step=fail)
    assert torch.equal(_latents(pair, request), expected)


def test_nan_in_an_expert_names_its_first_step(
    make_tiny_expert: Any,
    tiny_expert_folder: Callable[..., Path],
    tmp_path: Path,
    make_request: Request,
) -> None:
    broken = make_tiny_expert(seed=2)
    broken.proj_out.bias.data[0] = float("nan")
    save_expert_folder(broken, tmp_path, dtype=torch.float32)
    with open_experts(tiny_expert_folder(seed=1), tmp_path, compute_dtype=torch.float32) as pair:
        with pytest.raises(
            NonFiniteLatentError, match=r"after step 2 \(low-noise expert, sigma 0\.\d+\)"
        ):
            _latents(pair, make_request())
        _latents(pair, make_request(switch_step=5))


def test_infinite_noise_fails_in_the_first_step(open_pair: OpenPair, make_request: Request) -> None:
    noise = torch.randn(1, 16, 2, 4, 6)
    noise[0, 0, 0, 0, 0] = float("inf")
    with pytest.raises(NonFiniteLatentError, match=r"after step 0 \(high-noise expert"):
        _latents(open_pair(), make_request(noise=noise))


def test_the_request_is_left_alone_and_the_result_is_an_ordinary_tensor(
    open_pair: OpenPair, make_request: Request
) -> None:
    request = make_request()
    before = request.noise.clone()
    latents = _latents(open_pair(), request)
    assert torch.equal(request.noise, before)
    assert latents.dtype == torch.float32
    assert not latents.is_inference()


def test_what_does_not_fit_the_experts_is_refused(
    open_pair: OpenPair, make_request: Request
) -> None:
    with pytest.raises(RequestError, match="these are image-to-video experts"):
        _latents(open_pair(in_channels=36), make_request())
    with pytest.raises(ValueError, match="blocks_to_swap"):
        _latents(open_pair(), make_request(), OffloadPolicy.block_swap(LAYERS + 1))
    with pytest.raises(ValueError, match="meta is not supported"):
        denoise(open_pair(), make_request(), policy=LAYERWISE, device="meta")
