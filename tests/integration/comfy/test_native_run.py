"""Runs of streamed native models: shared visits, errors, short memory, automatic policies, events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(900)]

NATIVE_CASES = "native_run_cases"
STEPS = 3
SHARED = "the conditions share each visit"


def test_conditions_that_share_visits_give_the_same_bits_for_half_the_bytes(
    answers: dict[str, Any], case: Callable[[str], Any]
) -> None:
    families = [name.removeprefix("shared ") for name in answers if name.startswith("shared ")]
    assert len(families) >= 12
    for family in families:
        result = case(f"shared {family}")
        apart, together = result["apart"], result["together"]
        assert result["equal"] == [True] * 5, family
        assert together["notes"] == [SHARED], family
        assert together["visits"] * 2 == apart["visits"], family
        assert together["recompiled"] == apart["recompiled"] == 0, family
        # Blocks of a step that the step before has left in buffers are fetched once less.
        assert sum(together["bytes"][1:]) <= 0.55 * sum(apart["bytes"][1:]), family
        assert together["fetches"] <= together["visits"], family
        assert result["threads"] == []


def test_three_conditions_share_visits(case: Callable[[str], Any]) -> None:
    result = case("three conditions")
    assert result["equal"] == [True] * 3
    assert result["notes"] == [SHARED]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("DIFFUSION_MODEL", "the diffusion_model wrapper counting"),
        ("APPLY_MODEL", "the apply_model wrapper counting"),
        ("function", "the model function wrapper with_function"),
        ("replacement", "a replacement of dit blocks"),
    ],
)
def test_passes_stay_apart_where_another_node_may_count_them(
    case: Callable[[str], Any], change: str, reason: str
) -> None:
    result = case(f"prevented {change}")
    assert result["equal"] == [True, True]
    assert len(result["notes"]) == 1
    assert result["notes"][0].startswith(f"no shared visits, because of {reason}")
    assert result["recompiled"] == 0


def test_patches_of_attention_do_not_prevent_it(case: Callable[[str], Any]) -> None:
    result = case("prevented attention")
    assert result["equal"] == [True, True]
    assert result["notes"] == [SHARED]


@pytest.mark.parametrize("at", [1, 5, 9])
@pytest.mark.parametrize(("error", "raised"), [("error", "ValueError"), ("interrupt", "InterruptProcessingException")])
def test_an_error_of_one_condition_ends_the_run(case: Callable[[str], Any], error: str, raised: str, at: int) -> None:
    result = case(f"{error} at {at}")
    assert result == {"raised": raised, "running": False, "threads": [], "equal": True}


@pytest.mark.parametrize("share", [False, True])
def test_a_call_without_memory_is_repeated_with_a_smaller_policy(case: Callable[[str], Any], share: bool) -> None:
    result = case(f"short of memory, swap, {share}")
    assert result["raised"] == ""
    assert result["equal"]
    assert result["after"]
    assert len([note for note in result["notes"] if note.startswith("out of memory in call ")]) == 2
    assert (result["running"], result["threads"]) == (False, [])


@pytest.mark.parametrize("share", [False, True])
def test_a_run_ends_in_words_where_no_policy_is_smaller(case: Callable[[str], Any], share: bool) -> None:
    result = case(f"short of memory, layerwise, {share}")
    assert result["raised"].startswith("InsufficientMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert "make the video or image smaller" in result["raised"]
    assert result["after"]
    assert (result["running"], result["threads"]) == (False, [])


def test_an_automatic_policy_is_chosen_once_and_kept(case: Callable[[str], Any]) -> None:
    result = case("automatic")
    assert result["equal"] == [True] * 3
    assert result["presents"] == [True], "chosen after the first call of the first run, which is layerwise"
    (note,), *later = result["notes"]
    assert note.startswith("after the first call: 3 of 4 stream")
    assert note.endswith(" 0.500 s per call predicted")
    assert later == [[], []]
    assert result["requested"]
    assert result["loaded"]


def test_a_run_is_announced_at_the_node_that_executes(case: Callable[[str], Any]) -> None:
    result = case("announced")
    calls = 2 * STEPS - 1  # heun calls the model once in its last step
    heun = ["wanstream.begin", *["wanstream.step"] * calls, "wanstream.end"]
    assert result["names"] == [*heun, *heun, "wanstream.begin", "wanstream.end"]
    assert result["nodes"] == ["12:3"]
    assert result["predicted"] == [STEPS, calls, STEPS], "a run like the last one is known"
    assert result["settings"]["size"].startswith("latent 1x16x")
    assert result["errors"] == [None, None, "broken"]
    for record in result["records"]:
        assert record["bytes_moved"] > 0
        assert 0 < record["compute_s"] <= record["wall_s"]
