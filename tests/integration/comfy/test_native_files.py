"""Common forms of native model files, streamed or refused by name.

Streamed files have the same values as the usual form. One process runs all cases
(`native_file_cases.py`). Here each has a separate test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

NATIVE_CASES = "native_file_cases"

Case = Callable[[str], Any]

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(1800)]

EQUAL = [
    *(
        f"prefix {name}."
        for name in (
            "diffusion_model",
            "transformer",
            "video_model",
            "unet",
            "_orig_mod",
            "pipe.dit",
        )
    ),
    *(
        f"prefix {name}."
        for name in ("model", "net", "model.model", "model.diffusion_model", "module._orig_mod")
    ),
    *(
        "prefix module.model.diffusion_model.",
        "fp8 transformer.",
        "fp8 model.",
        "flux transformer.",
    ),
    "whole checkpoint",
    *(
        f"gguf {name}"
        for name in ("good", "block modulation", "one modulation", "head modulation", "all")
    ),
    *(f"gguf patches {name}" for name in ("folded", "as a matrix", "flat")),
    *(f"scaled_fp8 torch.{dtype}" for dtype in ("bfloat16", "float16")),
]
MARKED = [
    *(f"comfy_quant torch.{dtype}" for dtype in ("bfloat16", "float16", "float64")),
    *(f"marker {name}" for name in ("string", "bare", "NUL", "strings")),
]
"""Cases ComfyUI 0.3.64 cannot run."""


def lacks_marks(answers: dict[str, Any]) -> bool:
    return not answers["formats"]


@pytest.mark.parametrize("name", EQUAL)
def test_the_latent_is_that_of_the_usual_form(case: Case, name: str) -> None:
    assert case(name) == "equal"


@pytest.mark.parametrize("name", MARKED)
def test_markers_and_their_scales_in_other_spellings(
    answers: dict[str, Any], case: Case, name: str
) -> None:
    if lacks_marks(answers):
        pytest.skip("this ComfyUI has no layers that are marked one by one")
    assert case(name) == "equal"


@pytest.mark.parametrize(
    "name",
    [
        *(
            "one",
            "one bf16",
            "one scale_weight",
            "one e5m2 fp64",
            "rows",
            "rows bf16",
            "rows vector fp16",
        ),
        *("int8 rows", "int8 rows bf16", "int8 one", "blocks", "int8 blocks"),
    ],
)
def test_scales_without_a_marker(answers: dict[str, Any], case: Case, name: str) -> None:
    """ComfyUI rounds int8 layer inputs, so only the file with markers has equal results there."""
    result = case(f"unmarked {name}")
    assert result.get("marked", "equal") == "equal"
    if "marked" not in result or "int8" not in name:
        assert result["values"] == "equal"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "two models",
            ["two.safetensors", "holds 2 diffusion models, under the prefixes 'high.' and 'low.'"],
        ),
        (
            "part",
            ["part.safetensors", "not a diffusion model that this ComfyUI detects", "blocks.0."],
        ),
        (
            "uint8 scales",
            ["blocks.0.self_attn.q is torch.float8_e4m3fn with scales in torch.uint8, as in mxfp8"],
        ),
        ("no weight", ["weight_scale is a scale, but blocks.0.self_attn.q.weight is missing"]),
        ("two scales", ["blocks.0.self_attn.q has two scales"]),
        ("quanto", ["is quantised as quanto", "blocks.0.self_attn.q.weight._data"]),
        (
            "one without a scale",
            ["blocks.0.self_attn.q.weight is torch.float8_e4m3fn without a scale, though others"],
        ),
        (
            "other spelling",
            [
                "blocks.0.self_attn.q.scale has the name of a scale of blocks.0.self_attn.q in an "
                "unkn"
            ],
        ),
    ],
)
def test_files_without_a_meaning_are_refused(case: Case, name: str, words: list[str]) -> None:
    assert [word for word in ["refused", *words] if word not in case(name)] == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "marked bf16",
            "marked as float8_e4m3fn, but blocks.0.self_attn.q.weight is torch.float32",
        ),
        (
            "marked without a scale",
            "marked as float8_e4m3fn, but blocks.0.self_attn.q.weight_scale is missing",
        ),
        (
            "marked without a weight",
            "marked as float8_e4m3fn, but blocks.0.self_attn.q.weight is missing",
        ),
        (
            "nvfp4 without scales",
            "marked as nvfp4, but blocks.0.self_attn.q.weight_scale_2 is missing",
        ),
    ],
)
def test_marked_layers_without_a_part_are_refused(
    answers: dict[str, Any], case: Case, name: str, words: str
) -> None:
    if lacks_marks(answers):
        pytest.skip("this ComfyUI has no layers that are marked one by one")
    assert words in case(name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *((name, "q.comfy_quant is not JSON") for name in ("no JSON", "empty")),
        *((name, "q.comfy_quant is not a JSON object") for name in ("null", "list", "number")),
        (
            "no format",
            "layer blocks.0.self_attn.q is quantised as None, which this ComfyUI does not have",
        ),
        ("list as format", "layer blocks.0.self_attn.q is quantised as ['float8_e4m3fn'], which"),
        ("dict as format", "layer blocks.0.self_attn.q is quantised as {}, which"),
        ("unknown", "layer blocks.0.self_attn.q is quantised as int2, which"),
        *(
            (f"{kind} as layer", "for the layer blocks.0.self_attn.q, not")
            for kind in ("null", "list", "number")
        ),
        ("no format in header", "layer blocks.0.self_attn.q is quantised as None, which"),
        (
            "list as format in header",
            "layer blocks.0.self_attn.q is quantised as ['float8_e4m3fn'], which",
        ),
        ("no layers", "_quantization_metadata has no layers"),
        ("layers as list", "_quantization_metadata has no layers"),
        ("list at top", "_quantization_metadata is not a JSON object"),
        ("no JSON in header", "_quantization_metadata is not JSON"),
    ],
)
def test_broken_markers_are_refused_with_file_and_layer(
    answers: dict[str, Any], case: Case, name: str, words: str
) -> None:
    if lacks_marks(answers):
        pytest.skip("this ComfyUI has no layers that are marked one by one")
    found = case(f"marker {name}")
    assert found.startswith("refused: ")
    assert "marker.safetensors" in found
    assert words in found
