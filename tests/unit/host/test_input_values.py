"""Constants refused because they would silently become another value."""

import pytest

from wanstream.host.input_values import InputValueError, plain_value, same_choice

NAN = float("nan")
INF = float("inf")
READ = [
    *(("BOOLEAN", value, bool(value)) for value in (True, False, 1, 0)),
    *(("INT", value, 24) for value in (24, 24.0, "24", " 24 ")),
    ("INT", 2**64 - 1, 2**64 - 1),
    *(("FLOAT", value, 3.5) for value in (3.5, "3.5")),
    ("FLOAT", 4, 4.0),
    ("STRING", "", ""),
    ("STRING", 12, "12"),
    ("LATENT", None, None),
]
WORDS = ["disable", "enable", "false", "true", "False", "no", "off", "0", "1", ""]
REFUSED = {
    "BOOLEAN": (
        [*WORDS, None, 2, -1, 0.0, 1.0, {}],
        "is not true or false: write true or false, without quotes",
    ),
    "INT": (
        [64.7, -0.5, True, None, "", "64.7", "64.0", "many", NAN, INF, {"a": 1}],
        "is not a whole number: write one",
    ),
    "FLOAT": (
        [NAN, INF, -INF, "nan", "Infinity", 10**400, True, None, "", "many", {}],
        "is not a finite number: write one",
    ),
    "STRING": ([None, True, {}, {"text": "a cat"}], "is not a text: write one in quotes"),
}


@pytest.mark.parametrize(("io_type", "value", "read"), READ)
def test_constant_with_one_meaning_is_converted(io_type, value, read):
    converted = plain_value(io_type, value)
    assert (type(converted), converted) == (type(read), read)


@pytest.mark.parametrize("io_type", REFUSED)
def test_other_constant_is_refused_with_a_remedy(io_type):
    values, remedy = REFUSED[io_type]
    for value in values:
        with pytest.raises(InputValueError, match=remedy) as refused:
            plain_value(io_type, value)
        assert len(str(refused.value)) < 150


def test_name_with_other_slashes_is_the_same():
    for value, choices, found in (
        ("wan22\\high.sft", ["wan22/high.sft", "high.sft"], "wan22/high.sft"),
        ("a\\b/c.sft", ["a/b/c.sft"], "a/b/c.sft"),
        ("wan22/high.sft", ["wan22\\high.sft"], "wan22\\high.sft"),
        ("a\\b", ["a/b", "a\\b"], "a\\b"),
        ("high.sft", ["wan22/high.sft"], "high.sft"),
        (7, ["7"], 7),
    ):
        assert same_choice(value, choices) == found
