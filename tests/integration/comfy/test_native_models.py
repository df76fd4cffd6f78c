"""Streamed native models equal ComfyUI's own bit by bit and move each block once.

`native_cases.py` has the cases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(1800)]

NATIVE_CASES = "native_cases"

FAMILIES = [
    "wan_t2v", "wan_i2v", "wan22_i2v", "wan22_ti2v", "wan_vace", "wan_vace_twice", "wan22_animate",
    "wan22_s2v", "wan_humo", "wan_camera", "wan22_camera", "wan_scail", "flux", "flux_kontext",
    "qwen_image", "hunyuan_video", "hunyuan_video_15", "ltx_2",
]  # fmt: skip
FURTHER = [
    "minimax_h3", "minimax_h3_i2v", "z_image", "z_image_ref", "krea2", "flux2", "flux2_klein",
    "chroma", "wan_scail2", "wan_animate2", "wan_bernini", "wan_dancer", "ltx_2.3", "sd3",
    "kandinsky5", "ernie", "hidream", "cosmos_predict2",
]  # fmt: skip
NEWER = {"wan_scail", "hunyuan_video_15", "ltx_2"}
"""Families missing in ComfyUI 0.3.64."""

SAMPLERS = ["euler", "dpm_adaptive", "heun", "uni_pc", "dpmpp_2m_sde", "dpm_fast", "dpm_2", "lcm"]


Case = Callable[[str], Any]


def _check_fetches(found: dict[str, Any], *, layerwise: bool) -> None:
    """Check that the second run fetches a block once per visit, or less with resident blocks."""
    (_, fetches), (_, visits) = found["fetches"], found["visits"]
    # A run may start with the two blocks left over from the last one.
    least = visits - 2 if layerwise else 0
    assert least <= fetches <= visits
    assert all(moved == stored > 0 for moved, stored in found["bytes"][:1])
    assert all(moved == stored for moved, stored in found["bytes"])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_gives_the_same_bits(answers: dict[str, Any], case: Case, family: str) -> None:
    names = [name for name in answers if name.startswith(f"family {family},")]
    if family in NEWER and not names:
        pytest.skip("not in this ComfyUI")
    runs = {tuple(name.split(", ")[1:]) for name in names}
    assert {form for form, _ in runs} == {"bf16", "fp16", "fp32", "fp8", "fp8 kept"}
    assert {policy for _, policy in runs} >= {"layerwise", "block swap"}
    assert len(runs) >= (10 if family in ("wan_t2v", "flux") else 5)
    for name in names:
        result = case(name)
        assert result["finite"], name
        assert result["equal"] == [True, True], name
        assert result["recompiled"][1] == 0, name
        _check_fetches(result, layerwise=name.endswith("layerwise"))
        if name.endswith("resident"):
            assert result["fetches"] == [result["blocks"], 0]


@pytest.mark.parametrize("run", ["layerwise", "block swap", "shared"])
@pytest.mark.parametrize("family", FURTHER)
def test_a_further_family_gives_the_same_bits(newer_case: Case, family: str, run: str) -> None:
    result = newer_case(f"further {family}, {run}")
    assert result["finite"]
    assert result["equal"] == [True, True]
    first, again = result["recompiled"]
    # One more for a call's second pass, or where the conditions share visits from there on.
    assert (first <= 3 + (run != "layerwise"), again) == (True, 0)


@pytest.mark.parametrize("family", FURTHER)
def test_layers_outside_the_lists_stream_too(newer_case: Case, family: str) -> None:
    result = newer_case(f"layers {family}")
    assert result["finite"]
    assert result["equal"] == [True, True]
    assert result["blocks"] > newer_case(f"further {family}, layerwise")["blocks"]
    assert result["recompiled"][1] == 0


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_sampler_gives_the_same_bits(case: Case, sampler: str) -> None:
    result = case(f"sampler {sampler}")
    assert result["finite"]
    assert result["equal"] == [True, True]
    assert result["recompiled"][1] == 0
    _check_fetches(result, layerwise=SAMPLERS.index(sampler) % 2 == 0)


RUNS = ["denoise 0.5", "cfg 1", "two passes per step", "two passes per step with heun"]
GUIDERS = ["BasicGuider", "CFGGuider", "DualCFGGuider"]


@pytest.mark.parametrize("family", ["wan_t2v", "flux"])
@pytest.mark.parametrize("run", RUNS + GUIDERS)
def test_other_runs_give_the_same_bits(case: Case, family: str, run: str) -> None:
    result = case(f"run {run}, {family}")
    assert result["finite"]
    assert result["equal"] == [True, True]
    assert result["recompiled"][1] == 0
    _check_fetches(result, layerwise=False)


def test_two_models_by_turns_stay_loaded(case: Case) -> None:
    """KSampler (Advanced) twice, as for Wan2.2.

    Each model computes some steps, with leftover noise in between.
    """
    result = case("two models by turns")
    assert result == {
        "equal": [True, True],
        "recompiled": [0, 0],
        "loaded": [[True, True], [True, True]],
    }


PATCHES = {
    "attn1 patch": ["wan_t2v", "flux"],
    "attn2 patch": ["wan_t2v"],
    "attn1 output patch": ["flux"],
    "double-block patch": ["qwen_image"],
    "replaced blocks": ["wan_t2v", "flux", "wan_vace"],
    "skipped layer": ["wan_t2v", "flux", "wan_vace"],
    "repeated layer": ["wan_t2v"],
    "first-block cache": ["wan_t2v", "flux"],
    "TeaCache": ["wan_t2v", "flux"],
    "cache of apply_model": ["flux"],
    "cache in a function wrapper": ["wan_t2v"],
    "function wrapper": ["wan_t2v", "flux"],
    "wrappers": ["wan_t2v", "flux"],
    "replaced forward": ["wan_t2v", "flux"],
    "shift": ["wan_t2v", "flux"],
    "skip-layer guidance": ["wan_t2v", "flux"],
    "EasyCache": ["wan_t2v", "flux"],
    "LazyCache": ["wan_t2v"],
    "CFGZeroStar": ["wan_t2v"],
    "CFGNorm": ["flux"],
    "TCFG": ["wan_t2v"],
    "RescaleCFG": ["wan_t2v"],
    "NAG": ["flux"],
    "context windows": ["wan_t2v"],
    "regions": ["flux"],
    "control net": ["flux"],
    "batch of two": ["wan_t2v", "flux", "wan_vace"],
}
"""Patches from other packs and inputs from other graphs, and the families to try them on."""

NEWER_PATCHES = {"NAG"}
"""Patches by nodes missing in ComfyUI 0.3.64."""

WITHOUT_EFFECT_IN_OLDER = {"attn1 patch", "attn2 patch", "attn1 output patch"}
"""Patches ignored by Wan and Flux in ComfyUI 0.3.64."""


@pytest.mark.parametrize(
    ("patch", "family"), [(patch, family) for patch, on in PATCHES.items() for family in on]
)
def test_a_patched_model_gives_the_same_bits(
    answers: dict[str, Any], case: Case, patch: str, family: str
) -> None:
    if patch in NEWER_PATCHES and f"patch {patch}, {family}" not in answers:
        pytest.skip("not in this ComfyUI")
    result = case(f"patch {patch}, {family}")
    if (
        not result["effect"]
        and patch in WITHOUT_EFFECT_IN_OLDER
        and not any(name.startswith("family ltx_2,") for name in answers)
    ):
        pytest.skip("this ComfyUI ignores it")
    assert result["effect"]
    assert result["finite"]
    assert result["equal"] == [True, True]
    recompiled, visits, fetches = (result[name][1] for name in ("recompiled", "visits", "fetches"))
    # The run before has skipped the same blocks and passes.
    assert recompiled == 0
    assert fetches <= visits


def test_no_patch_is_left_out(answers: dict[str, Any]) -> None:
    there = {name.removeprefix("patch ") for name in answers if name.startswith("patch ")}
    tried = {f"{patch}, {family}": patch for patch, on in PATCHES.items() for family in on}
    assert there <= tried.keys()
    assert {tried[name] for name in tried.keys() - there} <= NEWER_PATCHES


SHARED = "the conditions share each visit"
ONE_CONDITION = {"cfg 1", "BasicGuider"}
HINDERED = {
    "replaced blocks": "a replacement of dit blocks",
    "skipped layer": "a replacement of dit blocks",
    "repeated layer": "a replacement of dit blocks",
    "first-block cache": "a replacement of dit blocks",
    "TeaCache": "the diffusion_model wrapper test",
    "cache of apply_model": None,
    "cache in a function wrapper": None,
    "function wrapper": "the model function wrapper",
    "wrappers": "wrapper test",
    "EasyCache": "the calc_cond_batch wrapper easycache",
    "control net": "a ControlNet",
}
"""Patches that prevent shared visits, and the reason. None: they are no passes of their own anyway.
"""


def _first_call(run: str, result: dict[str, Any]) -> int:
    """Extra visits in a run's first call, which computes conditions as ComfyUI does."""
    passes = 1 if run in ONE_CONDITION else 3 if run in {"DualCFGGuider", "regions"} else 2
    return int((passes - 1) * result["blocks"])


