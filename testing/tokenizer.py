"""Single-character tokenizer, in the file formats of a UMT5 tokenizer.

Ids 0 to 2 are UMT5's: padding, end of text, unknown. Letters, digits and symbols of Western European languages
follow; every other character is unknown. The same vocabulary is written for `tokenizers` (JSON) and for sentencepiece.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"
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
    return 0.0 if token in (PAD, END, UNKNOWN) else _SCORE


def sentencepiece_model() -> bytes:
    """Return the vocabulary as a sentencepiece model, which ComfyUI's text encoder files contain as `spiece_model`."""
    normal, unknown, control = 1, 2, 3
    kinds = {PAD: control, END: control, UNKNOWN: unknown}
    pieces = b"".join(
        _field(1, _field(1, token.encode()) + _float(2, _score(token)) + _integer(3, kinds.get(token, normal)))
        for token in VOCABULARY
    )
    no_start_token = 2**64 - 1  # -1
    ids = {40: VOCABULARY.index(UNKNOWN), 41: no_start_token, 42: VOCABULARY.index(END), 43: VOCABULARY.index(PAD)}
    unigram = 1
    trainer = _integer(3, unigram) + _integer(4, len(VOCABULARY)) + b"".join(_integer(*item) for item in ids.items())
    # Do not change characters; add a leading space, collapse spaces, and replace them by SPACE.
    normalizer = _field(1, b"identity") + b"".join(_integer(number, 1) for number in (3, 4, 5))
    return pieces + _field(2, trainer) + _field(3, normalizer)


# The three kinds of protocol buffer fields in a sentencepiece model.


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _integer(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _float(number: int, value: float) -> bytes:
    return _varint(number << 3 | 5) + struct.pack("<f", value)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
