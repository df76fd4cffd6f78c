"""Streamed native models in ComfyUI's hands: errors, interrupts, eviction and deletion.

`native_life_cases.py` has the cases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(1800)]

NATIVE_CASES = "native_life_cases"
ITEMS = """
import native_life_cases
answer = native_life_cases.queue_items(*arguments)
"""

Case = Callable[[str], Any]


@pytest.mark.parametrize("policy", ["layerwise", "block swap"])
@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize(
    ("kind", "error"),
    [("error", "ZeroDivisionError"), ("interrupt", "InterruptProcessingException")],
)
def test_a_run_ends_before_the_next_block(
    case: Case, kind: str, error: str, place: int, policy: str
) -> None:
    """In the first pass, whose order is not known, and later. The next run is right."""
    result = case(f"{kind} {place}, {policy}")
    assert result["raised"] == error
    assert result["later"] == []
    assert not result["running"]
    assert result["threads"] == result["said"] == []
    assert result["listed"] == 1
    assert result["equal"] == [True, True]


def test_an_error_that_a_wrapper_catches_does_not_end_the_run(case: Case) -> None:
    assert case("retried") == {"equal": True, "later": True, "threads": []}


def test_free_unloads_and_the_next_run_loads(case: Case) -> None:
    result = case("/free")
    assert result["equal"] == [True] * 3
    assert result["sizes"] == [[1, True], [0, 0, 0]] * 2


@pytest.mark.parametrize("policy", ["block swap", "resident"])
def test_other_models_evict_blocks(case: Case, policy: str) -> None:
    result = case(f"evicted, {policy}")
    assert result["equal"] == [True] * 4
    enough, everything = zip(*result["freed"], strict=True)
    assert enough[:2] == (True, True)
    assert everything == (False, False, True)
    assert result["listed"] == [1, 1, 0]


def test_a_vae_that_loads_during_a_run_evicts_nothing(case: Case) -> None:
    assert case("neighbour") == {"equal": [True, True], "listed": [1] * 6, "after": 1, "left": 0}


def test_two_types_of_one_file_are_two_models(case: Case) -> None:
    result = case("two types")
    assert result["equal"] == [True] * 5
    assert result["listed"] == [1, 1]
    assert result["engines"] == 2
    decoded, kept = result["buffers"]
    assert decoded >= 2 * kept
    assert result["differ"]


def test_clones_share_an_engine_and_an_entry(case: Case) -> None:
    assert case("clones") == {"equal": [True] * 4, "listed": 1, "engines": 1}


@pytest.mark.parametrize("when", ["while loaded", "when unloaded"])
def test_a_model_that_nobody_holds_is_gone(case: Case, when: str) -> None:
    result = case(f"deleted {when}")
    handles, mappings = result["opened"]
    assert handles
    assert not mappings, "a page of a file that is cut would end the process"
    assert result["openings"][1] == result["openings"][0] == [0, 0], (
        "handles and mappings of the file"
    )
    assert result["gone"] == [True, True]
    assert result["said"] == result["threads"] == []
    assert result["listed"] == 0


def test_a_file_that_is_removed(case: Case) -> None:
    """A loaded model keeps the handle.

    After unloading, the next run names the file it cannot read.
    """
    result = case("file removed")
    assert result["equal"] == [True, True]
    assert result["later"]
    assert "wan_t2v_fp16.safetensors" in result["refused"]
    assert "No such file" in result["refused"]
    assert result["said"] == result["threads"] == []
    assert not result["running"]


def test_queue_items_leave_no_memory_behind(
    in_comfyui: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The process's resident bytes are flat within 2 % after two items.

    By then all threads have their heaps.
    """
    result = in_comfyui(ITEMS, str(tmp_path_factory.mktemp("items")), 5, seconds=300)
    assert len(set(result["results"])) == 1
    assert result["left"] == [0] * 5
    for state in ("loaded", "evicted"):
        sizes = result[state][2:]
        assert max(sizes) <= 1.02 * min(sizes), result
    assert min(result["loaded"]) > 1.05 * max(result["evicted"]), "the experts show"
