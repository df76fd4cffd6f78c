"""Three clips continued by latent, against ComfyUI's samplers with conditions written by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CASES = """
import continue_cases
answer = continue_cases.answers(*arguments)
"""

pytestmark = pytest.mark.comfy

TOLERANCE = 1e-4
"""Relative L2 norm, for latents at the end of a clip."""


@pytest.fixture(scope="module")
def found(
    in_comfyui: Callable[..., Any],
    tiny_expert_file: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("continued")
    for seed, name in enumerate(("high", "low"), start=1):
        (folder / f"i2v_{name}.safetensors").symlink_to(tiny_expert_file(seed=seed, in_channels=36))
    answer: dict[str, Any] = in_comfyui(CASES, str(folder), seconds=600)
    return answer


@pytest.mark.parametrize("overlap", [1, 2])
def test_three_clips_are_those_of_native_nodes(found: dict[str, Any], overlap: int) -> None:
    result = found[f"overlap {overlap}"]
    assert result["shape"] == [1, 16, 5, 4, 6]
    assert max(result["differences"]) <= TOLERANCE, result
    assert result["effect"] > 10 * TOLERANCE, "a clip depends on the one before"


def test_latents_are_saved_and_loaded_on_either_side(found: dict[str, Any]) -> None:
    assert all(found["files"].values()), found["files"]
