"""UMT5 text encoder, streamed: weights in all file formats, and prompt encoding.

| form                                             | sizes       | tokenizer                 |
|--------------------------------------------------|-------------|---------------------------|
| `text_encoder` folder in a diffusers pipeline    | config.json | folder next to it         |
| ComfyUI's single file (`umt5_xxl_fp16` and such) | from shapes | tensor `spiece_model`     |
| file with the names in Wan's own release         | from shapes | file or folder next to it |
| GGUF by llama.cpp (`umt5-xxl-encoder-Q8_0.gguf`) | from shapes | lists in the header       |

Weights are in fp32, fp16, bf16, or in fp8 with or without scales. Block weights may also be int8,
mxfp8, nvfp4 or packed. Parameters get the names in transformers' UMT5EncoderModel. Only the
tokenizer is loaded here.

In bf16 the real encoder has 9 GB of blocks and a 2.1 GB token table. A prompt needs at most 512
table rows, which are read for each call. `attach_offload` streams the block matrices, once for all
prompts in a call.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...devices import AUTO, ComputeDtype, resolve_dtype
from ...offload.formats import FileTensor, QuantFormat
from ...offload.sources import read_tensors
from ...schema import OffloadPolicy
from ..checkpoint import components
from ..checkpoint.block_stack import BlockStack
from ..checkpoint.files import (
    CheckpointError,
    ModelVersion,
    is_gguf,
    model_version,
    read_checkpoint,
)
from ..checkpoint.meta_model import decoded
from .sentence_model import gguf_sentence_model
from .tokenizer import (
    SENTENCE_MODEL,
    FoundTokenizer,
    Tokenizer,
    clean_prompt,
    files_beside,
    open_sentence_tokenizer,
    open_tokenizer,
    sentence_tokenizer,
    tokenizer_beside,
)

if TYPE_CHECKING:
    from transformers import UMT5EncoderModel


TEXT_WIDTH = 4096
REMEDY = "use umt5_xxl_fp16.safetensors or umt5_xxl_fp8_e4m3fn_scaled.safetensors"
WEIGHTS = "model.safetensors"

UMT5 = {"model_type": "umt5", "d_model": TEXT_WIDTH, "feed_forward_proj": "gated-gelu"}

TEXT_STACK = "umt5"
"""Block name in transfer programs."""

TOKEN_TABLE = "shared.weight"
ALIASES = {"encoder.embed_tokens.weight": TOKEN_TABLE}

FIRST_BLOCK = "encoder.block.0.layer."
QUERIES = FIRST_BLOCK + "0.SelfAttention.q.weight"
POSITIONS = FIRST_BLOCK + "0.SelfAttention.relative_attention_bias.weight"
SECOND_POSITIONS = POSITIONS.replace(".block.0.", ".block.1.")
GATE = FIRST_BLOCK + "1.DenseReluDense.wi_0.weight"
BLOCK = re.compile(r"encoder\.block\.(\d{1,4})\.")
_OTHER_BLOCK_NAME = re.compile(r"(?:blocks|enc\.blk)\.(\d{1,4})\.(.+)")

MARKS = (QUERIES, "blocks.0.attn.q.weight", "enc.blk.0.attn_q.weight")
"""Names of a tensor in every encoder: in transformers, in Wan's own release and in llama.cpp."""
ROOTS = (
    "shared",
    "encoder",
    "token_embedding",
    "blocks",
    "norm",
    "token_embd",
    "enc",
    SENTENCE_MODEL,
)

_POSITIONS = "layer.0.SelfAttention.relative_attention_bias"
_OTHER_BLOCK = {
    **dict.fromkeys(("norm1", "attn_norm"), "layer.0.layer_norm"),
    **{f"attn{dot}{name}": f"layer.0.SelfAttention.{name}" for dot in "._" for name in "qkvo"},
    **dict.fromkeys(("pos_embedding.embedding", "attn_rel_b"), _POSITIONS),
    **dict.fromkeys(("norm2", "ffn_norm"), "layer.1.layer_norm"),
    **dict.fromkeys(("ffn.gate.0", "ffn_gate"), "layer.1.DenseReluDense.wi_0"),
    **dict.fromkeys(("ffn.fc1", "ffn_up"), "layer.1.DenseReluDense.wi_1"),
    **dict.fromkeys(("ffn.fc2", "ffn_down"), "layer.1.DenseReluDense.wo"),
}
_OTHER = {
    **dict.fromkeys(("token_embedding", "token_embd"), "shared"),
    **dict.fromkeys(("norm", "enc.output_norm"), "encoder.final_layer_norm"),
}
"""Modules in Wan's own release, kept by other people's files, and in llama.cpp, with their names in
transformers."""


