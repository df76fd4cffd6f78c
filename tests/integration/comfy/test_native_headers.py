"""Real architectures' headers: the loader finds ComfyUI's class and the blocks in the docs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from wanstream.tools.comfyui import ComfyUI

NATIVE_CASES = "native_header_cases"

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(1800)]

DOCS = Path(__file__).parents[3] / "docs" / "native-families.md"


def _rows() -> dict[str, list[str]]:
    """Return sizes in the docs' tables by family."""
    rows = {}
    for line in DOCS.read_text(encoding="utf-8").splitlines():
        _, *cells, _ = line.split(" | ") if line.startswith("| ") else ("", "")
        if cells and cells[0].endswith(" GB"):
            name = line.split(" | ")[0].removeprefix("| ")
            rows[name.partition(",")[0].partition(" (")[0]] = cells[:3]
    return rows


def test_the_loader_finds_the_blocks_that_the_docs_list(
    answers: dict[str, Any], comfyui: ComfyUI
) -> None:
    if not answers and comfyui.version() < (0, 33):
        pytest.skip("not in this ComfyUI")
    found = {name: each.get("figures", each) for name, each in answers.items()}
    assert found == _rows()
    assert all(each["class"] for each in answers.values())
