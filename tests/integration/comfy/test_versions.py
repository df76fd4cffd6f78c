"""ComfyUI's names in `host/comfy`, tried on this ComfyUI (`version_cases.py`)."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(600)]

CASES = """
import version_cases
answer = version_cases.answers()
"""
VERSIONS = Path(__file__).parents[3] / "host" / "comfy" / "versions.py"


def names() -> Iterator[str]:
    """Yield what `versions.py` defines."""
    for node in ast.parse(VERSIONS.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


@pytest.fixture(scope="module")
def found(in_comfyui: Callable[..., Any]) -> dict[str, dict[str, str]]:
    results: dict[str, dict[str, str]] = in_comfyui(CASES, seconds=500)
    return results


@pytest.mark.parametrize("name", sorted(names()))
def test_a_private_name_is_as_we_use_it(found: dict[str, dict[str, str]], name: str) -> None:
    fault = found["private"][name]
    assert not fault, fault


def test_no_case_is_of_a_name_that_is_gone(found: dict[str, dict[str, str]]) -> None:
    assert found["private"].keys() == {*names()}


def test_public_names_exist_and_take_our_arguments(found: dict[str, dict[str, str]]) -> None:
    assert found["public"] == {}


def test_overridden_methods_take_comfyuis_arguments(found: dict[str, dict[str, str]]) -> None:
    assert found["overridden"] == {}
