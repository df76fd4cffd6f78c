"""A real ComfyUI's guider with a cache, more guidance and context windows.

It is compared with our own sampler. The cases (`guider_settings_cases.py`) run in the process for
`test_guider.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from wanstream.tests.support.rounding import ROUNDING

Case = Callable[[str], Any]

SAME = [
    "cache",
    "magnitudes",
    "guidance list",
    "NAG",
    "windows",
    "cache in windows",
    "magnitudes in still windows",
    "all",
]
LANES = {
    "cache": 2,
    "magnitudes": 2,
    "cache in windows": 8,
    "magnitudes in still windows": 6,
    "all": 8,
}
"""Most lanes per step, in runs with a cache."""

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(900)]


@pytest.mark.parametrize("settings", SAME)
def test_a_setting_does_what_it_does_in_our_own_sampler(case: Case, settings: str) -> None:
    found = case(f"settings same {settings}")
    assert found["difference"] <= ROUNDING
    assert found["effect"] > 0.01, "and not what it would be without"
    assert found["alike"], "expert, noise level, and what was left out of every call"
    assert found["recompiled"] == 0
    assert (sum(found["cached"]) > 0) == (settings in LANES)
    assert max(found["cached"]) <= LANES.get(settings, 0)
    assert (sum(found["skipped"]) > 0) == (
        settings in {"cache", "magnitudes", "magnitudes in still windows"}
    )


def test_settings_that_say_nothing_change_no_bit(case: Case) -> None:
    assert case("settings nothing changes") == {"cache": True, "guidance": True, "windows": True}


def test_all_of_them_in_a_sampler_that_calls_twice_in_a_step(case: Case) -> None:
    found = case("settings many calls")
    assert found["finite"]
    assert found["again"]
    assert found["unpredicted"], "the same bits where no call was predicted"
    assert found["recompiled"][0] == 0 < found["recompiled"][1]
    assert found["cached"] > 0
    assert not found["nag"], "what NAG put into the experts is out again"


def test_sigmas_without_a_step_give_the_latent_back(case: Case) -> None:
    assert case("settings no steps")


def test_nag_acts_beside_a_negative_that_a_sampler_reads(case: Case) -> None:
    found = case("settings held beside the negative")
    assert found["finite"]
    assert found["effect"] > 0.01


def test_room_is_made_for_windows_and_for_what_a_cache_keeps(case: Case) -> None:
    needed = case("settings room")
    assert needed["plain"] == needed["again"]
    assert needed["cache"] > needed["plain"] != needed["windows"]


def test_a_first_block_cache_keeps_its_block_under_a_policy_of_the_planner(case: Case) -> None:
    assert case("settings first stays") == {"equal": True, "keeps": True}


def test_steps_that_magnitudes_leave_out_are_predicted(case: Case) -> None:
    found = case("settings predicted skips")
    assert found["predicted"] == found["found"]
    assert sum(found["found"]) > 0


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("guidance list too long", "guidance_steps has 7 numbers for 6 steps"),
        ("NAG without a step", "NAG acts in steps of guidance 1, and this run has none"),
        ("windows too long", "windows of 29 frames (8 latent) are longer than the video of 25"),
        ("magnitudes, two calls", "the sampler heun makes 11 model calls"),
        ("magnitudes, other levels", "the cache was calibrated for 6 steps, this run has 4"),
        ("magnitudes, sampler of another pack", "the sampler foreign has unknown model calls"),
        ("magnitudes, moving windows", "the context windows shift in every step"),
    ],
)
def test_settings_that_do_not_fit_are_refused(case: Case, what: str, message: str) -> None:
    raised, text = case(f"settings refused {what}")
    assert raised == "RequestError", text
    assert message in text