@pytest.mark.parametrize("family", ["wan_t2v", "flux"])
@pytest.mark.parametrize("run", RUNS + GUIDERS)
def test_conditions_that_share_visits_give_the_same_bits(case: Case, family: str, run: str) -> None:
    result = case(f"shared run {run}, {family}")
    assert result["finite"]
    assert result["equal"] == [True, True]
    assert result["recompiled"][1] == 0
    assert result["notes"] == ([] if run in ONE_CONDITION else [SHARED])
    once = case(f"run {run}, {family}")["visits"][1]
    together = once // 2 if "two passes" in run else once
    assert result["visits"][1] == together + _first_call(run, result)


@pytest.mark.parametrize(
    ("patch", "family"), [(patch, family) for patch, on in PATCHES.items() for family in on]
)
def test_a_patched_model_with_shared_visits_gives_the_same_bits(
    answers: dict[str, Any], case: Case, patch: str, family: str
) -> None:
    if patch in NEWER_PATCHES and f"patch {patch}, {family}" not in answers:
        pytest.skip("not in this ComfyUI")
    result = case(f"shared patch {patch}, {family}")
    assert result["finite"]
    assert result["equal"] == [True, True]
    if patch not in HINDERED:
        assert result["notes"] == [SHARED]
        once = case(f"patch {patch}, {family}")["visits"][1]
        if (
            family == "qwen_image"
        ):  # texts with different lengths: ComfyUI never computes them in one pass
            once //= 2
        if patch == "regions":  # one pass per positive region, in place of two for all
            once = once * 3 // 2
        assert result["visits"][1] == once + _first_call(patch, result)
    elif reason := HINDERED[patch]:
        (note,) = result["notes"]
        assert note.startswith("no shared visits, because of ")
        assert reason in note
    else:
        assert result["notes"] == []
