"""Streamed UMT5 text encoder: the blocks pass through a few buffers, and the token table stays on disk.

In bf16 the real encoder has 9 GB of blocks and a token table of 2.1 GB. A prompt needs at most 512 rows of the table,
which are read for each call. The blocks' matrices are streamed by `attach_offload`, once for all prompts of a call.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ...devices import AUTO, ComputeDtype, resolved_dtype
from ...offload import FileSource, attach_offload, read_tensors, streamed_names
from ...plan import BlockKey
from ...schema import OffloadPolicy
from ..checkpoint.components import component_folder
from ..checkpoint.meta_model import set_parameters
from .tokenizer import tokenise
from .umt5 import TOKEN_TABLE, Umt5, open_umt5_file, open_umt5_folder

MAX_TOKENS = 512

STACK = "umt5"
"""Name of the blocks in transfer programs."""


class PromptError(ValueError):
    """Prompts that cannot be encoded."""


def open_text_encoder(path: Path | str, *, compute_dtype: ComputeDtype = AUTO) -> TextEncoder:
    """Open the text encoder of a diffusers pipeline folder, its `text_encoder` folder, or ComfyUI's single file.

    `compute_dtype` is as in `open_experts`. A `text_encoder` folder needs `tokenizer` next to it; a single file
    contains its tokenizer. Reads only the tokenizer, the config and headers.

    Raises:
        CheckpointFileError: a file is missing, truncated, a pickle, or not a safetensors file; the config or the
            tensors are not those of a UMT5 encoder of width 4096; the tokenizer is missing.
    """
    path, dtype = Path(path), resolved_dtype(compute_dtype)
    if path.is_file():
        return TextEncoder(open_umt5_file(path), compute_dtype=dtype)
    return TextEncoder(open_umt5_folder(component_folder(path, "text_encoder")), compute_dtype=dtype)


class TextEncoder:
    """An opened UMT5 encoder and its tokenizer."""

    def __init__(self, opened: Umt5, *, compute_dtype: torch.dtype) -> None:
        self._compute_dtype = compute_dtype
        self._model = opened.model
        self._weights = opened.weights
        self._scales = opened.scales
        self._tokenizer = opened.tokenizer
        self._blocks: list[nn.Module] = list(self._model.encoder.block)
        for block in self._blocks:
            _split_batch(block)

    def encode(
        self,
        prompts: Sequence[str],
        *,
        device: torch.device | str,
        policy: OffloadPolicy | None = None,
        max_length: int = MAX_TOKENS,
    ) -> list[torch.Tensor]:
        """Encode all prompts, reading the weights once.

        Args:
            prompts: those of more than `max_length` tokens are cut.
            device: computes the blocks.
            policy: of the blocks; by default layerwise with one prefetched block.
            max_length: rows of each embedding.

        Returns:
            One embedding for each prompt, fp32 [1, max_length, 4096] on the CPU; rows after </s> are zero.

        Raises:
            PromptError: there are no prompts, or `max_length` is below 1.
            ValueError: the policy does not fit the number of blocks.
        """
        if not prompts or max_length < 1:
            raise PromptError(f"{len(prompts)} prompts of up to {max_length} tokens: give at least one of each")
        device = torch.device(device)
        tokens = tokenise(self._tokenizer, prompts, length=max_length)
        self._read_small_tensors(device)
        embeds = self._token_rows(tokens.ids).to(device)
        policy = policy or OffloadPolicy.layerwise(1)
        # Attached for this call only: the experts need the memory of the buffers afterwards.
        with (
            attach_offload({STACK: self._blocks}, policy=policy, device=device, source=self._source()),
            torch.no_grad(),
        ):
            hidden = self._model.encoder(inputs_embeds=embeds, attention_mask=tokens.mask.to(device)).last_hidden_state
        return [
            _zero_after(row, count) for row, count in zip(hidden.float().cpu().split(1), tokens.counts, strict=True)
        ]

    def close(self) -> None:
        """Do nothing: only small tensors are kept between calls. Exists for `with`."""

    def _source(self) -> FileSource:
        blocks, scales = {}, {}
        for index, block in enumerate(self._blocks):
            path, names = f"encoder.block.{index}.", streamed_names(block)
            blocks[BlockKey(STACK, index)] = {name: self._weights[path + name] for name in names}
            scales[BlockKey(STACK, index)] = {
                name: self._scales[path + name] for name in names if path + name in self._scales
            }
        dtypes = {name: self._dtype(name) for name in next(iter(blocks.values()))}
        return FileSource(blocks, computed_dtypes=dtypes, scales=scales)

    def _read_small_tensors(self, device: torch.device) -> None:
        """Read the tensors that are not streamed: norms and position tables, half a megabyte in all."""
        streamed = {
            f"encoder.block.{i}.{name}" for i, block in enumerate(self._blocks) for name in streamed_names(block)
        }
        small = {name: tensor for name, tensor in self._weights.items() if name not in streamed | {TOKEN_TABLE}}
        # Parameters stay in the model after this call, so they must not be inference tensors: a later call outside
        # inference mode could not compute with those.
        with torch.inference_mode(False):
            stored = read_tensors(small)
            factors = self._factors(small)
            values = {name: _decode(tensor, factors.get(name), self._dtype(name)) for name, tensor in stored.items()}
            set_parameters(self._model, {name: value.to(device) for name, value in values.items()})

    def _token_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the table's rows for `ids` [prompts, tokens], in the compute dtype: [prompts, tokens, 4096]."""
        # The table is never loaded as a whole (2.1 GB); each distinct row is read from the file once.
        distinct, index = ids.unique(return_inverse=True)
        table = self._weights[TOKEN_TABLE]
        rows = read_tensors({str(row): table.rows(row, row + 1) for row in distinct.tolist()})
        factor = self._factors([TOKEN_TABLE]).get(TOKEN_TABLE)
        return _decode(torch.cat(list(rows.values())), factor, self._compute_dtype)[index]

    def _factors(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return the scales of the names that have one: fp32, 0-d."""
        stored = read_tensors({name: self._scales[name] for name in names if name in self._scales})
        return {name: scale.float().reshape(()) for name, scale in stored.items()}

    def _dtype(self, name: str) -> torch.dtype:
        # As in transformers: outputs of `wo` exceed the range of fp16, but not that of bf16.
        needs_range = self._compute_dtype == torch.float16 and ".wo." in name
        return torch.float32 if needs_range else self._compute_dtype

    def __enter__(self) -> TextEncoder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _split_batch(block: nn.Module) -> None:
    """Make `block` compute the prompts of a batch one after the other while its weights are on the device.

    The result of a prompt is then bit-equal in every batch, which a batched matrix product does not guarantee.
    """
    forward = block.forward

    @functools.wraps(forward)
    def forward_each(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        outputs = [
            forward(hidden[row : row + 1], *(_row(value, row, hidden) for value in args), **_rows(kwargs, row, hidden))
            for row in range(len(hidden))
        ]
        return _concatenate(outputs)

    block.forward = forward_each


def _rows(values: Mapping[str, Any], row: int, hidden: torch.Tensor) -> dict[str, Any]:
    return {name: _row(value, row, hidden) for name, value in values.items()}


def _row(value: Any, row: int, hidden: torch.Tensor) -> Any:
    """Return the part of an argument that belongs to one prompt; only attention masks differ between prompts."""
    per_prompt = isinstance(value, torch.Tensor) and value.ndim > 1 and len(value) == len(hidden)
    return value[row : row + 1] if per_prompt else value


def _concatenate(outputs: list[Any]) -> Any:
    """Concatenate hidden states; in transformers 4 they are the first of several values, the others unused by Wan."""
    if isinstance(outputs[0], tuple):
        return (torch.cat([output[0] for output in outputs]), *outputs[0][1:])
    return torch.cat(outputs)


def _decode(stored: torch.Tensor, factor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Decode a tensor as the engine decodes streamed matrices."""
    return stored.to(dtype) if factor is None else (stored.float() * factor).to(dtype)


def _zero_after(embedding: torch.Tensor, count: int) -> torch.Tensor:
    embedding[:, count:] = 0
    return embedding
