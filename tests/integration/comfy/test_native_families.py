"""Tiny checkpoints for ComfyUI's native models, to compare streamed runs with."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(1800)]

NATIVE_CASES = "native_families"

INTERLEAVED = {
    "wan_vace": "b v b b v b b v b",
    "wan_vace_twice": "b vv b b vv b b vv b",
    "wan22_animate": "b f b b b b b f b b b b",
    "wan22_s2v": "b ai b b ai b b b ai",
    "flux": "d d d s s s s s",
    "hunyuan_video": "t t d d s s s s",
    "hunyuan_video_15": "t t d d d d",
}
"""Block orders in a pass, one letter per block, from the list's name."""

LETTERS = {
    "injector": "i",
    "injector_adain_layers": "a",
    "fuser_blocks": "f",
    "vace_blocks": "v",
    "single_blocks": "s",
    "double_blocks": "d",
}


def _letter(block: str) -> str:
    if block.startswith("txt_in."):
        return "t"
    return LETTERS.get(block.split(".")[-2], "b")


def test_every_family_is_whole(answers: dict[str, Any]) -> None:
    """Each block in each family changes the result, and ComfyUI finds all weights, even in fp8."""
    families = answers["families"]
    assert {"wan_t2v", "wan_vace", "flux"} <= families.keys()
    for name, found in families.items():
        assert found["warnings"] == found["idle"] == [], name
        assert found["finite"], name
        assert found["repeats"], name
        assert found["forwards"] in ([1, 2], [2, 2]), name
        assert 0 < found["difference"] < 0.3, name
        assert all(size < 5e6 for sizes in found["block bytes"].values() for size in sizes), name
        if name in INTERLEAVED:
            assert "".join(map(_letter, found["order"])) == INTERLEAVED[name].replace(" ", ""), name
        # LTX-2 runs text embedding connectors before the first pass.
        visited = {block.rpartition(".")[0] for block in (*found["order"], *found["outside"])}
        assert visited == set(found["blocks"]), name
        assert bool(found["outside"]) == (name == "ltx_2"), name


def test_scaled_fp8_and_loras(answers: dict[str, Any]) -> None:
    """Every scaled fp8 layout is close to the whole model, and every LoRA kind changes it."""
    for name, found in answers["layouts"].items():
        assert found["warnings"] == [], name
        assert found["unpatched"], name
        assert 0 < min(found["layouts"].values()) <= max(found["layouts"].values()) < 0.2, name
        assert all(patches >= 5 and change > 0.05 for patches, change in found["loras"].values()), (
            name
        )
        kinds = {"lora", "kohya", "dora", "loha", "lokr", "diff"} | (
            {"offset"} if name == "flux" else set()
        )
        assert found["loras"].keys() == kinds, name
