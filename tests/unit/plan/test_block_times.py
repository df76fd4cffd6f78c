"""Choice of the arithmetic from measured times."""

from __future__ import annotations

import pytest

from wanstream.plan import BlockTimes, choose_arithmetic


def _times(visit_s: float, decode_s: float = 0.0) -> BlockTimes:
    return BlockTimes(visit_s=visit_s, products_s=0.3, attention_s=0.2, parts={}, decode_s=decode_s)


@pytest.mark.parametrize(
    ("visits", "multiplied"),
    [
        ({}, ()),
        ({"fp8": 0.85}, ("fp8",)),
        ({"fp8": 0.99}, ()),
        ({"int8": 2.2, "fp8": 0.8}, ("fp8",)),
        ({"int8": 0.7, "fp8": 0.8}, ("int8", "fp8")),
        ({"fp8": 1.1}, ()),
    ],
)
def test_eight_bits_are_chosen_only_if_they_pay(visits: dict[str, float], multiplied: tuple[str, ...]) -> None:
    # Decoding takes so long that 8 bits would win against it in each case.
    choice = choose_arithmetic({"": _times(1.0), **{name: _times(each, 9.0) for name, each in visits.items()}})
    assert choice.multiplied == multiplied
    assert all(name in choice.words for name in visits)
    assert _times(1.0).limit_share == 0.5
