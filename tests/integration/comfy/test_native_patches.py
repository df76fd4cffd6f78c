"""LoRAs, merging, saving, hooks and compiled blocks on streamed native models.

The results are compared with ComfyUI's own. One process runs all cases (`native_patch_cases.py`).
Here each has a separate test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

NATIVE_CASES = "native_patch_cases"

KINDS = ["lora", "kohya", "dora", "loha", "lokr", "diff"]
NUMBER_FORMATS = ["fp32", "bf16", "fp8"]

Case = Callable[[str], Any]

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(1800)]


LORAS = [
    *(("wan_t2v", kind, dtype) for kind in KINDS for dtype in NUMBER_FORMATS),
    *(("flux", kind, "fp32") for kind in KINDS if kind != "lora"),
    *(("flux", kind, dtype) for kind in ("lora", "offset") for dtype in NUMBER_FORMATS),
]


@pytest.mark.parametrize(("family", "kind", "dtype"), LORAS)
def test_a_lora_gives_the_bits_of_comfyui(case: Case, family: str, kind: str, dtype: str) -> None:
    found = case(f"{kind} {family} {dtype}")
    assert found["equal"]
    assert found["effect"] > 0.1


def test_clones_share_the_weights_and_keep_their_own_patches(case: Case) -> None:
    found = case("clones")
    assert found["equal"] == [True] * 5
    assert found["different"] == 3
    assert found["is_clone"] == [True, True, False]
    assert found["same weights"] == [True, True, False, False]
    assert found["one engine"] == 1


@pytest.mark.parametrize("dtype", NUMBER_FORMATS)
def test_a_lora_is_added_once_to_a_block_that_stays(case: Case, dtype: str) -> None:
    found = case("arrival")
    for place in ("kept", "resident"):
        assert found[f"{dtype} {place}"] == {
            "additions": [found[f"{dtype} matrices"], 0, 0],
            "functions": False,
        }


def test_a_clone_for_another_gpu_streams_from_the_file(case: Case) -> None:
    assert case("multigpu") == {"equal": [True] * 4, "own weights": 4}


def test_another_dtype_to_compute_with(case: Case) -> None:
    assert case("compute_dtype") == {"equal": [True, True], "same": False}


def test_functions_of_other_nodes_on_weights(case: Case) -> None:
    assert case("wrapper") == {"equal": True}


def test_a_lora_for_another_architecture_changes_nothing(case: Case) -> None:
    assert case("foreign lora") == {"patches": [0, 0], "equal": True}


@pytest.mark.parametrize("source", ["file", "fp8 file", "checkpoint", "memory"])
def test_stream_model_carries_everything_over(case: Case, source: str) -> None:
    found = case("stream_model")[source]
    assert found["equal"]
    theirs, ours = found["calls"]
    assert sorted(ours) == sorted(theirs)
    assert len(ours) - ours.count("attn2") == 8  # Wan lacks attn2 in ComfyUI 0.3.64
    assert found["attached"] == "attached"
    assert found["bound"], "object patches that are methods belong to the model that streams"
    assert found["again"] == [True, True, True], "another policy for what streams already"
    assert found["other"] == [True, True], "a clone without patches shares the weights"
    assert found["given"] == [True, True], "the given MODEL is still usable"
    assert found["ours after theirs"]
    (line,) = found["log"]
    if source == "memory":
        assert (
            "is not known: its blocks stream from the 16.8 MB of RAM that they occupy, which saves "
            "VRAM only" in line
        )
    elif "is not known" not in line:  # in ComfyUI 0.3.64
        assert line.endswith("checkpoint.safetensors" if source == "checkpoint" else ".safetensors")


def test_merged_models(case: Case) -> None:
    found = case("merge")
    assert found.keys() == {
        "simple fp32",
        "blocks fp32",
        "subtract fp32",
        "add fp32",
        "matrices fp8",
    }
    assert all(all(equal) and equal for equal in found.values()), found


def test_merging_rounds_as_loading_does(case: Case) -> None:
    found = case("cast_merge")
    assert found["dtypes"] == ["torch.float8_e4m3fn", "torch.float32"]
    assert found["equal"]
    assert found["read"] == 0, "weights that stream are views of the file"


def test_saved_files_are_equal_to_those_of_comfyui(case: Case) -> None:
    found = case("save")
    if isinstance(found, str):  # ComfyUI 0.3.64 patches all weights in memory to save them
        assert "a node needs all weights of the model in memory" in found
    else:
        assert found.keys() == {"lora fp32", "diff fp32", "lora fp8", "None bf16"}
        assert all(equal == [True, True] for equal in found.values()), found


def test_a_file_that_was_changed_is_refused_in_words_whatever_reads_it(case: Case) -> None:
    """The process is alive: a cut mapped file would have ended it."""
    found = case("changed_file")
    assert len(found) == 7
    for kind, outcomes in found.items():
        for road, outcome in outcomes.items():
            # ComfyUI 0.3.64 cannot save or extract without all weights in memory.
            known = (
                f"changed_{kind.replace(' ', '_')}.safetensors" in outcome
                or "needs all weights" in outcome
            )
            assert known, (kind, road, outcome)
    assert all("SourceError" in outcomes["sample"] for outcomes in found.values())


def test_an_extracted_lora_is_that_of_comfyui(case: Case) -> None:
    found = case("extract")
    if isinstance(found, str):
        assert "a node needs all weights of the model in memory" in found
        return
    assert found["keys"]
    assert found["equal"]
    assert found["count"] > 100
    assert found["largest"] > 0.01


def test_hooks(case: Case) -> None:
    found = case("hooks")
    assert found["transformer options"] is True
    assert found["weights of another model"] is True
    assert found["weights change"]
    assert found["weights"].startswith(
        "a hook changes 40 weights that stream, diffusion_model.blocks.0.self_attn.q."
    )
    assert "use Load LoRA for the whole run" in found["weights"]


@pytest.mark.parametrize("way", ["wrapper", "object patches"])
def test_compiled_blocks(case: Case, way: str) -> None:
    found = case("compile")[way]
    assert found["equal"] == [True] * 4
    assert found["with a LoRA"]
    native, ours = found["graphs"]
    assert ours == native > 0, "blocks of a kind share their graphs"
    assert found["visits"] == [8, 8, 0]
    assert "compile the blocks instead (diffusion_model.blocks.0 and so on)" in found["whole"]


def test_compiling_the_whole_model_is_refused(case: Case) -> None:
    found = case("compile")
    assert found["node"].startswith("ValueError: diffusion_model is compiled as a whole")
    assert all(
        "put that node behind Stream Model" in message for message in found["stream model behind"]
    )


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "small",
            "the model is too small to be worth streaming (0.02 GB in its blocks, from 2 GB on): "
            "use it as it is",
        ),
        ("small file", "GB in its blocks, from 2 GB on)"),
        ("no lists", "the model has no list of blocks to stream (WAN21)"),
        (
            "quantised",
            "diffusion_model.blocks.0.ffn.0.weight is a _Quantised, which only that loader's "
            "layers can read",
        ),
        (
            "dynamic",
            "use Load Diffusion Model (streamed), or start ComfyUI with --disable-dynamic-vram",
        ),
        ("force_patch_weights", "a node needs all weights of the model in memory"),
    ],
)
def test_what_is_refused(case: Case, what: str, message: str) -> None:
    assert message in case("refused")[what]
