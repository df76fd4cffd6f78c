"""Prompts as tokens: cleaned as diffusers does, padded and cut to one length."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from .stored import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WHITESPACE = re.compile(r"\s+")


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptTokens:
    """`ids` and `mask`, int64 [prompts, length]; the mask is 1 up to and including </s>, 0 on the padding after it."""

    ids: torch.Tensor
    mask: torch.Tensor

    @property
    def counts(self) -> list[int]:
        """Tokens of each prompt, </s> included."""
        return [int(count) for count in self.mask.sum(dim=1)]


class Tokenizer(Protocol):
    """Knows a vocabulary."""

    def tokens(self, texts: Sequence[str], *, length: int) -> PromptTokens:
        """Turn each text, cleaned already, into exactly `length` tokens; one that is cut ends in </s> as well."""


class FolderTokenizer:
    """The tokenizer in the `tokenizer` folder of a diffusers pipeline."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def tokens(self, texts: Sequence[str], *, length: int) -> PromptTokens:
        found = self._tokenizer(
            list(texts),
            padding="max_length",
            max_length=length,
            truncation=True,
            add_special_tokens=True,
            return_attention_mask=True,
            return_tensors="pt",
        )
        return PromptTokens(ids=found.input_ids, mask=found.attention_mask)


def clean_prompt(prompt: str) -> str:
    """Repair broken encodings, undo HTML escapes (twice: "&amp;quot;" is common) and collapse white space."""
    import ftfy

    unescaped = html.unescape(html.unescape(ftfy.fix_text(prompt)))
    return WHITESPACE.sub(" ", unescaped).strip()


def open_tokenizer(folder: Path) -> FolderTokenizer:
    """Open the tokenizer in `folder`.

    Raises:
        CheckpointError: the folder is missing or its files are no tokenizer.
    """
    if not folder.is_dir():
        raise CheckpointError(folder, "the tokenizer is missing: it belongs beside the text encoder")
    from transformers import AutoTokenizer

    try:
        return FolderTokenizer(AutoTokenizer.from_pretrained(folder, local_files_only=True))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as err:
        raise CheckpointError(folder, f"is not a tokenizer: {err}") from err


def tokenise(tokenizer: Tokenizer, prompts: Sequence[str], *, length: int) -> PromptTokens:
    """Clean the prompts and turn each into exactly `length` tokens."""
    return tokenizer.tokens([clean_prompt(prompt) for prompt in prompts], length=length)
