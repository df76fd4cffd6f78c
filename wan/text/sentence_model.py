"""Sentencepiece models as bytes, and their conversion from the lists in a GGUF header."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from ...offload.formats import read_gguf_fields
from ..checkpoint.files import CheckpointError, ModelVersion, model_version

UNIGRAM = 1
BYTE = 6
"""Piece kind for spelling unknown characters as bytes."""

FIELDS = "tokenizer.ggml."
"""Prefix of GGUF fields."""
LISTS = (f"{FIELDS}tokens", f"{FIELDS}scores", f"{FIELDS}token_type")
MODEL = f"{FIELDS}model"
CHARACTERS = f"{FIELDS}precompiled_charsmap"
SPACE_FIRST = f"{FIELDS}add_space_prefix"
COLLAPSE_SPACES = f"{FIELDS}remove_extra_whitespaces"


class Piece(NamedTuple):
    """Sentencepiece token."""

    text: str
    score: float
    kind: int
    """Normal 1, unknown 2, control 3, user-defined 4, unused 5, byte 6: the same numbers in
    GGUF."""


def sentence_model(
    pieces: Iterable[Piece],
    *,
    characters: bytes = b"",
    space_first: bool = True,
    collapse_spaces: bool = True,
) -> bytes:
    """Return a unigram model.

    Args:
        pieces: tokens in id order.
        characters: compiled map for character replacement. Empty for none.
        space_first: put a space before the text.
        collapse_spaces: make one space of several.
    """
    pieces = list(pieces)
    spells_bytes = any(each.kind == BYTE for each in pieces)
    # TrainerSpec: model_type 3, vocab_size 4, byte_fallback 35. NormalizerSpec:
    # precompiled_charsmap 2, add_dummy_prefix 3, remove_extra_whitespaces 4, escape_whitespaces 5.
    trainer = _whole(3, UNIGRAM) + _whole(4, len(pieces)) + _whole(35, spells_bytes)
    normalizer = (
        _text(2, characters) + _whole(3, space_first) + _whole(4, collapse_spaces) + _whole(5, True)
    )
    # ModelProto: pieces 1 (`_token`), trainer_spec 2, normalizer_spec 3.
    return b"".join(map(_token, pieces)) + _text(2, trainer) + _text(3, normalizer)


def gguf_sentence_model(path: Path) -> bytes | None:
    """Return the sentencepiece model of a GGUF text encoder. None without one in the header.

    Raises:
        CheckpointFileError: the file cannot be read, or the lists do not belong together.
    """
    return _converted(path, model_version(path))


# The version is part of the cache key: a replaced file is read again.
@lru_cache(2)
def _converted(path: Path, version: ModelVersion) -> bytes | None:
    # Kept, 6 MB each: a graph is checked before it runs, and the conversion takes seconds.
    fields = read_gguf_fields(path, (MODEL, *LISTS, CHARACTERS, SPACE_FIRST, COLLAPSE_SPACES))
    # llama.cpp's name for a unigram tokenizer.
    if fields.get(MODEL) != "t5":
        return None
    lists = [fields.get(name) for name in LISTS]
    characters = fields.get(CHARACTERS, ())
    lengths = [f"{len(each)}" if isinstance(each, tuple) else "none" for each in lists]
    if len({*lengths}) > 1 or "none" in lengths or not isinstance(characters, tuple):
        found = ", ".join(lengths)
        raise CheckpointError(
            path, f"has a tokenizer with lists of {found} values: download the file again"
        )
    try:
        pieces = [
            Piece(str(text), float(score), int(kind))
            for text, score, kind in zip(*lists, strict=True)
        ]
        return sentence_model(
            pieces,
            # The list may hold signed bytes.
            characters=bytes(int(byte) & 0xFF for byte in characters),
            space_first=bool(fields.get(SPACE_FIRST, True)),
            collapse_spaces=bool(fields.get(COLLAPSE_SPACES, True)),
        )
    except (ValueError, OverflowError) as err:
        raise CheckpointError(
            path, f"has a damaged tokenizer ({err}): download the file again"
        ) from err


# The three kinds of protocol buffer fields in a sentencepiece model.


def _text(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _whole(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


_SCORE = struct.Struct("<BfB")


def _token(piece: Piece) -> bytes:
    # A model has a quarter of a million tokens, so the field numbers are constants here.
    text = piece.text.encode()
    # Before each value: 0x0a is field 1 (text), 0x15 field 2 (fp32 score), 0x18 field 3 (kind).
    numbers = _SCORE.pack(0x15, piece.score, 0x18) + _varint(piece.kind)
    content = b"\x0a" + _varint(len(text)) + text + numbers
    return b"\x0a" + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    if value <= 0x7F:
        return bytes((value,))
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
