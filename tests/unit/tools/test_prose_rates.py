"""Heavy words: counts, and rates in this project."""

import pytest

from wanstream.tools.prose_rates import page_prose, python_prose, rates, texts

SOURCE = '''"""Size of a block; see `of`."""
NAME = "of that which"
"""Its name."""
# Those of a comment.
x = 1  # noqa: E501
'''


def test_docstrings_and_comments_count_and_code_does_not():
    found = rates(iter([python_prose(SOURCE)]))
    assert found.words == 11
    counts = {word: round(rate * found.words / 1000) for word, rate in found.per_thousand.items()}
    assert counts == {"that": 0, "of": 2, "its": 1, ";": 1, "those": 1, "which": 0}
    assert found.comments_per_thousand_lines == 200


def test_code_of_a_page_does_not_count():
    found = rates(iter([page_prose("One `of of` word.\n```\nof that; which\n```\nAnd its end.\n")]))
    assert (found.words, found.per_thousand["of"], found.per_thousand["its"]) == (5, 0, 200)


@pytest.mark.parametrize("kind", ["code", "tests", "pages"])
def test_rates_of_the_project_stay_below_their_limits(kind):
    assert rates(texts(kind)).over == {}
