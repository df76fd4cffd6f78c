"""Native models that stream give the bits that ComfyUI's own give (`native_cases.py`), and move each block once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(900)]

ASK = """
import native_cases
answer = native_cases.answers(*arguments)
"""

FAMILIES = [
    "wan_t2v", "wan_i2v", "wan22_i2v", "wan22_ti2v", "wan_vace", "wan_vace_twice", "wan22_animate", "wan22_s2v",
    "wan_humo", "wan_camera", "wan_scail", "flux", "qwen_image", "hunyuan_video_15", "ltx_2",
]  # fmt: skip
NEWER = {"wan_scail", "hunyuan_video_15", "ltx_2"}
"""Families that ComfyUI 0.3.64 does not have."""

SAMPLERS = ["euler", "heun", "dpm_2", "uni_pc", "dpmpp_2m_sde", "dpm_fast", "dpm_adaptive", "lcm"]
ADAPTIVE = {"dpm_adaptive"}
"""Samplers whose number of passes depends on the latents."""


@pytest.fixture(scope="module")
def found(in_comfyui: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    results: dict[str, Any] = in_comfyui(ASK, str(tmp_path_factory.mktemp("native")), seconds=900)
    return results


Case = Callable[[str], Any]


@pytest.fixture
def case(found: dict[str, Any]) -> Case:
    """`case(name)` returns the result of a case, or fails with its traceback."""

    def result(name: str) -> Any:
        value = found[name]
        assert not (isinstance(value, dict) and "error" in value), value["error"]
        return value

    return result


def _check_fetches(found: dict[str, Any], *, layerwise: bool) -> None:
    """Check that the second run fetches a block once per visit, or less where blocks are resident."""
    (_, fetches), (_, visits) = found["fetches"], found["visits"]
    # A run may start with the two blocks that the last one has left.
    least = visits - 2 if layerwise else 0
    assert least <= fetches <= visits
    assert all(moved == stored > 0 for moved, stored in found["bytes"][:1])
    assert all(moved == stored for moved, stored in found["bytes"])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_gives_the_same_bits(found: dict[str, Any], case: Case, family: str) -> None:
    names = [name for name in found if name.startswith(f"family {family},")]
    if family in NEWER and not names:
        pytest.skip("not in this ComfyUI")
    assert {name.split(", ")[1] for name in names} == {"bf16", "fp16", "fp32", "fp8", "fp8 kept"}
    assert {name.split(", ")[2] for name in names} >= {"layerwise", "block swap"}
    for name in names:
        result = case(name)
        assert result["finite"], name
        assert result["equal"] == [True, True], name
        assert result["recompiled"][1] == 0, name
        _check_fetches(result, layerwise=name.endswith("layerwise"))
        if name.endswith("resident"):
            assert result["fetches"] == [result["blocks"], 0]


@pytest.mark.parametrize("family", ["wan_t2v", "flux"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_sampler_gives_the_same_bits(case: Case, family: str, sampler: str) -> None:
    result = case(f"sampler {family}, {sampler}")
    assert result["finite"]
    assert result["equal"] == [True, True]
    assert result["recompiled"][1] == 0 or sampler in ADAPTIVE
    _check_fetches(result, layerwise=SAMPLERS.index(sampler) % 2 == 0 and sampler not in ADAPTIVE)
