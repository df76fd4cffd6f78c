"""Single-character tokenizer, in the file formats of a UMT5 tokenizer.

Ids 0 to 2 are UMT5's: padding, end of text, unknown. Letters, digits and symbols of Western European languages
follow; every other character is unknown. The same vocabulary is written for `tokenizers` (JSON) and for sentencepiece.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ..wan import Piece, sentence_model

PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"
START = "<s>"
"""Third token of the published UMT5, which this vocabulary does not have."""
SPACE = "\u2581"
"""Replacement of a space in sentencepiece; it is also put before the first word."""

_ASCII = [chr(code) for code in range(0x21, 0x7F)]
_LATIN_1 = [chr(code) for code in range(0xA1, 0x100)]
VOCABULARY = (PAD, END, UNKNOWN, SPACE, *_ASCII, *_LATIN_1)

_SCORE = -1.0
"""Score of every character; it has no effect, because single characters cannot be segmented differently."""


def save_tokenizer(folder: Path) -> None:
    """Write the tokenizer folder of a diffusers pipeline."""
    folder.mkdir(parents=True, exist_ok=True)
    special = {"pad_token": PAD, "eos_token": END, "unk_token": UNKNOWN}
    config = {
        **special,
        "tokenizer_class": "T5Tokenizer",
        "model_max_length": 512,
        "padding_side": "right",
        "extra_ids": 0,
        "additional_special_tokens": [],
    }
    for name, content in {
        "tokenizer.json": _tokenizer_json(),
        "tokenizer_config.json": config,
        "special_tokens_map.json": special,
    }.items():
        (folder / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
    (folder / "spiece.model").write_bytes(sentencepiece_model())


def _tokenizer_json() -> dict[str, object]:
    metaspace = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always", "split": True}
    end = {"SpecialToken": {"id": END, "type_id": 0}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(index, token) for index, token in enumerate((PAD, END, UNKNOWN))],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}, end],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, end, {"Sequence": {"id": "B", "type_id": 0}}, end],
            "special_tokens": {END: {"id": END, "ids": [VOCABULARY.index(END)], "tokens": [END]}},
        },
        "decoder": metaspace,
        "model": {
            "type": "Unigram",
            "unk_id": VOCABULARY.index(UNKNOWN),
            "vocab": [[token, _score(token)] for token in VOCABULARY],
            "byte_fallback": False,
        },
    }


def _added_token(index: int, token: str) -> dict[str, object]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": token, **flags, "special": True}


def _score(token: str) -> float:
    return 0.0 if token in (PAD, END, UNKNOWN, START) else _SCORE


def sentencepiece_model(vocabulary: Sequence[str] = VOCABULARY) -> bytes:
    """Return the vocabulary as a sentencepiece model, which ComfyUI's text encoder files contain as `spiece_model`."""
    return sentence_model(Piece(token, _score(token), kind_of(token)) for token in vocabulary)


def kind_of(token: str) -> int:
    """Return the kind of a token in sentencepiece, which is the same number in GGUF."""
    normal, unknown, control = 1, 2, 3
    return {UNKNOWN: unknown, **dict.fromkeys((PAD, END, START), control)}.get(token, normal)
