"""DenoiseRequest: refusals with their messages, and the step plan."""

import re

import pytest
import torch

from wanstream.nodes.runs.benchmark import describe_request
from wanstream.sampling import DenoiseRequest, FirstBlockCache
from wanstream.sampling.steps import Guidance, RequestError, StepSettings
from wanstream.shapes import ContextWindows
from wanstream.wan import Nag

NOISE = torch.zeros(2, 16, 3, 4, 6)
TEXT = torch.zeros(1, 5, 4096)
LATE = {"sigmas": [1.0, 0.75, 0.5, 0.0], "start_step": 1}
LEFT = {**LATE, "add_noise": False, "latent": NOISE}
SIMPLE = {"steps": 20, "flow_shift": 8.0, "schedule": "simple"}
NAN = float("nan")
MOVING = ContextWindows(frames=3, overlap=1)
STILL = ContextWindows(frames=3, overlap=1, shift_windows=False)
NAG = Nag(scale=5.0, tau=1.5, alpha=0.5)


def _request(**changes):
    return DenoiseRequest(**{"noise": NOISE, "positive": TEXT, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise": NOISE[0]}, r"noise is \[16, 3, 4, 6\]: give \[B, 16 or 48, T, h, w\]"),
        ({"noise": NOISE.repeat(1, 2, 1, 1, 1)}, r"noise is \[2, 32, 3, 4, 6\]"),
        ({"noise": NOISE[:0]}, r"noise is \[0, 16, 3, 4, 6\]"),
        ({"noise": NOISE.half()}, "float16: give float32"),
        ({"positive": TEXT[0]}, r"positive is \[5, 4096\]: give a UMT5 embedding \[1 or 2, tok"),
        ({"positive": TEXT[:, :0]}, "no tokens"),
        ({"positive": TEXT.repeat(3, 1, 1)}, "3 texts for 2 samples: give 1 or 2"),
        ({"positive": TEXT.long()}, "positive is torch.int64"),
        ({"negative": torch.zeros(1, 5, 768)}, r"negative is \[1, 5, 768\]"),
        ({"image_condition": NOISE[:1]}, r"give \[1 or 2, 20 or 32 or 36 or 52 or 100, 3, 4, 6"),
        ({"image_condition": torch.zeros(1, 20, 3, 4, 8)}, "image_condition"),
        ({"image_condition": torch.zeros(3, 20, 3, 4, 6)}, "image_condition"),
        ({"latent": NOISE[:1]}, r"latent is \[1, 16, 3, 4, 6\]: give \[2, 16, 3, 4, 6\]"),
        ({"latent": NOISE.long()}, "latent is torch.int64"),
        ({"steps": 0}, "0 steps"),
        ({"steps": 4, "start_step": 4}, "start step 4 of 4 steps: give 0 to 3"),
        ({"steps": 4, "start_step": 2, "end_step": 2}, "ends before step 2, so no step is left"),
        ({"steps": 4, "end_step": 0}, "end step 0: give at least 1"),
        ({"mask": torch.zeros(1, 1, 3, 4, 8)}, r"mask is .*: give \[1 or 2, 1 or 16, 3, 4, 6\]"),
        ({"mask": torch.zeros(2, 4, 3, 4, 6)}, "mask is"),
        ({"add_noise": False}, "add_noise is off and the latent is empty"),
        ({"add_noise": False, "latent": NOISE}, "step 0 starts at sigma .*, which is pure noise"),
        ({**LEFT, "latent_sigma": 0.5}, "at sigma 0.50000, and step 1 starts at sigma 0.75000"),
        ({**LEFT, "latent_sigma": 0.0}, "turn leftover_noise on in the sampler before"),
        ({**LATE, "latent": NOISE, "latent_sigma": 0.75}, r"noise \(left at sigma 0.75000\)"),
        ({"start_step": -1}, "start step -1"),
        ({"boundary_ratio": NAN}, "boundary ratio nan: give 0 to 1"),
        ({"steps": 4, "switch_step": 5}, "switch step 5 of 4 steps: give 0 to 4"),
        ({"switch_step": -1}, "switch step -1"),
        ({"solver": "dpm"}, "unknown solver 'dpm': choose one of euler, unipc, dpm\\+\\+, lcm"),
        ({"schedule": "karras"}, "unknown schedule 'karras'"),
        ({"sigmas": [1.0, 0.5, 0.0], "steps": 3}, "3 sigmas make 2 steps, not 3"),
        ({"guidance": (4.0, 1.0)}, "needs a negative text"),
        ({"guidance": (NAN, 1.0)}, "two numbers"),
        ({"guidance": 4.0}, "guidance 4.0: give two numbers"),
    ],
)
def test_bad_input_is_refused(changes, message):
    with pytest.raises(RequestError, match=message):
        _request(**changes)


def test_texts_of_any_length_are_taken():
    texts = {"positive": torch.zeros(2, 1, 4096), "negative": torch.zeros(1, 700, 4096)}
    request = _request(**texts, guidance=(4.0, 3.0))
    assert (request.batch, request.guidance) == (2, (4.0, 3.0))


def test_arguments_have_a_fixed_order():
    given = DenoiseRequest(NOISE, TEXT, TEXT + 1, None, NOISE + 1, 2, 4)
    assert torch.equal(given.negative, TEXT + 1)
    assert torch.equal(given.latent, NOISE + 1)
    assert (given.start_step, given.steps) == (2, 4)
    first = ("noise", "positive", "negative", "image_condition", "latent", "start_step", "steps")
    assert tuple(given.keywords())[:7] == first


