"""LoRA strengths by step range, and their text."""

from dataclasses import replace
from pathlib import Path

import pytest

from wanstream.schema import StepRange, StepStrengths, parse_step_strengths
from wanstream.schema.refs import LoraRef
from wanstream.schema.step_strengths import StepStrengthsError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        (" , ;\n", []),
        ("3: 0.5", [(3, 3, 0.5)]),
        ("2-3: 0.5, 0 - 1 :0", [(0, 1, 0.0), (2, 3, 0.5)]),
        ("0: .5, 1: 1., 999999: +2", [(0, 0, 0.5), (1, 1, 1.0), (999_999, 999_999, 2.0)]),
        ("0-1: -1e-1; 4-4: 10\n7: 1", [(0, 1, -0.1), (4, 4, 10.0), (7, 7, 1.0)]),
    ],
)
def test_ranges_are_parsed_in_their_order(text, expected):
    ranges = tuple(StepRange(*each) for each in expected)
    assert parse_step_strengths(text) == ranges
    assert parse_step_strengths(", ".join(map(str, ranges))) == ranges


TWICE = "step 2 has two strengths"
NO_NUMBER = "is not a number from -10 to 10"
NUMBERS = ("nan", "inf", "-10.5", "\uff11", "1_0", "1e", "1e999")
NO_RANGES = ("-1: 0", "0-1 0", "0-9999999: 0", "\uff10-\uff11: 0")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0-2: 0, 2-3: 1", f"{TWICE}, in '0-2: 0' and in '2-3: 1': give ranges of steps that"),
        ("1: 0, 1: 0", "step 1 has two strengths"),
        ("3-1: 0", "'3-1: 0' ends before it begins: write 1-3"),
        ("0-1: much", "'much' in '0-1: much' is not a number from -10 to 10: give a strength"),
        *((f"0-1: {each}", f"'{each}' in '0-1: {each}' {NO_NUMBER}") for each in NUMBERS),
        ("0.5", "strengths by steps have '0.5': give the first and the last step, a colon, and"),
        ("0, 0, 1", "strengths by steps have '0'"),
        ("0-1: 0,5", "strengths by steps have '5'"),
        *((text, f"strengths by steps have '{text}'") for text in NO_RANGES),
        ("9" * 5000 + ": 0", f"strengths by steps have '{'9' * 40}...': give the first"),
    ],
)
def test_unreadable_texts_are_refused(text, message):
    with pytest.raises(StepStrengthsError) as refused:
        parse_step_strengths(text)
    assert message in str(refused.value)


def test_strength_applies_in_its_range():
    strengths = StepStrengths(usual=0.8, ranges=(StepRange(0, 1, 0.0), StepRange(3, 3, 2.0)))
    assert [strengths.at(step) for step in range(6)] == [0.0, 0.0, 0.8, 2.0, 0.8, 0.8]
    assert strengths.starts == {0, 2, 3, 4}
    assert str(strengths) == "0.8 (0-1: 0, 3: 2)"
    assert str(StepStrengths(usual=1.0)) == "1"


def test_ranges_hold_for_both_files_of_a_pair():
    pair = LoraRef(high_noise=Path("h"), low_noise=Path("l"), strength_low=0.5)
    ref = replace(pair, steps=parse_step_strengths("0: 0"))
    assert (ref.high.at(0), ref.low.at(0), ref.high.at(1), ref.low.at(1)) == (0, 0, 1.0, 0.5)
    assert hash(ref) != hash(pair)
