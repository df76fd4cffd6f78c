"""The UMT5 text encoder, streamed: its blocks pass through a few buffers and its token table stays on disk.

In bf16 the real encoder has 9 GB in its blocks and 2.1 GB in its token table. A prompt needs at most 512 rows of the
table, so those are read for each call, and the blocks' matrices go through `attach_offload` once for all prompts.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from transformers import UMT5Config, UMT5EncoderModel

from ..offload.attach import attach_offload
from ..offload.file_source import FileSource, read_tensors
from ..offload.layout import streamed_names
from ..plan import BlockKey, OffloadPolicy
from .component import build_on_meta, component_folder, component_weights, read_config, require_config, require_sizes
from .meta_model import set_parameters
from .prompt import open_tokenizer, tokenise

TEXT_WIDTH = 4096
MAX_TOKENS = 512
WEIGHTS = "model.safetensors"

UMT5 = {"model_type": "umt5", "d_model": TEXT_WIDTH, "feed_forward_proj": "gated-gelu"}

STACK = "umt5"
TOKEN_TABLE = "shared.weight"
TOKEN_TABLE_ALIAS = "encoder.embed_tokens.weight"


class PromptError(ValueError):
    """Prompts that cannot be encoded."""


def open_text_encoder(folder: Path | str, *, compute_dtype: torch.dtype = torch.bfloat16) -> TextEncoder:
    """Open the text encoder of a diffusers pipeline folder, or its `text_encoder` folder with `tokenizer` beside it.

    Reads the tokenizer, the config and headers only.

    Raises:
        CheckpointFileError: a file is missing, truncated, a pickle, or no safetensors file; the config or the tensors
            are not those of a UMT5 encoder that is 4096 wide.
    """
    return TextEncoder(component_folder(Path(folder), "text_encoder"), compute_dtype=compute_dtype)


class TextEncoder:
    """An opened UMT5 encoder and its tokenizer."""

    def __init__(self, folder: Path, *, compute_dtype: torch.dtype) -> None:
        config = read_config(folder)
        require_config(folder, config, UMT5, "the text encoder of a Wan2.1 or Wan2.2 pipeline (UMT5-XXL)")
        require_sizes(folder, config, ["vocab_size", "d_kv", "d_ff", "num_heads", "num_layers"])
        self._compute_dtype = compute_dtype
        self._model = build_on_meta(folder, lambda: UMT5EncoderModel(UMT5Config(**config)))
        self._weights = component_weights(
            folder, self._model, weights=WEIGHTS, aliases={TOKEN_TABLE_ALIAS: TOKEN_TABLE}
        )
        self._tokenizer = open_tokenizer(folder.parent / "tokenizer")
        self._blocks: list[nn.Module] = list(self._model.encoder.block)
        for block in self._blocks:
            _one_prompt_at_a_time(block)

    def encode(
        self,
        prompts: Sequence[str],
        *,
        device: torch.device | str,
        policy: OffloadPolicy | None = None,
        max_length: int = MAX_TOKENS,
    ) -> list[torch.Tensor]:
        """Encode every prompt, reading the weights once; layerwise with one block ahead unless `policy` says otherwise.

        Returns one embedding for each prompt, fp32 [1, max_length, 4096], on the CPU; rows after </s> are zero. Longer
        prompts are cut.

        Raises:
            PromptError: no prompts, or a `max_length` below 1.
            ValueError: the policy does not fit the number of blocks.
        """
        if not prompts or max_length < 1:
            raise PromptError(f"{len(prompts)} prompts of up to {max_length} tokens: give at least one of each")
        device = torch.device(device)
        tokens = tokenise(self._tokenizer, prompts, length=max_length)
        self._read_small_tensors(device)
        embeds = self._token_rows(tokens.ids).to(device)
        policy = policy or OffloadPolicy.layerwise(1)
        with (
            attach_offload({STACK: self._blocks}, policy=policy, device=device, source=self._source()),
            torch.no_grad(),
        ):
            hidden = self._model.encoder(inputs_embeds=embeds, attention_mask=tokens.mask.to(device)).last_hidden_state
        return [
            _zero_after(row, count) for row, count in zip(hidden.float().cpu().split(1), tokens.counts, strict=True)
        ]

    def close(self) -> None:
        """Nothing of any size is held between calls; this is here for `with`."""

    def _source(self) -> FileSource:
        blocks = {}
        for index, block in enumerate(self._blocks):
            path = f"encoder.block.{index}."
            blocks[BlockKey(STACK, index)] = {name: self._weights[path + name] for name in streamed_names(block)}
        dtypes = {name: self._dtype(name) for name in next(iter(blocks.values()))}
        return FileSource(blocks, computed_dtypes=dtypes)

    def _read_small_tensors(self, device: torch.device) -> None:
        """Norms and position tables: what does not stream, half a megabyte in all."""
        streamed = {
            f"encoder.block.{i}.{name}" for i, block in enumerate(self._blocks) for name in streamed_names(block)
        }
        small = {name: tensor for name, tensor in self._weights.items() if name not in streamed | {TOKEN_TABLE}}
        with torch.inference_mode(False):
            stored = read_tensors(small)
            set_parameters(self._model, {name: t.to(device, self._dtype(name)) for name, t in stored.items()})

    def _token_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """The table's rows for `ids` [prompts, tokens], in the compute dtype: [prompts, tokens, 4096]."""
        distinct, index = ids.unique(return_inverse=True)
        table = self._weights[TOKEN_TABLE]
        rows = read_tensors({str(row): table.rows(row, row + 1) for row in distinct.tolist()})
        return torch.cat(list(rows.values())).to(self._compute_dtype)[index]

    def _dtype(self, name: str) -> torch.dtype:
        # As transformers does: fp16 cannot hold what `wo` produces, bf16 can.
        needs_range = self._compute_dtype == torch.float16 and ".wo." in name
        return torch.float32 if needs_range else self._compute_dtype

    def __enter__(self) -> TextEncoder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _one_prompt_at_a_time(block: nn.Module) -> None:
    """Let the prompts of a batch take turns in `block` while its weights are there.

    A prompt's result then does not depend on its company, to the bit.
    """
    forward = block.forward

    @functools.wraps(forward)
    def in_turns(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        turns = [
            forward(hidden[row : row + 1], *(_row(value, row, hidden) for value in args), **_rows(kwargs, row, hidden))
            for row in range(len(hidden))
        ]
        return _joined(turns)

    block.forward = in_turns


def _rows(values: Mapping[str, Any], row: int, hidden: torch.Tensor) -> dict[str, Any]:
    return {name: _row(value, row, hidden) for name, value in values.items()}


def _row(value: Any, row: int, hidden: torch.Tensor) -> Any:
    """The part of an argument that belongs to one prompt: of attention masks; anything else is common to all."""
    per_prompt = isinstance(value, torch.Tensor) and value.ndim > 1 and len(value) == len(hidden)
    return value[row : row + 1] if per_prompt else value


def _joined(turns: list[Any]) -> Any:
    """A block returns its hidden state, in transformers 4 as the first of several values that Wan does not use."""
    if isinstance(turns[0], tuple):
        return (torch.cat([turn[0] for turn in turns]), *turns[0][1:])
    return torch.cat(turns)


def _zero_after(embedding: torch.Tensor, count: int) -> torch.Tensor:
    embedding[:, count:] = 0
    return embedding
