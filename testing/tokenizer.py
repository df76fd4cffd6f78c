"""Single-character tokenizer, in UMT5's tokenizer file formats.

Ids 0 to 2 are UMT5's: padding, end of text, unknown. Letters, digits and symbols in Western
European languages follow. Every other character is unknown. The same vocabulary is written for
`tokenizers` (JSON) and for sentencepiece.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from ..wan.text import Piece, sentence_model

PAD = "<pad>"
END = "</s>"
UNKNOWN = "<unk>"
START = "<s>"
"""Third token in the published UMT5. This vocabulary does not have it."""
SPACE = "\u2581"
"""Sentencepiece's replacement for a space, also put before the first word."""

_ASCII = [chr(code) for code in range(0x21, 0x7F)]
_LATIN_1 = [chr(code) for code in range(0xA1, 0x100)]
VOCABULARY = (PAD, END, UNKNOWN, SPACE, *_ASCII, *_LATIN_1)

_SCORE = -1.0
"""Score for every character. It has no effect, because single characters cannot be segmented
differently."""


def save_tokenizer(folder: Path) -> None:
    """Write the tokenizer folder for a diffusers pipeline."""
    folder.mkdir(parents=True, exist_ok=True)
    special = {"pad_token": PAD, "eos_token": END, "unk_token": UNKNOWN}
    config = {
        **special,
        "tokenizer_class": "T5Tokenizer",
        "model_max_length": 512,
        "padding_side": "right",
        # By default, T5Tokenizer adds 100 sentinel tokens behind the vocabulary.
        "extra_ids": 0,
        "additional_special_tokens": [],
    }
    for name, content in {
        "tokenizer.json": json.loads(_tokenizer().to_str()),
        "tokenizer_config.json": config,
        "special_tokens_map.json": special,
    }.items():
        (folder / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
    (folder / "spiece.model").write_bytes(sentencepiece_model())


def _tokenizer() -> Tokenizer:
    vocabulary = [(token, _score(token)) for token in VOCABULARY]
    tokenizer = Tokenizer(models.Unigram(vocabulary, VOCABULARY.index(UNKNOWN), False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        # Several spaces count as one, as in sentencepiece.
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(SPACE, "always")]
    )
    tokenizer.decoder = decoders.Metaspace(SPACE, "always")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", pair=f"$A {END} $B {END}", special_tokens=[(END, VOCABULARY.index(END))]
    )
    tokenizer.add_special_tokens([PAD, END, UNKNOWN])
    return tokenizer


def _score(token: str) -> float:
    return 0.0 if token in (PAD, END, UNKNOWN, START) else _SCORE


def sentencepiece_model(vocabulary: Sequence[str] = VOCABULARY) -> bytes:
    """Return the vocabulary as a sentencepiece model.

    ComfyUI's text encoder files contain it as `spiece_model`.
    """
    return sentence_model(Piece(token, _score(token), kind_of(token)) for token in vocabulary)


def kind_of(token: str) -> int:
    """Return a token's kind in sentencepiece, which is the same number in GGUF."""
    normal = 1
    unknown = 2
    control = 3
    return {UNKNOWN: unknown, **dict.fromkeys((PAD, END, START), control)}.get(token, normal)
