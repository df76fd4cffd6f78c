"""Constants refused because they would silently become another value."""

from __future__ import annotations

from typing import Any

import pytest

from wanstream.host.input_values import InputValueError, plain_value, same_choice

READ: list[tuple[str, Any, Any]] = [
    *(("BOOLEAN", value, bool(value)) for value in (True, False, 1, 0)),
    *(("INT", value, 24) for value in (24, 24.0, "24", " 24 ")),
    ("INT", 2**64 - 1, 2**64 - 1),
    *(("FLOAT", value, 3.5) for value in (3.5, "3.5")),
    ("FLOAT", 4, 4.0),
    ("STRING", "", ""),
    ("STRING", 12, "12"),
    ("LATENT", None, None),
]
REFUSED = {
    "BOOLEAN": [
        "disable",
        "enable",
        "false",
        "true",
        "False",
        "no",
        "off",
        "0",
        "1",
        "",
        None,
        2,
        -1,
        0.0,
        1.0,
        {},
    ],
    "INT": [
        64.7,
        -0.5,
        True,
        False,
        None,
        "",
        "64.7",
        "64.0",
        "many",
        float("nan"),
        float("inf"),
        {"a": 1},
    ],
    "FLOAT": [
        float("nan"),
        float("inf"),
        -float("inf"),
        "nan",
        "Infinity",
        10**400,
        True,
        None,
        "",
        "many",
        {},
    ],
    "STRING": [None, True, {}, {"text": "a cat"}],
}
REMEDY = {
    "BOOLEAN": "is not true or false: write true or false, without quotes",
    "INT": "is not a whole number: write one",
    "FLOAT": "is not a finite number: write one",
    "STRING": "is not a text: write one in quotes",
}


@pytest.mark.parametrize(("io_type", "value", "read"), READ)
def test_a_constant_with_one_meaning_is_converted(io_type: str, value: Any, read: Any) -> None:
    converted = plain_value(io_type, value)
    assert converted == read
    assert type(converted) is type(read)


@pytest.mark.parametrize(
    ("io_type", "value"), [(kind, value) for kind in REFUSED for value in REFUSED[kind]]
)
def test_a_constant_that_python_would_change_is_refused_with_what_to_write(
    io_type: str, value: Any
) -> None:
    with pytest.raises(InputValueError, match=REMEDY[io_type]) as refused:
        plain_value(io_type, value)
    assert len(str(refused.value)) < 150


@pytest.mark.parametrize(
    ("value", "choices", "found"),
    [
        ("wan22\\high.sft", ["wan22/high.sft", "high.sft"], "wan22/high.sft"),
        ("a\\b/c.sft", ["a/b/c.sft"], "a/b/c.sft"),
        ("wan22/high.sft", ["wan22\\high.sft"], "wan22\\high.sft"),
        ("a\\b", ["a/b", "a\\b"], "a\\b"),
        ("high.sft", ["wan22/high.sft"], "high.sft"),
        (7, ["7"], 7),
    ],
)
def test_a_name_with_other_slashes_is_the_same(value: Any, choices: list[str], found: Any) -> None:
    assert same_choice(value, choices) == found
