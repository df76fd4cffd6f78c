"""Every sampler and schedule in a real ComfyUI through our guider.

The results are compared with native experts behind a test guider. One process runs all cases
(`guider_cases.py`). Here each has a separate test. A case's `difference` is the relative L2
distance between the two results, from the same sampler object, sigmas, noise and random state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from wanstream.tests.support.rounding import ROUNDING

CLOSE = 1e-4

# fmt: off
SAMPLERS = [
    "euler", "euler_cfg_pp", "euler_ancestral", "euler_ancestral_cfg_pp", "heun", "heunpp2",
    "exp_heun_2_x0", "exp_heun_2_x0_sde", "dpm_2", "dpm_2_ancestral", "lms", "dpm_fast",
    "dpm_adaptive", "dpmpp_2s_ancestral", "dpmpp_2s_ancestral_cfg_pp", "dpmpp_sde", "dpmpp_sde_gpu",
    "dpmpp_2m", "dpmpp_2m_cfg_pp", "dpmpp_2m_sde", "dpmpp_2m_sde_gpu", "dpmpp_2m_sde_heun",
    "dpmpp_2m_sde_heun_gpu", "dpmpp_3m_sde", "dpmpp_3m_sde_gpu", "ddpm", "lcm", "ipndm", "ipndm_v",
    "deis", "res_multistep", "res_multistep_cfg_pp", "res_multistep_ancestral",
    "res_multistep_ancestral_cfg_pp", "gradient_estimation", "gradient_estimation_cfg_pp", "er_sde",
    "seeds_2", "seeds_3", "sa_solver", "sa_solver_pece", "ddim", "uni_pc", "uni_pc_bh2",
]
# fmt: on
NEWER = {"exp_heun_2_x0", "exp_heun_2_x0_sde"}
"""Samplers missing in ComfyUI 0.3.64."""
ADAPTIVE = {"dpm_adaptive"}
"""Samplers whose calls depend on the latents, and so cannot be predicted."""
# fmt: off
SCHEDULES = [
    "simple", "sgm_uniform", "karras", "exponential", "ddim_uniform", "beta", "normal",
    "linear_quadratic", "kl_optimal", "wan",
]
# fmt: on

Case = Callable[[str], Any]

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(900)]


def test_no_sampler_or_schedule_is_left_out(answers: dict[str, Any]) -> None:
    there = {name.removeprefix("sampler ") for name in answers if name.startswith("sampler ")}
    assert there >= set(SAMPLERS) - NEWER
    assert [
        name.removeprefix("schedule ") for name in answers if name.startswith("schedule ")
    ] == SCHEDULES


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_sampler_gives_what_it_gives_with_native_experts(
    answers: dict[str, Any], case: Case, sampler: str
) -> None:
    if sampler in NEWER and f"sampler {sampler}" not in answers:
        pytest.skip("not in this ComfyUI")
    found = case(f"sampler {sampler}")
    assert found["finite"]
    assert found["difference"] <= CLOSE
    ours, theirs = found["calls"]
    assert ours == theirs
    assert {"high", "low"} == set(ours)
    # Tried beforehand or not: the same bits, and the random state is left as it was.
    assert found["unpredicted equal"]
    assert found["unpredicted recompiled"] > 0
    if sampler not in ADAPTIVE:
        assert found["recompiled"] == 0
        # Every call moves each block once, for all lanes. A run before may have left blocks for the
        # first one.
        first, *others = found["bytes"]
        assert first <= max(others)
        assert len(set(others)) == 1


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_is_comfyuis_and_runs(case: Case, schedule: str) -> None:
    found = case(f"schedule {schedule}")
    assert found["equal"]
    assert found["difference"] <= CLOSE


@pytest.mark.parametrize(
    ("guidance", "lanes"),
    [("(1.0, 1.0)", 6), ("(1.0, 3.0)", 9), ("(4.0, 1.0)", 9)],
    ids=["none", "low", "high"],
)
def test_guidance_of_one_computes_no_negative_unless_the_sampler_reads_it(
    case: Case, guidance: str, lanes: int
) -> None:
    found = {name: case(f"cfg {guidance} {name}") for name in ("euler", "euler_cfg_pp")}
    assert found["euler"]["lanes"] == lanes
    assert found["euler_cfg_pp"]["lanes"] == 12
    assert max(each["difference"] for each in found.values()) <= CLOSE


@pytest.mark.parametrize(
    "hook", ["sampler_cfg_function", "sampler_pre_cfg_function", "sampler_post_cfg_function"]
)
def test_guidance_may_be_changed_by_others(case: Case, hook: str) -> None:
    found = case("hooks")[hook]
    assert found["difference"] <= CLOSE
    assert found["effect"] > 0.01


@pytest.mark.parametrize("start", ["noise", "later start"])
@pytest.mark.parametrize("sampler", ["euler", "dpmpp_2m", "ddim"])
def test_a_mask_keeps_what_it_keeps_natively(case: Case, sampler: str, start: str) -> None:
    found = case(f"mask {sampler} {start}")
    assert found["difference"] <= CLOSE
    assert found["kept"] <= 1e-5


def test_latents_of_an_odd_size_are_padded_as_natively(case: Case) -> None:
    found = case("odd_sizes")
    assert len(found) == 12
    assert max(found.values()) <= CLOSE, found
    assert case("odd image")["difference"] <= CLOSE


def test_a_batch_is_its_samples_and_moves_the_bytes_of_one(case: Case) -> None:
    found, alone = case("batch"), case("sampler dpmpp_2m")
    assert found["difference"] <= CLOSE
    assert found["as alone"]
    assert found["bytes"][1:] == alone["bytes"][1:], (
        "a run before may have left blocks for the first call"
    )


def test_room_is_made_for_the_tokens_that_are_computed_at_once(case: Case) -> None:
    found = case("chunk")
    assert found["equal"]
    whole, few, again = found["needed"]
    assert few < 0.8 * whole == 0.8 * again


def test_the_calls_of_a_run_are_predicted_on_a_machine_that_is_known(case: Case) -> None:
    """Heun calls the model twice in every step but the last one."""
    found = case("predicted")
    assert found["unknown"] is None
    assert (found["kind"], found["calls"]) == ("simulated", 11)
    assert found["equal"], "number, expert, noise level and bytes of every call"


def test_a_policy_that_is_left_to_the_planner_changes_no_bit(case: Case) -> None:
    found = case("chosen")
    assert found["equal"] == [True, True]
    assert found["reported"][0].startswith("chosen: "), "of the second run"
    assert found["moved"] == 0, "with so slow a disk both experts stay"


def test_split_sigmas_go_on_where_they_were_cut(case: Case) -> None:
    found = case("split")
    assert max(found["differences"]) <= CLOSE
    assert found["as one"] <= ROUNDING


@pytest.mark.parametrize(
    "images", ["image", "first and last image", "image known by the noise mask"]
)
def test_image_conditioning(case: Case, images: str) -> None:
    assert case(images)["difference"] <= CLOSE


def test_euler_is_our_own_sampler(case: Case) -> None:
    found = case("same_as_our_sampler")
    assert found["difference"] <= ROUNDING
    for what in ("bytes", "experts", "sigmas"):
        ours, theirs = found[what]
        assert ours == theirs, what


def test_cancel_ends_the_run_before_the_next_block(case: Case) -> None:
    # The third lane cancels the run: the other lane finishes the block, and no further block
    # begins.
    assert case("interrupt") == {"raised": "interrupt", "blocks": 4, "flag": False, "again": True}


def test_a_sampler_that_fails_leaves_all_usable(case: Case) -> None:
    assert case("error") == {"raised": "its own", "again": True}


def test_a_sampler_that_never_ends_is_tried_for_a_while(case: Case) -> None:
    assert case("endless") == 2000


def test_experts_that_run_are_not_evicted(case: Case) -> None:
    assert case("evicted") == {"equal": True, "during": [[10, True], True], "left": 0}


def test_a_trial_leaves_the_random_state_as_it_was(case: Case) -> None:
    assert case("random_state") == {"changed inside": True, "kept": True}


def test_a_sampler_of_another_pack_runs_once_and_right(case: Case) -> None:
    found = case("foreign")
    assert found["runs"] == 1
    assert found["reported"] == [
        "the sampler midpoint was not dry-run: expecting one model call per step"
    ]
    assert found["difference"] <= CLOSE
    ours, theirs = found["calls"]
    assert ours == theirs
    assert 0 < found["recompiled"] < len(ours) / 2


@pytest.mark.parametrize(
    ("sampler", "surprises"), [("er_sde", 0), ("sa_solver", 0), ("euler_cfg_pp alternative", 0)]
)
def test_samplers_of_comfyuis_nodes(case: Case, sampler: str, surprises: int) -> None:
    found = case("core_nodes")[sampler]
    assert found["difference"] <= CLOSE
    assert found["recompiled"] == surprises


def test_previews_are_comfyuis(case: Case) -> None:
    found = case("preview")
    for method, size in (("latent2rgb", [6, 8]), ("taesd", [48, 64])):
        if method not in found:
            continue  # ComfyUI 0.3.64 has no small VAE for Wan
        picture = ["JPEG", *size]
        sampling, own = found[method][:-2], found[method][-2:]
        assert sampling == [[1, 3, picture], [2, 3, picture], [3, 3, picture]]
        assert own == [[1, 4, picture], [4, 4, None]]
    assert {preview for _, _, preview in found["none"]} == {None}
    assert found["48 channels"] == [[3, 4]]
    assert found["shapes"] == [[1, 16, 2, 8, 6]] * 2
    assert found["finite"] == [True, True]


@pytest.mark.parametrize(
    ("what", "kind", "message"),
    [
        (
            "resizing sampler",
            "RequestError",
            "the sampler lcm_upscale changes the size of the latent from",
        ),
        (
            "sigmas of another model",
            "RequestError",
            "a sigma is 14.6, but flow models have none above 1",
        ),
        ("levels per sample", "RequestError", "uses 2 noise levels in one model call"),
        (
            "not a number",
            "NonFiniteLatentError",
            "the latent from the sampler broken is NaN or infinite at sigma 1.0",
        ),
        (
            "reads diffusion_model",
            "RequestError",
            "the sampler curious reads the attribute diffusion_model of the model",
        ),
        ("replaced conditions", "RequestError", "sampler_calc_cond_batch_function"),
        ("control", "ConditioningError", "positive carries a ControlNet (control)"),
        ("several parts", "RequestError", "the latent has several parts"),
        (
            "no image",
            "RequestError",
            "these are image-to-video experts, and no start image is connected",
        ),
        ("boundary", "RequestError", "boundary ratio 1.5: give 0 to 1"),
        ("flow shift", "RequestError", "flow shift 0: give a positive number"),
    ],
)
def test_what_is_refused(case: Case, what: str, kind: str, message: str) -> None:
    raised, text = case(f"refused {what}")
    assert raised == kind, text
    assert message in text
