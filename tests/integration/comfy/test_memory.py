"""ComfyUI's real memory manager over our experts, on a made-up device (`memory_cases.py`)."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.comfy, pytest.mark.slow, pytest.mark.timeout(600)]

ASK = """
from memory_cases import answers
answer = answers(*arguments)
"""

SHAPE = {"layers": 12, "heads": 1, "ffn_dim": 256}


Case = Callable[[str], Any]


@pytest.fixture(scope="module")
def answers(
    in_comfyui: Callable[..., Any], tiny_expert_file: Callable[..., Path]
) -> dict[str, Any]:
    high, low = (tiny_expert_file(seed=seed, **SHAPE) for seed in (1, 2))
    results: dict[str, Any] = in_comfyui(ASK, str(high), str(low), seconds=600)
    return results


def test_comfyui_frees_for_us_what_is_planned_and_no_more(case: Case) -> None:
    enough, short = case("room_for_what_is_planned")
    assert enough == [True, 0, "cuda:0"], "the neighbour keeps all of its bytes"
    assert short == [True, 1000, "cuda:0"]


def test_weights_stay_for_the_next_run(case: Case) -> None:
    stays = case("weights_stay_for_the_next_run")
    assert stays["bytes"][0] > 0
    assert stays["bytes"][1] == 0
    assert stays["outer"] == [True, False]
    assert stays["equal"]
    assert stays["as planned"]
    assert (stays["listed"], stays["neighbour"], stays["messages"]) == (2, True, [])


def test_other_models_evict_us_block_by_block(case: Case) -> None:
    evicted = case("evicted_block_by_block")
    for case, blocks in zip(evicted["found"], (1, 5, 8), strict=True):
        assert case == {
            "blocks gone": blocks,
            "listed": 2,
            "neighbour": True,
            "equal": True,
            "back": True,
        }
    freed = re.compile(r"freed [\d.]+ [MG]B of 8.81 GB for another model: (\d) blocks")
    lines = [freed.fullmatch(line) for line in evicted["messages"]]
    assert [line and line[1] for line in lines] == ["1", "5", "8"], evicted["messages"]


def test_what_blocks_do_not_make_up_for_and_free_empty_us(case: Case) -> None:
    whole = case("evicted_as_a_whole")
    assert (whole["left"], whole["listed"], whole["neighbour"]) == (0, 1, True)
    assert whole["after /free"] == [0, 0]
    assert whole["equal"]
    assert whole["again"]
    assert len(whole["messages"]) == 2
    assert all("the experts are unloaded" in line for line in whole["messages"])


@pytest.mark.parametrize(
    ("flag", "policy"),
    [
        ("normal", ["block_swap", 9, 1]),
        ("low", ["block_swap", 9, 1]),
        ("high", ["block_swap", 6, 1]),
        ("none", ["layerwise", 0, 1]),
        ("not smart", ["block_swap", 9, 1]),
    ],
)
def test_what_is_loaded_under_a_flag(case: Case, flag: str, policy: list[object]) -> None:
    loaded = case("flags")[flag]
    assert loaded["policy"] == policy
    assert loaded["same again"]
    assert loaded["stays"] == (flag != "not smart"), "beside a small model that loads after us"
    lines = [line for line in loaded["messages"] if "are free for the experts" in line]
    assert len(lines) == (0 if flag == "high" else 2)
    assert all(" instead of " in line and "6 of 12 blocks resident" in line for line in lines)


def test_what_is_reserved_is_not_taken(case: Case) -> None:
    assert case("reserve_counts") == [["block_swap", 6], ["block_swap", 8], ["layerwise", 0]]


def test_room_that_comes_back_is_used(case: Case) -> None:
    assert case("room_that_comes_back") == {
        "as fits": [True] * 4,
        "equal": True,
        "less": [10, True],
    }


def test_a_model_with_dynamic_vram_evicts_us_too(case: Case) -> None:
    evicted = case("a_dynamic_model_evicts_us")
    assert evicted["dynamic"]
    assert evicted["blocks gone"] == 3
    assert evicted["listed"] == ["Dynamic", "ExpertsPatcher"]
    assert len(evicted["messages"]) == 1


def test_other_experts_take_our_place(case: Case) -> None:
    others = case("other_experts")
    assert len(others["listed"]) == 1, "experts that nobody holds leave the list"
    assert others["taken"] == [False, True]
    assert len(others["with guider"]) == 1, "experts that were closed for a guider's leave it too"
    assert others["dead"] == [False]
    assert others["guider"] == [True, True, 5.0]
    assert len(others["after"]) == 1
    assert others["default shift"] == 8.0
    assert others["equal"]


def test_what_we_lock_is_in_comfyuis_count(case: Case) -> None:
    pins = case("pins")
    if pins is None:
        pytest.skip("this ComfyUI does not count page-locked memory")
    assert pins["after a run, when another model loads"] == pins["again"] == pins["there"] == 5100
    assert pins["ours"] == [5000, 5000, 5000]
    assert pins["when RAM is short"] == (100 if pins["every model is asked"] else 5100)
    gone = [count for name, count in pins.items() if name.startswith("gone")]
    assert gone == [100] * 5


@pytest.mark.parametrize("kind", ["smart", "not smart"])
def test_experts_that_run_stay_and_can_be_evicted_after_the_run(case: Case, kind: str) -> None:
    evicted = case("evicted_while_running")[kind]
    if evicted is None:
        pytest.skip(
            "this ComfyUI forgets every model with --disable-smart-memory, whatever the model says"
        )
    assert (evicted["equal"], evicted["listed"], evicted["left"]) == (True, 1, 0)
    assert evicted["messages"].startswith("the experts are running: their ")


def test_experts_stay_on_the_list_when_their_guider_goes_and_when_a_policy_is_refused(
    case: Case,
) -> None:
    others = case("experts_of_a_guider_that_is_gone")
    assert others["refused"].startswith("blocks_to_swap is 99")
    assert (others["listed"], others["left"]) == ([1, 1], [0, 0, 0])


def test_out_of_memory_leaves_nothing_behind(case: Case) -> None:
    oom = case("out_of_memory")
    assert oom["loading"] == [0, 0]
    assert oom["held"], "it is ComfyUI that unloads all after a run"
    assert oom["running"] == [0, 0]
    assert oom["equal"]


def test_comfyui_finds_a_model(case: Case) -> None:
    model = case("as_a_model")
    assert model["clones"] == [True, True, True]
    assert model["shift"] == [8.0, 3.0]
    assert "Wan Guider" in model["refusal"]
    assert model["latent"]
    assert (model["dtype"], model["memory grows"], model["parameters"]) == (
        "torch.float32",
        True,
        0,
    )
    assert model["both lanes"], (
        "ComfyUI keeps room for the least, and the negative is computed in the same pass"
    )


def test_a_step_that_is_short_of_memory_is_taken_again_under_comfyuis_eyes(case: Case) -> None:
    assert case("short_of_memory_in_a_step") == {
        "equal": True,
        "changes": 2,
        "smaller": True,
        "listed": 1,
        "back": [True, True],
    }


def test_what_the_planner_chooses_is_what_comfyui_has_room_for(case: Case) -> None:
    """Memory that a neighbour can free counts, reserved memory does not.

    The load keeps the chosen policy.
    """
    plenty, reserved = case("chosen_by_the_planner")
    assert plenty[1:] == reserved[1:] == [True, True]
    assert plenty[0] - reserved[0] == 4
    assert plenty[0] >= 5


def test_other_models_make_room_for_measuring_and_no_more(case: Case) -> None:
    over, stays = case("room_to_measure")
    assert 0 <= over < 2**20
    assert stays


def test_other_models_make_room_for_a_decode_and_no_more(case: Case) -> None:
    """Whole frames as long as neighbours can free the missing bytes.

    Tiles if all their memory is not enough.
    """
    beside = case("room_for_a_decode")
    assert beside["neighbour"][:3] == [[None, 1, 0, 0], [None, 1, 1001, 0], [None, 1, 2**30 + 1, 0]]
    pixels, over, given, lines = beside["neighbour"][3]
    assert 64 <= pixels < 832
    assert (over, given, lines) == (-(2**30), 2**32, 1)
    assert beside["experts"] == [True, 1.0]
