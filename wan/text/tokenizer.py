"""UMT5 tokenizers from a folder or ComfyUI's single file, and prompt cleaning as in diffusers."""

from __future__ import annotations

import html
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from sentencepiece import SentencePieceProcessor

from ...offload.formats import CheckpointFileError, FileTensor, read_header
from ...offload.sources import read_tensors
from ..checkpoint.files import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger("wanstream.text")

WHITESPACE = re.compile(r"\s+")


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptTokens:
    """Prompt token ids and attention mask, both int64 [prompts, length]."""

    ids: torch.Tensor
    mask: torch.Tensor
    """1 up to and including </s>, 0 on the padding."""


class Tokenizer(Protocol):
    """Converts texts to token ids."""

    def tokens(self, texts: Sequence[str], *, length: int) -> PromptTokens:
        """Convert each cleaned text to exactly `length` tokens. A cut text ends in </s> too."""


class FolderTokenizer:
    """Tokenizer in a diffusers pipeline's `tokenizer` folder."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def tokens(self, texts: Sequence[str], *, length: int) -> PromptTokens:
        """See `Tokenizer.tokens`."""
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
    """Repair encodings, undo HTML escapes (twice: "&amp;quot;" is common), collapse white space."""
    import ftfy

    unescaped = html.unescape(html.unescape(ftfy.fix_text(prompt)))
    return WHITESPACE.sub(" ", unescaped).strip()


def open_tokenizer(folder: Path) -> FolderTokenizer:
    """Open the tokenizer in `folder`. Python code in the folder never runs.

    Raises:
        CheckpointError: the folder is missing, the files are not a tokenizer, or they need their
            own code.
    """
    if not folder.is_dir():
        raise CheckpointError(
            folder, "the tokenizer is missing: it belongs next to the text encoder"
        )
    from transformers import AutoTokenizer

    try:
        # Without a decision, transformers asks on stdin whether it may run the code in an
        # `auto_map`.
        return FolderTokenizer(
            AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as err:
        reason = f"is not a tokenizer: {err}"
        if "trust_remote_code" in str(err):
            reason = (
                "needs Python code of its own (auto_map), which is never run: download the "
                "tokenizer folder of a Wan pipeline again"
            )
        raise CheckpointError(folder, reason) from err


SENTENCE_MODEL = "spiece_model"
"""Tensor with the sentencepiece model in a single file."""

# UMT5's model has 4.5 MB.
MAX_MODEL_BYTES = 64 * 1024**2


class SentenceTokenizer:
    """Opened sentencepiece model with padding, end and unknown tokens."""

    def __init__(self, processor: SentencePieceProcessor) -> None:
        self.processor = processor
        self._pad = processor.pad_id()
        self._end = processor.eos_id()
        special = (self._pad, self._end, processor.unk_id(), processor.bos_id())
        self._special = {processor.id_to_piece(token): token for token in special if token >= 0}
        # As in transformers, a special token spelled out in a prompt ("</s>") becomes this token.
        # sentencepiece alone would treat it as ordinary characters.
        self._spelled_out = re.compile(f"({'|'.join(map(re.escape, self._special))})")

    def tokens(self, texts: Sequence[str], *, length: int) -> PromptTokens:
        """See `Tokenizer.tokens`."""
        # Cut before the end token is added, so every text ends in </s>.
        rows = [[*self._ids(text)[: length - 1], self._end] for text in texts]
        return PromptTokens(
            ids=torch.tensor([row + [self._pad] * (length - len(row)) for row in rows]),
            mask=torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows]),
        )

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in self._spelled_out.split(text):
            if part in self._special:
                ids.append(self._special[part])
            else:
                ids += self.processor.encode(part)
        return ids


def open_sentence_tokenizer(
    path: Path, tensors: Mapping[str, FileTensor], *, rows: int
) -> SentenceTokenizer:
    """Open the tokenizer `SENTENCE_MODEL` in the file `path` with a token table of `rows` rows.

    Raises:
        CheckpointError: it is damaged, or has more tokens than the table has rows.
    """
    stored = tensors[SENTENCE_MODEL]
    if stored.dtype not in (torch.uint8, torch.int8) or not 0 < stored.nbytes <= MAX_MODEL_BYTES:
        reason = f"{SENTENCE_MODEL} is {stored.dtype} {list(stored.shape)}"
        raise CheckpointError(path, f"{reason}; a tokenizer is a few megabytes of uint8")
    data = read_tensors({SENTENCE_MODEL: stored})[SENTENCE_MODEL].numpy().tobytes()
    return sentence_tokenizer(path, data, rows=rows)


def sentence_tokenizer(path: Path, data: bytes, *, rows: int) -> SentenceTokenizer:
    """Return the tokenizer for the sentencepiece model in these bytes from the file `path`.

    Raises:
        CheckpointError: as in `open_sentence_tokenizer`.
    """
    try:
        processor = SentencePieceProcessor(model_proto=data)
    except (RuntimeError, ValueError) as err:
        raise CheckpointError(
            path, f"{SENTENCE_MODEL} is not a tokenizer ({err}); download the file again"
        ) from err
    if min(processor.pad_id(), processor.eos_id()) < 0:
        raise CheckpointError(
            path, f"{SENTENCE_MODEL} has no padding or no end token: it is not UMT5's"
        )
    if processor.get_piece_size() > rows:
        reason = f"{SENTENCE_MODEL} has {processor.get_piece_size()} tokens"
        raise CheckpointError(path, f"{reason}, but the token table has {rows} rows")
    return SentenceTokenizer(processor)


MORE_ROWS = 512
"""Upper limit for token table rows behind the sentencepiece model: UMT5 has 256,000 pieces and
256,384 rows."""
END_PIECE = "</s>"
"""End piece in UMT5. Gemma's tokenizer has as many pieces, but another end piece."""
FOLDERS_BESIDE = (".", "tokenizer", "google/umt5-xxl", "umt5-xxl")
"""Folders next to a text encoder that may hold the tokenizer, also as in Wan's own release."""
TENSOR_FILES = (".safetensors", ".sft")
SENTENCE_FILES = ("spiece.model", "tokenizer.model", "sentencepiece.bpe.model")