def test_replaced_settings_are_checked():
    request = _request(steps=4)
    fewer = request.replaced(step_settings=StepSettings(steps=2))
    assert (len(fewer.step_plan.steps), fewer.inputs) == (2, request.inputs)
    with pytest.raises(RequestError, match="needs a negative text"):
        request.replaced(guidance_settings=Guidance(scales=(4.0, 3.0)))


def test_defaults_are_the_makers():
    step_plan = _request().step_plan
    assert step_plan.schedule.steps == 40
    assert step_plan.experts == ("high",) * 26 + ("low",) * 14
    assert step_plan.steps == range(40)


@pytest.mark.parametrize(
    ("changes", "high_steps"),
    [
        (SIMPLE, 11),
        ({**SIMPLE, "boundary_ratio": 0.9}, 10),
        ({"steps": 20, "switch_step": 0}, 0),
        ({"steps": 20, "switch_step": 20}, 20),
        ({"steps": 20, "boundary_ratio": 0.0}, 20),
        ({"sigmas": [1.0, 0.9, 0.875, 0.8, 0.0]}, 3),
        ({"sigmas": torch.tensor([1.0, 0.9, 0.8, 0.0]), "steps": 3, "boundary_ratio": 0.95}, 1),
        ({"sigmas": [0.85, 0.5, 0.0], "latent": NOISE}, 0),
    ],
)
def test_the_expert_of_each_step(changes, high_steps):
    experts = _request(**changes).step_plan.experts
    assert experts == ("high",) * high_steps + ("low",) * (len(experts) - high_steps)


@pytest.mark.parametrize("latent_sigma", [None, 0.75, 0.750001])
def test_a_latent_left_where_the_run_starts_is_taken(latent_sigma):
    step_plan = _request(**LEFT, latent_sigma=latent_sigma).step_plan
    assert (step_plan.start_sigma, step_plan.end_sigma) == (0.75, 0.0)


def test_a_finished_latent_may_get_new_noise():
    assert _request(**LATE, latent=NOISE, latent_sigma=0.0).step_plan.steps == range(1, 3)


@pytest.mark.parametrize(
    ("changes", "steps", "end_sigma"),
    [
        ({"start_step": 15}, range(15, 20), 0.0),
        ({"end_step": 20, "leftover_noise": True}, range(20), 0.0),
        ({"end_step": 12}, range(12), 0.0),
        ({"end_step": 12, "leftover_noise": True}, range(12), None),
    ],
)
def test_a_part_keeps_the_schedule_and_the_switch(changes, steps, end_sigma):
    whole = _request(steps=20).step_plan
    part = _request(steps=20, **changes).step_plan
    assert part.steps == steps
    assert part.experts == whole.experts[: steps.stop]
    assert part.schedule.sigmas[:-1] == whole.schedule.sigmas[: steps.stop]
    assert part.end_sigma == (whole.schedule.sigmas[12] if end_sigma is None else end_sigma)


@pytest.mark.parametrize(
    ("channels", "of_latent", "of_model", "message"),
    [
        (0, 16, 16, None),
        (20, 16, 36, None),
        (0, 48, 48, None),
        (52, 48, 100, None),
        (100, 48, 148, None),
        (0, 16, 36, "image-to-video experts, .* WanStream Image to Video, .*36 channels expected"),
        (20, 16, 16, r"text-to-video experts, .* i2v in .* \(16 channels expected, 36"),
        (36, 16, 16, "text-to-video experts, .* Wan2.2 Fun Control .*concat_mask_index.* rem"),
        (36, 16, 36, "image-to-video experts, .* conditioning of Wan2.2 Fun Control is"),
        (32, 16, 36, r"Wan2.1 Fun Control is connected \(concat_latent_image of two latents\)"),
        (20, 16, 52, "Fun Control experts, and only a start im"),
        (0, 16, 52, "Fun Control experts, and no control video .* WanStream Fun Con"),
        (0, 48, 100, "Fun InP 5B experts, and no start image of theirs .* WanFunInpaintToVideo"),
        (0, 48, 148, "Fun Control 5B experts, and no control video"),
        (52, 48, 48, "takes a start image as the first frame of the latent"),
        (100, 48, 48, "the conditioning of Fun Control 5B is connected .* remove its node"),
        (100, 48, 100, "Fun InP 5B experts, and the conditioning of Fun Control 5B"),
    ],
)
def test_an_image_condition_must_fit_the_experts(channels, of_latent, of_model, message):
    condition = torch.zeros(1, channels, 3, 4, 6) if channels else None
    inputs = _request(noise=torch.zeros(1, of_latent, 3, 4, 6), image_condition=condition).inputs
    if message is None:
        inputs.check_channels(of_model, of_latent)
        return
    with pytest.raises(RequestError, match=message):
        inputs.check_channels(of_model, of_latent)


@pytest.mark.parametrize(
    ("changes", "name", "words"),
    [
        ({"guidance_steps": (4.0, 1.5)}, "Guidance", "4, 1.5, step by step"),
        ({"windows": MOVING}, "Context windows", "9 frames, 1 latent frames shared, linear"),
        ({"windows": STILL}, "Context windows", "9 .*, 1 latent .* at fixed positions"),
        ({"cache": FirstBlockCache(threshold=0.1)}, "Cache", "first block, threshold 0.1"),
        ({"nag": NAG, "guidance": (1, 1)}, "NAG", "scale 5, tau 1.5, alpha 0.5, in .* guidance 1"),
    ],
)
def test_reports_describe_the_options(changes, name, words):
    given = {"negative": TEXT, "guidance": (4.0, 3.0), **changes}
    assert re.fullmatch(words, describe_request(_request(**given))[name])
