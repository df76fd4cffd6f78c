"""Normalized attention guidance: formula, attention to both texts, complete detaching."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor, WanTransformerBlock

from wanstream.wan import Nag, attach_nag
from wanstream.wan.transformer.chunked_block import ChunkedAttention, ChunkedBlocks
from wanstream.wan.transformer.nag import NagAttention, guide

HEADS, WIDTH = 2, 256
STRONG = Nag(scale=5.0, tau=1.5, alpha=0.5)


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def block_of(seed: int = 0, **more: Any) -> WanTransformerBlock:
    torch.manual_seed(seed)
    return WanTransformerBlock(WIDTH, 512, HEADS, cross_attn_norm=True, **more).eval().requires_grad_(False)


def inputs_of(tokens: int = 40) -> dict[str, Any]:
    angles = torch.rand(1, tokens, 1, 64, generator=torch.Generator().manual_seed(2)).repeat_interleave(2, dim=-1)
    return {
        "hidden_states": normal(1, tokens, WIDTH, seed=1),
        "temb": normal(1, 6, WIDTH, seed=3),
        "rotary_emb": (angles.cos(), angles.sin()),
    }


POSITIVE, NEGATIVE = normal(1, 7, WIDTH, seed=4), normal(1, 5, WIDTH, seed=5)


def model_of(*blocks: WanTransformerBlock) -> Any:
    """Return a stand-in with the only attribute of a model that `attach_nag` uses."""
    return SimpleNamespace(blocks=blocks)


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


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
            torch.testing.assert_close(guide(positive, negative, nag).double(), expected, rtol=1e-5, atol=1e-6)
            assert (ratio[:, 10:] > nag.tau).all()
        within = kept[:, :10] * (STRONG.alpha * (1 + 4 * 0.1) + 1 - STRONG.alpha)
        torch.testing.assert_close(guide(positive, negative, STRONG)[:, :10].double(), within, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("nag", [Nag(alpha=0.0), Nag(scale=1.0, tau=1.0)])
    def test_nothing_to_guide_changes_nothing(self, nag: Nag) -> None:
        positive, negative = normal(1, 9, WIDTH, seed=6), normal(1, 9, WIDTH, seed=7)
        torch.testing.assert_close(guide(positive, negative, nag), positive)

    def test_zeros_stay_zeros_without_a_nan(self) -> None:
        nothing = torch.zeros(1, 2, WIDTH)
        assert torch.equal(guide(nothing, nothing, Nag()), nothing)
        assert torch.equal(guide(nothing, nothing + 1, Nag()), nothing), "tau times zero is the limit"

    def test_bf16_is_computed_in_fp32(self) -> None:
        positive, negative = normal(1, 9, WIDTH, seed=6).bfloat16(), normal(1, 9, WIDTH, seed=7).bfloat16()
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
    def test_numbers_that_make_no_sense_are_refused(self, given: dict[str, float], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            Nag(**given)


def by_hand(attn: WanAttention, hidden: torch.Tensor, positive: torch.Tensor, image: torch.Tensor | None) -> Any:
    """Return the expected result from two separate attention calls of torch."""

    def heads(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unflatten(2, (HEADS, -1)).transpose(1, 2)

    def attended(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query = heads(attn.norm_q(attn.to_q(hidden)))
        return F.scaled_dot_product_attention(query, heads(key), heads(value)).transpose(1, 2).flatten(2)

    each = [attended(attn.norm_k(attn.to_k(text)), attn.to_v(text)) for text in (positive, NEGATIVE)]
    result = guide(*each, STRONG)
    if image is not None:
        result = result + attended(attn.norm_added_k(attn.add_k_proj(image)), attn.add_v_proj(image))
    return attn.to_out[0](result)


class TestAttention:
    @pytest.mark.parametrize("tokens", [3, 40, 1327])
    def test_it_is_two_attentions_combined_before_the_output(self, tokens: int) -> None:
        block, hidden = block_of(), normal(1, tokens, WIDTH, seed=8)
        before = hidden.clone()
        with attach_nag([model_of(block)], STRONG):
            found = block.attn2(hidden, (POSITIVE, NEGATIVE), None, None)
        torch.testing.assert_close(found, by_hand(block.attn2, hidden, POSITIVE, None), rtol=1e-5, atol=1e-5)
        assert torch.equal(hidden, before)
        assert not torch.allclose(found, block.attn2(hidden, POSITIVE, None, None))

    def test_attention_to_the_image_is_added_to_it(self) -> None:
        block, hidden = block_of(added_kv_proj_dim=WIDTH), normal(1, 40, WIDTH, seed=8)
        image, text = normal(1, 9, WIDTH, seed=9), normal(1, 512, WIDTH, seed=10)
        with attach_nag([model_of(block)], STRONG):
            found = block.attn2(hidden, (torch.cat([image, text], dim=1), NEGATIVE), None, None)
        torch.testing.assert_close(found, by_hand(block.attn2, hidden, text, image), rtol=1e-5, atol=1e-5)

    def test_one_text_is_attended_to_as_before(self) -> None:
        block, given = block_of(), inputs_of()
        expected = block(encoder_hidden_states=POSITIVE, **given)
        with attach_nag([model_of(block)], STRONG):
            assert torch.equal(block(encoder_hidden_states=POSITIVE, **given), expected)

    def test_an_alpha_of_zero_is_the_first_text_alone_to_the_bit(self) -> None:
        block, given = block_of(), inputs_of()
        with attach_nag([model_of(block)], Nag(alpha=0.0)):
            found = block(encoder_hidden_states=(POSITIVE, NEGATIVE), **given)
        assert torch.equal(found, block(encoder_hidden_states=POSITIVE, **given))

    @pytest.mark.parametrize("chunk", [1, 17, 40])
    def test_chunks_change_nothing(self, chunk: int) -> None:
        block, given = block_of(), inputs_of()
        with attach_nag([model_of(block)], STRONG):
            whole = block(encoder_hidden_states=(POSITIVE, NEGATIVE), **given)
        chunked = ChunkedBlocks([block], chunk)
        with attach_nag([model_of(block)], STRONG):
            found = block(encoder_hidden_states=(POSITIVE, NEGATIVE), **given)
        torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-5)
        chunked.detach()


class TestAttached:
    def test_processors_are_given_back(self) -> None:
        blocks = [block_of(seed) for seed in range(2)]
        before = [block.attn2.processor for block in blocks]
        with attach_nag([model_of(*blocks)], STRONG):
            assert all(type(block.attn2.processor) is NagAttention for block in blocks)
            assert all(type(block.attn1.processor) is WanAttnProcessor for block in blocks)
        assert all(block.attn2.processor is own for block, own in zip(blocks, before, strict=True))

    def test_after_an_error_too(self) -> None:
        block = block_of()
        own = block.attn2.processor
        with pytest.raises(KeyError), attach_nag([model_of(block)], STRONG):
            raise KeyError
        assert block.attn2.processor is own

    def test_a_chunked_block_gets_its_own_back(self) -> None:
        block = block_of()
        chunked = ChunkedBlocks([block], 16)
        with attach_nag([model_of(block)], STRONG):
            pass
        assert type(block.attn2.processor) is ChunkedAttention
        chunked.detach()
        assert type(block.attn2.processor) is WanAttnProcessor

    def test_attention_of_another_kind_is_refused_and_nothing_is_left_behind(self) -> None:
        first, second = block_of(), block_of(1)
        own = first.attn2.processor
        with attach_nag([model_of(second)], STRONG):
            with pytest.raises(
                ValueError, match=r"NAG needs diffusers' attention processor .* not NagAttention: remove it"
            ):
                with attach_nag([model_of(first, second)], STRONG):
                    pass
            assert first.attn2.processor is own
        assert type(second.attn2.processor) is WanAttnProcessor

    def test_the_backend_that_was_chosen_stays(self) -> None:
        block = block_of()
        block.attn2.processor._attention_backend = "native"
        with attach_nag([model_of(block)], STRONG):
            assert block.attn2.processor._attention_backend == "native"
            block.attn2(normal(1, 40, WIDTH, seed=8), (POSITIVE, NEGATIVE), None, None)
