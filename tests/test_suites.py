"""Every test is in exactly one suite of `scripts/test`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

SCRIPT = Path(__file__).parent.parent / "scripts" / "test"


@pytest.fixture(scope="module")
def suites() -> dict[str, Expression]:
    """The `-m` expression of every suite."""
    found = re.findall(r'^(\w+)\) .*?pytest -m "([^"]+)"', SCRIPT.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return {name: Expression.compile(expression) for name, expression in found}


def test_there_are_three_suites(suites: dict[str, Expression]) -> None:
    assert list(suites) == ["unit", "integration", "slow"]


def test_every_test_is_in_exactly_one_suite(
    suites: dict[str, Expression], collected: dict[str, frozenset[str]]
) -> None:
    assert collected
    for test, marks in collected.items():
        chosen = [
            name for name, suite in suites.items() if suite.evaluate(lambda mark, marks=marks, **_: mark in marks)
        ]
        assert len(chosen) == 1, f"{test} is in {chosen}"