def _open_folder(folder: Path, compute_dtype: torch.dtype) -> TextEncoder:
    """Open a `text_encoder` folder with `tokenizer` next to it.

    Raises:
        CheckpointFileError: a file is missing, damaged, or for another model.
    """
    config = components.read_config(folder)
    sizes = ["vocab_size", "d_kv", "d_ff", "num_heads", "num_layers"]
    model_name = "the text encoder of a Wan2.1 or Wan2.2 pipeline (UMT5-XXL)"
    components.require_config(folder, config, UMT5, sizes, model_name)
    model = components.build_on_meta(folder / components.CONFIG, lambda: _model(config))
    stored = components.component_file(
        read_checkpoint(folder, weights=WEIGHTS), marks=MARKS, roots=ROOTS
    )
    tokenizer = open_tokenizer(folder.parent / "tokenizer")
    return _opened(folder, stored, model, components.CONFIG, tokenizer, compute_dtype)


def _open_file(path: Path, compute_dtype: torch.dtype) -> TextEncoder:
    """Open a single file, in any precision and with any names.

    Raises:
        CheckpointFileError: the file is missing, damaged, a pickle, or for another model, or there
            is no tokenizer in it or next to it.
    """
    # ComfyUI saves the tokenizer in a whole checkpoint as `text_encoders.spiece_model`, above the
    # encoder names.
    stored = components.component_file(
        read_checkpoint(path), marks=MARKS, roots=ROOTS, shared=[SENTENCE_MODEL]
    )
    tensors = {
        _name(key): tensor for key, tensor in stored.weights.items() if key != SENTENCE_MODEL
    }
    scales = {_name(key): scale for key, scale in stored.scales.items()}
    _refuse_other_models(path, tensors)
    config = _config_from_shapes(path, tensors)
    model = components.build_on_meta(path, lambda: _model(config))
    tokenizer, notes = _tokenizer(path, stored, rows=config["vocab_size"])
    renamed = replace(stored, weights=tensors, scales=scales, notes=(*stored.notes, *notes))
    return _opened(path, renamed, model, "the rest of the file", tokenizer, compute_dtype)


def _tokenizer(path: Path, stored: components.ComponentFile, *, rows: int) -> FoundTokenizer:
    if SENTENCE_MODEL in stored.weights:
        return FoundTokenizer(open_sentence_tokenizer(path, stored.weights, rows=rows))
    data = gguf_sentence_model(path) if is_gguf(path) else None
    if data is not None:
        return FoundTokenizer(sentence_tokenizer(path, data, rows=rows))
    return tokenizer_beside(path, rows=rows)


def _opened(
    path: Path,
    stored: components.ComponentFile,
    model: UMT5EncoderModel,
    described_by: str,
    tokenizer: Tokenizer,
    compute_dtype: torch.dtype,
) -> TextEncoder:
    stack = BlockStack(
        name=TEXT_STACK, prefix="encoder.block.", model=model, blocks=list(model.encoder.block)
    )
    # GGUF files pack the token table too.
    gguf = {name for name, each in stored.weights.items() if isinstance(each.packing, QuantFormat)}
    file = components.match_weights(
        path,
        stored,
        model,
        aliases=ALIASES,
        described_by=described_by,
        packed=stack.streamed | gguf,
    )
    return TextEncoder(stack, file, tokenizer, compute_dtype=compute_dtype)


def _name(key: str) -> str:
    """Return the parameter name in transformers."""
    module, _, leaf = key.rpartition(".")
    if module in _OTHER:
        return f"{_OTHER[module]}.{leaf}"
    found = _OTHER_BLOCK_NAME.fullmatch(module)
    if found is None or found[2] not in _OTHER_BLOCK:
        return key
    return f"encoder.block.{found[1]}.{_OTHER_BLOCK[found[2]]}.{leaf}"


def _model(config: Mapping[str, Any]) -> UMT5EncoderModel:
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(UMT5Config(**config))


