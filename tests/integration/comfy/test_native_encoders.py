"""Streamed text encoders and checkpoints against ComfyUI's own loaders.

`native_encoder_cases.py` has the cases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(1800)]

NATIVE_CASES = "native_encoder_cases"

Case = Callable[[str], Any]

ENCODERS = (
    *("umt5", "t5", "clip-l and t5", "clip-l and llama", "qwen2.5-vl", "qwen3", "qwen3-vl"),
    *("gemma2", "gemma3", "umt5, 24 layers", "qwen3-vl, 36 layers", "gemma3, 48 layers"),
    *("clip-l, clip-g and t5", "clip-l, clip-g, t5 and llama", "gemma4"),
    *("gemma4 and projection", "gemma4 without vision layers", "t5-gemma", "gpt-oss"),
)
CHANGED = ("umt5", "clip-l and t5", "qwen2.5-vl")
STORED = ("clip-l and llama", "gpt-oss", "gemma4 and projection")


@pytest.mark.parametrize("name", ENCODERS)
def test_encodings_have_the_bits_of_comfyuis_loader_in_two_blocks_of_memory(
    newer_case: Case, name: str
) -> None:
    found = newer_case(name)
    assert found["equal"] in ([True] * 3, [True] * 5)
    # Only the first encoding may fetch one part that the text does not need.
    assert found["fetched"] <= found["blocks"] + 1
    assert found["buffers"] == 2
    assert found["outside"] < 1  # the tokens' table, by far the largest tensor, is not among them
    assert found["kept"] == [0, 0]


@pytest.mark.parametrize("form", ["float32", "bfloat16", "scaled fp8"])
@pytest.mark.parametrize("name", [*CHANGED, *STORED])
def test_files_of_all_formats_have_the_bits_of_comfyuis_loader(
    newer_case: Case, name: str, form: str
) -> None:
    *equal, in_file = newer_case(f"{name}, {form}")
    assert equal == [True] * 3
    # ComfyUI converts some fp32 tables when it loads them.
    assert in_file or form == "float32"


@pytest.mark.parametrize("name", CHANGED)
def test_loras_of_several_strengths_have_the_bits_of_comfyuis_loader(case: Case, name: str) -> None:
    found = case(f"{name}, LoRA")
    assert found["equal"] == [True] * 5
    assert found["differs"]
    assert "a hook changes 1 weights that stream" in found["hook"]
    assert found["hook for the MODEL"] == "not refused"
    loader = "Load CLIP (Dual)" if "and" in name else "Load CLIP"
    assert found["hook"].endswith(f"or load this model with {loader}")


@pytest.mark.parametrize("name", CHANGED)
def test_an_encoding_may_end_at_an_earlier_layer(case: Case, name: str) -> None:
    assert case(f"{name}, layers") == [True] * 4


@pytest.mark.parametrize("name", CHANGED)
def test_clips_are_saved_with_their_patches(case: Case, name: str) -> None:
    found = case(f"{name}, saved")
    assert found == [True, True] or "which then saves models weight by weight" in found


@pytest.mark.parametrize("name", ["gemma2", "gemma2 with a head"])
def test_generated_texts_are_those_of_comfyuis_loader(case: Case, name: str) -> None:
    found = case(f"{name}, generated")
    assert found["streamed"] == found["own"]
    assert found["after"]


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        ("layerwise", [0, False]),
        ("block swap", [2, False]),
        ("resident", [4, False]),
        ("RAM", [0, True]),
    ],
)
def test_an_encoding_keeps_only_what_the_policy_asks_for(
    case: Case, policy: str, kept: list[float]
) -> None:
    found = case(f"policy {policy}")
    assert found["equal"] == [True] * 3
    assert found["kept"] == kept
    assert found["unloaded"] == [0, 0]
    assert found["freed"]


def test_the_clip_of_another_loader_streams_with_its_patches(case: Case) -> None:
    found = case("stream clips")
    assert found["equal"] == [True] * 3
    assert found["weights"] == 2  # a streaming CLIP's weights are used again


def test_an_image_for_a_file_without_vision_is_refused(case: Case) -> None:
    found = case("without vision")
    assert found["equal"]
    assert "visual." in found["image"]
    assert "choose a file of the whole encoder" in found["image"]


def test_files_and_policies_that_do_not_fit_are_refused(case: Case) -> None:
    found = case("refusals")
    assert "is too small to be worth streaming" in found["small"]
    assert "load it with Load CLIP (Dual)" in found["small"]
    assert "blocks_to_swap is 99" in found["policy"]
    assert "lora.safetensors: has no weights of the text encoders" in found["wrong"]
    assert "changed after it was opened" in found["cut while it streams"]
    assert found["running"] == "False"
    assert "is truncated" in found["cut"]


def test_the_parts_of_a_checkpoint_are_those_of_comfyuis_loader(case: Case) -> None:
    found = case("checkpoint")
    assert found["model"]
    assert found["vae"] == ["VAE", True]
    assert found["clip"] == [True, True]
    assert found["streams"] == [True, False]
    assert found["hook"].endswith("or load this model with Load Checkpoint")
    assert found["copy"].endswith("load the model with Load Checkpoint for that node")
    assert "load it with Load Checkpoint" in found["small"]


def test_a_checkpoint_may_be_a_bare_model(case: Case) -> None:
    found = case("bare checkpoint")
    assert found["model"]
    assert found["clip"] is True
