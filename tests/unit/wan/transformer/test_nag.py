"""Normalized attention guidance: formula. `test_block.py` has the attention to both texts."""

from __future__ import annotations

import pytest
import torch

from wanstream.wan import Nag
from wanstream.wan.transformer.nag import guide

WIDTH = 256
STRONG = Nag(scale=5.0, tau=1.5, alpha=0.5)


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class TestFormula:
    def test_it_is_that_of_the_paper_in_float64(self) -> None:
        positive, negative = normal(1, 30, WIDTH, seed=6), normal(1, 30, WIDTH, seed=7)
        negative[:, :10] = positive[:, :10] * 0.9  # these stay within the limit
        kept, against = positive.double(), negative.double()
        for nag in (Nag(), STRONG, Nag(scale=1.5, tau=0.5, alpha=1.0)):
            guided = kept + (nag.scale - 1) * (kept - against)
            ratio = guided.norm(p=1, dim=-1, keepdim=True) / kept.norm(p=1, dim=-1, keepdim=True)
            guided = guided * ratio.clamp(max=nag.tau) / ratio
            expected = nag.alpha * guided + (1 - nag.alpha) * kept
            torch.testing.assert_close(
                guide(positive, negative, nag).double(), expected, rtol=1e-5, atol=1e-6
            )
            assert (ratio[:, 10:] > nag.tau).all()
        within = kept[:, :10] * (STRONG.alpha * (1 + 4 * 0.1) + 1 - STRONG.alpha)
        torch.testing.assert_close(
            guide(positive, negative, STRONG)[:, :10].double(), within, rtol=1e-5, atol=1e-6
        )

    @pytest.mark.parametrize("nag", [Nag(alpha=0.0), Nag(scale=1.0, tau=1.0)])
    def test_nothing_to_guide_changes_nothing(self, nag: Nag) -> None:
        positive, negative = normal(1, 9, WIDTH, seed=6), normal(1, 9, WIDTH, seed=7)
        torch.testing.assert_close(guide(positive, negative, nag), positive)

    def test_zeros_stay_zeros_without_a_nan(self) -> None:
        nothing = torch.zeros(1, 2, WIDTH)
        assert torch.equal(guide(nothing, nothing, Nag()), nothing)
        assert torch.equal(guide(nothing, nothing + 1, Nag()), nothing), (
            "tau times zero is the limit"
        )

    def test_bf16_is_computed_in_fp32(self) -> None:
        positive, negative = (
            normal(1, 9, WIDTH, seed=6).bfloat16(),
            normal(1, 9, WIDTH, seed=7).bfloat16(),
        )
        exact = guide(positive.float(), negative.float(), Nag())
        assert torch.equal(guide(positive, negative, Nag()), exact.bfloat16())

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
    def test_numbers_that_make_no_sense_are_refused(
        self, given: dict[str, float], message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            Nag(**given)