def _refuse_other_models(path: Path, tensors: Mapping[str, FileTensor]) -> None:
    if QUERIES not in tensors or POSITIONS not in tensors or GATE not in tensors:
        found = f"it has {len(tensors)} tensors, first: {next(iter(tensors), 'none')}"
        raise CheckpointError(path, f"is not a UMT5 text encoder: {REMEDY} ({found})")
    # T5 has position biases in the first block only, UMT5 in every block.
    several = any(key.startswith("encoder.block.1.") for key in tensors)
    if several and SECOND_POSITIONS not in tensors:
        reason = "is a T5 (of SD3, Flux and others), not UMT5"
        raise CheckpointError(path, f"{reason}: {REMEDY} ({SECOND_POSITIONS} is missing)")


def _config_from_shapes(path: Path, weights: Mapping[str, FileTensor]) -> dict[str, Any]:
    """Return the encoder sizes under the names in config.json.

    Raises:
        CheckpointError: they do not belong to a UMT5 encoder with width 4096.
    """
    table = next((weights[name] for name in (TOKEN_TABLE, *ALIASES) if name in weights), None)
    if table is None:
        raise CheckpointError(path, f"{TOKEN_TABLE} is missing")
    queries, positions, gate = (weights[name].shape for name in (QUERIES, POSITIONS, GATE))
    for name, shape in ((TOKEN_TABLE, table.shape), (QUERIES, queries), (GATE, gate)):
        if len(shape) != 2 or shape[1] != TEXT_WIDTH or not shape[0]:
            raise CheckpointError(
                path, f"{name} is {list(shape)}; [rows, {TEXT_WIDTH}] is expected (UMT5-XXL)"
            )
    if len(positions) != 2 or not positions[1] or queries[0] % positions[1]:
        reason = f"{POSITIONS} is {list(positions)}; [buckets, heads] is expected"
        raise CheckpointError(path, f"{reason}, with heads a divisor of {queries[0]}")
    blocks = {int(found[1]) for name in weights if (found := BLOCK.match(name))}
    if gap := {*range(len(blocks))} - blocks:
        raise CheckpointError(
            path, f"encoder.block.{min(gap)} is missing, but later blocks are present"
        )
    return {
        **UMT5,
        "vocab_size": table.shape[0],
        # Query rows are heads x d_kv, and the position biases are [buckets, heads].
        "d_kv": queries[0] // positions[1],
        "d_ff": gate[0],
        "num_heads": positions[1],
        "num_layers": len(blocks),
    }


MAX_TOKENS = 512


class PromptError(ValueError):
    """Prompts that cannot be encoded."""


def open_text_encoder(path: Path | str, *, compute_dtype: ComputeDtype = AUTO) -> TextEncoder:
    """Open the text encoder in a diffusers pipeline, a `text_encoder` folder, or a single file.

    `compute_dtype` is as in `open_experts`. A `text_encoder` folder needs `tokenizer` next to it. A
    single file is safetensors, with names as in transformers or in Wan's own release, or GGUF. The
    tokenizer is in it or next to it. Reads only the tokenizer, the config and headers.

    Raises:
        CheckpointFileError: a file is missing, truncated, a pickle, or neither safetensors nor
            GGUF. The config or the tensors do not belong to a UMT5 encoder with width 4096. The
            tokenizer is missing.
    """
    path = Path(path)
    dtype = resolve_dtype(compute_dtype)
    if path.is_file():
        return _open_file(path, dtype)
    return _open_folder(components.component_folder(path, "text_encoder"), dtype)


def encoder_version(path: Path) -> ModelVersion:
    """Return the files read by `open_text_encoder` and their versions, including the tokenizer.

    Raises:
        CheckpointError: the folder is not a text encoder.
    """
    if path.is_file():
        return model_version(path, *files_beside(path))
    folder = components.component_folder(path, "text_encoder")
    return model_version(folder, folder.parent / "tokenizer")


