"""Arithmetic chosen from measured times."""

import pytest

from wanstream.shapes import BlockTimes, ExpertShape, block_rates, choose_arithmetic


def _times(visit_s: float, decode_s: float = 0.0) -> BlockTimes:
    return BlockTimes(visit_s=visit_s, products_s=0.3, attention_s=0.2, parts={}, decode_s=decode_s)


def test_eight_bits_are_chosen_only_if_they_pay():
    for visits, multiplied in (
        ({}, ()),
        ({"fp8": 0.85}, ("fp8",)),
        ({"fp8": 0.99}, ()),
        ({"int8": 2.2, "fp8": 0.8}, ("fp8",)),
        ({"int8": 0.7, "fp8": 0.8}, ("int8", "fp8")),
        ({"fp8": 1.1}, ()),
    ):
        # Decoding takes long enough for 8 bits to win in each case.
        times = {name: _times(each, 9.0) for name, each in visits.items()}
        choice = choose_arithmetic({"": _times(1.0), **times})
        assert choice.multiplied == multiplied, visits
        assert all(name in choice.words for name in visits)
    assert _times(1.0).limit_share == 0.5


def test_rates_predict_the_times_that_they_come_from():
    shape = ExpertShape()
    tokens = 7800
    times = {"": _times(1.0), "fp8": _times(0.7), "int8": _times(2.2), "absurd": _times(0.01)}
    rates = block_rates(times, shape, tokens)
    linear = shape.linear_flops(tokens)
    attention = shape.attention_flops(tokens)
    flops_per_s = shape.block_flops(tokens)
    for name in ("fp8", "int8"):
        predicted = (linear / rates.linear_speedups[name] + attention) / flops_per_s
        assert predicted == pytest.approx(times[name].visit_s)
    # No faster than its products.
    assert rates.linear_speedups["absurd"] == pytest.approx(linear / flops_per_s / 0.3)
    assert linear / rates.product_flops_per_s[""] == pytest.approx(0.3)
    assert attention / rates.attention_flops_per_s == pytest.approx(0.2)
