"""Streamed native models: shared visits, errors, short memory, automatic policies, events."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(1800)]

NATIVE_CASES = "native_run_cases"
STEPS = 3
SHARED = "the conditions share each visit"


IN_OTHER_TESTS = {
    "Chroma", "ErnieImage", "Krea2", "Lumina2", "MiniMaxH3", "SD3", "WAN_Animate2",
}  # fmt: skip
"""Family classes that `test_native_models.py` runs with shared visits."""


def test_conditions_that_share_visits_give_the_same_bits_for_half_the_bytes(
    answers: dict[str, Any], case: Callable[[str], Any]
) -> None:
    families = [name.removeprefix("shared ") for name in answers if name.startswith("shared ")]
    assert len(families) >= 12
    classes = set()
    for family in families:
        result = case(f"shared {family}")
        classes.add(result["class"])
        apart, together = result["apart"], result["together"]
        assert result["equal"] == [True] * 5, family
        assert together["notes"] == [SHARED], family
        # The first call shows whether ComfyUI computes the conditions one after the other.
        assert together["visits"] * 2 * STEPS == apart["visits"] * (STEPS + 1), family
        assert together["recompiled"] == apart["recompiled"] == 0, family
        # Blocks left in buffers by the step before are fetched once less.
        assert sum(together["bytes"][1:]) <= 0.55 * sum(apart["bytes"][1:]), family
        assert together["fetches"] <= together["visits"], family
        assert result["threads"] == []
    tested = {*case("tested models")}
    assert classes | (tested & IN_OTHER_TESTS) == tested, (
        "a class that shares visits by itself is tested"
    )


def test_three_conditions_share_visits(case: Callable[[str], Any]) -> None:
    result = case("three conditions")
    assert result["equal"] == [True] * 3
    assert result["notes"] == [SHARED]


@pytest.mark.parametrize("mode", ["on", "auto"])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("DIFFUSION_MODEL", "the diffusion_model wrapper counting"),
        ("APPLY_MODEL", "the apply_model wrapper counting"),
        ("function", "the model function wrapper with_function"),
        ("replacement", "a replacement of dit blocks"),
        ("apply_model", "the replaced apply_model"),
        ("callback", "the on_prepare_state callback with_callback"),
    ],
)
def test_passes_stay_apart_where_another_node_may_count_them(
    case: Callable[[str], Any], change: str, reason: str, mode: str
) -> None:
    result = case(f"prevented {change}, {mode}")
    assert result["equal"] == [True, True]
    assert len(result["notes"]) == 1
    assert result["notes"][0].startswith(f"no shared visits, because of {reason}")
    assert result["recompiled"] == 0


APART = ("attention", "override", "state", "compiled block")
"""Stateless code from other packs: the result does not depend on the pass order."""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("attention", "the attn2_patch with_attention_patch"),
        ("override", "the optimized_attention_override with_attention_override"),
        ("state", "the cache SimpleNamespace"),
        ("compiled block", "the compiled blocks.1"),
        ("object", "the replaced blocks.1.ffn.forward"),
        ("injection", "the replaced blocks.1.ffn.forward"),
        ("method", "the replaced forward_orig"),
        ("hook", "the hook with_hook"),
        ("subclass", "the replaced blocks.1.ffn.forward"),
    ],
)
def test_code_inside_the_layers_shares_visits_only_where_it_is_required(
    case: Callable[[str], Any], change: str, reason: str
) -> None:
    apart, together = (case(f"prevented {change}, {mode}") for mode in ("auto", "on"))
    assert apart["equal"][0]
    assert together["equal"][0] == (change in APART)
    assert together["notes"] == [SHARED]
    (note,) = apart["notes"]
    assert note.startswith(f"no shared visits, because of {reason}")
    assert note.endswith('("on" in share_visits shares them all the same)')
    assert apart["visits"] > together["visits"]


@pytest.mark.parametrize("name", ["optimized_attention", "forward"])
def test_replaced_functions_of_a_class_or_a_module_are_seen(
    case: Callable[[str], Any], name: str
) -> None:
    result = case("replaced function")[name]
    assert result["equal"] == [True, True]
    assert (
        f"no shared visits, because of the replaced {'blocks.0.' * (name == 'forward')}{name}"
        in result["notes"][0]
    )


def test_settings_of_earlier_runs_do_not_decide(case: Callable[[str], Any]) -> None:
    result = case("changed settings")
    assert all(run["equal"] for name, run in result.items() if name != "cfg 1")
    for name in (
        "cfg after cfg 1",
        "on",
        "auto after off",
        "auto after on",
        "fixed",
        "automatic after fixed",
    ):
        assert result[name]["notes"] == [SHARED], name
    assert result["cfg 1"]["notes"] == result["off"]["notes"] == []


def test_conditions_that_fit_into_one_pass_later_are_computed_as_comfyui_does(
    case: Callable[[str], Any],
) -> None:
    assert case("room later") == {"equal": [True, True], "notes": [[SHARED], []]}


def test_a_kind_of_run_that_was_out_of_memory_shares_no_visits_again(
    case: Callable[[str], Any],
) -> None:
    result = case("out of memory once")
    assert result["equal"] == [True, True]
    first, second = result["notes"]
    stopped = "no shared visits, because of a call that was out of memory with them"
    assert first == [
        SHARED,
        "out of memory in call 1: the conditions no longer share visits",
        stopped,
    ]
    assert second == [stopped]


def test_an_untested_model_shares_no_visits_by_itself(case: Callable[[str], Any]) -> None:
    result = case("untested class")
    assert result["equal"] == [True, True]
    assert result["notes"][0].startswith("no shared visits, because of the untested model WAN21")


def test_no_visits_are_shared_without_memory_for_the_activations(
    case: Callable[[str], Any],
) -> None:
    result = case("short of room")
    assert result["equal"] == [True, True]
    assert result["notes"] == [
        "no shared visits, because of the memory: 2 conditions at once may need 2.00 MB, 1.00 MB "
        "are free"
    ]


@pytest.mark.parametrize(("faster", "shares"), [(0.5, True), (0.97, False)])
def test_an_automatic_policy_shares_visits_where_that_saves_time(
    case: Callable[[str], Any], faster: float, shares: bool
) -> None:
    result = case(f"lanes {faster}")
    blocks = result["blocks"]
    assert result["equal"] == [True] * 3
    assert result["asked"] == [1, 2], (
        "passes with and without shared visits, after the first call of the first run"
    )
    assert result["visits"] == [(STEPS + 1 if shares else 2 * STEPS) * blocks] * 2
    wait = (
        "no shared visits, because of the time: more blocks in the memory that the conditions need"
    )
    assert [note.startswith(SHARED if shares else wait) for note in result["notes"]] == [True, True]
    assert result["short"][0].startswith(
        f"no shared visits, because of the {'memory' if shares else 'time'}: "
    )


def test_a_call_without_memory_is_first_repeated_without_shared_visits(
    case: Callable[[str], Any],
) -> None:
    result = case("short of memory, swap, auto")
    assert result["raised"] == ""
    assert result["equal"]
    assert result["notes"][1:] == [
        "out of memory in call 1: the conditions no longer share visits",
        "no shared visits, because of a call that was out of memory with them",
        "out of memory in call 1: block_swap 3, 1 ahead instead of block_swap 1, 1 ahead",
    ]


@pytest.mark.parametrize("at", [1, 5, 9])
@pytest.mark.parametrize(
    ("error", "raised"), [("error", "ValueError"), ("interrupt", "InterruptProcessingException")]
)
def test_an_error_of_one_condition_ends_the_run(
    case: Callable[[str], Any], error: str, raised: str, at: int
) -> None:
    result = case(f"{error} at {at}")
    assert result == {"raised": raised, "running": False, "threads": [], "equal": True}


@pytest.mark.parametrize("share", [False, True])
def test_a_call_without_memory_is_repeated_with_a_smaller_policy(
    case: Callable[[str], Any], share: bool
) -> None:
    result = case(f"short of memory, swap, {share}")
    assert result["raised"] == ""
    assert result["equal"]
    assert result["after"]
    assert len([note for note in result["notes"] if note.startswith("out of memory in call ")]) == 2
    assert (result["running"], result["threads"]) == (False, [])


@pytest.mark.parametrize("share", [False, True])
def test_a_run_ends_in_words_where_no_policy_is_smaller(
    case: Callable[[str], Any], share: bool
) -> None:
    result = case(f"short of memory, layerwise, {share}")
    assert result["raised"].startswith(
        "InsufficientMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    )
    assert "make the video or image smaller" in result["raised"]
    assert result["after"]
    assert (result["running"], result["threads"]) == (False, [])


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("wan_t2v", {"blocks.*.ffn"}),
        ("flux", {"double_blocks.*.img_mlp"}),
        ("qwen_image", {"transformer_blocks.*.img_mlp"}),
    ],
)
def test_feed_forwards_in_chunks_give_the_same_bits(
    case: Callable[[str], Any], family: str, kinds: set[str]
) -> None:
    result = case(f"in chunks, {family}")
    by_policy, *of_error = result["notes"]
    assert result["equal"] == [True] * (1 + len(of_error))
    assert result["replaced"] == []
    found = [
        re.search(r"feed-forwards \((.*)\) are computed in chunks of 1024", n) for n in by_policy
    ]
    assert {each[1] for each in found if each} == kinds
    assert len(of_error) == (2 if family == "qwen_image" else 0)
    if not of_error:
        return
    after_error, later = of_error
    assert after_error[0] == "out of memory in call 1: feed-forwards of 4096 tokens at once"
    assert not [note for note in later if note.startswith("out of memory")]
    assert [note for note in later if "in chunks of 4096 tokens" in note]


def test_a_first_call_keeps_in_ram_what_it_reads(case: Callable[[str], Any]) -> None:
    """Room for three and a half blocks: some stay, next to staging slots for the others."""
    result = case("first policy")
    assert 0 < result["kept"] < result["blocks"] == result["all fit"]
    assert result["reads"] == 3 * result["blocks"] - 2 * result["kept"]
    assert result["none fits"]


def test_a_first_load_does_without_ram_that_is_short(case: Callable[[str], Any]) -> None:
    assert case("first load, False") == {"tried": ["pinned"], "loaded": "pinned"}
    assert case("first load, True") == {"tried": ["pinned", "file"], "loaded": "file"}


def test_an_automatic_policy_is_chosen_once_and_kept(case: Callable[[str], Any]) -> None:
    result = case("automatic")
    assert result["equal"] == [True] * 3
    assert result["presents"] == [True], (
        "chosen after the first call of the first run, which is layerwise"
    )
    (note,), *later = result["notes"]
    assert note.startswith("after the first call: 3 of 4 stream")
    assert note.endswith(" 0.500 s per call predicted")
    assert later == [[], []]
    assert result["requested"]
    assert result["loaded"]


@pytest.mark.parametrize("share", [False, True])
def test_a_node_may_load_the_model_again_in_the_middle_of_a_pass(
    case: Callable[[str], Any], share: bool
) -> None:
    result = case(f"loaded again, {share}")
    assert result["equal"] == [True, True]
    assert result["done"]
    assert (result["recompiled"], result["steps"]) == (0, STEPS)


def test_other_patches_during_a_run_are_refused_in_words(case: Callable[[str], Any]) -> None:
    result = case("loaded with other patches")
    assert "loads the model with other LoRAs or patches while it runs" in result["raised"]
    assert (result["equal"], result["threads"]) == (True, [])


def test_a_refused_load_leaves_no_memory_that_comfyui_does_not_know(
    case: Callable[[str], Any],
) -> None:
    result = case("refused load")
    assert result["before"] > 0
    assert (result["listed"], result["loaded"]) == (False, 0)


@pytest.mark.parametrize("memory", ["RAM", "device"])
def test_a_run_goes_on_under_its_policy_if_there_is_no_memory_for_a_better_one(
    case: Callable[[str], Any], memory: str
) -> None:
    result = case(f"refused policy, {memory}")
    assert result["failed"]
    assert (result["equal"], result["after"], result["buffers"]) == (True, True, 2)
    assert any(note.startswith("layerwise, 1 ahead is kept: ") for note in result["notes"])
    assert "prefetch_blocks=1" in result["requested"]


def test_an_automatic_policy_leaves_room_for_conditions_that_are_computed_together(
    case: Callable[[str], Any],
) -> None:
    result = case("room for a batch")
    assert result["apart"] == 1_000_000
    assert result["lanes"] == 2_000_000
    assert (
        result["together"] == 3_000_000
    )  # 1.5 times the estimate for both: with less, ComfyUI computes them apart


@pytest.mark.parametrize("share", [False, True])
def test_a_call_inside_a_call_is_a_part_of_its_step(
    case: Callable[[str], Any], share: bool
) -> None:
    result = case(f"called inside a call, {share}")
    assert result["equal"] == [True, True]
    assert result["steps"] == STEPS


@pytest.mark.parametrize("share", [False, True])
def test_a_call_may_be_repeated_after_an_error(case: Callable[[str], Any], share: bool) -> None:
    assert case(f"repeated call, {share}") == {"equal": True, "steps": STEPS}


@pytest.mark.parametrize("share", [False, True])
def test_an_error_keeps_no_activations(case: Callable[[str], Any], share: bool) -> None:
    assert case(f"kept by an error, {share}") == [False] * 9


def test_a_block_may_be_computed_outside_of_a_pass(case: Callable[[str], Any]) -> None:
    result = case("block alone")
    assert result["equal"] == [True, True]
    assert all(math.prod(shape) for shape in result["shapes"]), "the block has its weights"


def test_bytes_on_a_device_are_known_before_blocks_are_decoded(case: Callable[[str], Any]) -> None:
    result = case("decoded on a device")
    assert result["used"] == result["predicted"]


def test_models_whose_runs_take_turns_need_the_buffers_of_one(case: Callable[[str], Any]) -> None:
    result = case("in turns")
    buffers = result["held"][0][0]
    assert buffers > 0
    absent = -result["outside"]
    turns = [[buffers, 0], [0, buffers]]
    assert result["held"] == [[buffers, absent], turns[1], *turns, [buffers, buffers]]


def test_a_run_is_announced_at_the_node_that_executes(case: Callable[[str], Any]) -> None:
    result = case("announced")
    calls = 2 * STEPS - 1  # heun's last step calls the model once
    heun = ["wanstream.begin", *["wanstream.step"] * calls, "wanstream.end"]
    assert result["names"] == [*heun, *heun, "wanstream.begin", "wanstream.end"]
    assert result["nodes"] == ["12:3"]
    (distilled,) = result["notices"][0]
    assert distilled.startswith("wan_lightx2v.safetensors needs no CFG, and cfg is 3: set it to 1")
    assert result["notices"][1:] == [[], []], "another model"
    assert result["predicted"] == [STEPS, calls, STEPS], "a run like the last one is known"
    assert result["settings"]["size"].startswith("latent 1x16x")
    assert result["errors"] == [None, None, "broken"]
    for record in result["records"]:
        assert record["bytes_moved"] > 0
        assert 0 < record["compute_s"] <= record["wall_s"]
