"""The tokenizer that ComfyUI's single-file text encoders carry: a sentencepiece model in a tensor of bytes.

The sentencepiece library reads it, as ComfyUI does, so that prompts become the tokens that the native nodes give. The
tokenizer folder of a pipeline is a conversion of the same model; in it, special tokens that are spelled out in a prompt
("</s>") count as such, and so they do here. What else differs lies in the conversion: a U+2581 or a "<0x41>" that is
typed out, and combining marks after some signs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from sentencepiece import SentencePieceProcessor

from ..offload.file_source import read_tensors
from ..offload.safetensors_header import FileTensor
from .prompt import PromptTokens
from .stored import CheckpointError

SENTENCE_MODEL = "spiece_model"

# That of UMT5 has 4.5 MB.
MAX_MODEL_BYTES = 64 * 1024**2


class SentenceTokenizer:
    """An opened sentencepiece model that has padding, an end and an unknown token."""

    def __init__(self, processor: SentencePieceProcessor) -> None:
        self._processor = processor
        self._pad, self._end = processor.pad_id(), processor.eos_id()
        special = (self._pad, self._end, processor.unk_id(), processor.bos_id())
        self._special = {processor.id_to_piece(token): token for token in special if token >= 0}
        self._spelled_out = re.compile(f"({'|'.join(map(re.escape, self._special))})")

    def tokens(self, texts: Sequence[str], *, length: int) -> PromptTokens:
        rows = [[*self._ids(text)[: length - 1], self._end] for text in texts]
        return PromptTokens(
            ids=torch.tensor([row + [self._pad] * (length - len(row)) for row in rows]),
            mask=torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows]),
        )

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in self._spelled_out.split(text):
            ids += [self._special[part]] if part in self._special else self._processor.encode(part)
        return ids


def open_sentence_tokenizer(path: Path, tensors: Mapping[str, FileTensor], *, rows: int) -> SentenceTokenizer:
    """Open the tokenizer among the tensors of the file `path`, whose token table has `rows` rows.

    Raises:
        CheckpointError: it is missing or damaged, or knows more tokens than the table has rows.
    """
    if SENTENCE_MODEL not in tensors:
        raise CheckpointError(
            path,
            f"has no tokenizer ({SENTENCE_MODEL}): use a file made for ComfyUI, umt5_xxl_fp16.safetensors or "
            "umt5_xxl_fp8_e4m3fn_scaled.safetensors, or a diffusers folder, which has its tokenizer beside it",
        )
    stored = tensors[SENTENCE_MODEL]
    if stored.dtype not in (torch.uint8, torch.int8) or not 0 < stored.nbytes <= MAX_MODEL_BYTES:
        raise CheckpointError(
            path, f"{SENTENCE_MODEL} is {stored.dtype} {list(stored.shape)}; a tokenizer is some megabytes of uint8"
        )
    data = read_tensors({SENTENCE_MODEL: stored})[SENTENCE_MODEL].numpy().tobytes()
    try:
        processor = SentencePieceProcessor(model_proto=data)
    except (RuntimeError, ValueError) as err:
        raise CheckpointError(path, f"{SENTENCE_MODEL} is not a tokenizer ({err}); download the file again") from err
    if min(processor.pad_id(), processor.eos_id()) < 0:
        raise CheckpointError(path, f"{SENTENCE_MODEL} has no padding or no end token: it is not that of UMT5")
    if processor.get_piece_size() > rows:
        raise CheckpointError(
            path, f"{SENTENCE_MODEL} knows {processor.get_piece_size()} tokens, but the token table has {rows} rows"
        )
    return SentenceTokenizer(processor)
