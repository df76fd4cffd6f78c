"""Single-file tokenizer: tokens equal to the tokenizer folder's."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from wanstream.offload.formats.safetensors_header import read_header
from wanstream.testing.tokenizer import VOCABULARY, save_tokenizer, sentencepiece_model
from wanstream.wan.checkpoint.files import CheckpointError
from wanstream.wan.text.tokenizer import (
    SENTENCE_MODEL,
    SentenceTokenizer,
    clean_prompt,
    open_sentence_tokenizer,
)

ROWS = len(VOCABULARY)

PROMPTS = [
    "",
    " ",
    "a cat walks through the snow",
    "words " * 200,
    "  two  spaces,\n\ta tab ",
    "caf\u00e9, na\u00efve; \u00c5ngstr\u00f6m \u00bd",
    "\u65e5\u672c\u306e\u732b \U0001f408",
    "\uff21 full width, \u00a0 no break",
    "\u0000 control",
    "e\u0301 combining",
    "(cat:1.2) \\( embedding:x &amp;amp; <b>",
    "</s>",
    "a </s> b",
    "a</s>b</s></s>",
    "<pad> <unk> x<unk>y",
]


def random_prompts(count: int) -> list[str]:
    draw = random.Random(0)
    signs = [
        *map(chr, range(32, 127)),
        *map(chr, range(0xA1, 0x180)),
        "\u3042",
        "\U0001f408",
        "</s>",
        "<pad>",
        "  ",
    ]
    return ["".join(draw.choices(signs, k=draw.randint(1, 60))) for _ in range(count)]


@pytest.fixture
def stored(tmp_path: Path) -> Callable[..., SentenceTokenizer]:
    """Return `stored(tensor, rows=ROWS)`, to open a tokenizer stored as this tensor."""

    def open_it(tensor: torch.Tensor, *, rows: int = ROWS) -> SentenceTokenizer:
        path = tmp_path / "umt5.safetensors"
        save_file({SENTENCE_MODEL: tensor, "shared.weight": torch.zeros(1)}, path)
        return open_sentence_tokenizer(path, read_header(path).tensors, rows=rows)

    return open_it


def as_bytes(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


@pytest.mark.parametrize("length", [1, 7, 512])
def test_tokens_are_those_of_the_folder(
    stored: Callable[..., SentenceTokenizer], tmp_path: Path, length: int
) -> None:
    save_tokenizer(tmp_path / "tokenizer")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    ours = stored(as_bytes(sentencepiece_model()))

    # Both tokenizers get cleaned texts, without white space at the ends and without double spaces.
    texts = [" ".join(prompt.split()) for prompt in PROMPTS + random_prompts(500)]
    found = ours.tokens(texts, length=length)
    expected = theirs(
        texts, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
    )

    for index, text in enumerate(texts):
        assert torch.equal(found.ids[index], expected.input_ids[index]), text
        assert torch.equal(found.mask[index], expected.attention_mask[index]), text
    assert found.ids.dtype == found.mask.dtype == torch.int64


def test_prompts_are_cleaned_first(stored: Callable[..., SentenceTokenizer]) -> None:
    tokens = stored(as_bytes(sentencepiece_model())).tokens(
        [clean_prompt(" a\n&amp;amp; b ")], length=8
    )

    expected = ["\u2581", "a", "\u2581", "&", "\u2581", "b", "</s>", "<pad>"]
    assert [VOCABULARY[token] for token in tokens.ids[0].tolist()] == expected
    assert tokens.mask.sum(dim=1).tolist() == [7]


class TestBadFiles:
    @pytest.mark.parametrize(
        ("tensor", "message"),
        [
            (torch.zeros(8), r"spiece_model is torch\.float32 \[8\]"),
            (torch.zeros(0, dtype=torch.uint8), r"torch\.uint8 \[0\]"),
            (as_bytes(b"garbage"), "spiece_model is not a tokenizer .*; download the file again"),
            (as_bytes(sentencepiece_model()[:-3]), "is not a tokenizer"),
            (
                as_bytes(sentencepiece_model()[: len(sentencepiece_model()) // 2]),
                "is not a tokenizer",
            ),
        ],
        ids=["fp32", "empty", "garbage", "cut short", "cut in half"],
    )
    def test_damaged(
        self, stored: Callable[..., SentenceTokenizer], tensor: torch.Tensor, message: str
    ) -> None:
        with pytest.raises(CheckpointError, match=message):
            stored(tensor)

    def test_more_tokens_than_the_table_has_rows(
        self, stored: Callable[..., SentenceTokenizer]
    ) -> None:
        with pytest.raises(
            CheckpointError, match=f"has {ROWS} tokens, but the token table has {ROWS - 1} rows"
        ):
            stored(as_bytes(sentencepiece_model()), rows=ROWS - 1)

    @pytest.mark.parametrize("token", ["<pad>", "</s>"])
    def test_a_token_that_umt5_has_is_missing(
        self, stored: Callable[..., SentenceTokenizer], token: str
    ) -> None:
        renamed = sentencepiece_model().replace(token.encode(), b"x" * len(token))
        with pytest.raises(CheckpointError, match="has no padding or no end token"):
            stored(as_bytes(renamed))
