"""Native model files in every number format, streamed with little RAM.

The results are bit-equal to ComfyUI's own runs. One process runs all cases
(`native_format_cases.py`). Here each has a separate test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

NATIVE_CASES = "native_format_cases"

SCALED_LAYOUTS = ["comfy_quant", "metadata", "scaled_fp8"]
FORMATS = ["float8_e4m3fn", "float8_e5m2", "nvfp4", "mxfp8"]
BYTES_PER_VALUE = {"float8_e4m3fn": 1.0, "float8_e5m2": 1.0, "nvfp4": 0.5625, "mxfp8": 1.03125}
FLUX_VALUES, WAN_VALUES = 589824, 1048576
"""Values in the largest block's matrices."""
MEGABYTE = 1_000_000

Case = Callable[[str], Any]

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("layout", SCALED_LAYOUTS)
@pytest.mark.parametrize("family", ["wan_t2v", "flux"])
def test_scaled_fp8_is_bit_equal_and_stays_fp8_in_the_buffers(
    case: Case, family: str, layout: str
) -> None:
    result = case(f"scaled {family} {layout}")
    assert result["finite"]
    assert result["equal"] == [True] * 4
    assert result["buffer"] == {"wan_t2v": WAN_VALUES, "flux": FLUX_VALUES}[family]


@pytest.mark.parametrize("quantised", FORMATS)
@pytest.mark.parametrize("family", ["wan_t2v", "flux"])
def test_quantised_layers_are_bit_equal_and_stream_with_their_scales(
    case: Case, family: str, quantised: str
) -> None:
    result = case(f"mixed {family} {quantised}")
    assert result["finite"]
    assert result["equal"] == [True] * 4
    assert (
        result["buffer"]
        == BYTES_PER_VALUE[quantised] * {"wan_t2v": WAN_VALUES, "flux": FLUX_VALUES}[family]
    )


def test_all_formats_and_plain_layers_in_one_file(answers: dict[str, Any], case: Case) -> None:
    result = case("mixed wan_t2v all")
    assert set(answers["formats"]) >= set(FORMATS)  # newer versions have int8 and int4 as well
    assert result["equal"] == [True] * 4


@pytest.mark.parametrize("name", ["wan_t2v", "flux", "prefix"])
def test_gguf_is_the_decoded_file_loaded_by_comfyui(case: Case, name: str) -> None:
    result = case(f"gguf {name}")
    assert result["finite"]
    assert result["equal"] == [True] * 4


def test_keys_of_diffusers_are_converted_by_comfyui(case: Case) -> None:
    result = case("diffusers")
    assert result["finite"]
    assert result["equal"] == [True] * 4
    assert result["blocks"] == 8
    assert result["joined that stream"] == [], (
        "they are not in the file as a whole, and stay in memory"
    )


def test_quantised_layers_are_saved_as_they_are_in_the_file(case: Case) -> None:
    result = case("saved")
    assert result["layers"] > 20
    assert result["kept"] == result["quantised"] == 2 * result["layers"]
    assert result["equal"]
    assert "Load Diffusion Model" in result["with a LoRA"]


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "by row", "nvfp4", "mxfp8", "int8_tensorwise"])
def test_a_lora_on_quantised_layers_has_the_bits_of_comfyui(newer_case: Case, kind: str) -> None:
    result = newer_case(f"quantised patches {kind}")
    assert result["differ"]
    assert result["equal"] == [True] * 6
    theirs, *ours = result["products"]
    assert set(ours) == {theirs}, "a product of 8 bits stays one"


def test_packed_weights_take_a_lora_and_are_neither_saved_nor_merged(case: Case) -> None:
    result = case("gguf patches")
    assert result["differ"]
    assert result["equal"]
    for done in ("saved", "merged"):
        assert (
            "packed (GGUF), diffusion_model.blocks.0.self_attn.q.weight and others, and cannot be "
            f"{done}" in result[done]
        )


def test_large_parameters_of_a_block_stream_with_its_matrices(case: Case) -> None:
    result = case("large parameters")
    assert result["equal"] == [True] * 4
    assert result["buffer"] > result["usual"]


@pytest.mark.parametrize("kind", ["fp16", "nvfp4"])
def test_opening_takes_no_memory_for_blocks(case: Case, kind: str) -> None:
    result = case(f"opening {kind}")
    assert result["blocks"] == 4
    assert result["in blocks"] > 100 * MEGABYTE
    assert result["grown"] < result["outside"] + 64 * MEGABYTE
    # The limit means something only if blocks in memory would exceed it.
    assert result["in blocks"] > 64 * MEGABYTE


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "threshold",
            ["too small to be worth streaming", "0.01 GB", "from 2 GB on", "Load Diffusion Model"],
        ),
        ("blocks", ["too small to be worth streaming", "Stream small models", "WAN21"]),
        ("shape", ["does not fit WAN21", "norm3.weight", "255", "256", "2 such findings"]),
        (
            "truncated",
            ["header: ", "is truncated", "11799368 of 11800368 bytes", "download it again"],
        ),
        ("model.pt", ["header: ", "model.pt", "PyTorch pickle", "safetensors"]),
        ("model.ckpt", ["header: ", "model.ckpt", "PyTorch pickle"]),
        ("model.bin", ["header: ", "model.bin", "PyTorch pickle"]),
        ("no model", ["header: ", "not a diffusion model that this ComfyUI detects"]),
        ("missing", ["header: ", "missing.safetensors", "No such file"]),
    ],
)
def test_files_that_cannot_stream_are_refused(case: Case, name: str, words: list[str]) -> None:
    assert [word for word in words if word not in case("refusals")[name]] == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("text encoder", ["header: ", "GGUF of 't5encoder'", "not a diffusion model"]),
        ("unknown", ["header: ", "stored as IQ1_S", "Q4_K"]),
        (
            "weight type",
            ["header: ", "such as GGUF", "choose the weight type default instead of fp8_e4m3fn"],
        ),
    ],
)
def test_gguf_files_that_cannot_stream_are_refused(case: Case, name: str, words: list[str]) -> None:
    assert [word for word in words if word not in case("gguf refusals")[name]] == []


def test_an_unknown_quantisation_is_refused_by_name(case: Case) -> None:
    for words in ("header: ", "blocks.1.self_attn.q", "int2_mystery", "update ComfyUI"):
        assert words in case("unknown format")


def test_a_unet_whose_blocks_are_not_called_is_refused(case: Case) -> None:
    assert "too small to be worth streaming (0.69 GB in its blocks, from 2 GB on)" in case(
        "without lists"
    )
    assert "(SDXL)" in case("without lists")
    assert "Load Diffusion Model" in case("without lists")


def test_a_file_that_is_changed_or_removed_is_named_and_works_again_when_it_is_back(
    case: Case,
) -> None:
    result = case("changed file")
    assert result["first"]
    assert "changed.safetensors" in result["changed"]
    assert "was changed after it was opened" in result["changed"]
    assert result["as before"]
    assert "changed.safetensors" in result["removed"]
    assert "No such file" in result["removed"]
    assert result["back"]
