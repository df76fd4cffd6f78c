"""One expert (Wan2.1, TI2V-5B) in a real ComfyUI, through our sampler and our guider.

The results are compared with ComfyUI's own KSampler. Both sides load the same fp32 file, draw the
same noise and take the same conditioning, from WanImageToVideo with a CLIP Vision output if there
is an image. One process runs all cases (`one_expert_cases.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from wanstream.testing.components import save_vae_file
from wanstream.testing.weights import make_vae

NATIVE = 1e-4
SECONDS = 300

ASK = """
import one_expert_cases
answer = one_expert_cases.answers(*arguments)
"""

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(SECONDS)]


@pytest.fixture(scope="module")
def found(
    in_comfyui: Callable[..., Any],
    vae_width: int,
    tiny_expert_file: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Any]:
    """`found(case)` returns a case's result or fails with the traceback."""
    folder = tmp_path_factory.mktemp("one_expert")
    (folder / "t2v.safetensors").symlink_to(tiny_expert_file(seed=1))
    (folder / "i2v.safetensors").symlink_to(
        tiny_expert_file(seed=2, in_channels=36, image_dim=1280)
    )
    (folder / "ti2v.safetensors").symlink_to(tiny_expert_file(seed=3, in_channels=48))
    save_vae_file(make_vae(seed=3, base_dim=vae_width), folder / "vae.safetensors")
    answers = in_comfyui(ASK, str(folder), seconds=SECONDS)

    def results_of(case: str) -> Any:
        value = answers[case]
        assert not (isinstance(value, dict) and "error" in value), value["error"]
        return value

    return results_of


def test_text_to_video_is_the_native_sampler(found: Callable[[str], Any]) -> None:
    case = found("sampled")
    assert case["difference"] <= NATIVE
    assert case["boundary"], "what is set for a pair changes nothing"


@pytest.mark.parametrize("sampler", ["euler", "dpmpp_2m", "heun", "uni_pc", "euler_cfg_pp"])
def test_the_guider_runs_one_expert_in_every_call(
    found: Callable[[str], Any], sampler: str
) -> None:
    case = found(f"guided {sampler}")
    assert case["difference"] <= NATIVE
    assert case["boundary"], "what is set for a pair changes nothing"
    assert case["experts"] == ["high"]
    assert case["recompiled"] == 0
    assert case["bytes"] == 1


def test_image_to_video_with_what_clip_sees_is_the_native_sampler(
    found: Callable[[str], Any],
) -> None:
    case = found("image")
    for run in ("sampler", "guider", "guider, dpmpp_2m", "other"):
        assert case[run] <= NATIVE, run
    assert case["effect"] > 100 * NATIVE, "and what CLIP sees matters"


def test_the_guider_runs_ti2v_5b_from_text_and_from_a_frame_that_stays(
    found: Callable[[str], Any],
) -> None:
    case = found("frames")
    for kind in ("text", "image"):
        for sampler in ("euler", "dpmpp_2m", "heun"):
            assert case[f"{kind} {sampler}"] <= NATIVE, (kind, sampler)
    assert case["kept"] <= 1e-5
    assert case["effect"] > 100 * NATIVE


@pytest.mark.parametrize("way", ["sampler", "guider"])
def test_an_image_branch_without_an_image_embedding_is_refused(
    found: Callable[[str], Any], way: str
) -> None:
    raised, text = found(f"blind {way}")
    assert raised == "RequestError"
    assert (
        "the model has an image branch (Wan2.1 I2V), and the request has no image embedding" in text
    )
