"""Two experts as one MODEL equal ComfyUI's own models bit by bit, whatever drives them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest

from wanstream.tests.support.rounding import ROUNDING

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(1800)]

NATIVE_CASES = "native_joined_cases"
FOREIGN = ("midpoints", "back and forth", "shifted")


def test_any_sampler_drives_both_experts_with_the_bits_of_comfyui(
    case: Callable[[str], Any],
) -> None:
    found = case("samplers")
    assert len(found) >= 24
    for name, result in found.items():
        assert result["equal"] == [True, True], name
        first, second = result["runs"]
        assert {"high", "low"} == set(first["experts"]), name
        assert first["experts"] == second["experts"], name
        # ComfyUI's samplers are dry-run, so the switch is predicted in the first run too.
        assert second["recompiled"] == 0, name
        if not name.startswith(FOREIGN):
            assert first["recompiled"] == 0, name


def test_the_switch_moves_the_bytes_of_other_steps(case: Callable[[str], Any]) -> None:
    for name, result in case("samplers").items():
        if "block swap" in name or "custom" in name:
            continue
        for run in result["runs"][1:]:
            assert len(set(run["bytes"])) == 1, name


def test_the_template_of_two_samplers_gives_the_same_bits_and_one_sampler_the_same_video(
    case: Callable[[str], Any],
) -> None:
    for steps, result in case("template").items():
        assert result["equal"], steps
        # Between two samplers ComfyUI removes the noise from the latent and adds it again.
        assert result["difference"] <= ROUNDING, steps
        one, two = result["bytes"]
        assert one <= two
        of_joined, of_two = result["buffers"]
        assert of_joined <= 0.51 * of_two


AROUND_A_SAMPLER = {"context windows", "EasyCache", "LazyCache"}


def test_patches_apply_to_both_experts_or_to_one(case: Callable[[str], Any]) -> None:
    found = case("patches")
    assert len(found) >= 12
    for name, result in found.items():
        assert result["changed"] or name in AROUND_A_SAMPLER
        assert result["both"] == [True, True], name
        assert result["clean"], name
        if name in AROUND_A_SAMPLER:
            assert "wrapper" in result["split"], name
            assert "which only both experts can have" in result["split"], name
        else:
            assert result["split"] is True, name
    for name in ("LoRA", "replaced forward"):
        assert found[name]["one"], name
        assert found[name]["differ"], name
    assert all(case("one_expert_options").values())


def test_a_shift_in_front_of_the_join_is_that_of_one_expert(case: Callable[[str], Any]) -> None:
    assert case("shifts") == {"both": True, "high": True, "split": [3.0, 3.0], "differ": True}


def test_experts_of_different_number_formats_have_the_bits_of_comfyui(
    case: Callable[[str], Any],
) -> None:
    found = case("formats")
    assert len(found) == 4
    for name, equal in found.items():
        assert equal == [True, True], name


def test_conditions_share_the_visits_of_both_experts(case: Callable[[str], Any]) -> None:
    found = case("shared_visits")
    for share, result in found.items():
        assert result["equal"] == [True, True], share
        assert result["runs"][1]["recompiled"] == 0
    apart, together = (found[share]["runs"][1]["bytes"] for share in ("off", "on"))
    assert sum(together[1:]) * 2 <= sum(apart[1:])
    experts = [name for name, _ in groupby(found["on"]["runs"][1]["experts"])]
    assert experts == ["high", "low"]


def test_feed_forwards_of_both_experts_are_computed_in_chunks(case: Callable[[str], Any]) -> None:
    result = case("chunks")
    assert result["equal"] == [True, True]
    notes = result["runs"][0]["notes"]
    assert [note.partition("(")[2][:3] for note in notes] == ["hig", "low"]


def test_joined_experts_share_memory_are_evicted_and_leave_their_models_alone(
    case: Callable[[str], Any],
) -> None:
    assert case("lives") == {
        "equal": [True] * 5,
        "shared": True,
        "unloaded": [True, 0, 0],
        "again": True,
        "dropped": [True] * 3,
        "originals": True,
    }


def test_each_expert_has_its_own_conditioning(case: Callable[[str], Any]) -> None:
    assert case("conditioned") == {"wan22_i2v": [True, True], "wan_vace": [True, True]}
    assert case("own_conditioning")


REFUSED = {
    "boundary": "the boundary is 1.5: give 0 to 1",
    "no number": "the boundary is nan",
    "family": "the class is WAN21 and Flux, the latent format is Wan21 and Flux",
    "variant": "in_dim is 16 and 36",
    "width": "dim is 256 and 384",
    "plain": "the low-noise MODEL does not stream: connect Load Diffusion Model (streamed)",
    "joined": "the high-noise MODEL is joined already",
    "no model": "the high-noise MODEL does not stream",
    "policies": "connect the same policy to both loaders",
    "sampler wrapper": "the outer_sample wrapper cache, which only both experts can have",
    "bound in front": "has replaced diffusion_model.blocks.0 by a module that holds",
    "bound behind": "has replaced diffusion_model.blocks.0 by a module that holds",
    "split": "this MODEL has one expert",
    "saved": "two experts cannot be saved as one",
    "merged": "two experts cannot be merged as one",
    "two levels": "noise levels from 0.1000 to 0.9000, on both sides of the boundary 0.875",
}


def test_what_is_not_a_pair_is_refused_with_both_values(case: Callable[[str], Any]) -> None:
    found = case("refusals")
    assert found.keys() == REFUSED.keys()
    for name, words in REFUSED.items():
        assert words in found[name], name


def test_a_level_at_the_boundary_is_of_the_high_noise_expert(case: Callable[[str], Any]) -> None:
    assert case("at_the_boundary") == ["high"] * 4


def test_a_lora_of_another_family_changes_nothing(case: Callable[[str], Any]) -> None:
    assert case("foreign_lora") == [True, True]
