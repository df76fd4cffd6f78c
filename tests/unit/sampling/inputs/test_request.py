"""DenoiseRequest: refusals with their messages, and the step plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from wanstream.sampling.inputs import DenoiseRequest
from wanstream.sampling.steps import Guidance, RequestError, StepSettings

NOISE = torch.zeros(2, 16, 3, 4, 6)
TEXT = torch.zeros(1, 5, 4096)
LATE: dict[str, Any] = {"sigmas": [1.0, 0.75, 0.5, 0.0], "start_step": 1}


def _request(**changes: Any) -> DenoiseRequest:
    return DenoiseRequest(**{"noise": NOISE, "positive": TEXT, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"noise": torch.zeros(16, 3, 4, 6)},
            r"noise is \[16, 3, 4, 6\]: give \[B, 16 or 48, T, h, w\]",
        ),
        ({"noise": torch.zeros(1, 4, 3, 4, 6)}, r"noise is \[1, 4, 3, 4, 6\]"),
        ({"noise": torch.zeros(0, 16, 3, 4, 6)}, r"noise is \[0, 16, 3, 4, 6\]"),
        ({"noise": NOISE.half()}, "float16: give float32"),
        (
            {"positive": TEXT[0]},
            r"positive is \[5, 4096\]: give a UMT5 embedding \[1 or 2, tokens, 4096\]",
        ),
        ({"positive": torch.zeros(1, 5, 768)}, r"positive is \[1, 5, 768\]"),
        ({"positive": TEXT[:, :0]}, "no tokens"),
        ({"positive": torch.zeros(3, 5, 4096)}, "3 texts for 2 samples: give 1 or 2"),
        ({"positive": TEXT.long()}, "positive is torch.int64"),
        ({"negative": torch.zeros(1, 5, 768)}, r"negative is \[1, 5, 768\]"),
        ({"negative": torch.zeros(3, 5, 4096)}, "negative has 3 texts"),
        (
            {"image_condition": torch.zeros(1, 16, 3, 4, 6)},
            r"give \[1 or 2, 20 or 32 or 36 or 52 or 100, 3, 4, 6",
        ),
        ({"image_condition": torch.zeros(3, 20, 3, 4, 6)}, "image_condition"),
        ({"image_condition": torch.zeros(1, 20, 3, 4, 8)}, "image_condition"),
        (
            {"latent": torch.zeros(1, 16, 3, 4, 6)},
            r"latent is \[1, 16, 3, 4, 6\]: give \[2, 16, 3, 4, 6\]",
        ),
        ({"latent": NOISE.long()}, "latent is torch.int64"),
        ({"steps": 0}, "0 steps"),
        ({"steps": 4, "start_step": 4}, "start step 4 of 4 steps: give 0 to 3"),
        (
            {"steps": 4, "start_step": 2, "end_step": 2},
            "starts with step 2 and ends before step 2, so no step is left: set start_step below "
            "2, or end_",
        ),
        ({"steps": 4, "end_step": 0}, "end step 0: give at least 1"),
        (
            {"mask": torch.zeros(1, 1, 3, 4, 8)},
            r"mask is \[1, 1, 3, 4, 8\]: give \[1 or 2, 1 or 16, 3, 4, 6\]",
        ),
        ({"mask": torch.zeros(2, 4, 3, 4, 6)}, "mask is"),
        ({"add_noise": False}, "add_noise is off and the latent is empty"),
        (
            {"add_noise": False, "latent": NOISE, "schedule": "simple"},
            "step 0 starts at sigma 1, which is pure noise",
        ),
        ({"add_noise": False, "latent": NOISE}, "which is pure noise"),
        (
            {**LATE, "add_noise": False, "latent": NOISE, "latent_sigma": 0.5},
            "left at sigma 0.50000, and step 1 starts at sigma 0.75000: give both samplers the "
            "same steps",
        ),
        (
            {**LATE, "add_noise": False, "latent": NOISE, "latent_sigma": 0.0},
            "left at sigma 0.00000, and step 1 starts at sigma 0.75000: turn leftover_noise on in "
            "the sampler before",
        ),
        (
            {**LATE, "latent": NOISE, "latent_sigma": 0.75},
            r"still carries noise \(left at sigma 0.75000\)",
        ),
        ({"start_step": -1}, "start step -1"),
        ({"boundary_ratio": 1.01}, "boundary ratio 1.01: give 0 to 1"),
        ({"boundary_ratio": -0.1}, "boundary ratio -0.1"),
        ({"boundary_ratio": float("nan")}, "boundary ratio nan"),
        ({"steps": 4, "switch_step": 5}, "switch step 5 of 4 steps: give 0 to 4"),
        ({"switch_step": -1}, "switch step -1"),
        ({"flow_shift": 0.0}, "flow shift 0"),
        ({"solver": "dpm"}, "unknown solver 'dpm': choose one of euler, unipc, dpm\\+\\+, lcm"),
        ({"schedule": "karras"}, "unknown schedule 'karras'"),
        ({"sigmas": [1.0, 0.5, -0.1]}, "last sigma is -0.1"),
        ({"sigmas": [1.0, 0.5, 0.0], "steps": 3}, "3 sigmas make 2 steps, not 3"),
        ({"guidance": (4.0, 1.0)}, "needs a negative text"),
        ({"guidance": (1.0, 3.0)}, "needs a negative text"),
        ({"guidance": (float("nan"), 1.0)}, "two numbers"),
        ({"guidance": (1.0,)}, "two numbers"),
        ({"guidance": 4.0}, "guidance 4.0: give two numbers"),
    ],
)
def test_bad_input_is_refused_when_the_request_is_made(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        _request(**changes)


def test_texts_of_any_length_and_of_one_or_all_samples_are_taken() -> None:
    request = _request(
        positive=torch.zeros(2, 1, 4096), negative=torch.zeros(1, 700, 4096), guidance=(4.0, 3.0)
    )
    assert request.batch == 2
    assert request.guidance == (4.0, 3.0)


def test_arguments_have_a_fixed_order() -> None:
    given = DenoiseRequest(NOISE, TEXT, TEXT + 1, None, NOISE + 1, 2, 4)
    assert torch.equal(given.negative, TEXT + 1)
    assert torch.equal(given.latent, NOISE + 1)
    assert (given.start_step, given.steps) == (2, 4)
    assert list(given.keywords())[:7] == [
        *("noise", "positive", "negative", "image_condition", "latent", "start_step", "steps")
    ]


def test_values_that_do_not_fit_together_are_refused() -> None:
    request = _request(steps=4)
    fewer = request.replaced(step_settings=StepSettings(steps=2))
    assert (len(fewer.step_plan.steps), fewer.inputs) == (2, request.inputs)
    with pytest.raises(RequestError, match="needs a negative text"):
        request.replaced(guidance_settings=Guidance(scales=(4.0, 3.0)))


def test_defaults_are_the_makers() -> None:
    step_plan = _request().step_plan
    assert step_plan.schedule.steps == 40
    assert step_plan.experts == ("high",) * 26 + ("low",) * 14
    assert step_plan.steps == range(40)


@pytest.mark.parametrize(
    ("changes", "high_steps"),
    [
        ({"steps": 20, "flow_shift": 8.0, "schedule": "simple"}, 11),
        ({"steps": 20, "flow_shift": 8.0, "schedule": "simple", "boundary_ratio": 0.9}, 10),
        ({"steps": 20, "flow_shift": 8.0, "schedule": "simple", "switch_step": 7}, 7),
        ({"steps": 20, "switch_step": 0}, 0),
        ({"steps": 20, "switch_step": 20}, 20),
        ({"steps": 20, "boundary_ratio": 0.0}, 20),
        ({"sigmas": [1.0, 0.9, 0.875, 0.8, 0.0]}, 3),
        ({"sigmas": torch.tensor([1.0, 0.9, 0.8, 0.0]), "steps": 3, "boundary_ratio": 0.95}, 1),
    ],
)
def test_the_expert_of_each_step(changes: dict[str, Any], high_steps: int) -> None:
    experts = _request(**changes).step_plan.experts
    assert experts == ("high",) * high_steps + ("low",) * (len(experts) - high_steps)


def test_starting_later_keeps_the_schedule_and_the_switch() -> None:
    late, whole = _request(steps=20, start_step=15).step_plan, _request(steps=20).step_plan
    assert (late.schedule, late.experts) == (whole.schedule, whole.experts)
    assert late.steps == range(15, 20)


@pytest.mark.parametrize("latent_sigma", [None, 0.75, 0.750001])
def test_a_latent_that_was_left_where_the_run_starts_is_taken(latent_sigma: float | None) -> None:
    step_plan = _request(**LATE, add_noise=False, latent=NOISE, latent_sigma=latent_sigma).step_plan
    assert (step_plan.start_sigma, step_plan.end_sigma) == (0.75, 0.0)


def test_a_finished_latent_may_get_new_noise() -> None:
    assert _request(**LATE, latent=NOISE, latent_sigma=0.0).step_plan.steps == range(1, 3)


@pytest.mark.parametrize(
    ("end_step", "leftover_noise", "steps", "end_sigma"),
    [
        (None, False, 20, 0.0),
        (10000, True, 20, 0.0),
        (20, True, 20, 0.0),
        (12, False, 12, 0.0),
        (12, True, 12, None),
    ],
)
def test_ending_earlier_keeps_the_schedule_and_the_switch(
    end_step: int | None, leftover_noise: bool, steps: int, end_sigma: float | None
) -> None:
    whole = _request(steps=20).step_plan
    cut = _request(steps=20, end_step=end_step, leftover_noise=leftover_noise).step_plan
    assert cut.steps == range(steps)
    assert cut.experts == whole.experts[:steps]
    assert cut.schedule.sigmas[:-1] == whole.schedule.sigmas[:steps]
    assert cut.end_sigma == (whole.schedule.sigmas[steps] if end_sigma is None else end_sigma)


def test_sigmas_that_end_above_zero_are_split_at_the_boundary_as_others_are() -> None:
    high_part = _request(sigmas=[1.0, 0.95, 0.9, 0.85, 0.8]).step_plan
    assert (high_part.experts, high_part.end_sigma) == (
        ("high",) * 3 + ("low",),
        pytest.approx(0.8),
    )
    low_part = _request(sigmas=[0.85, 0.5, 0.0], latent=NOISE).step_plan
    assert low_part.experts == ("low", "low")


def test_the_models_of_5b_name_what_they_take() -> None:
    noise = torch.zeros(1, 48, 3, 4, 6)
    plain = _request(noise=noise)
    control, inp = (
        _request(noise=noise, image_condition=torch.zeros(1, channels, 3, 4, 6))
        for channels in (100, 52)
    )
    plain.inputs.check_channels(48, 48)
    inp.inputs.check_channels(100, 48)
    control.inputs.check_channels(148, 48)
    for request, channels, message in (
        (plain, 100, "Fun InP 5B experts, and no start image of theirs .* WanFunInpaintToVideo"),
        (plain, 148, "Fun Control 5B experts, and no control video"),
        (inp, 48, "takes a start image as the first frame of the latent"),
        (control, 48, "the conditioning of Fun Control 5B is connected .* remove its node"),
        (control, 100, "Fun InP 5B experts, and the conditioning of Fun Control 5B"),
    ):
        with pytest.raises(RequestError, match=message):
            request.inputs.check_channels(channels, 48)


def test_an_image_condition_must_fit_the_experts() -> None:
    text_only = _request()
    with_image = _request(image_condition=torch.zeros(1, 20, 3, 4, 6))
    text_only.inputs.check_channels(16, 16)
    with_image.inputs.check_channels(36, 16)
    with pytest.raises(
        RequestError,
        match=r"these are image-to-video experts, .* WanStream Image to Video, .*36 channels "
        r"expected",
    ):
        text_only.inputs.check_channels(36, 16)
    with pytest.raises(
        RequestError,
        match=r"these are text-to-video experts, and a start image .* i2v in their names \(16 "
        r"channels expected, 36",
    ):
        with_image.inputs.check_channels(16, 16)
