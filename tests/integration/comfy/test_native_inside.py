"""Native model blocks that a model or a node enters from their inner modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

NATIVE_CASES = "native_inside_cases"

Case = Callable[[str], Any]

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(1800)]

POLICIES = ["layerwise", "block swap", "resident", "RAM"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_node_may_compute_blocks_from_their_modules(case: Case, policy: str) -> None:
    """An MLP called for each piece of the tokens is fetched once per visit."""
    found = case(f"in parts, {policy}")
    assert found["effect"]
    assert found["equal"] == [True, True]
    assert found["recompiled"] == [0, 0]
    assert found["visits"] == [3 * found["blocks"]] * 2
    assert found["fetches"][0] <= found["visits"][0]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_node_may_begin_to_do_so_in_a_later_step(case: Case, policy: str) -> None:
    found = case(f"in parts later, {policy}")
    assert found["effect"]
    assert found["equal"] == [True] * 3
    (note,) = (note for notes in found["notes"] for note in notes)  # in one run only
    assert note.startswith("call 1 was repeated: another node used modules of block ")
    assert found["recompiled"][2] == 0


@pytest.mark.parametrize("run", [*POLICIES, "shared"])
@pytest.mark.parametrize("adapter", ["nested", "nested whole"])
def test_a_block_may_be_used_inside_another_one(case: Case, adapter: str, run: str) -> None:
    found = case(f"{adapter}, {run}")
    assert found["effect"]
    assert found["equal"] == [True] * 3
    assert found["recompiled"][2] == 0


def test_modules_may_be_used_outside_a_run(case: Case) -> None:
    """An interrupt there does not keep the engine, and detaching removes all hooks."""
    assert case("outside") == {"equal": [True, True], "running": [False, False], "hooks": 0}


def test_hooks_inside_blocks_go_with_the_node_that_needed_them(case: Case) -> None:
    with_node, without = case("hooks inside")
    assert with_node > 0
    assert without == 0


def test_a_weight_that_is_read_directly_is_refused(case: Case) -> None:
    found = case("refused")
    assert "ffn.0.weight of block 0 of 'model' was used outside a visit of the block" in found
    assert "as Load Diffusion Model does" in found


@pytest.mark.parametrize("at", [1, 8])
@pytest.mark.parametrize("error", ["error", "interrupt", "shortage"])
def test_an_error_between_two_modules(newer_case: Case, error: str, at: int) -> None:
    found = newer_case(f"{error} at {at}")
    names = {"error": "ValueError", "interrupt": "InterruptProcessingException", "shortage": ""}
    assert found["raised"] == names[error]
    assert all(found["equal"])
    assert len(found["equal"]) == 1 + (error == "shortage"), "a shortage repeats the call"
    assert (found["running"], found["threads"]) == (False, [])


@pytest.mark.parametrize(
    "name",
    [
        *(
            f"lora {form}, {policy}"
            for form in ("bf16", "fp8 kept")
            for policy in ("layerwise", "RAM")
        ),
        "cache False",
        "cache True",
    ],
)
def test_animate_2_with_other_nodes(newer_case: Case, name: str) -> None:
    found = newer_case(name)
    assert found["equal"] == [True, True]
    assert found["effect"]
    assert found["recompiled"][1] == 0
