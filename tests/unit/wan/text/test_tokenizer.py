"""Tokenizers: tokens equal to the tokenizer folder's, cleaned prompts, files beside, refusals."""

from __future__ import annotations

import random

import pytest
import torch
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from safetensors.torch import save_file
from transformers import AutoTokenizer

from wanstream.offload.formats.safetensors_header import read_header
from wanstream.testing.tokenizer import START, VOCABULARY, save_tokenizer, sentencepiece_model
from wanstream.wan.checkpoint.files import CheckpointError
from wanstream.wan.text.tokenizer import (
    SENTENCE_MODEL,
    SentenceTokenizer,
    clean_prompt,
    open_sentence_tokenizer,
    tokenizer_beside,
)

ROWS = len(VOCABULARY)
GEMMA = ("<pad>", "<eos>", "<bos>", *VOCABULARY[2:])
MODEL = sentencepiece_model()
PROMPTS = [
    "",
    "words " * 200,
    "caf\u00e9, na\u00efve; \u00c5ngstr\u00f6m \u00bd",
    "\u65e5\u672c\u306e\u732b \U0001f408",
    "\uff21 full width, \u00a0 no break",
    "\u0000 control",
    "e\u0301 combining",
    "(cat:1.2) \\( embedding:x &amp;amp; <b>",
    "a </s> b",
    "a</s>b</s></s>",
    "<pad> <unk> x<unk>y",
]


def random_prompts(count: int) -> list[str]:
    draw = random.Random(0)
    letters = [*map(chr, range(32, 127)), *map(chr, range(0xA1, 0x180))]
    signs = [*letters, "\u3042", "\U0001f408", "</s>", "<pad>", "  "]
    return ["".join(draw.choices(signs, k=draw.randint(1, 60))) for _ in range(count)]


@pytest.fixture
def stored(tmp_path):
    """`stored(data, rows=ROWS)`: an opened tokenizer, stored as this tensor or as these bytes."""

    def open_it(data: bytes | torch.Tensor = MODEL, *, rows: int = ROWS) -> SentenceTokenizer:
        path = tmp_path / "umt5.safetensors"
        if isinstance(data, bytes):
            data = torch.tensor(list(data), dtype=torch.uint8)
        save_file({SENTENCE_MODEL: data, "shared.weight": torch.zeros(1)}, path)
        return open_sentence_tokenizer(path, read_header(path).tensors, rows=rows)

    return open_it


@pytest.mark.parametrize("length", [1, 7, 512])
def test_tokens_are_those_of_the_folder(stored, tmp_path, length):
    save_tokenizer(tmp_path / "tokenizer")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    # Both tokenizers get cleaned texts, without white space at the ends and without double spaces.
    texts = [" ".join(prompt.split()) for prompt in PROMPTS + random_prompts(500)]
    found = stored().tokens(texts, length=length)
    how = {"padding": "max_length", "max_length": length, "truncation": True}
    expected = theirs(texts, **how, return_tensors="pt")
    for index, text in enumerate(texts):
        assert torch.equal(found.ids[index], expected.input_ids[index]), text
        assert torch.equal(found.mask[index], expected.attention_mask[index]), text
    assert found.ids.dtype == found.mask.dtype == torch.int64


@pytest.mark.parametrize(
    ("prompt", "cleaned"),
    [
        ("  a\n b\t\tc ", "a b c"),
        ("&amp;quot;x&amp;quot;", '"x"'),
        ("caf\u00c3\u00a9", "caf\u00e9"),
        ("\uff21", "A"),
        ("", ""),
    ],
)
def test_prompts_are_cleaned_as_in_diffusers(prompt, cleaned):
    assert clean_prompt(prompt) == prompt_clean(prompt) == cleaned


@pytest.mark.parametrize(
    ("data", "rows", "message"),
    [
        (torch.zeros(8), ROWS, r"spiece_model is torch\.float32 \[8\]"),
        (b"", ROWS, r"torch\.uint8 \[0\]"),
        (b"garbage", ROWS, "spiece_model is not a tokenizer .*; download the file again"),
        (MODEL[:-3], ROWS, "is not a tokenizer"),
        (MODEL[: len(MODEL) // 2], ROWS, "is not a tokenizer"),
        (MODEL, ROWS - 1, f"{ROWS} tokens, but the token table has {ROWS - 1} rows"),
        (MODEL.replace(b"<pad>", b"x" * 5), ROWS, "has no padding or no end token"),
        (MODEL.replace(b"</s>", b"x" * 4), ROWS, "has no padding or no end token"),
    ],
    ids=["fp32", "empty", "garbage", "cut short", "cut in half", "rows", "no padding", "no end"],
)
def test_damaged_model_is_refused(stored, data, rows, message):
    with pytest.raises(CheckpointError, match=message):
        stored(data, rows=rows)


@pytest.mark.parametrize(
    ("vocabulary", "rows"), [(VOCABULARY, ROWS - 1), (VOCABULARY, ROWS + 512), (GEMMA, ROWS + 1)]
)
def test_tokenizer_of_another_model_is_not_taken(tmp_path, vocabulary, rows):
    """With more pieces than rows, with far fewer, and with the pieces of Gemma."""
    (tmp_path / "spiece.model").write_bytes(sentencepiece_model(vocabulary))
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        tokenizer_beside(tmp_path / "umt5.safetensors", rows=rows)


def test_published_tokenizer_has_a_start_token_and_384_rows_less(tmp_path):
    vocabulary = (*VOCABULARY[:2], START, *VOCABULARY[2:])
    (tmp_path / "spiece.model").write_bytes(sentencepiece_model(vocabulary))
    borrowed = tokenizer_beside(tmp_path / "umt5.safetensors", rows=len(vocabulary) + 384)
    tokens = borrowed.tokenizer.tokens(["a b"], length=6)
    expected = ["\u2581", "a", "\u2581", "b", "</s>", "<pad>"]
    assert [vocabulary[token] for token in tokens.ids[0]] == expected