class TextEncoder(AbstractContextManager["TextEncoder"]):
    """An opened UMT5 encoder and its tokenizer."""

    def __init__(
        self,
        stack: BlockStack,
        file: components.ComponentFile,
        tokenizer: Tokenizer,
        *,
        compute_dtype: torch.dtype,
    ) -> None:
        self._compute_dtype = compute_dtype
        self._stack = stack
        self._file = file
        self._tokenizer = tokenizer
        self.notes = file.notes
        """Sentences about unused tensors and the tokenizer's origin."""
        for block in self._stack.blocks:
            _split_batch(block)

    def encode(
        self,
        prompts: Sequence[str],
        *,
        device: torch.device | str,
        policy: OffloadPolicy | None = None,
        max_length: int = MAX_TOKENS,
        check: Callable[[], None] = lambda: None,
    ) -> list[torch.Tensor]:
        """Encode all prompts, reading the weights once.

        Args:
            prompts: texts, cut after `max_length` tokens.
            device: computes the blocks.
            policy: block policy. By default layerwise with one prefetched block.
            max_length: rows per embedding.
            check: called before every block. May raise to end the computation.

        Returns:
            One embedding for each prompt, fp32 [1, max_length, 4096] on the CPU. Rows after </s>
                are zero.

        Raises:
            PromptError: there are no prompts, or `max_length` is below 1.
            ValueError: the policy does not fit the block count.
        """
        if not prompts or max_length < 1:
            raise PromptError(
                f"{len(prompts)} prompts of up to {max_length} tokens: give at least one of each"
            )
        device = torch.device(device)
        tokens = self._tokenizer.tokens(
            [clean_prompt(prompt) for prompt in prompts], length=max_length
        )
        # With embeddings as input, the encoder does not read the token table.
        embeds = self._token_rows(tokens.ids).to(device)
        encoder = self._stack.model.get_submodule("encoder")
        # For this call only: the experts need the buffer memory afterwards.
        with self._stack.streaming(
            self._file, self._dtype, device=device, check=check, policy=policy, never=[TOKEN_TABLE]
        ):
            hidden = encoder(
                inputs_embeds=embeds, attention_mask=tokens.mask.to(device)
            ).last_hidden_state
        return list(hidden.float().cpu().masked_fill_(tokens.mask[..., None] == 0, 0).split(1))

    def close(self) -> None:
        """Do nothing: only small tensors are kept between calls. Exists for `with`."""

    def _token_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows [prompts, tokens, 4096] of `ids` [prompts, tokens] in the compute dtype."""
        # The table is never loaded as a whole (2.1 GB). Each distinct row is read from the file
        # once.
        distinct, index = ids.unique(return_inverse=True)
        table = self._file.weights[TOKEN_TABLE]
        rows = read_tensors({str(row): table.rows(row, row + 1) for row in distinct.tolist()})
        factor = self._file.read_factors([TOKEN_TABLE]).get(TOKEN_TABLE)
        # A scale per row, cut to the rows read.
        if factor is not None and factor.dim():
            factor = factor[distinct]
        read = replace(table, shape=(len(distinct), *table.shape[1:]))
        return decoded(read, torch.cat(list(rows.values())), factor, self._compute_dtype)[index]

    def _dtype(self, name: str) -> torch.dtype:
        # As in transformers: `wo` outputs exceed the fp16 range, but not the bf16 range.
        if self._compute_dtype == torch.float16 and ".wo." in name:
            return torch.float32
        return self._compute_dtype

    def __exit__(self, *_: object) -> None:
        self.close()


def _split_batch(block: nn.Module) -> None:
    """Make `block` compute prompts in a batch one by one while the weights are on the device.

    A prompt's result is then bit-equal in every batch. A batched matrix product does not guarantee
    this.
    """
    forward = block.forward

    @functools.wraps(forward)
    def forward_each(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        outputs = []
        for row in range(len(hidden)):
            own_args = [_row(value, row, hidden) for value in args]
            own_kwargs = {name: _row(value, row, hidden) for name, value in kwargs.items()}
            outputs.append(forward(hidden[row : row + 1], *own_args, **own_kwargs))
        return _concatenate(outputs)

    block.forward = forward_each


def _row(value: Any, row: int, hidden: torch.Tensor) -> Any:
    """Return one prompt's part of an argument. Only attention masks differ between prompts."""
    # In transformers 4, `cache_position` has one dimension, and may be as long as the batch.
    if isinstance(value, torch.Tensor) and value.ndim > 1 and len(value) == len(hidden):
        return value[row : row + 1]
    return value


def _concatenate(outputs: list[Any]) -> Any:
    """Concatenate hidden states.

    In transformers 4 these are the first of several values. Wan does not use the others.
    """
    if isinstance(outputs[0], tuple):
        return (torch.cat([output[0] for output in outputs]), *outputs[0][1:])
    return torch.cat(outputs)
