"""Normalized attention guidance: formula. `test_block.py` has the attention to both texts."""

import pytest
import torch

from wanstream.wan import Nag
from wanstream.wan.transformer.nag import guide

STRONG = Nag(scale=5.0, tau=1.5, alpha=0.5)


@pytest.fixture
def pair():
    """Attention to the positive and to the negative text. Ten rows stay within the limit."""
    draw = torch.Generator().manual_seed(6)
    positive, negative = (torch.randn(1, 30, 256, generator=draw) for _ in range(2))
    negative[:, :10] = positive[:, :10] * 0.9
    return [positive, negative]


@pytest.mark.parametrize("nag", [Nag(), STRONG, Nag(scale=1.5, tau=0.5, alpha=1.0)], ids=str)
def test_formula_is_that_of_the_paper(pair, nag):
    kept, against = (each.double() for each in pair)
    guided = kept + (nag.scale - 1) * (kept - against)
    ratio = guided.norm(p=1, dim=-1, keepdim=True) / kept.norm(p=1, dim=-1, keepdim=True)
    guided = guided * ratio.clamp(max=nag.tau) / ratio
    expected = nag.alpha * guided + (1 - nag.alpha) * kept
    found = guide(*pair, nag)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    assert (ratio[:, 10:] > nag.tau).all()
    if nag == STRONG:
        within = kept[:, :10] * (nag.alpha * (1 + 4 * 0.1) + 1 - nag.alpha)
        torch.testing.assert_close(found[:, :10].double(), within, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("nag", [Nag(alpha=0.0), Nag(scale=1.0, tau=1.0)], ids=str)
def test_nothing_to_guide_changes_nothing(pair, nag):
    torch.testing.assert_close(guide(*pair, nag), pair[0])


def test_zeros_stay_zeros_without_a_nan():
    nothing = torch.zeros(1, 2, 256)
    for negative in (nothing, nothing + 1):  # tau times zero is the limit
        assert torch.equal(guide(nothing, negative, Nag()), nothing)


def test_bf16_is_computed_in_fp32(pair):
    half = [each.bfloat16() for each in pair]
    exact = guide(*(each.float() for each in half), Nag())
    assert torch.equal(guide(*half, Nag()), exact.bfloat16())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scale": 0.5}, "NAG scale 0.5: give 1 .* or more, 11 is usual"),
        ({"scale": float("inf")}, "NAG scale inf"),
        ({"tau": 0.0}, "NAG tau 0: give a number above 0"),
        ({"tau": float("nan")}, "NAG tau nan"),
        ({"alpha": 1.5}, "NAG alpha 1.5: give 0 .* to 1"),
        ({"alpha": -0.1}, "NAG alpha -0.1"),
    ],
)
def test_other_numbers_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Nag(**given)