class FoundTokenizer(NamedTuple):
    """Tokenizer for a single file."""

    tokenizer: SentenceTokenizer
    notes: tuple[str, ...] = ()
    """A sentence about its origin if it comes from another file."""


def tokenizer_beside(path: Path, *, rows: int) -> FoundTokenizer:
    """Open a tokenizer next to the file `path`, from another text encoder or from tokenizer files.

    The token count must suit a table with `rows` rows, because other models have other tokenizers.

    Raises:
        CheckpointError: no tokenizer is found.
    """
    for file in files_beside(path):
        try:
            if file.suffix == ".model":
                tokenizer = sentence_tokenizer(file, file.read_bytes(), rows=rows)
            else:
                header = read_header(file)
                # A whole checkpoint has a prefix before the name.
                tensors = {key.rpartition(".")[2]: each for key, each in header.tensors.items()}
                if SENTENCE_MODEL not in tensors:
                    continue
                tokenizer = open_sentence_tokenizer(file, tensors, rows=rows)
        except (CheckpointFileError, OSError) as err:
            # An unused file must not end the run. The log shows why it was passed over.
            logger.info("no tokenizer for %s from %s", path.name, err)
            continue
        processor = tokenizer.processor
        ends_alike = processor.id_to_piece(processor.eos_id()) == END_PIECE
        if ends_alike and processor.get_piece_size() > rows - MORE_ROWS:
            note = f"{path.name} has no tokenizer: that of {file.relative_to(path.parent)} is used"
            logger.info("%s", note)
            return FoundTokenizer(tokenizer, (note,))
    raise CheckpointError(
        path,
        f"has no tokenizer ({SENTENCE_MODEL}), nor has a file next to it: put "
        "umt5_xxl_fp16.safetensors, umt5_xxl_fp8_e4m3fn_scaled.safetensors or the spiece.model of "
        "UMT5-XXL into its folder, or use one of the two",
    )


def files_beside(path: Path) -> Iterator[Path]:
    """Yield the files next to the text encoder `path` that may hold a tokenizer."""
    for folder in (path.parent / name for name in FOLDERS_BESIDE):
        yield from (folder / name for name in SENTENCE_FILES if (folder / name).is_file())
    yield from (
        file
        # Sorted, so that the choice does not depend on the file system.
        for file in sorted(path.parent.iterdir())
        if file.suffix in TENSOR_FILES and file != path
    )
