"""Fun models and Bernini's contexts in our sampler and guider.

The results are compared with ComfyUI's own sampling from the same files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

NATIVE_CASES = "lane_parts_cases"

NEAR = 1e-4
FUN = [
    "fun_control_22",
    "fun_inp_22",
    "fun_control_21",
    "fun_control_21_reference",
    "fun_inp_21",
    "fun_control_5b",
    "fun_inp_5b",
]
TWO_VIDEOS = ["fun_control_22", "fun_control_21_reference", "fun_control_5b"]
CONTEXTS = ["a source", "a source and images", "images"]

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(1800)]

Case = Callable[[str], Any]


def _check(found: dict[str, Any]) -> None:
    assert len(found["forwards"]) == 4
    assert max(found["forwards"].values()) <= NEAR
    assert found["sampler"] <= NEAR
    assert found["guider"] <= NEAR


@pytest.mark.parametrize("name", [*FUN, *(f"{name}, two videos" for name in TWO_VIDEOS)])
def test_a_fun_model_is_sampled_as_by_comfyui(case: Case, name: str) -> None:
    """One forward pass per expert, with and without guidance, and whole runs."""
    _check(case(name))


@pytest.mark.parametrize(
    "name",
    [
        *(f"Bernini {kind}, {name}" for kind in ("single", "pair") for name in CONTEXTS),
        "Bernini pair, two videos",
    ],
)
def test_contexts_are_read_as_by_comfyui(case: Case, name: str) -> None:
    """ComfyUI's own implementation. Neither was checked against the original."""
    found = case(name)
    _check(found)
    assert found["effect"] > 0.01


@pytest.mark.parametrize("name", ["fun_control_5b", "fun_inp_5b"])
def test_frames_that_a_fun_model_keeps_have_their_own_timestep(case: Case, name: str) -> None:
    """Runs without a reference image.

    With one, ComfyUI spreads the frames' timesteps over other tokens than ours.
    """
    assert case(f"{name}, first frame kept") <= NEAR


@pytest.mark.parametrize("name", ["single, 1", "pair, 1", "pair, 2"])
def test_context_guidance_is_that_of_comfyuis_dual_guider(case: Case, name: str) -> None:
    """A whole run per expert or pair, for one and two videos.

    Not checked against the original.
    """
    found = case(f"context guidance, {name}")
    assert found["run"] <= NEAR
    assert found["effect"] > 0.01
    assert "context_guidance is 1.75, which Wan Guider does not apply" in found["refused"][1]


REFUSED = {
    "control on plain experts": (
        "image-to-video experts, and the conditioning of Wan2.2 Fun Control is connected"
    ),
    "older control on newer experts": (
        "Wan2.2 Fun Control experts, and the conditioning of Wan2.1 Fun Control"
    ),
    "start image on control experts": (
        "Wan2.2 Fun Control experts, and only a start image is connected"
    ),
    "context on control experts": (
        "context 1 (context_latents) has 16 channels, and these experts take 52"
    ),
    "nothing on control experts": "Wan2.2 Fun Control experts, and no control video is connected",
    "reference of another size": (
        "the reference image (reference_latents) is a latent of [1, 16, 1, 8, 8]"
    ),
    "guider, control on plain experts": "conditioning of Wan2.2 Fun Control is connected",
    "wrong loader": (
        "is an expert of Fun Control of Wan2.2 A14B (52 channels), which has two: open it as a pair"
    ),
}


def test_what_does_not_fit_is_refused_by_name(case: Case) -> None:
    refusals = case("refusals")
    assert set(refusals) == set(REFUSED)
    for name, message in REFUSED.items():
        assert message in refusals[name][1], name


def test_our_nodes_write_what_comfyuis_write(case: Case) -> None:
    found = case("nodes")
    assert {
        "Fun Control 2.2",
        "Fun Control 2.2, longer than the control",
        "Fun Control 5B",
    } <= found.keys()
    for name, difference in found.items():
        assert difference <= 1e-5, name
