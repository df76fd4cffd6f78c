"""Fun-Control and Fun-InP in a real ComfyUI: tiny models load and run natively.

Every input changes the result. `fun_cases.py` has the models, their conditioning and the native
runs to compare other samplers with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from wanstream.tests.support.rounding import ROUNDING

NATIVE_CASES = "fun_cases"

CLIP, IMAGE, REFERENCE = "clip_vision_output", "concat_latent_image", "reference_latents"
MASK, INDEX = "concat_mask", "concat_mask_index"
CONTROL_22 = [IMAGE, MASK, INDEX, REFERENCE]

# ComfyUI's class, the network's input channels, and the conditioning keys.
MODELS = {
    "fun_control_22": ("WAN21", 52, CONTROL_22),
    "fun_inp_22": ("WAN21", 36, [IMAGE, MASK]),
    "fun_control_21": ("WAN21", 48, [CLIP, IMAGE]),
    "fun_control_21_reference": ("WAN21", 48, [CLIP, IMAGE, REFERENCE]),
    "fun_inp_21": ("WAN21", 36, [CLIP, IMAGE, MASK]),
    "fun_control_5b": ("WAN22", 148, CONTROL_22),
    "fun_inp_5b": ("WAN22", 100, [IMAGE, MASK]),
}
EFFECT = 0.01
"""A hundred times the largest distance allowed to other samplers."""

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(1800)]

Case = Callable[[str], Any]


def test_every_model_is_there(case: Case) -> None:
    assert case("names") == list(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_a_fun_model_runs_natively(case: Case, name: str) -> None:
    kind, channels, keys = MODELS[name]
    found = case(name)
    assert found["warnings"] == []
    assert found["class"] == kind
    assert found["channels"] == [channels, channels]
    assert found["keys"] == keys
    assert found["reference"] == [REFERENCE in keys] * 2
    latent = [1, 48 if kind == "WAN22" else 16, 3, 4, 6]
    assert found["shapes"] == [latent, latent]
    assert found["velocity"] <= ROUNDING, "one forward pass is what the network returns"
    assert found["finite"]
    assert 0.1 < found["std"] < 10
    assert found["repeats"] == [True, True]
    assert min(found["experts"], found["guided"]) > EFFECT


@pytest.mark.parametrize("name", MODELS)
def test_the_network_gets_what_the_description_says(case: Case, name: str) -> None:
    """Image, inverted mask and reference, normalised and in their order."""
    found = case(name)
    assert found["described"] <= 1e-6
    assert ("described reference" in found) == (REFERENCE in MODELS[name][2])
    assert found.get("described reference", 0) <= 1e-6


@pytest.mark.parametrize("name", MODELS)
def test_every_input_changes_the_result(answers: dict[str, Any], case: Case, name: str) -> None:
    changes = {
        key for key in answers if key.startswith((f"{name}, other", f"{name}, no", f"{name}, mask"))
    }
    assert len(changes) >= 4
    assert (f"{name}, mask" in changes) == (MASK in MODELS[name][2])
    for change in sorted(changes):
        assert min(case(change)) > EFFECT, change


@pytest.mark.parametrize("name", MODELS)
def test_two_samples_run_at_once(case: Case, name: str) -> None:
    found = case(f"{name}, batch")
    assert found["shape"][0] == 2
    assert found["between"] > EFFECT
