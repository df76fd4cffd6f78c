"""Heavy words: counts, and rates in this project."""

from __future__ import annotations

import pytest

from wanstream.tools.prose_rates import LIMITS, page_prose, python_prose, rates, texts

SOURCE = '''"""Size of a block; see `of`."""
NAME = "of that which"
"""Its name."""
# Those of a comment.
x = 1  # noqa: E501
'''


def test_docstrings_and_comments_count_and_code_does_not() -> None:
    found = rates(iter([python_prose(SOURCE)]))
    assert found.words == 11
    counts = {word: round(rate * found.words / 1000) for word, rate in found.per_thousand.items()}
    assert counts == {"that": 0, "of": 2, "its": 1, ";": 1, "those": 1, "which": 0}
    assert found.comments_per_thousand_lines == 200


def test_code_of_a_page_does_not_count() -> None:
    page = "One `of of` word.\n```\nof that; which\n```\nAnd its end.\n"
    found = rates(iter([page_prose(page)]))
    assert (found.words, found.per_thousand["of"], found.per_thousand["its"]) == (5, 0, 200)


@pytest.mark.parametrize(
    ("kind", "more"),
    # Pages include help pages, which repeat tooltips.
    [("code", {}), ("pages", {"of": 29, "its": 3.7, ";": 9, "those": 0.6})],
)
def test_rates_of_the_project_stay_below_their_limits(kind: str, more: dict[str, float]) -> None:
    found = rates(texts(kind)).per_thousand
    limits = {**LIMITS, **more}
    assert {word: rate for word, rate in found.items() if rate > limits[word]} == {}
